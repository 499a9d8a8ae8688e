"""What agents that learn from the newest trajectory share: network, acting, optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sebulba.agent import LEARNER_AXIS, TRAJECTORY_SPEC, Agent
from sebulba.agents.configs import OptimizerConfig, TorsoConfig
from sebulba.agents.kernels.distributions import make_distribution
from sebulba.agents.kernels.normalization import (
    REWARD_STATISTICS_SPEC,
    ObservationNormalizer,
    new_reward_statistics,
    normalized_rewards,
)
from sebulba.agents.kernels.optimizer import make_optimizer
from sebulba.agents.nets.networks import (
    ActorCritic,
    ActorCriticOutput,
    HeadSizes,
    ObservationEncoder,
)
from sebulba.one_kernel import one_kernel
from sebulba.types import ActionOutput, EnvSpec, EnvStep, PyTree, RunSpec, Trajectory


class OnPolicyConfig(Protocol):
    """The hyper-parameters that every on-policy agent has."""

    @property
    def learning_rate(self) -> float:
        """Step size of the optimizer."""
        ...

    @property
    def discount(self) -> float:
        """Discount per environment step."""
        ...

    @property
    def initial_std(self) -> float:
        """Standard deviation of continuous actions before training."""
        ...

    @property
    def torso(self) -> TorsoConfig:
        """Network from observation to features."""
        ...

    @property
    def optimizer(self) -> OptimizerConfig:
        """From gradient to update."""
        ...


ConfigT = TypeVar("ConfigT", bound=OnPolicyConfig)


class StepState(NamedTuple):
    """What an on-policy agent carries from step to step."""

    key: jax.Array
    """Typed PRNG key of the action noise."""
    core: PyTree
    """Recurrent state before the next observation, ``[B, ...]``; ``()`` where there is none."""
    scaling: PyTree = ()
    """What the last observation was normalised with; ``()`` where it was not."""


class ActingNetworks(NamedTuple):
    """What an agent acts with that normalises observations."""

    networks: PyTree
    """Parameters."""
    scaling: PyTree
    """See ``ObservationNormalizer``."""


class Extras(NamedTuple):
    """What the loss needs from acting, ``[B, ...]``."""

    raw: jax.Array
    """The sample before it became an action (see :mod:`sebulba.agents.kernels.distributions`)."""
    log_prob: jax.Array
    """Its log-probability when it was taken, ``[B]``."""


class Statistics(NamedTuple):
    """Running statistics; ``()`` for what is not normalised."""

    observations: PyTree
    """See ``ObservationNormalizer``."""
    rewards: PyTree
    """``RewardStatistics``."""


class Experience(NamedTuple):
    """The newest trajectory."""

    trajectory: Trajectory
    """``[T+1, B, ...]``; observations and rewards normalised, where they are to be."""
    core: PyTree
    """Recurrent state before row 0, ``[B, ...]``."""
    statistics: Statistics
    """Of all trajectories so far."""


class OnPolicyAgent(Agent[ConfigT]):
    """An agent that updates once on every trajectory; a subclass adds ``loss``."""

    def __init__(
        self,
        spec: EnvSpec,
        config: ConfigT,
        *,
        value_head: bool,
        lstm_size: int = 0,
        separate_value_torso: bool = False,
        normalize_observations: bool = False,
        normalize_rewards: bool = False,
    ) -> None:
        """Build encoder, network, distribution and optimizer; no arrays are made.

        Raises:
          UsageError: A space that the agent cannot take.
        """
        super().__init__(spec, config)
        self._normalizes_rewards = normalize_rewards
        self._normalizer: ObservationNormalizer | None = None
        if normalize_observations:
            flattened = config.torso.kind == "mlp"
            self._normalizer = ObservationNormalizer(spec, images_are_flattened=flattened)
        self.distribution = make_distribution(spec.action_space)
        self.network = ActorCritic(
            heads=HeadSizes(
                num_params=self.distribution.num_params,
                num_free_params=self.distribution.num_free_params,
                initial_free_param=math.log(config.initial_std),
            ),
            torso=config.torso,
            lstm_size=lstm_size,
            value_head=value_head,
            separate_value_torso=separate_value_torso,
        )
        self._encode = ObservationEncoder(spec, config.torso)
        self._optimizer = make_optimizer(config.learning_rate, config.optimizer)
        # Refuses an observation space here rather than in a thread.
        jax.eval_shape(self.new_networks, jax.eval_shape(jax.random.key, 0))

    def evaluate(
        self, networks: PyTree, obs: PyTree, core: PyTree, is_first: ArrayLike
    ) -> ActorCriticOutput:
        """Evaluate the network on rows ``[T, B, ...]`` from recurrent state ``core [B, ...]``.

        ``networks`` are those that are trained, and ``obs`` is normalised if it is to be.
        """
        encoded = self._encode(obs, num_leading=2)
        return self.network.apply({"params": networks}, encoded, core, jnp.asarray(is_first))  # type: ignore[return-value]

    def new_networks(self, key: jax.Array) -> PyTree:
        """Return initial parameters."""
        encoded = self._encode(_zero_obs(self.spec.observation_space), num_leading=2)
        is_first = jnp.zeros((1, 1), jnp.bool_)
        return self.network.init(key, encoded, self._new_core(1), is_first)["params"]

    def new_opt(self, networks: PyTree) -> PyTree:
        """Return the initial optimizer state."""
        return self._optimizer.init(networks)

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        """Return a trajectory of zeros, normalised as any, and statistics of nothing."""
        del key
        statistics = self.new_statistics(run)
        acting = self._acting(networks, statistics)
        trajectory = self.empty_trajectory(acting, run)
        if self._normalizer is not None:
            obs = self._normalizer(acting.scaling, trajectory.env_step.obs)
            trajectory = trajectory._replace(env_step=trajectory.env_step._replace(obs=obs))
        return Experience(trajectory, self._new_core(run.num_envs), statistics)

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree:
        """Keep the statistics; the trajectory in it has been learned from."""
        rewards = new.statistics.rewards
        if self._normalizes_rewards:
            rewards = rewards._replace(moments=saved.statistics.rewards.moments)
        return new._replace(statistics=Statistics(saved.statistics.observations, rewards))

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key, a recurrent state of zeros, and a scaling that changes nothing."""
        del inferencer
        scaling = self._acting((), self.new_statistics(run)).scaling if self._normalizer else ()
        return StepState(key, self._new_core(run.num_envs), scaling)

    def _new_core(self, num_envs: int) -> PyTree:
        size = self.network.lstm_size
        return tuple(jnp.zeros((num_envs, size)) for _ in range(2)) if size else ()

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return the networks, with the scaling of observations where there is one."""
        return (
            networks if self._normalizer is None else self._acting(networks, experience.statistics)
        )

    def _acting(self, networks: PyTree, statistics: Statistics) -> PyTree:
        if self._normalizer is None:
            return networks
        return ActingNetworks(networks, self._normalizer.scaling(statistics.observations))

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Sample actions, or take the likeliest without ``explore``."""
        obs = jax.tree.map(lambda x: jnp.asarray(x)[None], env_step.obs)
        is_first = jnp.asarray(env_step.is_first)[None]
        scaling: PyTree = ()
        if self._normalizer is not None:
            networks, scaling = networks
            obs = self._normalizer(scaling, obs)
        output = self.evaluate(networks, obs, step_state.core, is_first)
        params = output.params[0]
        impl = jax.random.key_impl(step_state.key)
        choose: Callable[..., tuple] = functools.partial(self._choose, explore, impl)
        if impl == "threefry2x32":  # the others' generators are no kernels of XLA's
            choose = one_kernel(choose, reduces=True)
        key_data, raw, log_prob, action = choose(jax.random.key_data(step_state.key), params)
        key = jax.random.wrap_key_data(key_data, impl=impl)
        return ActionOutput(action, Extras(raw, log_prob)), StepState(key, output.core, scaling)

    def _choose(self, explore: bool, impl: Any, key_data: jax.Array, params: jax.Array) -> tuple:
        """Return the next key's data, and raw sample, its log-probability and action."""
        key = jax.random.wrap_key_data(key_data, impl=impl)
        key, sample_key = jax.random.split(key)
        raw = self.distribution.mode(params)
        if explore:
            raw = self.distribution.sample(params, sample_key)
        log_prob = self.distribution.log_prob(params, raw)
        return jax.random.key_data(key), raw, log_prob, self.distribution.action(raw)

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: StepState,
        final_step_state: StepState,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        """Keep this trajectory in place of the last."""
        del networks
        trajectory, statistics = self.normalized(
            trajectory, final_step_state, experience.statistics
        )
        return Experience(trajectory, initial_step_state.core, statistics)

    # Normalisation.

    def new_statistics(self, run: RunSpec) -> Statistics:
        """Return statistics of nothing."""
        return Statistics(
            observations=self._normalizer.new() if self._normalizer else (),
            rewards=(
                new_reward_statistics(run.num_inferencers, run.num_envs)
                if self._normalizes_rewards
                else ()
            ),
        )

    def statistics_spec(self) -> Statistics:
        """Return the specs of ``new_statistics``."""
        return Statistics(P(), REWARD_STATISTICS_SPEC if self._normalizes_rewards else P())

    def normalized(
        self, trajectory: Trajectory, final_step_state: StepState, statistics: Statistics
    ) -> tuple[Trajectory, Statistics]:
        """Normalise a trajectory and add it to the statistics.

        Observations are scaled as they were when the trajectory was acted on, which may be several
        updates ago: with anything newer the policy would seem to have changed where it has not.
        Rewards are scaled with the newest statistics.
        """
        row, (observations, rewards) = trajectory.env_step, statistics
        if self._normalizer is not None:
            acted_on = jax.tree.map(lambda x: x[:-1], row.obs)
            observations = self._normalizer.update(observations, acted_on)
            row = row._replace(obs=self._normalizer(final_step_state.scaling, row.obs))
        if self._normalizes_rewards:
            reward, rewards = normalized_rewards(
                rewards, row, jnp.asarray(trajectory.inferencer), self.config.discount
            )
            row = row._replace(reward=reward)
        return trajectory._replace(env_step=row), Statistics(observations, rewards)

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Take one optimizer step."""
        updates, opt = self._optimizer.update(grads, opt, networks)
        return optax.apply_updates(networks, updates), opt

    def experience_spec(self) -> PyTree:
        """Split environments."""
        return Experience(TRAJECTORY_SPEC, P(LEARNER_AXIS), self.statistics_spec())


def _zero_obs(space: gymnasium.Space) -> PyTree:
    """Return one row of one environment, ``[1, 1, ...]``."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _zero_obs(part) for name, part in space.spaces.items()}
    return np.zeros((1, 1, *(space.shape or ())), jax.dtypes.canonicalize_dtype(space.dtype))

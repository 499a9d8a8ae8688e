"""What agents that learn from the newest trajectory share: network, acting, optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sebulba.agent import LEARNER_AXIS, TRAJECTORY_SPEC, Agent
from sebulba.agents.bases.normalization import ActingNetworks, Normalization, Statistics
from sebulba.agents.configs.on_policy import OnPolicyConfig
from sebulba.agents.kernels import popart
from sebulba.agents.kernels.distributions import Gaussian, make_distribution
from sebulba.agents.kernels.legal_actions import only_legal
from sebulba.agents.kernels.normalization import reward_deviation
from sebulba.agents.kernels.optimizer import annealed, make_optimizer
from sebulba.agents.nets.encoder import Encoded, ObservationEncoder
from sebulba.agents.nets.policy_value import ActorCritic, ActorCriticOutput
from sebulba.agents.nets.torso import has_convolutions, zero_core
from sebulba.errors import UsageError
from sebulba.support.checks import require
from sebulba.support.one_kernel import one_kernel
from sebulba.types import (
    ActionOutput,
    EnvSpec,
    EnvStep,
    FinalObs,
    PyTree,
    RunSpec,
    Trajectory,
    empty_env_step,
)

ConfigT = TypeVar("ConfigT", bound=OnPolicyConfig)


class StepState(NamedTuple):
    """What an on-policy agent carries from step to step."""

    key: jax.Array
    """Typed PRNG key of the action noise."""
    core: PyTree
    """Recurrent state before the next observation, ``[B, ...]``; ``()`` where there is none."""
    scaling: PyTree = ()
    """What the last observation was normalised with; ``()`` where it was not."""


VALUE_PARTS = (popart.HEAD, popart.SCALE, "value_torso")
"""Parts of the network that a central critic alone uses."""


class Extras(NamedTuple):
    """What the loss needs from acting, ``[B, ...]``."""

    raw: jax.Array
    """The sample before it became an action (see :mod:`sebulba.agents.kernels.distributions`)."""
    log_prob: jax.Array
    """Log-probability of the sample when it was drawn, ``[B]``."""


class Experience(NamedTuple):
    """The newest trajectory."""

    trajectory: Trajectory
    """``[T+1, B, ...]``; observations and rewards are normalised, if they have to be."""
    core: PyTree
    """Recurrent state before row 0, ``[B, ...]``."""
    statistics: Statistics
    """Statistics of all trajectories so far."""


class OnPolicyAgent(Agent[ConfigT]):
    """An agent that updates once on every trajectory; a subclass adds ``loss``.

    A loss gets an ``Experience``, evaluates the network on its rows (``evaluate``), asks
    ``self.distribution`` for log-probabilities of ``trajectory.extras.raw``, and takes means by
    ``masked_mean``. ``docs/agents/writing-an-agent.md`` has a whole one, in fifteen lines.
    """

    has_popart = False
    """Whether the loss asks ``value_scale``, which ``popart`` of the configuration needs."""

    def __init__(self, spec: EnvSpec, config: ConfigT) -> None:
        """Build network, distribution, normalisation and optimizer; no arrays are made.

        Raises:
          UsageError: A space or an option that the agent cannot take.
        """
        super().__init__(spec, config)
        rule = f"is of PPO and Impala; the loss of {type(self).__name__} does not have it"
        require(self.has_popart or not config.popart, "popart", True, rule, "use popart=False")
        self.normalization = Normalization(spec, config)
        self.distribution = make_distribution(spec.action_space)
        self.network = self.new_network()
        self._encode = ObservationEncoder(spec.policy_spec, config.torso)
        self._encode_for_critic: ObservationEncoder | None = None
        self._actor = self.network
        if config.central_critic:
            self._encode_for_critic = ObservationEncoder(spec, config.torso)
            self._actor = self.network.clone(value_head=False)
        own, base = type(self), OnPolicyAgent
        if own.evaluate is not base.evaluate and own.evaluate_rows is base.evaluate_rows:
            self.uses_final_obs = False  # it has a network that knows nothing of last observations
        self._optimizer = make_optimizer(config.learning_rate, config.optimizer)
        # Refuses an observation space here rather than in a thread.
        networks = jax.eval_shape(self.new_networks, jax.eval_shape(jax.random.key, 0))
        rule = f"needs networks that have {popart.SCALE!r}; those of {type(self).__name__} do not"
        has_scale = isinstance(networks, dict) and popart.SCALE in networks
        require(has_scale or not config.popart, "popart", True, rule, "use popart=False")
        self.updates_in_one_program = not has_convolutions(networks)

    def new_network(self) -> Any:
        """Return the network, which has no parameters yet."""
        config, of = self.config, self.distribution
        return ActorCritic(of.num_params, of.num_free_params, config, config.value_head)

    def check_run(self, run: RunSpec) -> None:
        """Check that the pace of an entropy bonus that changes is known."""
        last = self.config.final_entropy_coefficient
        require(
            last is None or self.config.optimizer.schedule == "linear",
            "final_entropy_coefficient",
            last,
            "is reached when the learning rate is 0, but it does not fall",
            "use anneal_learning_rate=True (--anneal-learning-rate), or leave it out",
        )

    @classmethod
    def uses_eval_only(cls, config: Any) -> bool:
        return config.central_critic

    def evaluate(
        self, networks: PyTree, obs: PyTree, core: PyTree, is_first: ArrayLike
    ) -> ActorCriticOutput:
        """Evaluate the network on rows of observations.

        Args:
          networks: Parameters, as ``loss`` gets them.
          obs: ``[T, B, ...]``, such as ``trajectory.env_step.obs`` of all T+1 rows; normalised, if
            it has to be, as it is in an ``Experience``.
          core: Recurrent state before the first row, ``[B, ...]``: ``experience.core``.
          is_first: ``[T, B]``; the recurrent state is reset where it is true.

        Returns:
          ``params [T, B, P]`` for ``self.distribution``, ``value [T, B]``, and the recurrent state
          after the last row. The last of T+1 rows has a value to bootstrap from, and no action.
        """
        return self._evaluate(networks, obs, core, is_first)

    def _evaluate(self, networks: PyTree, obs: PyTree, *rest: Any) -> ActorCriticOutput:
        output = self.network.apply({"params": networks}, *self._inputs(obs, *rest))
        return output._replace(params=only_legal(self.spec, obs, output.params))  # type: ignore[union-attr]

    def _inputs(
        self, obs: PyTree, core: PyTree, is_first: ArrayLike, final: PyTree = None
    ) -> tuple:
        """Return the arguments of the network; ``final`` are last observations, if there are any.

        A central critic has inputs of its own.
        """

        def encoded(encode: ObservationEncoder) -> tuple[Encoded, Encoded | None]:
            return encode(obs, num_leading=2), None if final is None else encode(final, 2)

        of_policy, final_of_policy = encoded(self._encode)
        inputs = of_policy, core, jnp.asarray(is_first), final_of_policy
        if self._encode_for_critic is None:
            return inputs
        return *inputs, encoded(self._encode_for_critic)

    def evaluate_rows(self, networks: PyTree, row: EnvStep, core: PyTree) -> ActorCriticOutput:
        """Evaluate rows of a trajectory as ``evaluate`` does, and ``row.final`` where there is one.

        The output then has a ``final_value [T, B]``, which ``transitions`` takes.
        """
        if not isinstance(row.final, FinalObs):
            return self.evaluate(networks, row.obs, core, row.is_first)
        return self._evaluate(networks, row.obs, core, row.is_first, row.final.obs)

    def entropy(self, params: jax.Array, raw: jax.Array) -> jax.Array:
        """Return the entropy of policies for a loss, ``[...]``.

        Without a coefficient it is only a metric: an estimate by the samples ``raw``, without
        gradient. The quadrature of a Gaussian costs more than the rest of its loss.
        """
        distribution = self.distribution
        config = self.config
        counts = config.entropy_coefficient or config.final_entropy_coefficient
        if counts or not isinstance(distribution, Gaussian):
            return distribution.entropy(params)
        return jax.lax.stop_gradient(distribution.entropy_at(params, raw))

    def value_scale(
        self, networks: PyTree, target: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return what value errors and advantages are divided by, a term of the loss, and metrics.

        Without ``popart`` they are 1, 0 and none.

        Args:
          networks: As ``loss`` gets them.
          target: ``[T, B]``, of values.
          valid: ``[T, B]`` bool.
        """
        if not self.config.popart:
            return jnp.float32(1), jnp.float32(0), {}
        scale = networks[popart.SCALE]
        new = popart.updated(scale, target, valid)
        metrics = {f"target_{name}": new[name] for name in ("mean", "deviation")}
        return new["deviation"], popart.telling(scale, new), metrics

    def total_loss(
        self,
        policy_loss: jax.Array,
        value_loss: jax.Array,
        entropy: jax.Array,
        obs: PyTree,
        opt: PyTree = (),
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the weighted sum of what an actor-critic minimises, and the metrics of it.

        ``opt`` tells how far the learning rate has fallen, for ``final_entropy_coefficient``.
        """
        config: Any = self.config
        first, last = config.entropy_coefficient, config.final_entropy_coefficient
        temperature = annealed(first, last, config.optimizer, opt)
        loss = policy_loss + config.value_coefficient * value_loss - temperature * entropy
        parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, parts | self.normalization.metrics(obs)

    def new_networks(self, key: jax.Array) -> PyTree:
        obs = jax.tree.map(lambda x: jnp.asarray(x)[None], empty_env_step(self.spec, 1).obs)
        core, is_first = zero_core(self.config, 1), jnp.zeros((1, 1), jnp.bool_)
        return self.network.init(key, *self._inputs(obs, core, is_first))["params"]

    def new_opt(self, networks: PyTree) -> PyTree:
        return self._optimizer.init(networks)

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        """Return a trajectory of zeros in the dtypes of a normalised one, and empty statistics."""
        statistics = self.normalization.new(run)
        scaling = self.normalization.scaling(statistics)
        core = zero_core(self.config, run.num_envs)
        empty = Experience((), core, statistics)  # type: ignore[arg-type]
        trajectory = self.empty_trajectory(self.acting_networks(networks, empty), run)
        row = self.normalization.scaled_row(scaling, trajectory.env_step, statistics)
        return empty._replace(trajectory=trajectory._replace(env_step=row))

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree:
        """Keep the statistics and drop the trajectory, which has been learned from."""
        return self.with_lasting(new, self.lasting_experience(saved))

    def lasting_experience(self, experience: PyTree) -> PyTree:
        """Return the statistics, without what counts in each environment."""
        return self.normalization.lasting(experience.statistics)

    def with_lasting(self, experience: PyTree, lasting: PyTree) -> PyTree:
        statistics = self.normalization.with_lasting(experience.statistics, lasting)
        return experience._replace(statistics=statistics)

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key, a recurrent state of zeros, and a scaling that changes nothing."""
        scaling = self.normalization.scaling(self.normalization.new(run))
        return StepState(key, zero_core(self.config, run.num_envs), scaling)

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return the networks, with the scaling of observations where there is one.

        A central critic is not among them.
        """
        if self.config.central_critic:
            networks = {name: part for name, part in networks.items() if name not in VALUE_PARTS}
        if not self.normalization.observations:
            return networks
        return ActingNetworks(networks, self.normalization.scaling(experience.statistics))

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Sample actions, or take the likeliest without ``explore``."""
        output, scaling = self._evaluate_step(networks, step_state, env_step)
        params = output.params[0]
        impl = jax.random.key_impl(step_state.key)
        choose: Callable[..., tuple] = functools.partial(self._choose, explore, impl)
        if impl == "threefry2x32":  # XLA has no single kernel for the other generators
            choose = one_kernel(choose, reduces=True)
        key_data, raw, log_prob, action = choose(jax.random.key_data(step_state.key), params)
        key = jax.random.wrap_key_data(key_data, impl=impl)
        return ActionOutput(action, Extras(raw, log_prob)), StepState(key, output.core, scaling)

    def _evaluate_step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> tuple[ActorCriticOutput, PyTree]:
        """Return the output ``[1, B, ...]`` of acting networks, and what scaled observations."""
        obs = jax.tree.map(lambda x: jnp.asarray(x)[None], env_step.obs)
        is_first = jnp.asarray(env_step.is_first)[None]
        scaling: PyTree = ()
        if isinstance(networks, ActingNetworks):
            networks, scaling = networks
        obs = self.normalization.observations(scaling, obs)
        if not self.config.central_critic:
            return self.evaluate(networks, obs, step_state.core, is_first), scaling
        encoded = self._encode(obs, num_leading=2)
        output = self._actor.apply({"params": networks}, encoded, step_state.core, is_first)
        params = only_legal(self.spec, obs, output.params)  # type: ignore[union-attr]
        return output._replace(params=params), scaling  # type: ignore[union-attr]

    def value_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return the standard deviation that rewards are divided by, where they are."""
        if self.config.central_critic or not self.config.normalize_rewards:
            return ()
        return reward_deviation(experience.statistics.rewards)

    def acting_value(
        self, networks: PyTree, value_networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> jax.Array:
        if not self.config.value_head:
            raise UsageError(f"{type(self).__name__} has no values; use Impala or PPO")
        if self.config.central_critic:
            raise UsageError(
                "a policy that was trained with a central critic has no values: the critic sees "
                "more than the policy, and is not saved with it"
            )
        output, _ = self._evaluate_step(networks, step_state, env_step)
        value = output.value[0] / self.config.reward_scale
        return value * value_networks if self.config.normalize_rewards else value

    def acting_distribution(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> PyTree:
        """Return the distribution that actions are sampled from in training."""
        output, _ = self._evaluate_step(networks, step_state, env_step)
        return self.distribution.of_actions(output.params[0])

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
        trajectory, statistics = self.normalization(
            trajectory, final_step_state.scaling, experience.statistics
        )
        return Experience(trajectory, initial_step_state.core, statistics)

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        if self.config.popart:
            networks, grads = popart.rescaled(networks, grads)
        updates, opt = self._optimizer.update(grads, opt, networks)
        return optax.apply_updates(networks, updates), opt

    def experience_spec(self) -> PyTree:
        return Experience(TRAJECTORY_SPEC, P(LEARNER_AXIS), self.normalization.spec())


def check_minibatches(minibatches: int, run: RunSpec, *, of_steps: bool = False) -> None:
    """Raise UsageError unless all minibatches of a trajectory are of one size.

    They are of environments, or ``of_steps``: of transitions.
    """
    envs = run.num_envs // run.num_update_devices
    columns, what = envs, f"{envs} environments"
    if of_steps:
        columns = run.steps_per_cycle * envs
        what = f"{run.steps_per_cycle} steps x {envs} environments = {columns} transitions"
    if columns % minibatches == 0:
        return
    divisors = [d for d in range(1, columns + 1) if columns % d == 0]
    fits = [
        max(d for d in divisors if d < minibatches),
        *[d for d in divisors if d > minibatches][:1],
    ]
    raise UsageError(
        f"minibatches={minibatches} must divide the {what} of a trajectory on each of the "
        f"{run.num_update_devices} update devices; use {' or '.join(map(str, fits))}"
    )

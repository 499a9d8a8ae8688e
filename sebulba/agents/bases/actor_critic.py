"""Actor and critics of continuous actions, and what agents that have them share.

The gradient of a critic with respect to the action trains the actor; a batch comes from a replay.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sebulba.agents.bases.off_policy import OffPolicyAgent, OffPolicyConfig, replay_options
from sebulba.agents.configs import TorsoConfig
from sebulba.agents.kernels.optimizer import make_optimizer
from sebulba.agents.kernels.squashing import Squashing
from sebulba.agents.nets.networks import MLP, Encoded, Torso, orthogonal
from sebulba.agents.replay.layouts import Draw, Replay, TransitionReplay
from sebulba.errors import UsageError
from sebulba.one_kernel import after
from sebulba.types import ActionOutput, EnvSpec, EnvStep, PyTree, RunSpec, empty_env_step


class ActorCriticConfig(OffPolicyConfig, Protocol):
    """The hyper-parameters that agents with actor and critics have."""

    @property
    def critic_learning_rate(self) -> float:
        """Step size of the critics' optimizer."""
        ...

    @property
    def reward_scale(self) -> float:
        """Multiplies rewards."""
        ...

    @property
    def random_env_steps(self) -> int:
        """Environment steps with uniformly random actions at the beginning."""
        ...


ConfigT = TypeVar("ConfigT", bound=ActorCriticConfig)


class Actor(nn.Module):
    """From an encoded observation to numbers that say what to do, ``[N, num_params]``."""

    torso: TorsoConfig
    num_params: int

    @nn.compact
    def __call__(self, encoded: Encoded) -> jax.Array:
        """Return numbers near 0 before training."""
        init = orthogonal(0.01)
        features = Torso(self.torso, name="torso")(encoded)
        return nn.Dense(self.num_params, kernel_init=init, name="head")(features)


class Critic(nn.Module):
    """From an encoded observation and a unit action ``[N, K]`` to what they are worth, ``[N]``.

    The action joins the vector parts of the observation, and the features of its images, in front
    of the MLP.
    """

    torso: TorsoConfig

    @nn.compact
    def __call__(self, encoded: Encoded, action: jax.Array) -> jax.Array:
        """Return the values."""
        parts = [encoded.vector, action]
        if encoded.images:
            only_images = encoded._replace(vector=encoded.vector[:, :0])
            parts.insert(0, Torso(self.torso, name="torso")(only_images))
        mlp = MLP(self.torso.hidden_sizes, self.torso.activation, name="mlp")
        features = mlp(jnp.concatenate(parts, axis=-1))
        init = orthogonal(1.0)
        return nn.Dense(1, kernel_init=init, name="head")(features)[:, 0]


class Batch(NamedTuple):
    """Transitions from the replay, leaves ``[N, ...]``."""

    obs: Encoded
    """Where the action was taken."""
    action: jax.Array
    """Unit action, ``[N, K]``."""
    reward: jax.Array
    """Scaled and discounted sum of the rewards until ``next_obs``, ``[N]``."""
    discount: jax.Array
    """What the value of ``next_obs`` counts, 0 after a termination, ``[N]``."""
    next_obs: Encoded
    """Where the target bootstraps."""
    weight: jax.Array
    """Importance weight of the draw, ``[N]``; 1 where it was uniform."""


class StepState(NamedTuple):
    """What the agent carries from step to step."""

    key: jax.Array
    """Typed PRNG key of the action noise."""
    random_steps: jax.Array
    """Steps still to take at random, int32."""
    noise_scale: PyTree
    """Scale of the noise of each environment, ``[B]``; ``()`` where the actor says it."""


class ActorCriticAgent(OffPolicyAgent[ConfigT]):
    """An agent that learns continuous actions from a replay; a subclass adds policy and loss.

    ``networks`` is ``{"actor": ..., "critics": (..., ...)}``, and what the subclass adds; only the
    actor is staged.
    """

    replay: TransitionReplay
    """Where batches are drawn."""

    def __init__(
        self,
        spec: EnvSpec,
        config: ConfigT,
        *,
        params_per_action: int,
        num_critics: int,
        num_steps: int = 1,
    ) -> None:
        """Build the networks' description; no arrays are made.

        Args:
          spec: Spaces of a single environment.
          config: Hyper-parameters.
          params_per_action: What the actor puts out for each component of an action.
          num_critics: How many critics there are.
          num_steps: Rewards in a target before it bootstraps.

        Raises:
          UsageError: A space that the agent cannot take.
        """
        self.squashing = Squashing(_continuous(spec.action_space, type(self).__name__))
        replay = TransitionReplay(num_steps=num_steps, **replay_options(spec, config.replay))
        super().__init__(spec, config, replay)
        self.actor = Actor(config.torso, params_per_action * self.squashing.size)
        self.critic = Critic(config.torso)
        self._num_critics = num_critics
        self.optimizer = optax.multi_transform(
            {
                name: make_optimizer(rate, config.optimizer)
                for name, rate in self.learning_rates().items()
            },
            {name: name for name in self.learning_rates()},
        )
        # Refuses an observation space here rather than in a thread.
        jax.eval_shape(self.new_networks, jax.eval_shape(jax.random.key, 0))

    # What a subclass says of itself.

    def learning_rates(self) -> dict[str, float]:
        """Return the step size of each part of the networks."""
        config = self.config
        return {"actor": config.learning_rate, "critics": config.critic_learning_rate}

    @abc.abstractmethod
    def unit_action(
        self, params: jax.Array, step_state: StepState, key: jax.Array, *, explore: bool
    ) -> jax.Array:
        """Return the unit actions ``[B, K]`` for what the actor put out, ``params [B, P]``."""

    def noise_scale(self, run: RunSpec, inferencer: int) -> PyTree:
        """Return the scale of the noise of each environment."""
        del run, inferencer
        return ()

    # Networks.

    def policy(self, actor: PyTree, obs: Encoded) -> jax.Array:
        """Return what the actor puts out, ``[N, P]``."""
        return self.actor.apply({"params": actor}, obs)  # type: ignore[return-value]

    def values(self, critics: Sequence[PyTree], obs: Encoded, action: jax.Array) -> jax.Array:
        """Return what each critic says of unit actions ``[N, K]``, ``[critics, N]``."""
        # One after the other: mapped over stacked parameters they took the same time on a CPU,
        # where convolutions would be grouped, which is slow.
        values = [self.critic.apply({"params": critic}, obs, action) for critic in critics]
        return jnp.stack(values)  # type: ignore[arg-type]

    def new_networks(self, key: jax.Array) -> dict[str, Any]:
        """Return initial parameters of actor and critics."""
        actor_key, *critic_keys = jax.random.split(key, 1 + self._num_critics)
        obs = self.encode(empty_env_step(self.spec, 1).obs, num_leading=1)
        action = jnp.zeros((1, self.squashing.size))
        return {
            "actor": self.actor.init(actor_key, obs)["params"],
            "critics": tuple(self.critic.init(k, obs, action)["params"] for k in critic_keys),
        }

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return the actor."""
        del experience
        return networks["actor"]

    # Acting.

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key, the noise of these environments, and how long they act at random."""
        envs = run.num_envs * run.num_inferencers
        random_steps = jnp.int32(-(-self.config.random_env_steps // envs))
        return StepState(key, random_steps, self.noise_scale(run, inferencer))

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Act by the actor; at random at the beginning, unless ``explore`` is False."""
        params = self.policy(networks, self.encode(env_step.obs, num_leading=1))
        key, noise_key, random_key = jax.random.split(after(step_state.key, params), 3)
        unit = self.unit_action(params, step_state, noise_key, explore=explore)
        left = step_state.random_steps
        if explore and self.config.random_env_steps:
            at_random = jax.random.uniform(random_key, unit.shape, minval=-1.0, maxval=1.0)
            unit = jnp.where(left > 0, at_random, unit)
            left = jnp.maximum(left - 1, 0)
        next_state = step_state._replace(key=key, random_steps=left)
        return ActionOutput(self.squashing.action(unit)), next_state

    # Learning.

    def draw_batch(self, experience: Replay, key: jax.Array) -> tuple[Draw, Batch]:
        """Return this device's share of a batch, ready for networks, and where it came from."""
        config = self.config
        draw, weight = self.draw(experience, key)
        drawn = self.replay.transitions(experience, draw, config.discount)
        return draw, Batch(
            obs=self.encode(drawn.obs, num_leading=1),
            action=self.squashing.unit_of(drawn.action),
            reward=config.reward_scale * drawn.reward,
            discount=drawn.discount,
            next_obs=self.encode(drawn.next_obs, num_leading=1),
            weight=weight,
        )


class CriticLoss(NamedTuple):
    """What the critics are to learn."""

    loss: jax.Array
    """Scalar; its gradient is that of the critics only."""
    error: jax.Array
    """Size of the temporal difference, mean over critics, ``[N]``: the priority."""


def critic_loss(values: jax.Array, batch: Batch, next_value: jax.Array) -> CriticLoss:
    """Return ``sum_i mean_n w_n (Q_in - r_n - discount_n V'_n)^2 / 2``.

    Sources: Lillicrap et al. 2015 (arXiv 1509.02971), algorithm 1; Haarnoja et al. 2018 (arXiv
    1812.05905), equation 5; the weights, Horgan et al. 2018 (arXiv 1803.00933).

    Args:
      values: ``Q``, ``[critics, N]``, of the actions that were taken.
      batch: Rewards, discounts and weights of the transitions.
      next_value: ``V'``, ``[N]``, by target networks.
    """
    target = jax.lax.stop_gradient(batch.reward + batch.discount * next_value)
    error = values - target[None]
    loss = 0.5 * jnp.sum(jnp.mean(batch.weight[None] * jnp.square(error), axis=1))
    return CriticLoss(loss, jax.lax.stop_gradient(jnp.mean(jnp.abs(error), axis=0)))


def _continuous(space: gymnasium.Space, agent_name: str) -> gymnasium.spaces.Box:
    """Return the action space as a Box of floats.

    Raises:
      UsageError: It is another.
    """
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return space
    raise UsageError(
        f"action_space={space} must be a Box of floats for {agent_name}, whose actor learns from "
        "the gradient of a critic with respect to the action; use Impala, PPO, DQN or R2D2 for "
        "discrete actions, or wrap the environment"
    )

"""The component that SAC and DDPG share: actor and critics of continuous actions.

The gradient of a critic with respect to the action trains the actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs.off_policy import ContinuousControlConfig
from sebulba.agents.kernels.squashing import Squashing
from sebulba.agents.nets.actor_and_critic import Actor, Critic
from sebulba.agents.nets.encoder import Encoded, ObservationEncoder
from sebulba.agents.replay.transitions_and_sequences import Transition
from sebulba.errors import UsageError
from sebulba.support.key_streams import FIRST_NOISE_STREAM
from sebulba.support.one_kernel import after
from sebulba.types import ActionOutput, EnvSpec, EnvStep, PyTree, RunSpec, empty_env_step


class Batch(NamedTuple):
    """Transitions from the replay, leaves ``[N, ...]``."""

    obs: Encoded
    """Observations in which the actions were taken."""
    action: jax.Array
    """Unit action, ``[N, K]``."""
    reward: jax.Array
    """Scaled and discounted sum of the rewards until ``next_obs``, ``[N]``."""
    discount: jax.Array
    """Factor of the value of ``next_obs``, 0 after a termination, ``[N]``."""
    next_obs: Encoded
    """Observations from which the targets bootstrap."""
    weight: jax.Array
    """Importance weight of the draw, ``[N]``; 1 where it was uniform."""


class StepState(NamedTuple):
    """What the agent carries from step to step."""

    key: jax.Array
    """Typed PRNG key of the action noise."""
    random_steps: jax.Array
    """Steps still to take at random, int32."""
    noise_scale: PyTree
    """Scale of the noise of each environment, ``[B]``; ``()`` if the actor decides it."""
    noise: PyTree = ()
    """Noise of the last step, ``[B, K]``, variance 1; ``()`` if the next is drawn anew."""


STEP_STATE_SPEC = StepState(P(), P(), P(LEARNER_AXIS), P(LEARNER_AXIS))  # type: ignore[arg-type]
"""Prefix tree of PartitionSpecs of a StepState."""


class ActorAndCritics:
    """Networks of an agent for continuous actions, how they act, and how they see a batch.

    Parameters are ``{"actor": ..., "critics": (..., ...)}``; only the actor is needed to act.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: ContinuousControlConfig,
        *,
        agent_name: str,
        params_per_action: int,
        num_critics: int,
    ) -> None:
        """Build the networks' description; no arrays are made.

        Args:
          spec: Spaces of a single environment.
          config: Hyper-parameters.
          agent_name: For messages.
          params_per_action: What the actor puts out for each component of an action.
          num_critics: How many critics there are.

        Raises:
          UsageError: Actions that are not continuous.
        """
        self.squashing = Squashing(_continuous(spec.action_space, agent_name))
        self.encode = ObservationEncoder(spec, config.torso)
        self._spec, self._config, self._num_critics = spec, config, num_critics
        self._actor = Actor(config.torso, params_per_action * self.squashing.size)
        self._critic = Critic(config.torso)

    def new(self, key: jax.Array) -> dict[str, Any]:
        """Return initial parameters."""
        actor_key, *critic_keys = jax.random.split(key, 1 + self._num_critics)
        obs = self.encode(empty_env_step(self._spec, 1).obs, num_leading=1)
        action = jnp.zeros((1, self.squashing.size))
        return {
            "actor": self._actor.init(actor_key, obs)["params"],
            "critics": tuple(self._critic.init(k, obs, action)["params"] for k in critic_keys),
        }

    def policy(self, actor: PyTree, obs: Encoded) -> jax.Array:
        """Return what the actor puts out, ``[N, P]``."""
        return self._actor.apply({"params": actor}, obs)  # type: ignore[return-value]

    def values(self, critics: Sequence[PyTree], obs: Encoded, action: jax.Array) -> jax.Array:
        """Return the values that each critic gives to unit actions ``[N, K]``, ``[critics, N]``."""
        # In a loop: vmap over stacked parameters takes the same time for an MLP on a CPU, and makes
        # grouped convolutions of image networks, which are slow there.
        values = [self._critic.apply({"params": critic}, obs, action) for critic in critics]
        return jnp.stack(values)  # type: ignore[arg-type]

    def acting_value(
        self, actor: PyTree, env_step: EnvStep, critics: Sequence[PyTree]
    ) -> jax.Array:
        """Return the smallest value that a critic gives to the evaluation policy's action, ``[B]``.

        In units of the environment.
        """
        obs = self.encode(env_step.obs, num_leading=1)
        raw = self.policy(actor, obs)[:, : self.squashing.size]  # a standard deviation may follow
        values = self.values(critics, obs, self.squashing.unit(raw))
        return jnp.min(values, axis=0) / self._config.reward_scale

    def new_step_state(self, key: jax.Array, run: RunSpec, noise_scale: PyTree = ()) -> StepState:
        """Return a key, the number of random steps, and the noise of these environments."""
        random_steps = jnp.int32(-(-self._config.random_env_steps // run.num_envs_in_all))
        noise: PyTree = ()
        if self._config.noise_correlation:
            first_key = jax.random.fold_in(key, FIRST_NOISE_STREAM)
            noise = jax.random.normal(first_key, (run.num_envs, self.squashing.size))
        return StepState(key, random_steps, noise_scale, noise)

    @staticmethod
    def advanced(step_state: StepState, num_steps: int) -> StepState:
        """Return a new step state without the random steps that have been taken already."""
        left = max(int(step_state.random_steps) - num_steps, 0)
        return step_state._replace(random_steps=jnp.int32(left))

    def act(
        self,
        actor: PyTree,
        step_state: StepState,
        env_step: EnvStep,
        unit_action: Callable[[jax.Array, jax.Array], jax.Array],
        *,
        explore: bool,
    ) -> tuple[ActionOutput, StepState]:
        """Act by the actor, or at random in the first steps unless ``explore`` is False.

        Args:
          actor: Its parameters.
          step_state: Before this step.
          env_step: ``[B, ...]``.
          unit_action: From what the actor puts out, ``[B, P]``, and noise ``[B, K]`` of variance 1,
            to ``[B, K]``.
          explore: Static.
        """
        params = self.policy(actor, self.encode(env_step.obs, num_leading=1))
        key, noise_key, random_key = jax.random.split(after(step_state.key, params), 3)
        noise = jax.random.normal(noise_key, (params.shape[0], self.squashing.size))
        if correlation := self._config.noise_correlation:
            rest = math.sqrt(1.0 - correlation**2)  # which keeps the variance at 1
            noise = correlation * step_state.noise + rest * noise
            step_state = step_state._replace(noise=noise)
        unit = unit_action(params, noise)
        left = step_state.random_steps
        if explore and self._config.random_env_steps:
            at_random = jax.random.uniform(random_key, unit.shape, minval=-1.0, maxval=1.0)
            unit = jnp.where(left > 0, at_random, unit)
            left = jnp.maximum(left - 1, 0)
        next_state = step_state._replace(key=key, random_steps=left)
        return ActionOutput(self.squashing.action(unit)), next_state

    def batch(self, drawn: Transition, weight: jax.Array) -> Batch:
        """Return a batch for the networks from transitions and importance weights.

        Args:
          drawn: Leaves ``[N, ...]``.
          weight: ``[N]``.
        """
        return Batch(
            obs=self.encode(drawn.obs, num_leading=1),
            action=self.squashing.unit_of(drawn.action),
            reward=self._config.reward_scale * drawn.reward,
            discount=drawn.discount,
            next_obs=self.encode(drawn.next_obs, num_leading=1),
            weight=weight,
        )


class CriticLoss(NamedTuple):
    """Loss and errors of the critics."""

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

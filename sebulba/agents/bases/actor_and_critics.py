"""What SAC and DDPG share: an actor, and critics of its actions.

The gradient of a critic with respect to a continuous action trains the actor.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.agents.configs.off_policy import ContinuousControlConfig
from sebulba.agents.kernels.optimizer import make_optimizers
from sebulba.agents.kernels.squashing import Squashing
from sebulba.agents.nets.actor_and_critic import Actor, Critic
from sebulba.agents.nets.encoder import Encoded, ObservationEncoder
from sebulba.agents.replay.transitions_and_sequences import (
    Draw,
    Replay,
    Transition,
    TransitionReplay,
)
from sebulba.errors import UsageError
from sebulba.support.key_streams import FIRST_NOISE_STREAM
from sebulba.support.one_kernel import after
from sebulba.types import ActionOutput, EnvSpec, EnvStep, PyTree, RunSpec, empty_env_step

ConfigT = TypeVar("ConfigT", bound=ContinuousControlConfig)


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


class ActorCriticsAgent(OffPolicyAgent[ConfigT, TransitionReplay]):
    """An agent with an actor and critics; a subclass adds ``unit_action`` and ``loss``.

    Actions are continuous, unless a subclass has another ``new_squashing``. Networks are
    ``{"actor": ..., "critics": (..., ...)}``; only the actor is needed to act.
    """

    uses_final_obs = True
    encoder: type[ObservationEncoder] = ObservationEncoder
    num_actions = 0
    """With discrete actions: how many each critic values at once."""

    def __init__(
        self,
        spec: EnvSpec,
        config: ConfigT,
        replay: TransitionReplay,
        *,
        params_per_action: int,
        num_critics: int,
        **learning_rates: float,
    ) -> None:
        """Build the networks' description; no arrays are made.

        Args:
          spec: Spaces of a single environment.
          config: Hyper-parameters.
          replay: What is kept.
          params_per_action: What the actor puts out for each component of an action.
          num_critics: How many critics there are.
          **learning_rates: Of parts of the networks other than actor and critics.

        Raises:
          UsageError: Actions that are not continuous, or a space that the networks cannot take.
        """
        self.squashing: Any = self.new_squashing(spec.action_space, config)
        self.encode = self.encoder(spec, config.torso)
        self._num_critics = num_critics
        self._actor = Actor(config.torso, params_per_action * self.squashing.size)
        self._critic = Critic(config.torso, self.num_actions, config.crossq)
        rates = {"actor": config.learning_rate, "critics": config.critic_learning_rate}
        optimizer = make_optimizers(
            rates | learning_rates, config.optimizer, {"actor": config.actor_period}
        )
        super().__init__(spec, config, replay, optimizer)

    # What a subclass for other actions overrides.

    def new_squashing(self, space: gymnasium.Space, config: ConfigT) -> Any:
        """Return what maps raw numbers to unit actions, and these to actions of ``space``."""
        continuous = _continuous(space, type(self).__name__)
        return Squashing(continuous, soft=config.single_bounds == "soft")

    def of_action(self, outputs: jax.Array, action: jax.Array) -> jax.Array:
        """Return the values ``[..., N]`` of unit actions, given what critics put out."""
        return outputs

    def at_random(self, key: jax.Array, params: jax.Array) -> jax.Array:
        """Draw unit actions ``[N, K]`` without heed of the policy's parameters ``[N, P]``."""
        return self.squashing.at_random(key, params.shape[0])  # type: ignore[no-any-return]

    @abc.abstractmethod
    def unit_action(
        self, params: jax.Array, noise: jax.Array, step_state: StepState, *, explore: bool
    ) -> jax.Array:
        """Return unit actions ``[B, K]``.

        Args:
          params: What the actor puts out, ``[B, P]``.
          noise: ``[B, K]`` of variance 1.
          step_state: Before this step.
          explore: Static.
        """

    def new_networks(self, key: jax.Array) -> dict[str, Any]:
        actor_key, *critic_keys = jax.random.split(key, 1 + self._num_critics)
        obs = self.encode(empty_env_step(self.spec, 1).obs, num_leading=1)
        action = jnp.zeros((1, self.squashing.size))
        return {
            "actor": self._actor.init(actor_key, obs)["params"],
            "critics": tuple(self._critic.init(k, obs, action)["params"] for k in critic_keys),
        }

    def acting_part(self, networks: PyTree) -> PyTree:
        return networks["actor"]

    def value_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        return networks["critics"]

    def policy(self, actor: PyTree, obs: Encoded) -> jax.Array:
        """Return what the actor puts out, ``[N, P]``."""
        return self._actor.apply({"params": actor}, obs)  # type: ignore[return-value]

    def values(self, critics: Sequence[PyTree], obs: Encoded, action: jax.Array) -> jax.Array:
        """Return the values that each critic gives to unit actions ``[N, K]``, ``[critics, N]``."""
        return self.of_action(self.outputs(critics, obs, action), action)

    def outputs(self, critics: Sequence[PyTree], obs: Encoded, action: jax.Array) -> jax.Array:
        """Return what each critic puts out, ``[critics, N]``, or ``[critics, N, A]``."""
        # In a loop: vmap over stacked parameters takes the same time for an MLP on a CPU, and makes
        # grouped convolutions of image networks, which are slow there.
        values = [self._critic.apply({"params": critic}, obs, action) for critic in critics]
        return jnp.stack(values)  # type: ignore[arg-type]

    def acting_value(
        self, networks: PyTree, value_networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> jax.Array:
        """Return the smallest value of a critic, ``[B]``, in units of the environment.

        It is of the evaluation policy's action. SAC's counts the entropies to come, times the
        temperature, as rewards.
        """
        actor, env_step = self.as_seen(networks, env_step)
        obs = self.encode(env_step.obs, num_leading=1)
        raw = self.policy(actor, obs)[:, : self.squashing.size]  # a standard deviation may follow
        values = self.values(value_networks, obs, self.squashing.unit(raw))
        return jnp.min(values, axis=0) / self.config.reward_scale

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key, the number of random steps, and the noise of these environments."""
        random_steps = jnp.int32(-(-self.config.random_env_steps // run.num_envs_in_all))
        noise: PyTree = ()
        if self.config.noise_correlation:
            first_key = jax.random.fold_in(key, FIRST_NOISE_STREAM)
            noise = jax.random.normal(first_key, (run.num_envs, self.squashing.size))
        return StepState(key, random_steps, (), noise)

    def advance_step_state(self, step_state: StepState, num_steps: int) -> StepState:
        left = max(int(step_state.random_steps) - num_steps, 0)
        return step_state._replace(random_steps=jnp.int32(left))

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Act by the actor, or at random in the first steps unless ``explore`` is False."""
        actor, env_step = self.as_seen(networks, env_step)
        params = self.policy(actor, self.encode(env_step.obs, num_leading=1))
        key, noise_key, random_key = jax.random.split(after(step_state.key, params), 3)
        noise = jax.random.normal(noise_key, (params.shape[0], self.squashing.size))
        if correlation := self.config.noise_correlation:
            rest = math.sqrt(1.0 - correlation**2)  # which keeps the variance at 1
            noise = correlation * step_state.noise + rest * noise
            step_state = step_state._replace(noise=noise)
        unit = self.unit_action(params, noise, step_state, explore=explore)
        left = step_state.random_steps
        if explore and self.config.random_env_steps:
            unit = jnp.where(left > 0, self.at_random(random_key, params), unit)
            left = jnp.maximum(left - 1, 0)
        next_state = step_state._replace(key=key, random_steps=left)
        return ActionOutput(self.squashing.action(unit)), next_state

    def batch(self, experience: Replay, key: jax.Array) -> tuple[Draw, jax.Array, Transition]:
        """Draw transitions; return where they are, their weights ``[N]``, and them.

        They are as the networks take them: observations encoded, unit actions, rewards scaled.
        """
        draw, weight = self.draw(experience, key)
        drawn = self.gathered(experience, draw)
        obs, next_obs = (self.encode(x, num_leading=1) for x in (drawn.obs, drawn.next_obs))
        action = self.squashing.unit_of(drawn.action)
        reward = self.config.reward_scale * drawn.reward
        return (
            draw,
            weight,
            drawn._replace(obs=obs, action=action, reward=reward, next_obs=next_obs),
        )


def critic_loss(
    values: jax.Array, batch: Transition, weight: jax.Array, next_value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``sum_i mean_n w_n (Q_in - r_n - discount_n V'_n)^2 / 2``, and the priorities ``[N]``.

    Its gradient is that of the critics only. A priority is the mean size of the temporal
    differences of the critics.
    Sources: Lillicrap et al. 2015 (arXiv 1509.02971), algorithm 1; Haarnoja et al. 2018 (arXiv
    1812.05905), equation 5; the weights, Horgan et al. 2018 (arXiv 1803.00933).

    Args:
      values: ``Q``, ``[critics, N]``, of the actions that were taken.
      batch: The transitions.
      weight: ``w``, ``[N]``, importance weights of their draw.
      next_value: ``V'``, ``[N]``, by target networks.
    """
    target = jax.lax.stop_gradient(batch.reward + batch.discount * next_value)
    error = values - target[None]
    loss = 0.5 * jnp.sum(jnp.mean(weight[None] * jnp.square(error), axis=1))
    return loss, jax.lax.stop_gradient(jnp.mean(jnp.abs(error), axis=0))


def _continuous(space: gymnasium.Space, agent_name: str) -> gymnasium.spaces.Box:
    """Return the action space as a Box of floats.

    Raises:
      UsageError: It is another.
    """
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return space
    raise UsageError(
        f"action_space={space} must be a Box of floats for {agent_name}, whose actor learns from "
        "the gradient of a critic with respect to the action; use Impala or PPO, or for a Discrete "
        "also DQN, R2D2 or SAC, or wrap the environment"
    )

"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1801.01290 and 1812.05905)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from sebulba.agents.bases.actor_and_critics import (
    STEP_STATE_SPEC,
    ActorAndCritics,
    StepState,
    critic_loss,
)
from sebulba.agents.bases.off_policy import OffPolicyAgent, Opt
from sebulba.agents.configs import SACConfig
from sebulba.agents.kernels.distributions import SquashedGaussian
from sebulba.agents.kernels.optimizer import make_optimizers
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.replay.transitions_and_sequences import Replay, TransitionReplay
from sebulba.types import ActionMoments, ActionOutput, EnvSpec, EnvStep, PyTree, RunSpec


class Sampled(NamedTuple):
    """Actions of the policy now."""

    action: jax.Array
    """Unit action, ``[N, K]``."""
    log_prob: jax.Array
    """Its log-density, ``[N]``, in nats."""


class SAC(OffPolicyAgent[SACConfig, TransitionReplay]):
    """Two critics, a Gaussian policy that is squashed, and a temperature that learns.

    ``networks`` is ``{"actor", "critics", "log_temperature"}``; the critics have targets.
    """

    uses_final_obs = True

    def __init__(self, spec: EnvSpec, config: SACConfig) -> None:
        """Describe networks and replay; raise UsageError for a space that does not fit."""
        self.nets = ActorAndCritics(
            spec, config, agent_name="SAC", params_per_action=2, num_critics=2
        )
        self.distribution = SquashedGaussian(spec.action_space)  # type: ignore[arg-type]
        given = config.target_entropy
        self.target_entropy = -float(self.nets.squashing.size) if given is None else given
        rates = {
            "actor": config.learning_rate,
            "critics": config.critic_learning_rate,
            "log_temperature": config.temperature_learning_rate,
        }
        replay = TransitionReplay.of(spec, config.replay)
        super().__init__(spec, config, replay, make_optimizers(rates, config.optimizer))

    def new_networks(self, key: jax.Array) -> dict[str, Any]:
        """Return initial parameters of actor, critics and temperature."""
        log_temperature = jnp.float32(math.log(self.config.initial_temperature))
        return {**self.nets.new(key), "log_temperature": log_temperature}

    def acting_part(self, networks: PyTree) -> PyTree:
        """Return the actor."""
        return networks["actor"]

    def value_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return the critics."""
        del experience
        return networks["critics"]

    def acting_value(
        self, networks: PyTree, value_networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> jax.Array:
        """Return the smallest value of a critic, ``[B]``, in units of the environment.

        It counts the entropies to come, times the temperature, as rewards.
        """
        del step_state
        return self.nets.acting_value(*self.as_seen(networks, env_step), value_networks)

    def acting_distribution(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> ActionMoments:
        """Return the moments of what is sampled in training."""
        del step_state
        actor, env_step = self.as_seen(networks, env_step)
        obs = self.nets.encode(env_step.obs, num_leading=1)
        return self.distribution.of_actions(self.nets.policy(actor, obs))

    def with_target(self, networks: PyTree) -> PyTree:
        """Return the critics."""
        return networks["critics"]

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key, and how long these environments act at random."""
        del inferencer
        return self.nets.new_step_state(key, run)

    def advance_step_state(self, step_state: StepState, num_steps: int) -> StepState:
        """Leave out the random steps that have been taken already."""
        return self.nets.advanced(step_state, num_steps)

    def step_state_spec(self) -> StepState:
        """Split the noise, if it depends on that of the step before."""
        return STEP_STATE_SPEC

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Sample actions, or take the middle of the distribution without ``explore``."""

        def unit_action(params: jax.Array, noise: jax.Array) -> jax.Array:
            distribution = self.distribution
            raw = distribution.at(params, noise) if explore else distribution.mode(params)
            return self.nets.squashing.unit(raw)

        actor, env_step = self.as_seen(networks, env_step)
        return self.nets.act(actor, step_state, env_step, unit_action, explore=explore)

    def sampled(self, actor: PyTree, obs: Encoded, key: jax.Array) -> Sampled:
        """Draw an action for each observation, differentiable in ``actor``."""
        params = self.nets.policy(actor, obs)
        raw = self.distribution.sample(params, key)
        return Sampled(self.nets.squashing.unit(raw), self.distribution.log_prob(params, raw))

    def loss_keys(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Return the keys of what is drawn, and of the actions after and at its observations."""
        return tuple(jax.random.split(key, 3))

    def loss(
        self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array
    ) -> tuple[jax.Array, tuple[Replay, dict[str, jax.Array]]]:
        """Return the sum of the losses of critics, actor and temperature.

        Each trains its own part of the networks: the others are constants to it. Equations 5, 9
        and 18 of arXiv 1812.05905, with the smaller of two target critics (section 5).
        """
        draw_key, next_key, now_key = self.loss_keys(key)
        draw, weight = self.draw(experience, draw_key)
        batch = self.nets.batch(self.transitions(experience, draw), weight)
        temperature = jnp.exp(networks["log_temperature"])

        following = self.sampled(networks["actor"], batch.next_obs, next_key)
        next_values = self.nets.values(opt.target, batch.next_obs, following.action)
        next_value = jnp.min(next_values, axis=0) - temperature * following.log_prob
        values = self.nets.values(networks["critics"], batch.obs, batch.action)
        critic = critic_loss(values, batch, next_value)

        now = self.sampled(networks["actor"], batch.obs, now_key)
        value = jnp.min(
            self.nets.values(stop_gradient(networks["critics"]), batch.obs, now.action), 0
        )
        actor_loss = jnp.mean(stop_gradient(temperature) * now.log_prob - value)
        entropy = -jnp.mean(stop_gradient(now.log_prob))
        temperature_loss = temperature * (entropy - self.target_entropy)

        metrics = {
            "critic_loss": critic.loss,
            "actor_loss": actor_loss,
            "value": jnp.mean(values),
            "entropy": entropy,
            "temperature": temperature,
            **self.replay_metrics(experience, opt),
        }
        experience = self.set_priority(experience, draw, critic.error)
        return critic.loss + actor_loss + temperature_loss, (experience, metrics)

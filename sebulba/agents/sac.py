"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1801.01290 and 1812.05905)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from sebulba.agent import Loss
from sebulba.agents.bases.actor_and_critics import ActorCriticsAgent, StepState, critic_loss
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.configs import SACConfig
from sebulba.agents.kernels.distributions import SquashedGaussian
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.replay.transitions_and_sequences import Replay, TransitionReplay
from sebulba.types import ActionMoments, EnvSpec, EnvStep, PyTree


class SAC(ActorCriticsAgent[SACConfig]):
    """Two critics, a Gaussian policy that is squashed, and a temperature that learns.

    ``networks`` is ``{"actor", "critics", "log_temperature"}``; the critics have targets.
    """

    def __init__(self, spec: EnvSpec, config: SACConfig) -> None:
        super().__init__(
            spec,
            config,
            TransitionReplay.of(spec, config.replay),
            params_per_action=2,
            num_critics=2,
            log_temperature=config.temperature_learning_rate,
        )
        self.distribution = SquashedGaussian(self.squashing)
        given = config.target_entropy
        self.target_entropy = -float(self.squashing.size) if given is None else given

    def new_networks(self, key: jax.Array) -> dict[str, Any]:
        log_temperature = jnp.float32(math.log(self.config.initial_temperature))
        return {**super().new_networks(key), "log_temperature": log_temperature}

    def acting_distribution(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> ActionMoments:
        """Return the moments of what is sampled in training."""
        actor, env_step = self.as_seen(networks, env_step)
        obs = self.encode(env_step.obs, num_leading=1)
        return self.distribution.of_actions(self.policy(actor, obs))

    def with_target(self, networks: PyTree) -> PyTree:
        return networks["critics"]

    def unit_action(
        self, params: jax.Array, noise: jax.Array, step_state: StepState, *, explore: bool
    ) -> jax.Array:
        """Sample actions, or take the middle of the distribution without ``explore``."""
        distribution = self.distribution
        raw = distribution.at(params, noise) if explore else distribution.mode(params)
        return self.squashing.unit(raw)

    def sampled(self, actor: PyTree, obs: Encoded, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw unit actions ``[N, K]``, differentiable in ``actor``, and their log-densities."""
        params = self.policy(actor, obs)
        raw = self.distribution.sample(params, key)
        return self.squashing.unit(raw), self.distribution.log_prob(params, raw)

    def loss_keys(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Return the keys of what is drawn, and of the actions after and at its observations."""
        return tuple(jax.random.split(key, 3))

    def loss(self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array) -> Loss:
        """Return the sum of the losses of critics, actor and temperature.

        Each trains its own part of the networks: the others are constants to it. Equations 5, 9
        and 18 of arXiv 1812.05905, with the smaller of two target critics (section 5).
        """
        draw_key, next_key, now_key = self.loss_keys(key)
        draw, weight, batch = self.batch(experience, draw_key)
        temperature = jnp.exp(networks["log_temperature"])

        next_action, log_prob = self.sampled(networks["actor"], batch.next_obs, next_key)
        next_values = self.values(opt.target, batch.next_obs, next_action)
        next_value = jnp.min(next_values, axis=0) - temperature * log_prob
        values = self.values(networks["critics"], batch.obs, batch.action)
        loss, priority = critic_loss(values, batch, weight, next_value)

        action, log_prob = self.sampled(networks["actor"], batch.obs, now_key)
        value = jnp.min(self.values(stop_gradient(networks["critics"]), batch.obs, action), 0)
        actor_loss = jnp.mean(stop_gradient(temperature) * log_prob - value)
        entropy = -jnp.mean(stop_gradient(log_prob))
        temperature_loss = temperature * (entropy - self.target_entropy)

        metrics = {
            "critic_loss": loss,
            "actor_loss": actor_loss,
            "value": jnp.mean(values),
            "entropy": entropy,
            "temperature": temperature,
            **self.replay_metrics(experience, opt),
        }
        experience = self.set_priority(experience, draw, priority)
        return loss + actor_loss + temperature_loss, (experience, metrics)

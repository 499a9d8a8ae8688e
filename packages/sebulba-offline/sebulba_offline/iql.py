"""Implicit Q-learning (Kostrikov et al. 2022, arXiv 2110.06169)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from sebulba.agent import Loss
from sebulba.agents.bases.actor_and_critics import ActorCriticsAgent, StepState, critic_loss
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.kernels.distributions import clipped
from sebulba.agents.nets.actor_and_critic import Actor
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.replay.transitions_and_sequences import Replay, TransitionReplay
from sebulba.types import EnvSpec, PyTree, empty_env_step
from sebulba_offline.configs import IQLConfig
from sebulba_offline.kernels import advantage_weight, expectile_loss, gaussian_log_prob
from sebulba_offline.learning import LearnsFromData


class IQL(LearnsFromData, ActorCriticsAgent[IQLConfig]):
    """Critics that never ask for an action beyond the data, and an actor that imitates the best.

    ``networks`` is ``{"actor": {"mean", "log_std"}, "critics", "value"}``; the critics have
    targets. The policy is a Gaussian around a squashed mean; its deviation is that of all
    observations.
    """

    config: IQLConfig

    def __init__(self, spec: EnvSpec, config: IQLConfig) -> None:
        self._value = Actor(config.torso, 1)
        super().__init__(
            spec,
            config,
            TransitionReplay.of(spec, config.replay),
            params_per_action=1,
            num_critics=2,
            value=config.value_learning_rate,
        )
        self.hold_data()

    def new_networks(self, key: jax.Array) -> dict[str, Any]:
        networks_key, value_key = jax.random.split(key)
        networks = super().new_networks(networks_key)
        obs = self.encode(empty_env_step(self.spec, 1).obs, num_leading=1)
        log_std = jnp.zeros(self.squashing.size)
        return networks | {
            "actor": {"mean": networks["actor"], "log_std": log_std},
            "value": self._value.init(value_key, obs)["params"],
        }

    def with_target(self, networks: PyTree) -> PyTree:
        return networks["critics"]

    def policy(self, actor: PyTree, obs: Encoded) -> jax.Array:
        """Return raw means and logarithms of deviations, ``[N, 2 K]``."""
        mean = super().policy(actor["mean"], obs)
        log_std = jnp.broadcast_to(clipped(actor["log_std"])[None], mean.shape)
        return jnp.concatenate([mean, log_std], axis=-1)

    def unit_action(
        self, params: jax.Array, noise: jax.Array, step_state: StepState, *, explore: bool
    ) -> jax.Array:
        """Return the means, with noise if ``explore``."""
        raw, log_std = jnp.split(params, 2, axis=-1)
        unit = self.squashing.unit(raw)
        return self.squashing.clip(unit + jnp.exp(log_std) * noise) if explore else unit

    def state_value(self, networks: PyTree, obs: Encoded) -> jax.Array:
        """Return ``V``, ``[N]``."""
        values: Any = self._value.apply({"params": networks["value"]}, obs)
        return values[:, 0]

    def loss(self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array) -> Loss:
        """Return the sum of the losses of state values, critics and actor.

        Equations 5, 6 and 7 of the paper, each with a gradient for its own networks only.
        """
        config = self.config
        _, weight, batch = self.batch(experience, key)
        target_value = jnp.min(self.values(opt.target, batch.obs, batch.action), axis=0)
        value = self.state_value(networks, batch.obs)
        advantage = target_value - value
        value_loss = jnp.mean(weight * expectile_loss(advantage, config.expectile))

        next_value = stop_gradient(self.state_value(networks, batch.next_obs))
        values = self.values(networks["critics"], batch.obs, batch.action)
        of_critics, _ = critic_loss(values, batch, weight, next_value)

        raw, log_std = jnp.split(self.policy(networks["actor"], batch.obs), 2, axis=-1)
        log_prob = gaussian_log_prob(batch.action, self.squashing.unit(raw), log_std)
        imitated = advantage_weight(
            advantage, config.inverse_temperature, config.most_advantage_weight
        )
        actor_loss = -jnp.mean(weight * imitated * log_prob)
        metrics = {
            "value_loss": value_loss,
            "critic_loss": of_critics,
            "actor_loss": actor_loss,
            "value": jnp.mean(value),
            "advantage_weight": jnp.mean(imitated),
            **self.replay_metrics(experience, opt),
        }
        return value_loss + of_critics + actor_loss, (experience, metrics)

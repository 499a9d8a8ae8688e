"""TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860), with the terms of ReBRAC.

ReBRAC: Tarasov et al. 2023 (arXiv 2305.09836). Its penalty of the critic is here; its layer
normalisation is not. ``actor_period`` delays the actor, as in ``DDPG``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import pmean, stop_gradient

from sebulba.agent import LEARNER_AXIS, Loss
from sebulba.agents.bases.actor_and_critics import critic_loss
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.ddpg import DDPG
from sebulba.agents.replay.store import rows_at
from sebulba.agents.replay.transitions_and_sequences import Draw, Replay
from sebulba.types import EnvSpec, PyTree
from sebulba_offline.configs import TD3BCConfig
from sebulba_offline.kernels import distance, penalised_value, regularised_actor_loss
from sebulba_offline.learning import LearnsFromData


class TD3BC(LearnsFromData, DDPG):
    """A deterministic policy that climbs the critic, and stays near the actions of the data."""

    config: TD3BCConfig

    def __init__(self, spec: EnvSpec, config: TD3BCConfig) -> None:
        super().__init__(spec, config)
        self.hold_data()

    def loss(self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array) -> Loss:
        """Return the sum of the losses of critics and actor."""
        config = self.config
        draw_key, noise_key = self.loss_keys(key)
        draw, weight, batch = self.batch(experience, draw_key)

        next_action = self.target_action(opt.target["actor"], batch.next_obs, noise_key)
        next_values = self.values(opt.target["critics"], batch.next_obs, next_action)
        penalty = self.next_distance(experience, draw, next_action)
        next_value = penalised_value(next_values, penalty, config.critic_penalty)
        values = self.values(networks["critics"], batch.obs, batch.action)
        loss, _ = critic_loss(values, batch, weight, next_value)

        guide = stop_gradient(networks["critics"][:1])
        action = self.chosen(networks["actor"], batch.obs)
        value = self.values(guide, batch.obs, action)[0]
        apart = distance(action, batch.action)
        size = pmean(jnp.mean(jnp.abs(value)), LEARNER_AXIS)
        of_each = regularised_actor_loss(value, apart, config.actor_penalty, size)
        actor_loss = jnp.mean(weight * of_each)
        metrics = {
            "critic_loss": loss,
            "actor_loss": actor_loss,
            "value": jnp.mean(values),
            "distance_to_data": jnp.mean(weight * apart),
            **self.replay_metrics(experience, opt),
        }
        return loss + actor_loss, (experience, metrics)

    def next_distance(self, replay: Replay, draw: Draw, next_action: jax.Array) -> jax.Array:
        """Return how far actions ``[N, K]`` are from those after the transitions, ``[N]``.

        0 where the episode ended and there is none.
        """
        index = (draw.inferencer, (draw.row + 1) % replay.num_rows, draw.env)
        rows = replay.rows
        action, *ends = rows_at((rows.action, rows.terminated, rows.truncated), index)
        apart = distance(next_action, self.squashing.unit_of(action))
        return jnp.where(ends[0] | ends[1], 0.0, apart)

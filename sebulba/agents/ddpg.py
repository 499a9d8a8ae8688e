"""Deep deterministic policy gradient (Lillicrap et al. 2015, arXiv 1509.02971).

Its Ape-X form (Horgan et al. 2018, arXiv 1803.00933) is prioritized replay, several steps before a
target bootstraps, and a ladder of exploration over all environments of all Inferencers. From TD3
(Fujimoto et al. 2018, arXiv 1802.09477): two critics, a smoothed target and a delayed actor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from sebulba.agent import Loss
from sebulba.agents.bases.actor_and_critics import ActorCriticsAgent, StepState, critic_loss
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.configs import DDPGConfig
from sebulba.agents.kernels.exploration import exploration_ladder
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.replay.transitions_and_sequences import Replay, TransitionReplay
from sebulba.types import ActionMoments, EnvSpec, EnvStep, PyTree, RunSpec

_NOISE_CLIP = 2.5
"""The noise on a target's action is clipped at so many standard deviations (0.5 / 0.2 in TD3)."""


class DDPG(ActorCriticsAgent[DDPGConfig]):
    """A deterministic policy that climbs the critic; Gaussian noise explores.

    The paper's noise is correlated in time (``noise_correlation``); TD3, section 6.1, found no use
    in that.
    ``networks`` is ``{"actor", "critics"}``, and both have targets.
    """

    def __init__(self, spec: EnvSpec, config: DDPGConfig) -> None:
        replay = TransitionReplay.of(spec, config.replay, num_steps=config.num_steps)
        super().__init__(spec, config, replay, params_per_action=1, num_critics=config.num_critics)

    def acting_distribution(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> ActionMoments:
        """Return the moments of the actor's action, without noise."""
        actor, env_step = self.as_seen(networks, env_step)
        unit = self.chosen(actor, self.encode(env_step.obs, num_leading=1))
        action = self.squashing.action(unit).astype(jnp.float32)
        return ActionMoments(action, jnp.zeros_like(action))

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key, the number of random steps, and this Inferencer's part of the ladder."""
        base, exponent = self.config.noise_scale, self.config.noise_exponent
        noise_scale = exploration_ladder(run, inferencer, base=base, exponent=exponent)
        return super().new_step_state(key, run, inferencer)._replace(noise_scale=noise_scale)

    def unit_action(
        self, params: jax.Array, noise: jax.Array, step_state: StepState, *, explore: bool
    ) -> jax.Array:
        """Return the actor's actions, with noise if ``explore``."""
        unit = self.squashing.unit(params)
        if not explore:
            return unit
        return self.squashing.clip(unit + step_state.noise_scale[:, None] * noise)

    def chosen(self, actor: PyTree, obs: Encoded) -> jax.Array:
        """Return the unit actions of the policy, ``[N, K]``."""
        return self.squashing.unit(self.policy(actor, obs))

    def target_action(self, actor: PyTree, obs: Encoded, key: jax.Array) -> jax.Array:
        """Return the unit actions of the target policy, smoothed by clipped noise, ``[N, K]``."""
        action, scale = self.chosen(actor, obs), self.config.target_noise
        if not scale:
            return action
        noise = jax.random.normal(key, action.shape)
        return self.squashing.clip(action + scale * jnp.clip(noise, -_NOISE_CLIP, _NOISE_CLIP))

    def loss_keys(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Return the keys of what is drawn and of the noise on a target's action."""
        return tuple(jax.random.split(key))

    def loss(self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array) -> Loss:
        """Return the sum of the losses of critics and actor.

        The critics' parameters are constants to the actor's loss (algorithm 1 of the paper). The
        first critic is the actor's guide.
        """
        draw_key, noise_key = self.loss_keys(key)
        draw, weight, batch = self.batch(experience, draw_key)

        next_action = self.target_action(opt.target["actor"], batch.next_obs, noise_key)
        next_values = self.values(opt.target["critics"], batch.next_obs, next_action)
        values = self.values(networks["critics"], batch.obs, batch.action)
        loss, priority = critic_loss(values, batch, weight, jnp.min(next_values, axis=0))

        guide = stop_gradient(networks["critics"][:1])
        action = self.chosen(networks["actor"], batch.obs)
        actor_loss = -jnp.mean(self.values(guide, batch.obs, action))

        metrics = {
            "critic_loss": loss,
            "actor_loss": actor_loss,
            "value": jnp.mean(values),
            **self.replay_metrics(experience, opt),
        }
        experience = self.set_priority(experience, draw, priority)
        return loss + actor_loss, (experience, metrics)

"""Deep deterministic policy gradient (Lillicrap et al. 2015, arXiv 1509.02971).

Its Ape-X form (Horgan et al. 2018, arXiv 1803.00933) is prioritized replay, several steps before a
target bootstraps, and a ladder of exploration over all environments of all Inferencers. From TD3
(Fujimoto et al. 2018, arXiv 1802.09477): two critics and a smoothed target, but no delayed actor.
"""

from __future__ import annotations

from typing import Any

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
from sebulba.agents.configs import DDPGConfig
from sebulba.agents.kernels.exploration import exploration_ladder
from sebulba.agents.kernels.optimizer import make_optimizers
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.replay.transitions_and_sequences import Replay, TransitionReplay
from sebulba.types import ActionMoments, ActionOutput, EnvSpec, EnvStep, PyTree, RunSpec

_NOISE_CLIP = 2.5
"""The noise on a target's action is clipped at so many standard deviations (0.5 / 0.2 in TD3)."""


class DDPG(OffPolicyAgent[DDPGConfig, TransitionReplay]):
    """A deterministic policy that climbs the critic; Gaussian noise explores.

    The paper's noise is correlated in time (``noise_correlation``); TD3, section 6.1, found no use
    in that.
    ``networks`` is ``{"actor", "critics"}``, and both have targets.
    """

    uses_final_obs = True

    def __init__(self, spec: EnvSpec, config: DDPGConfig) -> None:
        """Describe networks and replay; raise UsageError for a space that does not fit."""
        self.nets = ActorAndCritics(
            spec, config, agent_name="DDPG", params_per_action=1, num_critics=config.num_critics
        )
        rates = {"actor": config.learning_rate, "critics": config.critic_learning_rate}
        replay = TransitionReplay.of(spec, config.replay, num_steps=config.num_steps)
        super().__init__(spec, config, replay, make_optimizers(rates, config.optimizer))

    def new_networks(self, key: jax.Array) -> dict[str, Any]:
        """Return initial parameters of actor and critics."""
        return self.nets.new(key)

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
        """Return the smallest value of a critic, ``[B]``, in units of the environment."""
        del step_state
        return self.nets.acting_value(*self.as_seen(networks, env_step), value_networks)

    def acting_distribution(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> ActionMoments:
        """Return the moments of the actor's action, without noise."""
        del step_state
        actor, env_step = self.as_seen(networks, env_step)
        unit = self.chosen(actor, self.nets.encode(env_step.obs, num_leading=1))
        action = self.nets.squashing.action(unit).astype(jnp.float32)
        return ActionMoments(action, jnp.zeros_like(action))

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key, the number of random steps, and this Inferencer's part of the ladder."""
        base, exponent = self.config.noise_scale, self.config.noise_exponent
        noise_scale = exploration_ladder(run, inferencer, base=base, exponent=exponent)
        return self.nets.new_step_state(key, run, noise_scale)

    def advance_step_state(self, step_state: StepState, num_steps: int) -> StepState:
        """Leave out the random steps that have been taken already."""
        return self.nets.advanced(step_state, num_steps)

    def step_state_spec(self) -> StepState:
        """Split the scale of the noise."""
        return STEP_STATE_SPEC

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Return the actor's actions, with noise if ``explore``."""

        def unit_action(params: jax.Array, noise: jax.Array) -> jax.Array:
            unit = self.nets.squashing.unit(params)
            if not explore:
                return unit
            return self.nets.squashing.clip(unit + step_state.noise_scale[:, None] * noise)

        actor, env_step = self.as_seen(networks, env_step)
        return self.nets.act(actor, step_state, env_step, unit_action, explore=explore)

    def chosen(self, actor: PyTree, obs: Encoded) -> jax.Array:
        """Return the unit actions of the policy, ``[N, K]``."""
        return self.nets.squashing.unit(self.nets.policy(actor, obs))

    def target_action(self, actor: PyTree, obs: Encoded, key: jax.Array) -> jax.Array:
        """Return the unit actions of the target policy, smoothed by clipped noise, ``[N, K]``."""
        action, scale = self.chosen(actor, obs), self.config.target_noise
        if not scale:
            return action
        noise = jax.random.normal(key, action.shape)
        return self.nets.squashing.clip(action + scale * jnp.clip(noise, -_NOISE_CLIP, _NOISE_CLIP))

    def loss_keys(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Return the keys of what is drawn and of the noise on a target's action."""
        return tuple(jax.random.split(key))

    def loss(
        self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array
    ) -> tuple[jax.Array, tuple[Replay, dict[str, jax.Array]]]:
        """Return the sum of the losses of critics and actor.

        The critics' parameters are constants to the actor's loss (algorithm 1 of the paper). The
        first critic is the actor's guide.
        """
        draw_key, noise_key = self.loss_keys(key)
        draw, weight = self.draw(experience, draw_key)
        batch = self.nets.batch(self.transitions(experience, draw), weight)

        next_action = self.target_action(opt.target["actor"], batch.next_obs, noise_key)
        next_values = self.nets.values(opt.target["critics"], batch.next_obs, next_action)
        values = self.nets.values(networks["critics"], batch.obs, batch.action)
        critic = critic_loss(values, batch, jnp.min(next_values, axis=0))

        guide = stop_gradient(networks["critics"][:1])
        action = self.chosen(networks["actor"], batch.obs)
        actor_loss = -jnp.mean(self.nets.values(guide, batch.obs, action))

        metrics = {
            "critic_loss": critic.loss,
            "actor_loss": actor_loss,
            "value": jnp.mean(values),
            **self.replay_metrics(experience, opt),
        }
        experience = self.set_priority(experience, draw, critic.error)
        return critic.loss + actor_loss, (experience, metrics)

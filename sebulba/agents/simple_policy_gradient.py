"""REINFORCE (Williams 1992) on unrolls of fixed length; the plainest agent there is."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sebulba.agent import LEARNER_AXIS, Loss
from sebulba.agents.bases.on_policy import Experience, OnPolicyAgent
from sebulba.agents.configs import SimplePolicyGradientConfig
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.agents.kernels.returns import n_step_returns, transitions
from sebulba.types import PyTree


class SimplePolicyGradient(OnPolicyAgent[SimplePolicyGradientConfig]):
    """One update a trajectory: log-probability times return; no value, nothing to bootstrap from.

    Returns are cut at the end of the unroll, so ``steps_per_cycle`` is also the horizon.
    """

    uses_final_obs = True

    def loss(self, networks: PyTree, opt: PyTree, experience: Experience, key: jax.Array) -> Loss:
        """Return the policy loss minus the weighted entropy."""
        config, trajectory = self.config, experience.trajectory
        row = trajectory.env_step
        obs = jax.tree.map(lambda x: x[:-1], row.obs)
        params = self.evaluate(networks, obs, experience.core, row.is_first[:-1]).params
        log_prob = self.distribution.log_prob(params, trajectory.extras.raw)
        no_value = jnp.zeros(row.reward.shape, jnp.float32)
        step = transitions(trajectory, config.discount, config.reward_scale, no_value)
        returns = jax.vmap(n_step_returns, in_axes=1, out_axes=1)(no_value, step)
        advantage = _normalized(returns, step.valid) if config.normalize_returns else returns

        policy_loss = masked_mean(-advantage * log_prob, step.valid)
        entropy = masked_mean(self.entropy(params, trajectory.extras.raw), step.valid)
        loss = policy_loss - config.entropy_coefficient * entropy
        metrics = {
            "policy_loss": policy_loss,
            "entropy": entropy,
            "return_mean": masked_mean(returns, step.valid),
        }
        return loss, (experience, metrics)


def _normalized(returns: jax.Array, valid: jax.Array) -> jax.Array:
    """Return ``(returns - mean of the row) / standard deviation``, ``[T, B]``.

    The mean is that of the same row over the environments of all devices. Returns shrink towards
    the end of an unroll, where fewer rewards are left, and no action is the cause of that.
    """
    weight = valid.astype(jnp.float32)
    count = jax.lax.psum(jnp.sum(weight, axis=1), LEARNER_AXIS)
    total = jax.lax.psum(jnp.sum(weight * returns, axis=1), LEARNER_AXIS)
    centered = weight * (returns - (total / jnp.maximum(count, 1.0))[:, None])
    square = jax.lax.psum(jnp.sum(jnp.square(centered)), LEARNER_AXIS)
    deviation = jnp.sqrt(square / jnp.maximum(jnp.sum(count), 1.0))
    return centered / (deviation + 1e-5)

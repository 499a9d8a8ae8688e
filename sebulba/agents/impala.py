"""IMPALA: actor-critic with V-trace (Espeholt et al. 2018, arXiv 1802.01561)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sebulba.agent import Loss
from sebulba.agents.bases.on_policy import Experience, OnPolicyAgent, check_minibatches
from sebulba.agents.configs import ImpalaConfig
from sebulba.agents.kernels.optimizer import masked_mean, masked_normalized
from sebulba.agents.kernels.returns import transitions, vtrace
from sebulba.types import PyTree, RunSpec, Trajectory


class Impala(OnPolicyAgent[ImpalaConfig]):
    """V-trace policy gradient, value regression, entropy bonus; ``epochs`` updates a trajectory."""

    uses_final_obs = has_popart = True

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return self.config.epochs * self.config.minibatches

    def check_run(self, run: RunSpec) -> None:
        """Check that minibatches are of one size."""
        super().check_run(run)
        check_minibatches(self.config.minibatches, run)

    def loss(self, networks: PyTree, opt: PyTree, experience: Experience, key: jax.Array) -> Loss:
        """Return the sum of policy loss, weighted value loss and weighted negative entropy.

        The policy is evaluated again on all T+1 rows, from the recurrent state that acted first.
        """
        config = self.config
        trajectory, core = self._minibatch(experience, key)
        row = trajectory.env_step
        output = self.evaluate_rows(networks, row, core)
        params = output.params[:-1]
        log_prob = self.distribution.log_prob(params, trajectory.extras.raw)
        rho = jnp.exp(log_prob - trajectory.extras.log_prob)
        step = transitions(trajectory, config.discount, config.reward_scale, output.final_value)
        kernel = functools.partial(
            vtrace,
            trace_decay=config.trace_decay,
            max_rho=config.max_rho,
            max_c=config.max_c,
            max_policy_rho=config.max_policy_rho,
        )
        targets = jax.vmap(kernel, in_axes=1, out_axes=1)(output.value, step, rho)

        target = targets.value_target
        scale, statistics, of_target = self.value_scale(networks, target, step.valid)
        advantage = targets.advantage / scale
        if config.normalize_advantages:
            advantage = masked_normalized(advantage, step.valid)
        if config.ratio_clip:
            is_far = (rho - 1.0) * jnp.sign(advantage) > config.ratio_clip
            advantage = jnp.where(is_far, 0.0, advantage)
        policy_loss = masked_mean(-advantage * log_prob, step.valid)
        value_error = (target - output.value[:-1]) / scale
        value_loss = 0.5 * masked_mean(jnp.square(value_error), step.valid)
        entropy = masked_mean(self.entropy(params, trajectory.extras.raw), step.valid)
        loss, metrics = self.total_loss(policy_loss, value_loss, entropy, row.obs, opt)
        metrics |= {"rho_mean": masked_mean(rho, step.valid), **of_target}
        return loss + statistics, (experience, metrics)

    def _minibatch(self, experience: Experience, key: jax.Array) -> tuple[Trajectory, PyTree]:
        """Return the trajectory and the recurrent state of environments that are drawn."""
        trajectory, core = experience.trajectory, experience.core
        if self.config.minibatches == 1:
            return trajectory, core
        num_envs = trajectory.env_step.reward.shape[1]
        chosen = jax.random.permutation(key, num_envs)[: num_envs // self.config.minibatches]
        of_rows = trajectory.env_step, trajectory.action, trajectory.extras
        env_step, action, extras = jax.tree.map(lambda x: x[:, chosen], of_rows)
        trajectory = trajectory._replace(env_step=env_step, action=action, extras=extras)
        return trajectory, jax.tree.map(lambda x: x[chosen], core)

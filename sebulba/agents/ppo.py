"""PPO: several epochs of clipped updates a trajectory (Schulman et al. 2017, arXiv 1707.06347).

With ``kl_coefficient`` it is magnetic mirror descent (Sokota et al. 2023, arXiv 2206.05825): an
update maximises ``E[advantage] - alpha KL(pi, magnet) - KL(pi, pi_t) / eta``, and its last policy
nears an equilibrium of a zero-sum game that it plays with itself.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, Loss
from sebulba.agents.bases.normalization import Statistics
from sebulba.agents.bases.on_policy import Experience, OnPolicyAgent, StepState, check_minibatches
from sebulba.agents.configs import PPOConfig
from sebulba.agents.kernels.optimizer import masked_mean, masked_normalized
from sebulba.agents.kernels.returns import gae, transitions
from sebulba.agents.kernels.shuffle import shuffled
from sebulba.support.platforms import cond_on_cpu
from sebulba.types import PyTree, RunSpec, Trajectory

Metrics = dict[str, jax.Array]


class Batch(NamedTuple):
    """The transitions of a trajectory, ``[T, B, ...]``, or of a minibatch."""

    obs: PyTree
    """Observations, normalised if they have to be."""
    is_first: jax.Array
    """Bool."""
    raw: jax.Array
    """Actions, as the distribution sampled them."""
    log_prob: jax.Array
    """Log-probability of the actions when they were taken."""
    value: jax.Array
    """Value estimated before the first update with this trajectory."""
    advantage: jax.Array
    """Generalized advantage estimate; with ``value`` added, the target of the value."""
    valid: jax.Array
    """Bool; the other transitions have weight 0."""
    params: PyTree = ()
    """Parameters of the policy when the trajectory arrived, with a ``kl_coefficient``."""


class MagnetOpt(NamedTuple):
    """State of an optimizer with a magnet that moves."""

    optimizer: PyTree
    """That of the networks."""
    magnet: PyTree
    """Networks, laid out as those that learn."""


class PPOExperience(NamedTuple):
    """The newest trajectory, and the progress of its updates."""

    batch: Batch
    """``[T, B, ...]``."""
    core: PyTree
    """Recurrent state before row 0, ``[B, ...]``."""
    statistics: Statistics
    """Statistics of all trajectories so far."""
    order: jax.Array
    """``[T * B]`` int32, or ``[B]`` with an LSTM: permutation of this epoch, one a device."""
    minibatch: jax.Array
    """Scalar int32: number of the next minibatch in this epoch."""
    is_stopped: jax.Array | tuple[()] = ()
    """Scalar bool, with a ``target_kl``: the policy has moved too far from this trajectory."""


def _is_schedule(state: PyTree) -> bool:
    return isinstance(state, optax.ScaleByScheduleState)


class PPO(OnPolicyAgent[PPOConfig]):
    """Each trajectory is learned from ``epochs`` times in ``minibatches`` parts."""

    uses_final_obs = has_popart = True

    def check_run(self, run: RunSpec) -> None:
        """Check that minibatches are of one size."""
        super().check_run(run)
        check_minibatches(self.config.minibatches, run, of_steps=not self.config.lstm_size)

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return self.config.epochs * self.config.minibatches

    def new_opt(self, networks: PyTree) -> PyTree:
        opt = super().new_opt(networks)
        return MagnetOpt(opt, jax.tree.map(jnp.copy, networks)) if self.config.magnet_rate else opt

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Take a step, after which the magnet follows; with a target KL, none without a gradient.

        Adam would go on by its momentum. Only the count of a learning rate that falls goes on.
        """
        has_magnet = isinstance(opt, MagnetOpt)
        after = super().optimize(networks, opt.optimizer if has_magnet else opt, grads)
        if has_magnet:
            magnet = optax.incremental_update(after[0], opt.magnet, self.config.magnet_rate)
            after = after[0], MagnetOpt(after[1], magnet)
        if not self.config.target_kl:
            return after
        size = optax.tree.norm(grads)
        moves = (size > 0) & (size < jnp.inf)

        def held(new: PyTree, old: PyTree) -> PyTree:
            return new if _is_schedule(new) else jnp.where(moves, new, old)

        return jax.tree.map(held, after, (networks, opt), is_leaf=_is_schedule)

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PPOExperience:
        base: Experience = super().new_experience(key, networks, run)
        no_value = jnp.zeros((run.steps_per_cycle + 1, run.num_envs), jnp.float32)
        num_params = self.distribution.num_params + self.distribution.num_free_params
        no_params = jnp.zeros((*no_value.shape, num_params), jnp.float32)
        columns = run.num_envs * (1 if self.config.lstm_size else run.steps_per_cycle)
        return PPOExperience(
            batch=self._batch(base.trajectory, no_value, no_value, no_params),
            core=base.core,
            statistics=base.statistics,
            order=jnp.zeros(columns, jnp.int32),
            minibatch=jnp.int32(0),
            is_stopped=jnp.bool_(False) if self.config.target_kl else (),
        )

    def experience_spec(self) -> PyTree:
        return PPOExperience(
            batch=P(None, LEARNER_AXIS),  # type: ignore[arg-type]
            core=P(LEARNER_AXIS),
            statistics=self.normalization.spec(),
            order=P(LEARNER_AXIS),  # type: ignore[arg-type]
            minibatch=P(),  # type: ignore[arg-type]
            is_stopped=P() if self.config.target_kl else (),  # type: ignore[arg-type]
        )

    def update_experience(
        self,
        experience: PPOExperience,
        initial_step_state: StepState,
        final_step_state: StepState,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PPOExperience:
        """Estimate values and advantages, once for all updates with this trajectory."""
        newest: Experience = super().update_experience(
            experience, initial_step_state, final_step_state, trajectory, networks
        )
        output = self.evaluate_rows(networks, newest.trajectory.env_step, newest.core)
        return experience._replace(
            batch=self._batch(newest.trajectory, output.value, output.final_value, output.params),
            core=newest.core,
            statistics=newest.statistics,
            minibatch=jnp.int32(0),
            is_stopped=jax.tree.map(jnp.zeros_like, experience.is_stopped),
        )

    def _batch(
        self,
        trajectory: Trajectory,
        value: jax.Array,
        final_value: jax.Array | tuple[()],
        params: jax.Array,
    ) -> Batch:
        """Return the transitions, given values and policies of all rows, ``[T+1, B, ...]``."""
        config, row = self.config, trajectory.env_step
        step = transitions(trajectory, config.discount, config.reward_scale, final_value)
        kernel = functools.partial(gae, trace_decay=config.trace_decay)
        return Batch(
            obs=jax.tree.map(lambda x: x[:-1], row.obs),
            is_first=jnp.asarray(row.is_first[:-1]),
            raw=trajectory.extras.raw,
            log_prob=trajectory.extras.log_prob,
            value=value[:-1],
            advantage=jax.vmap(kernel, in_axes=1, out_axes=1)(value, step),
            valid=step.valid,
            params=params[:-1] if config.kl_coefficient else (),
        )

    def loss(
        self, networks: PyTree, opt: PyTree, experience: PPOExperience, key: jax.Array
    ) -> Loss:
        """Return the loss of the next minibatch; the first of an epoch draws a permutation."""
        number, order = experience.minibatch, experience.order
        order = cond_on_cpu(
            number == 0,
            lambda: shuffled(key, order.shape[0]),
            lambda: order,
        )
        size = order.shape[0] // self.config.minibatches
        chosen = jax.lax.dynamic_slice(order, (number * size,), (size,))
        core, batch = self._minibatch(experience, chosen)
        loss, metrics = self._loss(networks, opt, core, batch)
        number = (number + 1) % self.config.minibatches
        experience = experience._replace(order=order, minibatch=number)
        if self.config.target_kl:
            kl = jax.lax.pmean(metrics["approx_kl"], LEARNER_AXIS)
            is_stopped = experience.is_stopped | (kl > 1.5 * self.config.target_kl)
            loss = jnp.where(is_stopped, jax.lax.stop_gradient(loss), loss)
            metrics |= {"stopped": is_stopped.astype(jnp.float32)}
            experience = experience._replace(is_stopped=is_stopped)
        return loss, (experience, metrics)

    def _minibatch(self, experience: PPOExperience, chosen: jax.Array) -> tuple[PyTree, Batch]:
        """Return recurrent states and the chosen columns.

        ``[T, M, ...]`` of M whole unrolls with an LSTM, else ``[1, M, ...]`` of M transitions.
        """
        batch = experience.batch
        if not self.config.lstm_size:
            batch = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2)[None], batch)

        def take(x: jax.Array, axis: int) -> jax.Array:
            at = (slice(None),) * axis + (chosen,)
            return x.at[at].get(mode="promise_in_bounds", unique_indices=True)

        core = jax.tree.map(functools.partial(take, axis=0), experience.core)
        return core, jax.tree.map(functools.partial(take, axis=1), batch)

    def _loss(
        self, networks: PyTree, opt: PyTree, core: PyTree, batch: Batch
    ) -> tuple[jax.Array, Metrics]:
        """Return the negative of equation 9, to be minimised, and metrics."""
        config = self.config
        output = self.evaluate(networks, batch.obs, core, batch.is_first)
        log_ratio = self.distribution.log_prob(output.params, batch.raw) - batch.log_prob
        # Masking in the means alone would leave infinity times 0 in the gradient.
        log_ratio = jnp.where(batch.valid, log_ratio, 0.0)
        ratio = jnp.exp(log_ratio)
        target = batch.value + batch.advantage
        scale, statistics, of_target = self.value_scale(networks, target, batch.valid)
        advantage = batch.advantage / scale
        if config.normalize_advantages:
            advantage = masked_normalized(advantage, batch.valid)
        clipped = jnp.clip(ratio, 1.0 - config.ratio_clip, 1.0 + config.ratio_clip)
        gain = jnp.minimum(ratio * advantage, clipped * advantage)

        square = jnp.square((output.value - target) / scale)
        if config.value_clip:
            reach = config.value_clip * scale
            change = jnp.clip(output.value - batch.value, -reach, reach)
            square = jnp.maximum(square, jnp.square((batch.value + change - target) / scale))

        policy_loss = masked_mean(-gain, batch.valid)
        value_loss = 0.5 * masked_mean(square, batch.valid)
        entropy = masked_mean(self.entropy(output.params, batch.raw), batch.valid)
        bonus = entropy
        if isinstance(opt, MagnetOpt):
            magnet = self.evaluate(opt.magnet, batch.obs, core, batch.is_first)
            bonus = -masked_mean(self.distribution.kl(output.params, magnet.params), batch.valid)
        if config.kl_coefficient:
            moved = self.distribution.kl(output.params, batch.params)
            policy_loss += config.kl_coefficient * masked_mean(moved, batch.valid)
        loss, metrics = self.total_loss(policy_loss, value_loss, bonus, batch.obs, opt)
        outside = jnp.abs(ratio - 1.0) > config.ratio_clip
        return loss + statistics, metrics | {
            **of_target,
            "entropy": entropy,
            # Schulman 2020, "Approximating KL Divergence": unbiased and never negative.
            "approx_kl": masked_mean(ratio - 1.0 - log_ratio, batch.valid),
            "clip_fraction": masked_mean(outside.astype(jnp.float32), batch.valid),
        }

"""R2D2: Q-learning on sequences, with a recurrent state that is stored with them.

Source: Kapturowski et al. 2019, Recurrent experience replay in distributed reinforcement learning
(openreview.net/forum?id=r1lyTjAqYX).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from sebulba.agent import Loss
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.bases.value_based import ValueBasedAgent
from sebulba.agents.configs import R2D2Config
from sebulba.agents.kernels.exploration import exploration_ladder
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.agents.kernels.returns import (
    Transitions,
    double_q_values,
    n_step_returns,
    rescale_value,
    restore_value,
    transitions,
    value_of,
)
from sebulba.agents.nets.q_networks import QOutput
from sebulba.agents.replay.transitions_and_sequences import Replay, SequenceReplay
from sebulba.errors import UsageError
from sebulba.types import EnvSpec, EnvStep, PyTree, RunSpec


class R2D2(ValueBasedAgent[R2D2Config, SequenceReplay]):
    """Double Q-learning of n steps on prioritized sequences that overlap."""

    uses_final_obs = True

    def __init__(self, spec: EnvSpec, config: R2D2Config) -> None:
        length = config.burn_in + config.sequence_length
        super().__init__(spec, config, SequenceReplay.of(spec, config.replay, length=length))

    def check_run(self, run: RunSpec) -> None:
        """Check that sequences begin and end where trajectories do."""
        period, num_rows = run.steps_per_cycle, self.replay.length
        if num_rows % period:
            less = num_rows // period * period
            nearest = [n - self.config.burn_in for n in (less, less + period)]
            fits = " or ".join(str(n) for n in nearest if n > 0)
            raise UsageError(
                f"sequence_length={self.config.sequence_length} after burn_in="
                f"{self.config.burn_in} makes {num_rows} rows, which must be a multiple of "
                f"steps_per_cycle={period}, at which sequences begin; use sequence_length={fits}"
            )
        super().check_run(run)

    def new_epsilon(self, run: RunSpec, inferencer: int) -> jax.Array:
        config = self.config
        return exploration_ladder(
            run, inferencer, base=config.epsilon, exponent=config.epsilon_exponent
        )

    def loss(self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array) -> Loss:
        """Return the mean squared error of a batch of sequences, and set their priorities."""
        config = self.config
        draw, weight = self.draw(experience, key)
        sequence = self.gathered(experience, draw)
        core = sequence.core
        if not config.stored_state:
            core = jax.tree.map(jnp.zeros_like, core)
        values, _, final_values, _ = self._unroll(networks, sequence.env_step, core)
        target_values, _, final_targets, _ = self._unroll(opt.target, sequence.env_step, core)
        learned = jax.tree.map(lambda x: x[config.burn_in :], sequence._replace(core=()))
        final: jax.Array | tuple[()] = ()
        if not isinstance(final_values, tuple) and not isinstance(final_targets, tuple):
            final = self._bootstrap(final_values, final_targets)
        step = transitions(learned, config.discount, config.reward_scale, final)
        target = self._targets(values, target_values, step)
        error = target - value_of(values[:-1], self.actions.index(learned.action))
        error = jnp.where(step.valid, error, 0.0)
        loss = 0.5 * masked_mean(weight[None] * jnp.square(error), step.valid)
        size = jnp.abs(error)
        metrics = {
            "value": masked_mean(jnp.max(values[:-1], axis=-1), step.valid),
            "td_error": masked_mean(size, step.valid),
            **self.replay_metrics(experience, opt, config.sequence_length),
        }
        priority = sequence_priority(size, step.valid, config.priority_max_share)
        experience = self.set_priority(experience, draw, priority)
        return loss, (experience, metrics)

    def _unroll(self, networks: PyTree, rows: EnvStep, core: PyTree) -> QOutput:
        """Return the values of the rows after burn-in, through which no gradient goes."""
        burn_in = self.config.burn_in
        if burn_in:
            before = jax.tree.map(lambda x: x[:burn_in], rows)
            core = jax.lax.stop_gradient(self.evaluate(networks, before, core).core)
        rest = jax.tree.map(lambda x: x[burn_in:], rows)
        return self.evaluate(networks, rest, core)

    def _targets(self, values: jax.Array, target_values: jax.Array, step: Transitions) -> jax.Array:
        """Return n-step double-Q targets, ``[T, B]``, of values ``[T+1, B, A]``."""
        bootstrap = self._bootstrap(values, target_values)
        kernel = functools.partial(n_step_returns, num_steps=self.config.num_steps)
        returns = jax.vmap(kernel, in_axes=1, out_axes=1)(bootstrap, step)
        return rescale_value(returns) if self.config.rescale_values else returns

    def _bootstrap(self, values: jax.Array, target_values: jax.Array) -> jax.Array:
        """Return what targets bootstrap from, ``[...]``, of values ``[..., A]``."""
        return self.restored(double_q_values(target_values, values))

    def restored(self, values: jax.Array) -> jax.Array:
        """Return values without their rescaling."""
        return restore_value(values) if self.config.rescale_values else values


def sequence_priority(size: jax.Array, valid: jax.Array, max_share: float) -> jax.Array:
    """Return ``eta max |delta| + (1 - eta) mean |delta|`` of each sequence, ``[B]``.

    Source: Kapturowski et al. 2019, section 2.3, with eta of 0.9.

    Args:
      size: Absolute temporal differences, ``[T, B]``, 0 where not valid.
      valid: ``[T, B]`` bool.
      max_share: Eta.
    """
    mean = jnp.sum(size, axis=0) / jnp.maximum(jnp.sum(valid, axis=0), 1)
    return max_share * jnp.max(size, axis=0) + (1.0 - max_share) * mean

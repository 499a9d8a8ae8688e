"""Optimizers from configurations, and the mean of a loss over valid cells of all devices."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs import OptimizerConfig
from sebulba.types import PyTree


def masked_mean(x: jax.Array, valid: jax.Array) -> jax.Array:
    """Return this device's part of the mean of ``x`` over valid cells of all devices.

    The loop takes the mean of losses, gradients and metrics over devices, and the mean of these
    parts is the mean over all valid cells, even if devices hold unequal numbers of them. To be
    called in ``update_experience``, ``loss`` or ``optimize``.

    Args:
      x: ``[T, B]`` on this device.
      valid: ``[T, B]`` bool: ``transitions(...).valid``, or ``env_step.valid[1:]``.

    Returns:
      Scalar float32; 0 where no cell is valid.
    """
    count = jax.lax.pmean(jnp.sum(valid, dtype=jnp.float32), LEARNER_AXIS)
    # The lower bound lets a batch without any valid cell give 0 and not NaN.
    return jnp.sum(jnp.where(valid, x, 0.0)) / jnp.maximum(count, 1e-8)


def masked_normalized(x: jax.Array, valid: jax.Array) -> jax.Array:
    """Return ``x [T, B]`` with mean 0 and standard deviation 1 over valid cells of all devices."""
    centered = x - jax.lax.pmean(masked_mean(x, valid), LEARNER_AXIS)
    variance = jax.lax.pmean(masked_mean(jnp.square(centered), valid), LEARNER_AXIS)
    return centered / (jnp.sqrt(variance) + 1e-8)


def make_optimizer(
    learning_rate: float, config: OptimizerConfig, period: int = 1
) -> optax.GradientTransformation:
    """Return the optimizer that ``config`` describes; its count of updates is in its state.

    It moves in every ``period``-th update.
    """
    rate: optax.ScalarOrSchedule = learning_rate
    if config.schedule == "linear":
        end = -(-config.schedule_updates // period)
        rate = optax.linear_schedule(learning_rate, 0.0, end)
        if share := config.share_after_schedule:
            after = optax.constant_schedule(share * learning_rate)
            rate = optax.join_schedules([rate, after], [end])
    optimizers = {
        "adam": lambda: optax.adam(rate, eps=config.epsilon),
        "radam": lambda: optax.radam(rate, eps=config.epsilon),
        "rmsprop": lambda: optax.rmsprop(
            rate, decay=config.decay, eps=config.epsilon, eps_in_sqrt=config.epsilon_in_root
        ),
        "sgd": lambda: optax.sgd(rate),
    }
    optimizer = optimizers[config.kind]()
    if config.max_grad_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optimizer)
    if period == 1:
        return optimizer
    return optax.conditionally_mask(optimizer, lambda update: (update + 1) % period == 0)


def annealed(
    first: float, last: float | None, config: OptimizerConfig, opt: PyTree
) -> jax.Array | float:
    """Return a coefficient that goes from ``first`` to ``last`` while a linear learning rate falls.

    ``opt`` is the state of an optimizer that ``make_optimizer`` made. With None it stays ``first``.
    """
    if last is None:
        return first
    counts = optax.tree_utils.tree_get_all_with_path(opt, "count")  # the last is the schedule's
    return optax.linear_schedule(first, last, config.schedule_updates)(counts[-1][1])  # type: ignore[arg-type,return-value]


def make_optimizers(
    learning_rates: Mapping[str, float], config: OptimizerConfig, periods: Mapping[str, int]
) -> optax.GradientTransformation:
    """Return an optimizer for networks that are a dict, each part with its own learning rate.

    A part without a period moves in every update.
    """
    return optax.multi_transform(
        {
            name: make_optimizer(rate, config, periods.get(name, 1))
            for name, rate in learning_rates.items()
        },
        {name: name for name in learning_rates},
    )

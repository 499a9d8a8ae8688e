"""The mathematics of learning from data, as functions of one batch ``[N]``."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient


def expectile_loss(error: jax.Array, expectile: float) -> jax.Array:
    """Return ``|tau - 1(u < 0)| u^2``, ``[N]``, for ``u``, a target minus a value.

    Source: Kostrikov et al. 2022 (arXiv 2110.06169), equation 4.
    """
    return jnp.where(error < 0, 1.0 - expectile, expectile) * jnp.square(error)


def advantage_weight(advantage: jax.Array, inverse_temperature: float, most: float) -> jax.Array:
    """Return ``min(exp(beta A), most)``, ``[N]``, without gradient.

    Source: Kostrikov et al. 2022, equation 7; the bound is that of the authors' code.
    """
    limit = math.log(most)
    return stop_gradient(jnp.exp(jnp.minimum(inverse_temperature * advantage, limit)))


def gaussian_log_prob(action: jax.Array, mean: jax.Array, log_std: jax.Array) -> jax.Array:
    """Return the log-density of actions ``[N, K]`` under independent Gaussians, ``[N]``."""
    z = (action - mean) * jnp.exp(-log_std)
    return jnp.sum(-0.5 * jnp.square(z) - log_std - 0.5 * math.log(2 * math.pi), axis=-1)


def distance(action: jax.Array, of_data: jax.Array) -> jax.Array:
    """Return the mean squared distance of the components of actions ``[N, K]``, ``[N]``."""
    return jnp.mean(jnp.square(action - of_data), axis=-1)


def penalised_value(next_values: jax.Array, penalty: jax.Array, weight: float) -> jax.Array:
    """Return ``min_i Q'_i(s', a') - beta_2 d(a', a'_data)``, ``[N]``.

    Source: Tarasov et al. 2023 (arXiv 2305.09836), equation 4.

    Args:
      next_values: ``Q'``, ``[critics, N]``.
      penalty: ``d``, ``[N]``; 0 where the data have no next action.
      weight: ``beta_2``.
    """
    return jnp.min(next_values, axis=0) - weight * penalty


def regularised_actor_loss(
    value: jax.Array, penalty: jax.Array, weight: float, mean_size: jax.Array
) -> jax.Array:
    """Return ``beta_1 d(pi(s), a) - Q(s, pi(s)) / mean |Q|``, ``[N]``.

    Source: Fujimoto and Gu 2021 (arXiv 2106.06860), equations 3 and 5, divided by alpha, so
    ``beta_1`` is ``1 / alpha``.

    Args:
      value: ``Q(s, pi(s))``, ``[N]``.
      penalty: ``d``, ``[N]``.
      weight: ``beta_1``.
      mean_size: ``mean |Q|`` over the whole batch, scalar, without gradient.
    """
    return weight * penalty - value / stop_gradient(jnp.maximum(mean_size, 1e-6))

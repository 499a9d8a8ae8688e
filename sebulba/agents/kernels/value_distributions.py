"""Kernels of value distributions: categorical ones, and quantiles.

Sources: Bellemare et al. 2017 (arXiv 1707.06887); Dabney et al. 2018 (arXiv 1710.10044).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import xlogy

from sebulba.agents.kernels.returns import value_of


def logits_of(logits: jax.Array, index: jax.Array) -> jax.Array:
    """Return ``logits[..., index, :]``, ``[..., K]`` of ``[..., A, K]``."""
    return value_of(jnp.swapaxes(logits, -2, -1), index[..., None])


def expected_value(logits: jax.Array, support: jax.Array) -> jax.Array:
    """Return the mean of the distribution over ``support [K]``, ``[...]`` of ``[..., K]``."""
    return jnp.dot(jax.nn.softmax(logits), support, precision="highest")


def projected(atoms: jax.Array, probability: jax.Array, support: jax.Array) -> jax.Array:
    """Return a distribution over ``atoms`` as one over ``support``, ``[K]``.

    Atoms beyond the support move to its ends; the probability of any other is divided between its
    two neighbours, which keeps the mean.
    Source: Bellemare et al. 2017, equation 7.

    Args:
      atoms: ``[J]``, where the probabilities are.
      probability: ``[J]``.
      support: ``[K]``, evenly spaced and rising.
    """
    spacing = (support[-1] - support[0]) / (support.shape[0] - 1)
    clipped = jnp.clip(atoms, support[0], support[-1])
    distance = jnp.abs(clipped[None, :] - support[:, None]) / spacing
    return jnp.sum(jnp.maximum(1.0 - distance, 0.0) * probability[None, :], axis=-1)


def categorical_td(
    logits: jax.Array,
    next_logits: jax.Array,
    reward: jax.Array,
    discount: jax.Array,
    support: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the loss of a value distribution, and its divergence from the target.

    The target is the distribution of ``reward + discount * Z``, projected onto the support. The
    loss is its cross-entropy with the prediction (Bellemare et al. 2017, algorithm 1). The
    divergence is that of Kullback and Leibler, the loss minus the entropy of the target: 0 where
    the prediction is right (the priority of Hessel et al. 2018, arXiv 1710.02298).

    Args:
      logits: ``[K]``, of the action taken.
      next_logits: ``[K]``, of the next action; constant to differentiation.
      reward: Scalar, the discounted sum of n rewards.
      discount: Scalar, of the next value; 0 after the end of an episode.
      support: ``[K]``, evenly spaced and rising.

    Returns:
      Two scalars; the divergence is constant to differentiation.
    """
    target = projected(reward + discount * support, jax.nn.softmax(next_logits), support)
    target = jax.lax.stop_gradient(target)
    loss = -jnp.sum(target * jax.nn.log_softmax(logits))
    divergence = loss + jnp.sum(xlogy(target, target))
    # Rounding makes it slightly negative where the prediction is right.
    return loss, jax.lax.stop_gradient(jnp.maximum(divergence, 0.0))


def quantile_td(
    quantiles: jax.Array, next_quantiles: jax.Array, reward: jax.Array, discount: jax.Array
) -> jax.Array:
    """Return the quantile Huber loss of a value distribution, a scalar.

    ``sum_i mean_j |tau_i - 1{e_ij < 0}| huber(e_ij)``, with ``tau_i`` the middle of the i-th of N
    equal shares and ``e_ij = r + discount z'_j - z_i``.
    Source: Dabney et al. 2018, equation 10 and algorithm 1, with kappa = 1.

    Args:
      quantiles: ``z``, ``[N]``, of the action taken.
      next_quantiles: ``z'``, ``[M]``, of the next action; constant to differentiation.
      reward: ``r``, scalar, the discounted sum of n rewards.
      discount: Scalar, of the next value; 0 after the end of an episode.
    """
    target = jax.lax.stop_gradient(reward + discount * next_quantiles)
    error = target[None, :] - quantiles[:, None]
    size = quantiles.shape[0]
    share = (jnp.arange(size, dtype=jnp.float32) + 0.5) / size
    weight = jnp.abs(share[:, None] - (error < 0.0))
    return jnp.sum(jnp.mean(weight * optax.huber_loss(error), axis=1))

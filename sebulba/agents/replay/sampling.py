"""Draws in proportion to weights, by cumulative sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def draw_in_proportion(key: jax.Array, weight: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Draw indices with replacement, index i with probability ``weight_i / sum(weight)``.

    It draws in three stages, so that no array is larger than ``num`` times about the cube root of
    the number of weights M: first a block of neighbours by the sums of blocks, then a smaller block
    in it, then a weight in that. Each stage has its own uniform number. The 23 bits of a single one
    are too few: of a million equal weights some would get 7 of its values and others 9.

    The distribution is that of Schaul et al. 2016 (arXiv 1511.05952), equation 1. The paper keeps a
    tree of sums, which costs a chain of small scatters wherever a weight changes; one pass over the
    weights when they are drawn from costs less up to some millions of them.

    Args:
      key: Typed PRNG key.
      weight: ``[M]`` float32, not negative.
      num: N.

    Returns:
      Indices ``[N]`` int32, and the sum of the weights. A weight of 0 is never drawn, unless all
      are 0.
    """
    size = weight.size
    inner = _largest_divisor(size, round(size ** (1 / 3)))
    middle = _largest_divisor(size // inner, round((size // inner) ** 0.5))
    weights = weight.reshape(-1, middle, inner)
    middle_sums = weights.sum(axis=2)
    sums = middle_sums.sum(axis=1)
    uniform = jax.random.uniform(key, (3, num))
    i = pick(sums, uniform[0])
    j = pick_in_rows(middle_sums[i], uniform[1])
    k = pick_in_rows(weights[i, j], uniform[2])
    return ((i * middle + j) * inner + k).astype(jnp.int32), sums.sum()


def _largest_divisor(num: int, limit: int) -> int:
    """Return the largest divisor of ``num`` up to ``limit``."""
    return next(size for size in range(max(limit, 1), 0, -1) if num % size == 0)


def pick_in_rows(weight: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return the first index of each row at which the cumulative weight exceeds its share.

    Args:
      weight: ``[N, L]``, not negative.
      uniform: ``[N]``, the share, in [0, 1).

    Returns:
      ``[N]``; the index of a weight of 0 only where a row has no other.
    """
    sums = jax.lax.platform_dependent(weight.T, cpu=_sums_one_by_one, default=_parallel_sums)
    index = jnp.sum(sums <= (uniform * sums[-1])[None], axis=0)
    return jnp.minimum(index, weight.shape[1] - 1)


def _sums_one_by_one(weight: jax.Array) -> jax.Array:
    """Return cumulative sums along axis 0: they never fall, and a weight of 0 leaves them alone.

    On a CPU parallel sums and an argmax took four times as long.
    """
    return jax.lax.scan(_add, jnp.zeros_like(weight[0]), weight, unroll=128)[1]


def _parallel_sums(weight: jax.Array) -> jax.Array:
    """Return cumulative sums along axis 0, in one kernel of an accelerator.

    The last bits of a parallel sum need not be monotone, and a weight of 0 could be the first whose
    sum exceeds a share.
    """
    return jax.lax.cummax(jnp.where(weight > 0, jnp.cumsum(weight, axis=0), 0.0), axis=0)


def _add(total: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = total + weight
    return total, total


def pick(weight: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return the same as ``pick_in_rows`` for one row ``[L]`` without repeating it N times."""
    sums = _parallel_sums(weight)
    index = jnp.searchsorted(sums, uniform * sums[-1], side="right")
    return jnp.minimum(index, weight.size - 1)

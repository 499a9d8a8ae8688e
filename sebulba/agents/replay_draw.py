"""Draws in proportion to weights, by cumulative sums."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def draw_in_proportion(key: jax.Array, weight: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Draw indices with replacement, index i with probability ``weight_i / sum(weight)``.

    In two stages, so that no array is larger than ``num`` times about the square root of the
    number of weights: a block of neighbours by the sums of blocks, then one of the block. Each
    stage has a uniform number of its own: the 23 bits of one would not reach a million weights.
    This is the distribution of Schaul et al. 2016 (arXiv 1511.05952), equation 1, for which the
    paper keeps a tree of sums; a tree costs a chain of small scatters at every change.

    Args:
      key: Typed PRNG key.
      weight: ``[M]`` float32, not negative.
      num: N.

    Returns:
      Indices ``[N]`` int32, never of a weight that is 0 (index 0 if all are), and the sum of the
      weights.
    """
    blocks = weight.reshape(-1, _block_size(weight.size))
    block_sums = blocks.sum(axis=1)
    block_key, inner_key = jax.random.split(key)
    block = _pick(block_sums[None], jax.random.uniform(block_key, (num, 1)))
    inner = _pick(blocks[block], jax.random.uniform(inner_key, (num, 1)))
    return (block * blocks.shape[1] + inner).astype(jnp.int32), block_sums.sum()


def _block_size(num: int) -> int:
    """Return the largest divisor of ``num`` up to its square root."""
    return next(size for size in range(math.isqrt(num), 0, -1) if num % size == 0)


def _pick(weight: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return the first index of each row whose cumulative weight exceeds ``uniform`` of the sum.

    Args:
      weight: ``[N or 1, M]``, not negative.
      uniform: ``[N, 1]`` in [0, 1).

    Returns:
      ``[N]``; only where all of a row is 0 the index of a weight that is 0.
    """
    # A parallel sum need not be monotone in its last bits, so a weight of 0 is excluded by name,
    # and the limit is the largest sum at a weight that is none.
    sums = jnp.where(weight > 0, jnp.cumsum(weight, axis=1), 0.0)
    return jnp.argmax(sums > uniform * sums.max(axis=1, keepdims=True), axis=1)

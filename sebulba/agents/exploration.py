"""How much each environment explores."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sebulba.types import RunSpec


def global_env_index(run: RunSpec, inferencer: int) -> jax.Array:
    """Return the index of each environment of an Inferencer among those of all, ``[B]`` int32."""
    return inferencer * run.num_envs + jnp.arange(run.num_envs, dtype=jnp.int32)


def exploration_ladder(run: RunSpec, inferencer: int, *, base: float, exponent: float) -> jax.Array:
    """Return ``base ** (1 + exponent * i / (N - 1))`` for environment i of all N.

    The first environment of all explores at ``base`` and the last at ``base ** (1 + exponent)``;
    a single one at ``base``. Source: Horgan et al. 2018 (arXiv 1803.00933), section 4.1.

    Args:
      run: N is ``num_inferencers * num_envs``.
      inferencer: Whose environments.
      base: Probability of a random action, or scale of the noise.
      exponent: Alpha of the paper; 0 gives all the same.

    Returns:
      ``[B]`` float32.
    """
    last = max(run.num_inferencers * run.num_envs - 1, 1)
    share = global_env_index(run, inferencer).astype(jnp.float32) / last
    return base ** (1.0 + exponent * share)


def linear_decay(initial: float, final: float, share: jax.Array) -> jax.Array:
    """Return what is on the line from ``initial`` to ``final`` at ``share``, ``final`` beyond 1."""
    return initial + (final - initial) * jnp.clip(share, 0.0, 1.0)


def epsilon_greedy(
    key: jax.Array, greedy: jax.Array, num_actions: int, epsilon: jax.Array
) -> jax.Array:
    """Return ``greedy`` action indices, a random one with probability ``epsilon``.

    Args:
      key: Typed PRNG key.
      greedy: ``[B]`` int32, from 0.
      num_actions: The random index is below this.
      epsilon: ``[B]``.

    Returns:
      ``[B]`` int32.
    """
    # One draw serves both: below epsilon the number is uniform again.
    uniform = jax.random.uniform(key, greedy.shape)
    other = jnp.minimum((uniform / jnp.maximum(epsilon, 1e-8) * num_actions), num_actions - 1)
    return jnp.where(uniform < epsilon, other.astype(greedy.dtype), greedy)

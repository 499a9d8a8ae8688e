"""Actions of a fused cycle, which nobody can refuse: they are made valid, and counted."""

from __future__ import annotations

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.spaces import choices, first_entries


def clamp(action: jax.Array, space: gymnasium.Space) -> tuple[jax.Array, jax.Array]:
    """Return actions ``[B, ...]`` clamped into ``space``, and how many were outside (or NaN)."""
    if isinstance(space, gymnasium.spaces.Box):
        limit = np.finfo(space.dtype).max
        low, high = np.clip(space.low, -limit, limit), np.clip(space.high, -limit, limit)
        middle = np.clip(np.zeros_like(low), low, high)
        inside = jnp.where(jnp.isnan(action), middle[None], jnp.clip(action, low[None], high[None]))
    else:
        first, last = (np.asarray(end, np.int32)[None] for end in choices(space))
        inside = jnp.clip(action, first, last)
    is_invalid = (inside != action).reshape(len(action), -1).any(axis=1)
    return inside, is_invalid.sum(dtype=jnp.int32)


def make_legal(
    action: jax.Array, mask: jax.Array, space: gymnasium.Space
) -> tuple[jax.Array, jax.Array]:
    """Return actions with the first legal one in the place of each that is not legal.

    Args:
      action: ``[N, ...]``, inside ``space``.
      mask: ``[N, entries]``; where none is legal, all are.
      space: Discrete or MultiDiscrete.

    Returns:
      The actions, and in which rows one was not legal, ``[N]`` bool.
    """
    first = np.reshape(choices(space)[0], (1, -1))
    parts = jnp.split(mask.astype(jnp.bool_), first_entries(space)[1:], axis=1)
    index = action.reshape(len(action), -1) - first
    legal = [
        jnp.take_along_axis(part, index[:, i : i + 1], axis=1)[:, 0] | ~part.any(axis=1)
        for i, part in enumerate(parts)
    ]
    first_legal = jnp.stack([jnp.argmax(part, axis=1) for part in parts], axis=1)
    mended = jnp.where(jnp.stack(legal, axis=1), index, first_legal) + first
    is_illegal = ~jnp.stack(legal).all(axis=0)
    return mended.reshape(action.shape).astype(action.dtype), is_illegal

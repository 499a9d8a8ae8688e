"""Actions of a fused cycle, which nobody can refuse: they are clamped into their space."""

from __future__ import annotations

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np


def clamp(action: jax.Array, space: gymnasium.Space) -> tuple[jax.Array, jax.Array]:
    """Return actions ``[B, ...]`` clamped into ``space``, and how many were outside (or NaN)."""
    if isinstance(space, gymnasium.spaces.Box):
        limit = np.finfo(space.dtype).max
        low, high = np.clip(space.low, -limit, limit), np.clip(space.high, -limit, limit)
        middle = np.clip(np.zeros_like(low), low, high)
        inside = jnp.where(jnp.isnan(action), middle[None], jnp.clip(action, low[None], high[None]))
    else:
        assert isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete)
        count = space.n if isinstance(space, gymnasium.spaces.Discrete) else space.nvec
        first = np.asarray(space.start, np.int32)[None]
        last = np.asarray(first + count - 1, np.int32)
        inside = jnp.clip(action, first, last)
    is_invalid = (inside != action).reshape(len(action), -1).any(axis=1)
    return inside, is_invalid.sum(dtype=jnp.int32)

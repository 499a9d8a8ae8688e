"""Masks of legal actions, taken from the part of an observation that the spec names."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.types import EnvSpec, PyTree

ILLEGAL = -1e9
"""Logit, or value, of an action that is not legal: its probability is exactly 0 in float32."""


def legal_mask(spec: EnvSpec, obs: PyTree) -> jax.Array | None:
    """Return which actions are legal, ``[..., entries]`` bool; None where all always are.

    Where none is legal, as in observations that no agent made, all are.

    Args:
      spec: Names the part.
      obs: ``[..., *]``.
    """
    if spec.legal_actions is None:
        return None
    mask = jnp.asarray(obs[spec.legal_actions]).astype(jnp.bool_)
    space: Any = spec.action_space
    sizes = np.ravel(space.nvec if isinstance(space, gymnasium.spaces.MultiDiscrete) else space.n)
    parts = jnp.split(mask, np.cumsum(sizes)[:-1], axis=-1)
    whole = [part | ~part.any(axis=-1, keepdims=True) for part in parts]
    return jnp.concatenate(whole, axis=-1)


def only_legal(spec: EnvSpec, obs: PyTree, x: jax.Array) -> jax.Array:
    """Return logits or values ``[..., entries]``, ``ILLEGAL`` where the action is."""
    mask = legal_mask(spec, obs)
    return x if mask is None else jnp.where(mask, x, ILLEGAL)

"""Arrays of a saved state, put back into the tree that they came from."""

from __future__ import annotations

from typing import Any

import jax

from sebulba.errors import EnvError
from sebulba.types import PyTree


def fitted(leaves: list[Any], like: PyTree, what: str) -> PyTree:
    """Return saved leaves as a tree like ``like``.

    Raises:
      EnvError: They are not of its shapes and dtypes.
    """
    shapes, expected = ([(x.shape, x.dtype) for x in y] for y in (leaves, jax.tree.leaves(like)))
    if shapes != expected:
        raise EnvError(
            f"the saved state of {what} has arrays {shapes}, the environment "
            f"{expected}; use the environment that was saved"
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

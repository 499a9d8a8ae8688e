"""Names for the leaves of a pytree, as files have them."""

from __future__ import annotations

from typing import Any

import jax

from sebulba.types import PyTree


def named_leaves(tree: PyTree) -> tuple[list[str], list[Any]]:
    """Return the leaves with their paths, such as ``params/Dense_0/kernel``; a bare leaf is 0."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "0" for path, _ in paths]
    return names, [leaf for _, leaf in paths]

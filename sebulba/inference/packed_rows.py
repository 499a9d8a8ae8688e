"""Rows of many small arrays, joined into one array for each dtype."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.support.one_kernel import one_kernel
from sebulba.types import PyTree

MOST_PACKED_ELEMENTS = 4096
"""A leaf with more elements in a row is not joined: copying it would cost more than a kernel."""


class Packed(NamedTuple):
    """One packed row, or several with a leading dimension ``[T, ...]``."""

    joined: list[jax.Array]
    """One ``[B, W]`` array for each dtype: the small leaves, flattened, side by side."""
    loose: list[jax.Array]
    """The large leaves, ``[B, ...]``."""


class RowPacking:
    """Joins the leaves of a tree of ``[B, ...]`` by dtype, and takes them apart again.

    A scan on a CPU pays about a microsecond for every array that it carries or writes.
    """

    def __init__(self, row: PyTree) -> None:
        """Take structure, shapes and dtypes from ``row``, whose leaves are ``[B, ...]``."""
        leaves, self._structure = jax.tree.flatten(row)
        self._shapes = [tuple(leaf.shape) for leaf in leaves]
        self._loose = [i for i, s in enumerate(self._shapes) if math.prod(s) > MOST_PACKED_ELEMENTS]
        self._groups: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if index not in self._loose:
                self._groups.setdefault(np.dtype(leaf.dtype), []).append(index)

    def pack(self, row: PyTree) -> Packed:
        """Return ``row`` with its small leaves joined."""
        leaves = jax.tree.leaves(row)
        joined = one_kernel(self._join)([leaves[i] for g in self._groups.values() for i in g])
        return Packed(joined, [leaves[i] for i in self._loose])

    def _join(self, small: list[jax.Array]) -> list[jax.Array]:
        rest = iter(small)
        return [
            jnp.concatenate([_flat(next(rest)) for _ in group], axis=1)
            for group in self._groups.values()
        ]

    def unpack(self, packed: Packed) -> PyTree:
        """Return the tree that was packed; arrays may have dimensions in front, such as T."""
        leaves: list[Any] = [None] * len(self._shapes)
        for index, leaf in zip(self._loose, packed.loose, strict=True):
            leaves[index] = leaf
        for group, joined in zip(self._groups.values(), packed.joined, strict=True):
            begin = 0
            for index in group:
                width = math.prod(self._shapes[index][1:])
                part = joined[..., begin : begin + width]
                leaves[index] = part.reshape(*joined.shape[:-2], *self._shapes[index])
                begin += width
        return jax.tree.unflatten(self._structure, leaves)


def _flat(leaf: jax.Array) -> jax.Array:
    return jnp.asarray(leaf).reshape(leaf.shape[0], -1)

"""Pytrees of arrays: copies that own their buffers, placement on devices, and names of leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from sebulba.types import PyTree


def copy_tree(tree: PyTree) -> PyTree:
    """Return a copy of ``tree`` in its own buffers; to be called inside a jitted function."""
    return jax.tree.map(jnp.copy, tree)


def owned_copy(tree: PyTree, sharding: jax.Device | jax.sharding.Sharding | PyTree) -> PyTree:
    """Return a copy of ``tree`` in ``sharding`` that shares no buffer with it.

    ``jax.device_put`` alone returns the same buffer if it is already in place; if one holder then
    donated it, the other would lose it.
    """
    if isinstance(sharding, jax.Device):
        sharding = SingleDeviceSharding(sharding)
    return jax.jit(copy_tree, out_shardings=sharding)(jax.device_put(tree, sharding))


def is_on(tree: PyTree, device: jax.Device) -> bool:
    """Tell whether all leaves of ``tree`` are JAX arrays on ``device`` and on no other."""
    return all(
        isinstance(leaf, jax.Array) and leaf.devices() == {device} for leaf in jax.tree.leaves(tree)
    )


def on_device(tree: PyTree, device: jax.Device) -> PyTree:
    """Return a tree of replicated arrays on one device; shards that are there are not moved."""
    if is_on(tree, device):
        return tree

    def one(leaf: jax.Array) -> jax.Array:
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        return shards.get(device, next(iter(shards.values())))

    return jax.device_put(jax.tree.map(one, tree), device)


def is_key(leaf: PyTree) -> bool:
    """Tell whether ``leaf`` is an array, or the shape of one, of typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def num_bytes(tree: PyTree) -> int:
    """Return the size of all arrays in ``tree`` but typed PRNG keys."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if not is_key(leaf))


class KeyData:
    """Replaces the typed PRNG keys of a tree by plain arrays, and puts them back.

    JAX dispatches a program in C++ only if none of its arguments and results is a typed key.
    """

    def __init__(self, tree: PyTree) -> None:
        """Remember where ``tree`` has keys, and of which kinds."""
        self._impls = _key_impls(tree)

    def fits(self, tree: PyTree) -> bool:
        """Tell whether ``tree`` has keys of the same kinds in the same places."""
        return _key_impls(tree) == self._impls

    def unwrap(self, tree: PyTree) -> PyTree:
        """Return ``tree`` with each key replaced by its uint32 array, without a copy."""
        return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)

    def wrap(self, data: PyTree) -> PyTree:
        """Return the tree that ``unwrap`` turned into ``data``, without a copy."""
        leaves, structure = jax.tree.flatten(data)
        wrapped = [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(leaves, self._impls, strict=True)
        ]
        return jax.tree.unflatten(structure, wrapped)


def _key_impls(tree: PyTree) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in leaves]


def fold_in_count(key: jax.Array, count: int) -> jax.Array:
    """Return ``key`` with a count of any size folded in, of which ``fold_in`` takes 32 bits.

    Below 2^32 it is ``jax.random.fold_in(key, count)``.
    """
    key = jax.random.fold_in(key, count & 0xFFFFFFFF)
    return fold_in_count(key, count >> 32) if count >> 32 else key


def is_finite(tree: PyTree) -> bool:
    """Tell whether all numbers in ``tree`` are finite; on the host, so that nothing is compiled.

    No view of a leaf is kept, since a view would prevent the leaf's next donation.
    """
    return all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(tree))


def host_copy(tree: PyTree) -> PyTree:
    """Return a copy of ``tree`` as NumPy arrays, with typed keys as their data.

    On a CPU ``np.asarray`` would share the JAX array's buffer, which would prevent the array's next
    donation.
    """
    data = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    return jax.tree.map(lambda x: np.array(x, copy=True), jax.device_get(data))


def named_leaves(tree: PyTree) -> tuple[list[str], list[Any]]:
    """Return paths such as ``params/Dense_0/kernel`` and leaves; the path of a bare leaf is 0."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "0" for path, _ in paths]
    return names, [leaf for _, leaf in paths]

"""Programs that donate exactly those arguments whose buffers their results can reuse."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sebulba.types import PyTree

DEBUGGING = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")
"""Debugging options of JAX, which take effect only if a program is called through ``jax.jit``."""


class DonatingProgram:
    """Jits ``function(*donated, *others)`` and donates the leaves whose buffers an output can take.

    If more is donated, JAX warns at every compile; if less, memory is wasted. A leaf is usable if
    an output that no earlier leaf has taken has the same shape, dtype and shards.
    """

    def __init__(
        self, function: Callable, donated: PyTree, result: PyTree, out: PyTree = None
    ) -> None:
        """Choose the leaves to donate; nothing is compiled before the first call, or ``compile``.

        Args:
          function: Takes the elements of ``donated``, then other arguments.
          donated: Tuple of the arguments that may be donated, as examples.
          result: An example, or shapes, of what ``function`` returns.
          out: Shardings of the outputs, a prefix tree of ``result``; None lets JAX choose.
        """
        leaves, treedef = jax.tree.flatten(donated)
        self._usable = usable = _usable(leaves, result, out)

        def call(given: list, kept: list, *others: PyTree) -> PyTree:
            merged = iter(given), iter(kept)
            leaves = [next(merged[0] if use else merged[1]) for use in usable]
            return function(*jax.tree.unflatten(treedef, leaves), *others)

        self.jitted = jax.jit(call, donate_argnums=(0,), out_shardings=out)
        self._run: Callable = self.jitted

    def __call__(self, donated: PyTree, *others: PyTree) -> PyTree:
        """Run the program; ``donated`` is a tuple of the same structure as the example."""
        arguments = *self._parted(donated), *others
        try:
            return self._run(*arguments)
        except (TypeError, ValueError):
            if self._run is self.jitted or any(map(_is_deleted, arguments[0])):
                raise
            # It was compiled for other shapes or devices and has not run: let jax.jit compile it.
            self._run = self.jitted
            return self._run(*arguments)

    def compile(self, donated: PyTree, *others: PyTree) -> None:
        """Compile the program ahead of its first call, for arguments of these shapes.

        A call with other shapes or on other devices compiles it again.
        """
        if any(getattr(jax.config, name) for name in DEBUGGING):
            return
        self._run = self.jitted.lower(*self._parted(donated), *others).compile()

    def _parted(self, donated: PyTree) -> tuple[list, list]:
        leaves = jax.tree.leaves(donated)
        given = [leaf for leaf, use in zip(leaves, self._usable, strict=True) if use]
        kept = [leaf for leaf, use in zip(leaves, self._usable, strict=True) if not use]
        return given, kept


def _is_deleted(leaf: Any) -> bool:
    """Tell whether an array was donated; one of NumPy never is."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _usable(leaves: Sequence[Any], result: PyTree, out: PyTree) -> list[bool]:
    """Return for each leaf whether an output can take its buffer."""

    def key(leaf: Any, sharding: Any) -> tuple:
        shape = tuple(leaf.shape)
        return shape, leaf.dtype, shape if sharding is None else sharding.shard_shape(shape)

    free: collections.Counter[tuple] = collections.Counter()

    def count(sharding: Any, subtree: PyTree) -> None:
        free.update(key(leaf, sharding) for leaf in jax.tree.leaves(subtree))

    jax.tree.map(count, out, result, is_leaf=lambda x: x is None)
    usable = []
    for leaf in leaves:
        taken = key(leaf, getattr(leaf, "sharding", None))
        usable.append(free[taken] > 0)
        free[taken] -= 1
    return usable

"""Programs that take over as many of their arguments' buffers as their results can use."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sebulba.types import PyTree

DEBUGGING = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")
"""Options of JAX for which a program has to be run by ``jax.jit``: it finds the operation."""


class DonatingProgram:
    """``function(*donated, *others)`` jitted, with those leaves donated that an output can take.

    Donating more is a warning from JAX at every compile, donating less costs memory. A leaf is
    usable for an output of the same shape, dtype and shards that no leaf before it has taken.
    """

    def __init__(
        self, function: Callable, donated: PyTree, result: PyTree, out: PyTree = None
    ) -> None:
        """Choose the leaves; nothing is compiled before the first call, or ``compile``.

        Args:
          function: Takes the elements of ``donated``, then others.
          donated: A tuple of arguments, as examples.
          result: What it returns, as an example.
          out: Shardings of the outputs, a prefix tree of ``result``, or None.
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
        """Run it; ``donated`` is a tuple as the example was."""
        arguments = *self._parted(donated), *others
        try:
            return self._run(*arguments)
        except (TypeError, ValueError):
            if self._run is self.jitted or any(leaf.is_deleted() for leaf in arguments[0]):
                raise
            # It was compiled for others than it is given, and has not run.
            self._run = self.jitted
            return self._run(*arguments)

    def compile(self, donated: PyTree, *others: PyTree) -> None:
        """Compile it ahead of its first call, for arguments of these shapes.

        A call with other shapes or on other devices is compiled anew.
        """
        if any(getattr(jax.config, name) for name in DEBUGGING):
            return
        self._run = self.jitted.lower(*self._parted(donated), *others).compile()

    def _parted(self, donated: PyTree) -> tuple[list, list]:
        leaves = jax.tree.leaves(donated)
        given = [leaf for leaf, use in zip(leaves, self._usable, strict=True) if use]
        kept = [leaf for leaf, use in zip(leaves, self._usable, strict=True) if not use]
        return given, kept


def _usable(leaves: Sequence[Any], result: PyTree, out: PyTree) -> list[bool]:
    """Tell of each leaf whether an output can take it over."""

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

"""Programs that take over as many of their arguments' buffers as their results can use."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sebulba.types import PyTree


class DonatingProgram:
    """``function(*donated, *others)`` jitted, with those leaves donated that an output can take.

    Donating more is a warning from JAX at every compile, donating less costs memory. A leaf is
    usable for an output of the same shape, dtype and shards that no leaf before it has taken.
    """

    def __init__(
        self, function: Callable, donated: PyTree, result: PyTree, out: PyTree = None
    ) -> None:
        """Choose the leaves; nothing is compiled before the first call.

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
            if self._run is self.jitted:
                raise
            # It was compiled for others than it is given, which JAX finds before it runs anything.
            self._run = self.jitted
            return self._run(*arguments)

    def compile(self, donated: PyTree, *others: PyTree) -> None:
        """Compile it ahead of its first call, for arguments of these shapes.

        A call with others is compiled anew.
        """
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

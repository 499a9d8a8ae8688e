"""Small computations as one kernel each, for programs that are called or repeated very often."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from sebulba.types import PyTree

MOST_ELEMENTS = 1 << 16
"""Arrays of more elements than this together are worth several kernels, and several threads."""

ResultT = TypeVar("ResultT")


def one_kernel(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Return ``function`` in such a form that XLA on a CPU compiles it to one kernel.

    There XLA runs every operation that it cannot fuse as a kernel of its own, about a microsecond
    each, and hands independent ones to other threads, which costs more than they do. The mark is
    the one that XLA gives to small loops of its own accord; elsewhere, and with an XLA that does
    not know it, ``function`` is what it was.

    Args:
      function: Of pytrees of arrays. No products of matrices (they would be plain loops), no
        scatter, no sort, no generator of bits but threefry: XLA has them in kernels of their own
        only.
    """
    jitted = jax.jit(function)

    def marked(*args: PyTree) -> ResultT:
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            return jitted(*args)

    def run(*args: PyTree) -> ResultT:
        if sum(jax.numpy.size(leaf) for leaf in jax.tree.leaves(args)) > MOST_ELEMENTS:
            return function(*args)
        return jax.lax.platform_dependent(*args, cpu=marked, default=function)

    return run

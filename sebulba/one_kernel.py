"""Ways to keep XLA on a CPU from splitting small computations, which are called very often."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from sebulba.types import PyTree

MOST_ELEMENTS = 1 << 13
"""Arrays of more elements than this together are worth several kernels, and several threads, which
XLA then takes: in one kernel they fail to compile (JAX 0.10: at 64 000 floats, not at 24 576)."""
MOST_REDUCED_ELEMENTS = 1 << 11
"""Sums and maxima of more floats than this XLA may give to a library, which fits into no kernel of
XLA's own: the compile would fail (measured on JAX 0.10 and 0.12: at 4096, not at 2048)."""

ResultT = TypeVar("ResultT")


def one_kernel(
    function: Callable[..., ResultT], *, reduces: bool = False
) -> Callable[..., ResultT]:
    """Return ``function`` in such a form that XLA on a CPU compiles it to one kernel.

    XLA on a CPU runs every operation that it cannot fuse as a separate kernel, about a microsecond
    each, and hands independent ones to other threads, which costs more than the operations. The
    mark used here is the one that XLA itself puts on small loops. On other platforms, in versions
    of XLA that do not know the mark, and for large arrays, ``function`` is compiled as usual.

    Args:
      function: Of pytrees of arrays. It must contain no matrix product (which would become plain
        loops), no scatter, no sort, and no random bits but threefry: XLA compiles these to separate
        kernels only. Its intermediate arrays are no larger than its arguments.
      reduces: Whether it has sums, maxima or minima of floats.
    """
    most = MOST_REDUCED_ELEMENTS if reduces else MOST_ELEMENTS
    jitted = jax.jit(function)

    def marked(*args: PyTree) -> ResultT:
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            return jitted(*args)

    def run(*args: PyTree) -> ResultT:
        if sum(jax.numpy.size(leaf) for leaf in jax.tree.leaves(args)) > most:
            return function(*args)
        return jax.lax.platform_dependent(*args, cpu=marked, default=function)

    return run


def after(key: jax.Array, x: jax.Array) -> jax.Array:
    """Return ``key`` with a dependency on ``x``, so that what uses the key runs after ``x``.

    XLA on a CPU would otherwise draw random numbers, a few microseconds of work, in another
    thread, which costs more CPU time than it saves: acting with 5 layers of 200 units took 63 us of
    CPU time a step, and 32 us in sequence. ``jax.lax.optimization_barrier`` leaves no dependency in
    the compiled program, so the dependency is in the value.

    Args:
      key: Typed PRNG key; another one comes back only if ``x`` is NaN.
      x: Floats, any shape.
    """
    data = jax.random.key_data(key)
    is_nan = jnp.isnan(x.reshape(-1)[0]).astype(data.dtype)
    return jax.random.wrap_key_data(data + is_nan, impl=jax.random.key_impl(key))

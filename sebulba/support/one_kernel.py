"""Makes XLA compile small computations to one kernel each, for programs called very often."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from sebulba.types import PyTree

MOST_ELEMENTS = 1 << 13
"""If its arguments have more elements in all, a function is left to XLA, which may use several
kernels and threads. Much larger ones fail to compile to one (JAX 0.10: 64 000 floats, not 24 576).
"""
MOST_REDUCED_ELEMENTS = 1 << 11
"""The same limit for a function that sums or takes maxima. XLA may hand larger reductions to a
library, and one kernel would then fail to compile (JAX 0.10 and 0.12: 4096 floats, not 2048)."""

_IS_LEFT_ALONE = contextvars.ContextVar("is_left_alone", default=False)
ResultT = TypeVar("ResultT")


def one_kernel(
    function: Callable[..., ResultT], *, reduces: bool = False
) -> Callable[..., ResultT]:
    """Return ``function`` in a form that XLA compiles to one kernel on a CPU.

    By default XLA on a CPU makes a kernel of every operation that it cannot fuse, which costs about
    a microsecond each, and hands independent ones to other threads, which costs more than it saves.
    ``function`` gets the mark that XLA itself gives to small loops. It stays as it is on other
    platforms, with an XLA that does not know the mark, and for large arrays.

    Args:
      function: Takes and returns pytrees of arrays. It must not sort, scatter or make random bits
        except by threefry, since XLA needs separate kernels for these; nor multiply matrices, which
        would become plain loops. Its intermediate results are no larger than its arguments.
      reduces: Whether it has sums, maxima or minima of floats.
    """
    most = MOST_REDUCED_ELEMENTS if reduces else MOST_ELEMENTS
    jitted = jax.jit(function)

    def marked(*args: PyTree) -> ResultT:
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            return jitted(*args)

    def run(*args: PyTree) -> ResultT:
        if _IS_LEFT_ALONE.get() or sum(jnp.size(leaf) for leaf in jax.tree.leaves(args)) > most:
            return function(*args)
        return jax.lax.platform_dependent(*args, cpu=marked, default=function)

    return run


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Within this, functions are traced as they are, for programs that XLA does not run."""
    token = _IS_LEFT_ALONE.set(True)
    try:
        yield
    finally:
        _IS_LEFT_ALONE.reset(token)


def after(key: jax.Array, x: jax.Array) -> jax.Array:
    """Return ``key``, but let computations that use it run only after ``x`` is known.

    Otherwise XLA on a CPU draws in another thread, and the hand-over costs more CPU time than the
    draw: acting with 5 layers of 200 units took 63 us of CPU time a step, and 32 us in one thread.
    The key depends on a value of ``x``, since ``jax.lax.optimization_barrier`` leaves no dependency
    in the compiled program.

    Args:
      key: Typed PRNG key; another key is returned only if the first element of ``x`` is NaN.
      x: Floats of any shape.
    """
    data = jax.random.key_data(key)
    is_nan = jnp.isnan(x.reshape(-1)[0]).astype(data.dtype)
    return jax.random.wrap_key_data(data + is_nan, impl=jax.random.key_impl(key))

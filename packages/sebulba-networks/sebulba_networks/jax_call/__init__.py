"""Compiled JAX programs step the native engine: a library that XLA calls, and its use."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from sebulba_networks import build

if TYPE_CHECKING:
    from sebulba_networks.native import Layout, Rows

TARGET = "sebulba_network_step"
"""Name of the call in XLA programs."""
MAIN = Path(__file__).parent / "jax_call.cc"


class JaxCall:
    """Vector environments of a ``NativePool``, for programs on a CPU, one of them at a time."""

    def __init__(self, engine: ctypes.CDLL, pool: int | None, layout: Layout) -> None:
        """Let programs step the environments at the address ``pool``.

        Raises:
          UsageError: The library cannot be compiled.
        """
        self._lib = _load()
        self._layout = layout
        step, error = (
            ctypes.cast(function, ctypes.c_void_p)
            for function in (engine.net_step, engine.net_error)
        )
        self._number: int | None = self._lib.net_jax_open(
            pool, step, error, layout.num_action_numbers, layout.num_bytes
        )
        self.handle = np.array([self._number], np.uint64).view(np.uint32)
        """``[2]`` uint32: what the first ``step`` takes. Nothing runs once it was closed."""

    def step(self, handle: jax.Array, actions: jax.Array) -> tuple[jax.Array, Rows]:
        """Step within a program.

        Args:
          handle: ``[2]`` uint32, of the step before: so the steps of a program are a chain, which
            no compiler can drop or reorder.
          actions: ``[B]`` or ``[B, A]`` numbers inside the action space.

        Returns:
          The handle for the next step, and the rows, without ``info``.
        """
        from sebulba_networks.native import Rows

        layout = self._layout
        numbers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        flags = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bool_)
        results = (
            jax.ShapeDtypeStruct((2,), jnp.uint32),
            numbers((*layout.shape, layout.num_features)),
            numbers(layout.shape),
            *[flags(layout.shape)] * 4,
            flags((layout.num_envs,)),
        )
        called: Any = jax.ffi.ffi_call(TARGET, results)(handle, actions.astype(jnp.float32))
        handle, *rows = called
        return handle, Rows._make([*rows, None])

    def close(self) -> None:
        """Let no program step them any more; may be called twice."""
        number, self._number = self._number, None
        if number is not None:
            self._lib.net_jax_close(number)


def library() -> Path:
    """Return the compiled library, which depends on the headers of jaxlib (``build.compiled``)."""
    headers = Path(jax.ffi.include_dir())
    sources = [MAIN, *(headers / "xla" / "ffi" / "api").iterdir()]
    name = f"jax-call-{jaxlib.version.__version__}"
    return build.compiled(name, MAIN, build.FLAGS, sources, headers=headers)


@functools.cache
def _load() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(library()))
    lib.net_jax_open.restype = ctypes.c_uint64
    lib.net_jax_open.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2]
    lib.net_jax_close.restype, lib.net_jax_close.argtypes = None, [ctypes.c_uint64]
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(lib.net_jax_step), platform="cpu")
    return lib

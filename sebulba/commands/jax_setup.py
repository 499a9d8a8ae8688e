"""How JAX is set up before its backend starts: platform, CPU devices, kept programs."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from typing import Literal

import jax

from sebulba.errors import UsageError

CPU_POOL_THREADS = 8
"""Fewer XLA threads than this can starve a collective among forced CPU devices."""

COMPILE_CACHE_S = 30 * 24 * 3600.0
"""Age at which a compiled program is removed."""

Platform = Literal["cpu", "cuda", "tpu"]


def configure_jax(
    platform: Platform | None = None,
    num_cpu_devices: int | None = None,
    compile_cache: str = "auto",
) -> None:
    """Choose JAX's platform, split the CPU and keep compiled programs, before JAX's backend starts.

    On one CPU device, programs will run in the thread that calls them.

    Args:
      platform: None takes the best there is.
      num_cpu_devices: None leaves the CPU whole.
      compile_cache: A folder, ``"auto"`` for ``~/.cache/sebulba``, or ``"off"``.

    Raises:
      UsageError: The backend has started already, with another number of devices.
    """
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    if compile_cache != "off":
        _use_compile_cache(compile_cache)
    if num_cpu_devices is None:
        # Programs then run in the thread that calls them: two pool threads, which the cycles of two
        # Inferencers fill, would keep an update waiting. CartPole trains 10 % faster.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        return
    os.environ["NPROC"] = str(
        max(CPU_POOL_THREADS, num_cpu_devices, int(os.environ.get("NPROC", 0)))
    )
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    except RuntimeError as error:
        raise UsageError(
            f"num_cpu_devices={num_cpu_devices} must be set before JAX starts, and it has "
            f"started with {len(jax.devices())} devices; use a new process"
        ) from error


def _use_compile_cache(folder: str) -> None:
    """Let JAX keep compiled programs: a second start on CartPole is about 2 s shorter.

    Fused programs do not profit, since the address of their environments is part of them; they
    are why old files have to be removed.
    """
    is_ours = folder == "auto"
    if is_ours:
        if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            return  # JAX's own variable: the user has chosen.
        folder = auto_compile_cache()
    try:
        if folder.startswith("~"):
            raise OSError(f"there is no home folder {folder.partition('/')[0]}; set HOME")
        os.makedirs(folder, exist_ok=True)
        if is_ours:
            _remove_old_files(folder)
    except OSError as error:
        warnings.warn(f"compiled programs are not kept in {folder}: {error}", stacklevel=3)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def auto_compile_cache() -> str:
    """Return the folder that ``compile_cache="auto"`` means."""
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return chosen
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return os.path.join(os.path.expanduser(home), "sebulba", "jax")


def _remove_old_files(folder: str) -> None:
    with os.scandir(folder) as entries:
        old = [e.path for e in entries if e.stat().st_mtime < time.time() - COMPILE_CACHE_S]
    for path in old:
        # Another run may have been faster.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

"""How JAX is set up before its backend starts: platform, CPU devices, kept programs.

What a configuration leaves to the machine is chosen here too (``set_up_jax``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from typing import Literal

import jax

from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError
from sebulba.loops.devices import local_devices
from sebulba.loops.jax_settings import check_jax_settings
from sebulba.runs.placement import has_accelerator, num_cpu_devices_for, placement_of
from sebulba.support.machine import num_cores

CPU_POOL_THREADS = 8
"""Fewer XLA threads than this can starve a collective among forced CPU devices."""

COMPILE_CACHE_S = 30 * 24 * 3600.0
"""Age at which a compiled program is removed."""

COMPILE_CACHE_BYTES = 2 * 2**30
"""Size of the folder of compiled programs after a start."""

Platform = Literal["cpu", "cuda", "tpu"]


def set_up_jax(config: ExperimentConfig) -> ExperimentConfig:
    """Set JAX up for a run, before its backend starts, and choose what is left to the machine.

    Where JAX runs on the CPU, it may be split (``num_cpu_devices_for``): then all its devices
    update, and the first one infers. Where there is an accelerator, a small network may leave it
    alone (``placement_of``), which a line on the terminal says.

    Returns:
      The configuration with the devices that were chosen. A run folder keeps the one without, so
      that the run can be resumed on another machine, with the devices that are best there.

    Raises:
      UsageError: The backend has started already, on another platform or with another number of
        devices than the configuration names; or a setting of JAX cannot be used.
    """
    check_jax_settings()
    num_devices = num_cpu_devices_for(config)
    is_free = not _is_platform_named() and has_accelerator()
    placement = placement_of(config) if is_free else None
    platform = "cpu" if placement is not None and placement.updates_on_cpu else config.platform
    configure_jax(platform, config.num_cpu_devices, config.compile_cache, preallocate=True)
    if num_devices > 1:
        # JAX may run already, in a process that did more before.
        with contextlib.suppress(UsageError):
            _split_cpu(num_devices)
    if config.platform is not None:
        _check_platform(config.platform)
    if placement is not None:
        is_on_cpu = jax.default_backend() == "cpu"
        if placement.updates_on_cpu or not is_on_cpu:
            print(f"sebulba: {placement.why}", flush=True)
        if not is_on_cpu:  # on both, or JAX had started before
            updates = ("cpu:0",) if placement.updates_on_cpu else None
            return dataclasses.replace(config, inference_devices=("cpu:0",), update_devices=updates)
    if num_devices == 1:
        return config
    if jax.default_backend() != "cpu" or len(jax.local_devices()) != num_devices:
        return config
    return dataclasses.replace(
        config,
        num_cpu_devices=num_devices,
        inference_devices=(0,),
        update_devices=tuple(range(num_devices)),
    )


def _is_platform_named() -> bool:
    """Tell whether JAX was told where to run, as by ``JAX_PLATFORMS``."""
    return bool(getattr(jax.config, "jax_platforms", None))


def _check_platform(platform: Platform) -> None:
    """Raise UsageError if JAX has started on another platform, or there is no such device."""
    found = local_devices()[0].platform
    if found != {"cuda": "gpu"}.get(platform, platform):
        if platform != "cpu" and not has_accelerator():
            local_devices(platform)  # says what is missing
        raise UsageError(
            f"platform={platform} must be chosen before JAX starts, and it has started on {found}; "
            "use a new process"
        )


def configure_jax(
    platform: Platform | None = None,
    num_cpu_devices: int | None = None,
    compile_cache: str = "auto",
    *,
    preallocate: bool = False,
) -> None:
    """Choose JAX's platform, split the CPU and keep compiled programs, before JAX's backend starts.

    On one CPU device, programs will run in the thread that calls them.

    Args:
      platform: None takes the best there is.
      num_cpu_devices: None leaves the CPU whole.
      compile_cache: A folder, ``"auto"`` for ``~/.cache/sebulba``, or ``"off"``.
      preallocate: Leave it to JAX whether most of a GPU's memory is taken at once. A training may
        do that; whatever runs beside one takes what it needs.

    Raises:
      UsageError: The backend has started already, with another number of devices.
    """
    if not preallocate:
        share_accelerator()
    if platform is not None:
        # Some arrays are made on the CPU whatever the platform of the run.
        jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
    if compile_cache != "off":
        _use_compile_cache(compile_cache)
    if num_cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
    _split_cpu(num_cpu_devices or 1)


def share_accelerator() -> None:
    """Let several processes use a GPU, unless the user has decided; before JAX's backend starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _split_cpu(num_devices: int) -> None:
    """Let the CPU be so many devices, if it is what JAX runs on."""
    if num_devices == 1:
        # Programs then run in the thread that calls them: two pool threads, which the cycles of two
        # Inferencers fill, would keep an update waiting. CartPole trains 10 % faster.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        return
    # XLA takes the variable for the size of its pool, whatever the machine has.
    wanted = max(CPU_POOL_THREADS, num_cores(), num_devices, int(os.environ.get("NPROC", 0)))
    os.environ["NPROC"] = str(wanted)
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise UsageError(
            f"num_cpu_devices={num_devices} must be set before JAX starts, and it has "
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
            raise OSError(f"the home folder is missing: {folder.partition('/')[0]}; set HOME")
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
    """Remove programs that are old and, the oldest first, what makes the folder too large.

    Folders are JAX's own (it keeps kernels of GPUs in one). What cannot be removed stays.
    """
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Another run may remove it at the same time.
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    files.append((stat.st_mtime, stat.st_size, entry.path))
    size = 0
    for modified, file_size, path in sorted(files, reverse=True):
        size += file_size
        if size > COMPILE_CACHE_BYTES or modified < time.time() - COMPILE_CACHE_S:
            with contextlib.suppress(OSError):
                os.unlink(path)

"""How much memory a process and its devices use."""

from __future__ import annotations

import contextlib
import ctypes
import math
import resource
import sys
from pathlib import Path

import jax

MB = 1e6
"""Bytes."""


def rss_bytes() -> int:
    """Return the resident memory of this process, or its peak on a system without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest * (1 if sys.platform == "darwin" else 1024)
    return pages * resource.getpagesize()


def peak_rss_mb(pid: int | None) -> float:
    """Return the peak resident memory of a process in 10^6 bytes, 0 if it has ended.

    ``getrusage`` does not serve here: its maximum starts at the size of the parent that forked.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MB
    return 0.0


def device_bytes() -> int:
    """Return the bytes in use on all devices, or of all living arrays if backends do not count."""
    counted = [device.memory_stats() for device in jax.local_devices()]
    if all(counted):
        return sum(stats["bytes_in_use"] for stats in counted if stats)
    places = ((array, array.sharding) for array in jax.live_arrays())
    return sum(
        math.prod(where.shard_shape(array.shape)) * array.dtype.itemsize * len(where.device_set)
        for array, where in places
    )


def peak_device_mb() -> float:
    """Return the peak of the fullest device in 10^6 bytes, or what ``device_bytes`` counts."""
    counted = [device.memory_stats() for device in jax.local_devices()]
    if all(counted):
        return max(stats["peak_bytes_in_use"] for stats in counted if stats) / MB
    return device_bytes() / MB


class _Mallinfo2(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns; see mallinfo(3)."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    ]


def allocator_mb() -> tuple[float | None, float | None]:
    """Return (given out, kept) of glibc's allocator in 10^6 bytes, None on other systems."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None, None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return (info.uordblks + info.hblkhd) / MB, info.fordblks / MB

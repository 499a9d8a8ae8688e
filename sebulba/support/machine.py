"""The cores, memory and disk that the system and its control groups let this process use."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sebulba.errors import MORE_OPEN_FILES, UsageError

ROOT = Path("/")

LEAST_OPEN_FILES = 128
WANTED_OPEN_FILES = 4096
"""Files, pipes and sockets that a process may have open: worker processes take some each."""


class CoreCounts(NamedTuple):
    """Numbers of cores."""

    installed: int
    """Cores of the machine."""
    allowed: int
    """Cores in the affinity of this process."""
    quota: float | None
    """Cores that its control group grants; None for no limit."""

    @property
    def usable(self) -> float:
        """Cores that this process can really use."""
        return self.allowed if self.quota is None else min(self.allowed, self.quota)


class Memory(NamedTuple):
    """Memory in bytes."""

    total: int
    """Memory of the machine."""
    limit: int | None
    """Limit of the control group; None for no limit."""
    available: int
    """Memory that system and control group still grant."""


def cores(root: Path = ROOT) -> CoreCounts:
    """Return how many cores this process has."""
    return CoreCounts(os.cpu_count() or 1, _num_allowed(), _cpu_quota(root))


def num_cores(root: Path = ROOT) -> int:
    """Return for how many cores threads should be planned: those allowed, or a smaller quota."""
    return max(1, math.ceil(cores(root).usable))


def _num_allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory(root: Path = ROOT) -> Memory:
    """Return the memory of this process."""
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    total, available, limit = fields["MemTotal"], fields["MemAvailable"], None
    for folder in _groups(root, "memory"):
        most = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if most is None or most >= total:
            continue
        limit = most if limit is None else min(limit, most)
        # The system takes memory back that only caches files.
        cached = _statistic(folder, "inactive_file")
        available = min(available, most - (used or 0) + cached)
    return Memory(total, limit, max(0, available))


def nearest_folder(path: Path) -> Path:
    """Return the folder ``path``, or the nearest above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for folder in _groups(root, "cpu"):
        words = _words(folder / "cpu.max")  # version 2: "quota period" or "max period"
        if not words:
            quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
            words = [*_words(quota), *_words(period)]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, of either version."""
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        group = top / path.lstrip("/")
        # In a container the path may be that seen from outside, so that only the top exists.
        for folder in (group, *group.parents):
            if folder.is_dir():
                yield folder
            if folder == top:
                break


def _number(folder: Path, *names: str) -> int | None:
    for name in names:
        if (words := _words(folder / name)) and words[0].isdigit():
            return int(words[0])
    return None


def _statistic(folder: Path, name: str) -> int:
    pairs = (line.split() for line in _lines(folder / "memory.stat"))
    return next((int(pair[1]) for pair in pairs if pair[0] in (name, f"total_{name}")), 0)


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def allow_open_files() -> None:
    """Raise the limit of open files as far as it goes.

    Raises:
      UsageError: It is too low for JAX, an environment and a run folder together.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < WANTED_OPEN_FILES:
        soft = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        raise UsageError(
            f"this process may open {soft} files, and a run needs {LEAST_OPEN_FILES}; "
            f"{MORE_OPEN_FILES}"
        )

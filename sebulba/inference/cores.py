"""Which CPU cores an Inferencer and the threads of its environment run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

Cores = frozenset[int]
"""Numbers of cores, as the system counts them."""


def num_cores() -> int:
    """Return how many this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shares_of_cores(num_inferencers: int, num_threads: int | None) -> list[Cores | None]:
    """Return each Inferencer's share of the cores that this process may run on.

    An Inferencer and its environment wake each other at every step, and a thread that wakes on the
    core on which the other has just gone to sleep finds its data there, and no other core in the
    way. Nobody else is kept off: the update and XLA's own threads run where the system puts them.
    Shares are of neighbouring numbers; which of these are threads of one core is not looked at.

    Args:
      num_inferencers: Of this process.
      num_threads: Of the environment of each; None if that is not known.

    Returns:
      One an Inferencer, all of one size. None for each where that would not help: there is but one
      Inferencer, its environment has more threads than the share cores (it uses those of the others
      while they act) or an unknown number, cores and Inferencers do not divide, or the system
      cannot bind threads to cores.
    """
    none: list[Cores | None] = [None] * num_inferencers
    if num_inferencers < 2 or num_threads is None or not hasattr(os, "sched_setaffinity"):
        return none
    cores = sorted(os.sched_getaffinity(0))
    each, rest = divmod(len(cores), num_inferencers)
    if num_threads > max(each, 1) or (rest if each else num_inferencers % len(cores)):
        return none
    if not each:
        return [Cores({cores[i % len(cores)]}) for i in range(num_inferencers)]
    return [Cores(cores[i * each : (i + 1) * each]) for i in range(num_inferencers)]


def run_on(cores: Cores | None) -> None:
    """Let the calling thread, and those that it starts, run on ``cores`` only; None: as it is.

    It is a matter of speed alone: where the system refuses, they run where it likes.
    """
    if cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def threads_run_on(cores: Cores | None) -> Iterator[None]:
    """Let threads that are started inside run on ``cores`` only; the calling one does meanwhile."""
    if cores is None:
        yield
        return
    before = Cores(os.sched_getaffinity(0))
    run_on(cores)
    try:
        yield
    finally:
        run_on(before)

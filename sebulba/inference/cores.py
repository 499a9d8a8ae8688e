"""Which CPU cores an Inferencer and the threads of its environment run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

Cores = frozenset[int]
"""Numbers that the operating system gives to cores."""


def shares_of_cores(num_inferencers: int, num_threads: int | None) -> list[Cores | None]:
    """Return each Inferencer's share of the cores that this process may run on.

    An Inferencer and its environment wake each other at every step. A thread that wakes on the core
    on which the other has just gone to sleep finds the data in that core's cache. The shares are
    not exclusive: the update and XLA's own threads run where the system puts them. A share is a
    range of neighbouring numbers; whether two of these are hyper-threads of one core is ignored.

    Args:
      num_threads: Threads of each Inferencer's environment; None if the number is not known.

    Returns:
      A share for each Inferencer, all of one size; or None for each where shares would not help:
      there is only one Inferencer, an environment has more threads than a share has cores (it uses
      the others' cores while they act), the number of threads is not known, the cores cannot be
      divided evenly, or the system cannot bind threads to cores.
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
    """Let the calling thread, and those that it starts, run on ``cores`` only; None does nothing.

    This matters for speed only, so that a refusal of the system is ignored.
    """
    if cores is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def threads_run_on(cores: Cores | None) -> Iterator[None]:
    """Let the calling thread, and threads that it starts inside, run on ``cores`` only.

    On leaving, the calling thread gets its own cores back. None changes nothing.
    """
    if cores is None:
        yield
        return
    before = Cores(os.sched_getaffinity(0))
    run_on(cores)
    try:
        yield
    finally:
        run_on(before)

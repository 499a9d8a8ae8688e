"""Permits to begin cycles, and the stop that ends waits and cycles. Free of JAX."""

from __future__ import annotations

import threading
from typing import NamedTuple

WAKE_S = 0.25
"""Every blocking call looks at its stop event at least this often."""


class Stop(NamedTuple):
    """The two events that tell an Inferencer to end."""

    soon: threading.Event
    """Set: begin no further cycle."""
    now: threading.Event
    """Set: end every wait, and the cycle in flight at its next step or chunk; its rows are lost."""

    @classmethod
    def new(cls) -> Stop:
        """Return a stop that has not been asked for."""
        return cls(threading.Event(), threading.Event())


class CyclePermits:
    """Counts how many cycles the Inferencers of an asynchronous run may still begin in all.

    With it no cycle is begun that the update loop will not consume.
    """

    def __init__(self, number: int) -> None:
        """Permit ``number`` cycles."""
        self._number = number
        self._changed = threading.Condition()

    def take(self, stop: threading.Event) -> bool:
        """Wait for a permit and use it up; False if ``stop`` is set."""
        with self._changed:
            while not self._number:
                if stop.is_set():
                    return False
                self._changed.wait(WAKE_S)
            self._number -= 1
            return not stop.is_set()

    def give(self) -> None:
        """Permit one more cycle, since the trajectory of another was not consumed."""
        with self._changed:
            self._number += 1
            self._changed.notify()

    def wake(self) -> None:
        """Make all threads that wait look at their ``stop``."""
        with self._changed:
            self._changed.notify_all()

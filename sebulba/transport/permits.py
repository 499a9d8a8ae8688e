"""How many cycles may begin, and how who waits is told to end. Free of JAX."""

from __future__ import annotations

import threading
from typing import NamedTuple

WAKE_S = 0.25
"""Every blocking call looks at its stop event at least this often."""


class Stop(NamedTuple):
    """How an Inferencer is told to end."""

    soon: threading.Event
    """Begin no further cycle."""
    now: threading.Event
    """End every wait, and the cycle in flight at its next step or chunk; its rows are lost."""

    @classmethod
    def new(cls) -> Stop:
        """Return a stop that has not been asked for."""
        return cls(threading.Event(), threading.Event())


class CyclePermits:
    """How many cycles the Inferencers of an asynchronous run may still begin between them.

    So that none is begun which the update loop will not consume.
    """

    def __init__(self, number: int) -> None:
        """Permit ``number`` cycles."""
        self._number = number
        self._changed = threading.Condition()

    def take(self, stop: threading.Event) -> bool:
        """Use up one, or wait for one; False if ``stop`` was set first."""
        with self._changed:
            while not self._number:
                if stop.is_set():
                    return False
                self._changed.wait(WAKE_S)
            self._number -= 1
            return not stop.is_set()

    def give(self) -> None:
        """Permit one more: what a cycle made was not consumed."""
        with self._changed:
            self._number += 1
            self._changed.notify()

    def wake(self) -> None:
        """Make all who wait look at their ``stop``."""
        with self._changed:
            self._changed.notify_all()

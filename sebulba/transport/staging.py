"""Staging: per inference device, the newest networks and nothing else."""

from __future__ import annotations

import collections
import threading
from typing import NamedTuple

from sebulba.transport.permits import WAKE_S
from sebulba.types import PyTree


class Staged(NamedTuple):
    """What a slot holds."""

    policy_version: int
    networks: PyTree
    """Acting networks, owned by the slot's device; read by its Inferencers, donated by nobody."""


class Staging:
    """A slot of one; publishing never blocks and the newest wins."""

    def __init__(self) -> None:
        self._slot: collections.deque[Staged] = collections.deque(maxlen=1)
        self._published = threading.Condition()

    def publish(self, staged: Staged) -> None:
        """Replace what is staged."""
        with self._published:
            self._slot.append(staged)
            self._published.notify_all()

    def newest(self) -> Staged | None:
        """Return what is staged, without waiting; None before the first publish."""
        with self._published:
            return self._slot[-1] if self._slot else None

    def take(self, stop: threading.Event, at_least: int = 0) -> Staged | None:
        """Return the newest networks, which stay staged for the device's other Inferencers.

        Args:
          stop: Ends the wait.
          at_least: Wait for this policy version (lockstep).

        Returns:
          None if ``stop`` was set before that version came.
        """
        with self._published:
            while not self._slot or self._slot[-1].policy_version < at_least:
                if stop.is_set():
                    return None
                self._published.wait(WAKE_S)
            return self._slot[-1]

"""Staging: a slot per inference device that holds only the newest networks."""

from __future__ import annotations

import collections
import threading
from typing import NamedTuple

from sebulba.transport.permits import WAKE_S
from sebulba.types import PyTree


class Staged(NamedTuple):
    """What a slot holds."""

    policy_version: int
    """Rises by one whenever trained networks are published."""
    networks: PyTree
    """Acting networks on the slot's device, ``WithBank`` where the agent has one; its Inferencers
    read them, and nobody donates them."""


class Staging:
    """A slot for one ``Staged``; publishing never blocks, and replaces what was there."""

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
        """Wait for networks and return them; they stay for the device's other Inferencers.

        Args:
          stop: Ends the wait.
          at_least: Wait until the policy version is this or higher (lockstep).

        Returns:
          The newest networks; None if ``stop`` was set before they came.
        """
        with self._published:
            while not self._slot or self._slot[-1].policy_version < at_least:
                if stop.is_set():
                    return None
                self._published.wait(WAKE_S)
            return self._slot[-1]

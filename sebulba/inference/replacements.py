"""Inferencers that get new environments elsewhere while all others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from sebulba.inference.inferencer import Inferencer, InferencerPosition, pass_on_wishes

Replace = Callable[[Inferencer], Inferencer]
"""Returns an Inferencer with a new environment in the place of one whose environment failed."""
BEING_REPLACED = "it was being replaced when the checkpoint was made"


class Arrival(NamedTuple):
    """What became of a replacement."""

    old: Inferencer
    """The Inferencer that failed."""
    error: BaseException
    """What had ended it."""
    new: Inferencer | BaseException
    """The one in its place, or why there is none."""


class Replacements:
    """Makes Inferencers anew, each in a thread, for the update loop to take over."""

    def __init__(self, replace: Replace) -> None:
        """Make them with ``replace``, which several threads may call at once."""
        self._replace = replace
        self._pending: dict[int, Inferencer] = {}
        self._arrived: list[Arrival] = []
        self._lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        """Those that have not been taken over."""

    def __len__(self) -> int:
        """Return how many Inferencers are missing."""
        return len(self._pending)

    def begin(self, old: Inferencer, error: BaseException) -> None:
        """Begin to replace ``old``, which ``error`` ended."""
        self._pending[old.index] = old
        thread = threading.Thread(
            target=self._make, args=(old, error), name=f"replace-{old.index}", daemon=True
        )
        self.threads.append(thread)
        thread.start()

    def _make(self, old: Inferencer, error: BaseException) -> None:
        try:
            new: Inferencer | BaseException = self._replace(old)
        except BaseException as failure:  # else the update loop would wait for it for ever
            new = failure
        with self._lock:
            self._arrived.append(Arrival(old, error, new))

    def take(self) -> list[Arrival]:
        """Return those that are ready; checkpoints do not wait for the others."""
        for old in self._pending.values():
            if old.position_wanted.is_set():
                old.position_wanted.clear()
                old.left_position = InferencerPosition(old.cycle, None, BEING_REPLACED)
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for arrival in arrived:
            del self._pending[arrival.old.index]
            if isinstance(arrival.new, Inferencer):
                pass_on_wishes(arrival.old, arrival.new)
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        return arrived

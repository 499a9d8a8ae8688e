"""Who else learns: by default nobody. ``cluster/hosts/`` has the hosts that learn together."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Word(NamedTuple):
    """What one host says before the updates of a round; numbers, since a collective carries it."""

    failed: float = 0.0
    """1: it has no round, and ends."""
    stop: float = 0.0
    """1: it was asked to stop after this round."""
    due: float = 0.0
    """1: a checkpoint is due."""
    busy: float = 0.0
    """1: it still writes the last checkpoint."""
    with_experience: float = 0.0
    """1: the experience is due with the next checkpoint, if it is kept apart."""
    waited_s: float = 0.0
    """Seconds that it waited for the trajectories of its own Inferencers."""
    episodes: float = 0.0
    """Episodes that ended in this round."""
    masked: float = 0.0
    """Transitions of this round that are masked, as ``Counters.masked_truncations``."""


class Wants(NamedTuple):
    """Whether a checkpoint is wanted."""

    due: bool
    """One is due."""
    busy: bool
    """The last one is still being written."""
    with_experience: bool
    """The experience is due with it, if that is kept apart."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all hosts do, the same on each of them."""

    words: tuple[Word, ...]
    """The word of every host."""

    def hosts_with(self, name: str) -> list[int]:
        """Return the hosts whose word has something else than 0 in this field."""
        return [host for host, word in enumerate(self.words) if getattr(word, name)]

    @property
    def failed(self) -> list[int]:
        """The hosts that have no round and end."""
        return self.hosts_with("failed")

    @property
    def stop(self) -> bool:
        """All end after this round."""
        return bool(self.hosts_with("stop"))

    @property
    def checkpoint(self) -> bool:
        """All begin a checkpoint after this round: one is due, and nobody still writes another."""
        return bool(self.hosts_with("due")) and not self.hosts_with("busy")

    @property
    def with_experience(self) -> bool:
        """A checkpoint that begins now has the experience, if that is kept apart.

        It is due for one host alone if that could not write the last one.
        """
        return bool(self.hosts_with("with_experience"))

    def total(self, name: str) -> int:
        """Return the sum of a field over the hosts."""
        return round(sum(getattr(word, name) for word in self.words))


class Peers:
    """Nobody else learns: this process decides alone, and waits for nobody."""

    index = 0
    """Which of the hosts this is."""
    number = 1
    """How many hosts learn together."""
    ended_together = True
    """A failure left the same networks everywhere, so that they can be saved."""

    def run(self, run: Callable[[], T], on_lost: Any) -> T:
        """Return what ``run`` does, a run from its begin to its end.

        Args:
          on_lost: Called with the error where another host is gone and ``run`` does not raise.
        """
        return run()

    def check_same(self, about: Mapping[str, Any]) -> None:
        """Raise UsageError unless all hosts give the same, by name; JSON."""

    def agree(
        self,
        word: Word,
        error: Exception | None,
        stop_requested: threading.Event,
        wants: Callable[[], Wants],
        ready: Callable[[], None],
    ) -> Agreed:
        """Tell this host's word before the updates of a round, and return those of all.

        Args:
          error: Why this host has no round, if it has failed.
          stop_requested: Whether it was asked to stop.
          wants: Returns whether it wants a checkpoint.
          ready: Waits for the updates in flight, with which a collective would share threads.

        Raises:
          HostError: Another host has failed.
          Exception: ``error``, once the others know.
        """
        if error is not None:
            raise error
        return Agreed((word,))

    def ends(self, stop_requested: threading.Event) -> bool:
        """Tell whether the run ends with the round that was agreed on last."""
        return stop_requested.is_set()

    def checkpoint(self, wants: Callable[[], Wants]) -> Wants:
        """Return whether a checkpoint is due now for all, and whether with the experience."""
        return wants()

    def end(self, error: Exception | None) -> None:
        """Wait until no host has anything more to do but to save.

        Args:
          error: What this host failed with as it ended.

        Raises:
          HostError: Another host has failed.
          Exception: ``error``, once the others know.
        """
        if error is not None:
            raise error

    def __str__(self) -> str:
        return ""

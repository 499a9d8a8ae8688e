"""Where the update loop gets trajectories from, whoever makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sebulba.transport.item import Item


class TrajectorySource(Protocol):
    """What runs the Inferencers, as the update loop sees it: threads here, hosts in a cluster."""

    @property
    def fullness(self) -> float:
        """The share of the queue that is taken, 0 to 1."""
        ...

    def next_item(self, wait_s: float) -> Item | None:
        """Return the next trajectory of any Inferencer; raise what an Inferencer raised.

        Args:
          wait_s: Seconds to wait for it after a stop was requested.

        Returns:
          None if a stop was requested and nothing came.
        """
        ...

    def next_round(self, end_takes_long: Callable[[], None]) -> list[Item]:
        """Return one trajectory of each Inferencer, in their order; the rest as ``next_item``.

        Args:
          end_takes_long: Called if a stop was requested and the round is slow to come.

        Raises:
          HangError: A stop was requested, and no Inferencer gets on any more.
        """
        ...

    def give_permit(self) -> None:
        """Permit one more cycle in the place of one whose trajectory was not consumed."""
        ...

    def begin_no_more(self) -> None:
        """Tell every Inferencer to end after the cycle it is in; do not wait for that."""
        ...

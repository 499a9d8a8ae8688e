"""Starts again what was lost with a node before the run had begun, and counts it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from sebulba.cluster.inferencers.nodes import LostNodeError

T = TypeVar("T")


class Starting:
    """Makes what is made at the start of a run, again and again while nodes are lost with it.

    Once the run has begun, ``RunningInferencers`` replaces Inferencers.
    """

    def __init__(self, most_restarts: int = 0) -> None:
        """Allow so many restarts in all; 0 raises at the first lost node."""
        self._most = most_restarts
        self.num_restarts = 0
        """How often a lost node was replaced; runs count them as ``env_restarts``."""

    def __call__(self, make: Callable[[], T], make_again: Callable[[], T] | None = None) -> T:
        """Return what ``make`` returns.

        Args:
          make: Makes it; whatever else it raises is raised.
          make_again: Makes it after a node was lost; None calls ``make`` again.

        Raises:
          LostNodeError: A node was lost once more than is allowed.
        """
        while True:
            try:
                return make()
            except LostNodeError as error:
                self._count(error)
            make = make_again or make

    def _count(self, error: LostNodeError) -> None:
        if self.num_restarts >= self._most:
            if self._most:
                error.add_note(
                    f"{self.num_restarts} processes were replaced before this one; "
                    f"max_env_restarts={self._most}"
                )
            raise error
        self.num_restarts += 1
        warnings.warn(
            f"{error} before the run began, and is replaced by a new one "
            f"(restart {self.num_restarts} of {self._most})",
            RuntimeWarning,
            stacklevel=2,
        )

"""How long a benchmark may take in all, and what it prints meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

EVERY_S = 4.0
"""Seconds between two lines."""


class Budget:
    """Counts seconds, and prints every few of them what is being done; a context manager."""

    def __init__(
        self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to count.

        Args:
          seconds: How long everything may take.
          clock: Returns seconds.
        """
        self._clock = clock
        self._began = self._mark = clock()
        self._seconds = seconds
        self._longest = 0.0
        self._what = ""
        self._ended = threading.Event()

    def left(self) -> float:
        """Return the seconds that are left; below 0 if there are none."""
        return self._seconds - (self._clock() - self._began)

    def mark(self) -> None:
        """Begin with what ``fits_again`` is asked about."""
        self._mark = self._clock()

    def fits_again(self, and_s: float = 0.0) -> bool:
        """Tell whether there is time for the longest of what was done between two calls.

        Args:
          and_s: Seconds that are to be left after it.
        """
        now = self._clock()
        self._longest = max(self._longest, now - self._mark)
        self._mark = now
        return self.left() >= self._longest + and_s

    @property
    def longest_s(self) -> float:
        """The longest of what was done between two calls of ``fits_again``."""
        return self._longest

    def doing(self, what: str) -> None:
        """Print what is done from now on."""
        self._what = what
        self._say()

    def _say(self) -> None:
        print(f"  {self._clock() - self._began:.0f} s: {self._what}", flush=True)

    def _say_on(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self._what:
                self._say()

    def __enter__(self) -> Budget:
        threading.Thread(target=self._say_on, name="budget", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

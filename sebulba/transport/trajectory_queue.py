"""The trajectory queue: bounded, first in first out; a failure always gets through."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from sebulba.transport.permits import WAKE_S

T = TypeVar("T")


class TrajectoryQueue(Generic[T]):
    """Carries items from the Inferencers, which wait while it is full, to the update loop."""

    def __init__(self, size: int) -> None:
        """Make a queue for at most ``size`` items."""
        self.size = size
        self._items: collections.deque[T] = collections.deque()
        self._failures: list[BaseException] = []
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, stop: threading.Event) -> bool:
        """Append ``item`` once there is room; False if ``stop`` was set first."""
        with self._changed:
            while len(self._items) >= self.size:
                if stop.is_set():
                    return False
                self._changed.wait(WAKE_S)
            if stop.is_set():
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def fail(self, error: BaseException) -> None:
        """Make every ``get`` from now on raise ``error``, or an earlier failure if there is one."""
        with self._changed:
            self._failures.append(error)
            self._changed.notify_all()

    def forgive(self, error: BaseException) -> None:
        """Forget a failure whose Inferencer has been replaced."""
        with self._changed:
            self._failures = [failure for failure in self._failures if failure is not error]

    def get(self, timeout_s: float = WAKE_S) -> T | None:
        """Remove and return the oldest item, or None after ``timeout_s`` seconds without one.

        Raises:
          BaseException: The first failure, with its own traceback, before any item.
        """
        with self._changed:
            if not self._items and not self._failures:
                self._changed.wait(timeout_s)
            self.raise_failure()
            if not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def raise_failure(self) -> None:
        """Raise the first failure that was not forgiven, if there is one."""
        if self._failures:
            raise self._failures[0]

    def count(self, is_counted: Callable[[T], bool]) -> int:
        """Return the number of waiting items for which ``is_counted`` is true."""
        with self._changed:
            return sum(map(is_counted, self._items))

    def drain(self) -> list[T]:
        """Remove and return all items."""
        with self._changed:
            items = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return items

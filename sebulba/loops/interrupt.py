"""Ctrl-C while a loop runs: first a stop, and the exception then. Free of JAX."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable
from typing import Any

from sebulba.support.streams import notify

STOPPING = "stopping; the update is finished and saved. Ctrl-C again ends at once"


class KeptInterrupt:
    """Makes a Ctrl-C stop what runs inside, and raises its KeyboardInterrupt only then.

    A context manager. Python's own handler raises KeyboardInterrupt in whatever the main thread
    is doing: amid an update, after which nothing can be saved, or in a callback of the garbage
    collector (JAX has one), where Python prints the exception and goes on. So the handler asks for
    a stop, and leaving raises KeyboardInterrupt; a second Ctrl-C raises it at once. Where one is
    inside another, a Ctrl-C inside both stops both.

    A handler of the user's is left alone, and so is a thread other than the main one.

    Args:
      stop: Ends what runs inside soon.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """Change nothing yet."""
        self._stop = stop
        self._before: Any = None
        self.came = False
        """A Ctrl-C came."""

    def _handle(self, which: int, frame: types.FrameType | None) -> None:
        if self.came:
            signal.default_int_handler(which, frame)
        self.came = True
        # An Event's lock is not re-entrant: this hangs if Ctrl-C comes inside another stop().
        self._stop()
        if isinstance(getattr(self._before, "__self__", None), KeptInterrupt):
            self._before(which, frame)
        else:
            notify(STOPPING)

    def __enter__(self) -> KeptInterrupt:
        if threading.current_thread() is not threading.main_thread():
            return self
        before = signal.getsignal(signal.SIGINT)
        if isinstance(of := getattr(before, "__self__", None), KeptInterrupt) and of.came:
            before = signal.default_int_handler  # left behind, or its stop is asked for
        if before is signal.default_int_handler or isinstance(of, KeptInterrupt):
            self._before = before
            signal.signal(signal.SIGINT, self._handle)
        return self

    def restore(self) -> None:
        """Put back the handler that was there, unless somebody has exchanged ours; may be repeated.

        Whoever uses this does it once more at his end: a second Ctrl-C may have cut short ours.
        """
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        self.restore()
        if self.came and kind is None:
            raise KeyboardInterrupt

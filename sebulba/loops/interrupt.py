"""Ctrl-C while a loop runs, whose exception Python may lose. Free of JAX."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable


class KeptInterrupt:
    """Makes a Ctrl-C end what runs inside, although its KeyboardInterrupt may be lost.

    A context manager. Python's own handler raises KeyboardInterrupt in whatever the main thread
    is doing. If that is a callback of the garbage collector (JAX has one), ``__del__`` or a weak
    reference's callback, Python prints the exception and goes on. So the handler asks for a stop,
    too, and leaving raises KeyboardInterrupt if nothing else has.

    A handler other than Python's own is left alone, and so is a thread other than the main one.

    Args:
      stop: Ends what runs inside soon.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """Change nothing yet."""
        self._stop = stop
        self._installed = False
        self.came = False
        """A Ctrl-C came."""

    def _handle(self, which: int, frame: types.FrameType | None) -> None:
        del which, frame
        if not self.came:
            self.came = True
            self._stop()
        raise KeyboardInterrupt

    def __enter__(self) -> KeptInterrupt:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._installed = True
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        if self._installed and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and kind is None:
            raise KeyboardInterrupt

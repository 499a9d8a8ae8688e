"""Ctrl-C, SIGTERM, SIGHUP: a run that is asked to end ends with everything saved. Free of JAX."""

from __future__ import annotations

import os
import signal
import types
from typing import Protocol

from sebulba.runs.exit_codes import EXIT_OK, EXIT_SIGNAL
from sebulba.support.streams import notify

STOPPING = "stopping; the update is finished and saved. Ctrl-C ends at once"
ENDED = "ended by a signal before there was anything to save"


class Stoppable(Protocol):
    """What can be told to stop, such as a loop."""

    def stop(self) -> None:
        """Come to an end soon, with everything saved."""


def _end_now(which: int, frame: types.FrameType | None) -> None:
    os._exit(EXIT_SIGNAL + which)


class StopOnSignal:
    """Turns a signal into ``loop.stop()``; Ctrl-C after that ends the process at once.

    The signals are Ctrl-C, SIGTERM and, unless it is ignored (``nohup``), SIGHUP, which comes when
    the terminal is closed.

    Before there is a loop, either ends it at once. An exception would not do: imports and JAX's
    callbacks lose some, and an interpreter that ends amid the import of native code may crash.
    """

    def __init__(self) -> None:
        """Change nothing yet."""
        self._signal: int | None = None
        self._loop: Stoppable | None = None
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """0, or what says that a signal ended the run."""
        return EXIT_OK if self._signal is None else EXIT_SIGNAL + self._signal

    def attach(self, loop: Stoppable) -> None:
        """Stop this loop from now on."""
        self._loop = loop

    def _handle(self, which: int, frame: types.FrameType | None) -> None:
        del frame
        if self._loop is None:
            notify(ENDED)
            os._exit(EXIT_SIGNAL + which)
        if self._signal is not None:
            return  # this signal may have interrupted the stop below, which still holds its lock
        self._signal = which
        self._loop.stop()
        # A second Ctrl-C is left to the system: a handler in Python would have to wait for the
        # program in flight. The system ignores it for process 1, as in a container.
        signal.signal(signal.SIGINT, signal.SIG_DFL if os.getpid() != 1 else _end_now)
        notify(STOPPING)

    def __enter__(self) -> StopOnSignal:
        for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if which != signal.SIGHUP or signal.getsignal(which) != signal.SIG_IGN:
                self._before[which] = signal.signal(which, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for which, before in self._before.items():
            signal.signal(which, before)  # type: ignore[arg-type]

"""Ctrl-C and SIGTERM: a run that is asked to end ends with everything saved."""

from __future__ import annotations

import contextlib
import os
import signal
import types

from sebulba.exit_codes import EXIT_OK, EXIT_SIGNAL
from sebulba.loops.gymnasium_loop import GymnasiumLoop

STDERR = 2
STOPPING = b"sebulba: stopping; the update is finished and saved. Ctrl-C ends at once\n"


class StopOnSignal:
    """Turns Ctrl-C and SIGTERM into ``loop.stop()``; Ctrl-C after that ends the process at once."""

    def __init__(self) -> None:
        """Change nothing yet."""
        self.signal: int | None = None
        """The first signal that came."""
        self._loop: GymnasiumLoop | None = None
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """0, or what says that a signal ended the run."""
        return EXIT_OK if self.signal is None else EXIT_SIGNAL + self.signal

    def attach(self, loop: GymnasiumLoop) -> None:
        """Stop this loop from now on; before, a signal interrupts at once."""
        self._loop = loop
        if self.signal is not None:  # its exception was lost, as in a callback of native code
            loop.stop()

    def _handle(self, which: int, frame: types.FrameType | None) -> None:
        del frame
        is_first, self.signal = self.signal is None, self.signal or which
        if self._loop is None:
            raise KeyboardInterrupt if which == signal.SIGINT else SystemExit(EXIT_SIGNAL + which)
        self._loop.stop()
        if is_first:
            # By the system: a handler of ours would have to wait for the program in flight.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.write(STDERR, STOPPING)  # print() may be what was interrupted

    def __enter__(self) -> StopOnSignal:
        for which in (signal.SIGINT, signal.SIGTERM):
            self._before[which] = signal.signal(which, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for which, before in self._before.items():
            signal.signal(which, before)  # type: ignore[arg-type]

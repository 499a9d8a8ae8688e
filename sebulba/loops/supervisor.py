"""The supervisor: finds a thread that has been silent for too long, and says where it is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType

from sebulba.errors import HangError
from sebulba.loops.running_inferencers import RunningInferencers, silence_error, stacks
from sebulba.loops.session import Session
from sebulba.runtime.inferencer import ENV_PHASES, WAITING_PHASES, Inferencer
from sebulba.runtime.staging import WAKE_S
from sebulba.runtime.timer import PhaseTimer

SUPERVISOR_THREAD = "supervisor"
"""Name of the thread."""

LEARNER_WAITING = ("get",)
"""Phases in which the update loop waits for Inferencers."""

OnHang = Callable[[HangError], None]
"""Called where the calling thread of ``run()`` itself is silent, so that nothing can be raised
there: a command ends its process here, after it has said why."""


class Supervisor:
    """Watches the phases of the threads of a run: a context manager around it.

    The timers that measure where time goes are the heartbeats: a thread that has been in one phase
    for longer than the limit, and does not just wait for others, hangs.
    """

    def __init__(
        self,
        limit_s: float | None,
        learner: PhaseTimer,
        session: Session,
        running: RunningInferencers,
        on_hang: OnHang | None,
    ) -> None:
        """Watch from entering to leaving.

        Args:
          limit_s: Longest that a phase may last; None watches nothing.
          learner: Timer of the update loop.
          session: Its Inferencers.
          running: Is told of an Inferencer that hangs.
          on_hang: Called where the update loop hangs.
        """
        self._limit_s = limit_s
        self._learner = learner
        self._session = session
        self._running = running
        self._on_hang = on_hang
        self._stop = threading.Event()
        self._told: set[int] = set()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Supervisor:
        if self._limit_s is not None:
            self._thread = threading.Thread(
                target=supervisor_thread,
                args=(self.look, self._stop),
                name=SUPERVISOR_THREAD,
                daemon=True,
            )
            self._main = threading.current_thread()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self) -> None:
        """Look at every thread once."""
        assert self._limit_s is not None
        for inferencer in list(self._session.inferencers):
            self._look_at(inferencer)
        present = self._learner.present()
        if present is not None and present[0] not in LEARNER_WAITING and present[1] > self._limit_s:
            self._tell_of_learner(*present)

    def _look_at(self, inferencer: Inferencer) -> None:
        present = inferencer.timer.present()
        if present is None or id(inferencer) in self._told:
            return
        phase, silent_s = present
        if phase in WAITING_PHASES or silent_s <= self._limit_s:  # type: ignore[operator]
            return
        self._told.add(id(inferencer))
        error = silence_error(inferencer, phase, silent_s, phase in ENV_PHASES)
        self._print_stacks(str(error))
        self._running.fail(inferencer, error)

    def _tell_of_learner(self, phase: str, silent_s: float) -> None:
        if id(self) in self._told:
            return
        self._told.add(id(self))
        error = HangError(
            f"the update loop is silent: it did not leave {phase!r} for {silent_s:.0f} s; raise "
            "hang_timeout_s if it is just slow"
        )
        self._print_stacks(str(error))
        if self._on_hang is not None:
            self._on_hang(error)

    def _print_stacks(self, what: str) -> None:
        threads = [thread for thread in threading.enumerate() if thread.name != SUPERVISOR_THREAD]
        print(f"sebulba: {what}\nAll threads:\n{stacks(threads)}", file=sys.stderr, flush=True)


def supervisor_thread(look: Callable[[], None], stop: threading.Event) -> None:
    """Look four times a second until stopped."""
    while not stop.wait(WAKE_S):
        look()

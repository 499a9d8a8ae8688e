"""The supervisor: finds a thread that has been silent for too long, and says where it is."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import TracebackType

from sebulba.errors import HangError
from sebulba.inference.hangs import silence_error, stacks
from sebulba.inference.inferencer import WAITING_PHASES, Inferencer
from sebulba.inference.inferencer_pool import RunningInferencers
from sebulba.loops.evaluation_thread import EVALUATOR_THREAD, Evaluations
from sebulba.loops.session import Session
from sebulba.transport.permits import WAKE_S

SUPERVISOR_THREAD = "supervisor"
"""Name of the thread."""

LEARNER_WAITING = ("get", "checkpoint")
"""Phases in which the update loop waits for Inferencers, or for a disk with its own limit."""
WAITING_FOR_ENVS = ("restart",)
"""Those in which it waits for environments elsewhere, with a limit for each request."""

PAUSE_S = 10 * WAKE_S
"""If the supervisor itself could not look for this many seconds, the whole process stood still."""


class Supervisor:
    """Watches the phases of the threads of a run: a context manager around it.

    The timers that measure where time goes are the heartbeats: a thread that has been in one phase
    for longer than the limit, and does not just wait for others, hangs. A process that stood still
    (stopped by a debugger, suspended with its machine) is given the whole limit again.
    """

    def __init__(
        self, session: Session, running: RunningInferencers, evaluations: Evaluations
    ) -> None:
        """Watch from entering to leaving, unless the run is inline or has no ``hang_timeout_s``."""
        options = session.options
        # Inline is for debuggers, which may keep any phase as long as they like.
        self._limit_s = None if options.inline else options.faults.hang_timeout_s
        waits = WAITING_FOR_ENVS if running.replacing_takes_long else ()
        self._learner_waiting = LEARNER_WAITING + waits
        self._session = session
        self._running = running
        self._evaluations = evaluations
        self._stop = threading.Event()
        self._told: set[object] = set()
        """The Inferencers, and names of other threads, whose hang has been told."""
        self._looked_at = self._awake_since = 0.0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Supervisor:
        if self._limit_s is not None:
            self._thread = threading.Thread(target=self._watch, name=SUPERVISOR_THREAD, daemon=True)
            self._looked_at = self._awake_since = time.perf_counter()
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

    def _watch(self) -> None:
        while not self._stop.wait(WAKE_S):
            self.look()

    def look(self) -> None:
        """Look at every thread once."""
        now, before = time.perf_counter(), self._looked_at
        self._looked_at = now
        if now - before > self._pause_s():
            self._awake_since = now
        for inferencer in list(self._session.inferencers):
            phase, silent_s = inferencer.timer.present() or ("", 0.0)
            if phase not in WAITING_PHASES and self._is_hang(silent_s):
                self._tell_of_inferencer(inferencer, phase, silent_s)
        if self._is_hang(silent_s := self._evaluations.silent_s()):
            self._tell_of_evaluator(silent_s)
        phase, silent_s = self._session.timer.present() or ("", 0.0)
        if phase not in self._learner_waiting and self._is_hang(silent_s):
            self._tell_of_learner(phase, silent_s)

    def _is_hang(self, silent_s: float) -> bool:
        limit_s = self._limit_s
        assert limit_s is not None
        if time.perf_counter() - self._looked_at > self._pause_s():
            return False  # the process stood still since this look began; the next look sees that
        return min(silent_s, self._looked_at - self._awake_since) > limit_s

    def _pause_s(self) -> float:
        """Return the time between two looks from which on the process stood still."""
        assert self._limit_s is not None
        return max(PAUSE_S, self._limit_s / 10)

    def _tell_of_inferencer(self, inferencer: Inferencer, phase: str, silent_s: float) -> None:
        if inferencer.failure is None and self._is_new(inferencer.timer):
            error = silence_error(inferencer, phase, silent_s)
            self._print_stacks(str(error), inferencer.thread_name)
            self._running.fail(inferencer, error)

    def _tell_of_evaluator(self, silent_s: float) -> None:
        if not self._is_new(EVALUATOR_THREAD):
            return
        error = HangError(
            f"thread {EVALUATOR_THREAD!r} is silent: the evaluation did not check its stop event "
            "for "
            f"{silent_s:.0f} s; repair the environment, or raise hang_timeout_s if it is only slow"
        )
        self._print_stacks(str(error))
        self._running.silent += self._evaluations.threads
        self._running.queue.fail(error)
        self._evaluations.end()

    def _tell_of_learner(self, phase: str, silent_s: float) -> None:
        if not self._is_new(self._session.timer):
            return
        error = HangError(
            f"the update loop is silent: it did not leave {phase!r} for {silent_s:.0f} s; raise "
            "hang_timeout_s if it is just slow"
        )
        self._print_stacks(str(error))
        if self._session.attached.on_hang is not None:
            self._session.attached.on_hang(error)

    def _is_new(self, who: object) -> bool:
        """Tell whether its hang has not been told yet, and note that it is told now."""
        is_new = who not in self._told
        self._told.add(who)
        return is_new

    def _print_stacks(self, what: str, name: str = "") -> None:
        """Say what hangs, and show the stacks of all threads; of another Inferencer only its own.

        Where many hang, or one after the other is replaced, all stacks each time would be
        megabytes.
        """
        silent = {thread.ident for thread in self._running.silent}
        threads = [t for t in threading.enumerate() if t.ident not in silent]
        if not name or len(self._told) == 1:
            which, threads = "All threads", [t for t in threads if t.name != SUPERVISOR_THREAD]
        else:
            which, threads = "Its stack", [t for t in threads if t.name == name]
        with contextlib.suppress(OSError, ValueError):  # nobody may be reading any more
            print(f"sebulba: {what}\n{which}:\n{stacks(threads)}", file=sys.stderr, flush=True)

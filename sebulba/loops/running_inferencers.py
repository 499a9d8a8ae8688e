"""The Inferencers of one run, in threads or inline: started, listened to, replaced, ended."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence

from sebulba.errors import EnvHangError, HangError, is_env_failure
from sebulba.loops.session import Session
from sebulba.runtime.inferencer import (
    CyclePermits,
    HandOff,
    Inferencer,
    Item,
    Schedule,
    Stop,
    inferencer_thread,
    run_cycles,
)
from sebulba.runtime.trajectory_queue import TrajectoryQueue

JOIN_S = 60.0
"""How long a stop waits for the program or the compile in flight in a thread."""

Replace = Callable[[Inferencer], Inferencer]
"""Returns an Inferencer with a new environment in the place of one whose environment failed."""


class RunningInferencers:
    """Runs the Inferencers of a session and passes on what they make."""

    def __init__(
        self,
        session: Session,
        hand_off: HandOff,
        schedule: Schedule,
        queue_size: int,
        stop_requested: threading.Event,
        replace: Replace,
        max_replaced: int,
        *,
        inline: bool,
    ) -> None:
        """Prepare a run; nothing starts yet.

        Args:
          session: Whose Inferencers run.
          hand_off: Places what a cycle made on the update devices.
          schedule: async or lockstep.
          queue_size: Trajectories that may wait.
          stop_requested: By the user; ends every wait here.
          replace: Called when an environment failed.
          max_replaced: How often at most, over all runs of the session; then failures are raised.
          inline: Run in the calling thread, one cycle of each in turn.
        """
        self._session = session
        self._hand_off = hand_off
        self._schedule: Schedule = schedule
        self._stop_requested = stop_requested
        self._replace = replace
        self._max_replaced = max_replaced
        self._inline = inline
        self._permits = CyclePermits(0)
        self.queue: TrajectoryQueue[Item] = TrajectoryQueue(queue_size)
        """Between the threads and the update loop."""
        self._soon = threading.Event()
        self._stops: list[Stop] = []
        self._threads: list[threading.Thread] = []
        self._turns: Iterator[Iterator[Item]] | None = None

    def start(self, num_cycles: int) -> None:
        """Start; the first networks have been published.

        Args:
          num_cycles: Async: how many cycles may begin.
        """
        self._permits = CyclePermits(num_cycles)
        inferencers = self._session.inferencers
        self._stops = [Stop(self._soon, threading.Event()) for _ in inferencers]
        kept = bool(self._session.kept_round)
        cycles = [self._cycles(inferencer, kept) for inferencer in inferencers]
        if self._inline:
            # One item of each in turn: the order that threads of equal speed would have.
            self._turns = itertools.cycle(cycles)
            return
        self._threads = [self._thread(i, c) for i, c in zip(inferencers, cycles, strict=True)]
        for thread in self._threads:
            thread.start()

    def _cycles(self, inferencer: Inferencer, round_is_kept: bool) -> Iterator[Item]:
        staged = inferencer.staging.newest()
        assert staged is not None, "publishing comes first"
        stop = self._stops[inferencer.index]
        return run_cycles(
            inferencer,
            staged,
            self._hand_off,
            self._schedule,
            round_is_kept,
            self._permits,
            stop,
        )

    def _thread(self, inferencer: Inferencer, cycles: Iterator[Item]) -> threading.Thread:
        return threading.Thread(
            target=inferencer_thread,
            args=(inferencer, cycles, self.queue, self._stops[inferencer.index]),
            name=inferencer.thread_name,
            daemon=True,
        )

    # What they make.

    def next_item(self, wait_s: float) -> Item | None:
        """Return the next trajectory, whoever made it; raises what its maker raised.

        Args:
          wait_s: How long to wait on after a stop was requested.

        Returns:
          None if a stop was requested and nothing came.

        Raises:
          RuntimeError: Nobody is left to make one.
        """
        if self._turns is not None:
            return next(next(self._turns))
        deadline = None
        while True:
            nobody_left = not any(thread.is_alive() for thread in self._threads)
            try:
                item = self.queue.get()
            except Exception as error:
                if not self._mend(error):
                    raise
                continue
            if item is not None:
                return item
            if nobody_left:
                raise RuntimeError("all Inferencer threads ended without an error or a stop")
            if self._stop_requested.is_set() or self._soon.is_set():
                deadline = deadline or time.monotonic() + wait_s
                if time.monotonic() >= deadline:
                    return None

    def give_permit(self) -> None:
        """Permit one cycle more: what one made was not consumed."""
        self._permits.give()

    # An environment that failed.

    def _mend(self, error: BaseException) -> bool:
        """Replace the Inferencer that ``error`` ended; False where that is not to be done."""
        session = self._session
        guilty = next((i for i in session.inferencers if i.failure is error), None)
        if guilty is None or not self._max_replaced or not is_env_failure(error):
            return False
        if session.counters.env_restarts >= self._max_replaced:
            error.add_note(
                f"{session.counters.env_restarts} environments were replaced before this one; "
                f"max_env_restarts={self._max_replaced}"
            )
            return False
        warnings.warn(
            f"the environment of Inferencer {guilty.index} failed and gets replaced by a new one "
            f"(restart {session.counters.env_restarts + 1} of {self._max_replaced}): "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        # A thread that hangs is left behind: whatever it still makes goes nowhere.
        self._stops[guilty.index].now.set()
        new = self._replace(guilty)
        session.counters.env_restarts += 1
        session.counters.dropped_env_cycles += 1
        session.inferencers[guilty.index] = new
        self._stops[guilty.index] = Stop(self._soon, threading.Event())
        self._threads[guilty.index] = self._thread(new, self._cycles(new, False))
        self._permits.give()
        self._threads[guilty.index].start()
        self.queue.forgive(error)
        return True

    def fail(self, inferencer: Inferencer, error: HangError) -> None:
        """End the run for, or replace, an Inferencer whose thread is silent."""
        inferencer.failure = error
        self.queue.fail(error)

    # The end.

    def begin_no_more(self) -> None:
        """Let every Inferencer end with the cycle it is in, without waiting for that."""
        self._soon.set()

    def stop(self) -> None:
        """Let every Inferencer end with the program it is in; what is under way is dropped."""
        self.begin_no_more()
        for stop in self._stops:
            stop.now.set()
        self._permits.wake()
        # And wakes who waits to put.
        self._session.counters.dropped_stop_cycles += len(self.queue.drain())

    @property
    def threads(self) -> list[threading.Thread]:
        """Of the Inferencers, but for those left behind."""
        return self._threads


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that were told to end.

    Raises:
      HangError: One does not.
    """
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise hang_error(threads)


def hang_error(threads: Sequence[threading.Thread]) -> HangError:
    """Say which of these still run, and where they are."""
    alive = [thread for thread in threads if thread.is_alive()]
    return HangError(
        f"{len(alive)} threads did not end within {JOIN_S:.0f} s of being stopped; an "
        f"environment that does not return from step is the usual cause. They are in:\n"
        f"{stacks(alive)}"
    )


def stacks(threads: Sequence[threading.Thread]) -> str:
    """Return what each thread is doing, as Python sees it."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )


def silence_error(inferencer: Inferencer, phase: str, silent_s: float, in_env: bool) -> HangError:
    """Return the error of an Inferencer that has been in one phase for too long."""
    kind = EnvHangError if in_env else HangError
    where = "its environment did not return" if in_env else f"it did not leave {phase!r}"
    return kind(
        f"thread {inferencer.thread_name!r} is silent: {where} for {silent_s:.0f} s, in cycle "
        f"{inferencer.cycle}; mend the environment, or raise hang_timeout_s if it is just slow"
    )

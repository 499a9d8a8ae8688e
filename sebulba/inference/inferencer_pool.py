"""Starts the Inferencers of a run, collects what they make, replaces them and ends them."""

from __future__ import annotations

import collections
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from sebulba.errors import EnvHangError, HangError, LostNodeError, is_env_failure, text_of
from sebulba.inference import hangs
from sebulba.inference.env_thread import EnvThread, Task
from sebulba.inference.hangs import AnyThread
from sebulba.inference.inferencer import (
    WAITING_PHASES,
    Inferencer,
    explained,
    inferencer_thread,
    run_cycles,
)
from sebulba.inference.places import Places
from sebulba.inference.replacements import Replace, Replacements
from sebulba.metrics.counters import Counters
from sebulba.metrics.timer import PhaseTimer
from sebulba.options import LoopOptions
from sebulba.transport.item import HandOff, Item
from sebulba.transport.permits import CyclePermits, Stop
from sebulba.transport.trajectory_queue import TrajectoryQueue


class RunningInferencers:
    """Runs Inferencers in threads or inline, and returns what they make to the update loop."""

    def __init__(
        self,
        options: LoopOptions,
        inferencers: list[Inferencer],
        counters: Counters,
        timer: PhaseTimer,
        hand_off: HandOff,
        stop_requested: threading.Event,
        replace: Replace,
        places: Places,
    ) -> None:
        """Prepare a run; nothing starts yet.

        Args:
          inferencers: All of the loop; one that is replaced is replaced in this list, too.
          stop_requested: Set when the user asks for a stop; ends every wait here.
          replace: Called when an environment failed: by the update loop, or, in async, in a thread
            of its own where a replacement takes long.
        """
        self._inferencers = inferencers
        self._counters = counters
        self._timer = timer
        self._hand_off = hand_off
        self._schedule = options.schedule
        self._stop_requested = stop_requested
        self._replace = replace
        self._max_replaced = options.env_restarts_allowed
        self._hang_timeout_s = options.faults.hang_timeout_s
        self._while_idle: Callable[[], None] = lambda: None
        self._inline = options.inline
        self._places = places
        self._replacements = Replacements(replace)
        self._replaces_beside = places.takes_long and options.schedule == "async"
        self._permits = CyclePermits(0)
        self.queue: TrajectoryQueue[Item] = TrajectoryQueue(options.queue_size)
        """Carries items from the threads to the update loop."""
        self.threads: list[Task] = []
        """One per Inferencer; the thread of a replaced Inferencer is left out. Empty inline."""
        self.silent: list[AnyThread] = []
        """Threads that hang; nobody waits for them any more."""
        self._soon = threading.Event()
        self._stops: list[Stop] = []
        self._turns: Iterator[tuple[Inferencer, Iterator[Item]]] | None = None
        self._second_version = 0
        self._num_items: collections.Counter[int] = collections.Counter()

    @property
    def replacing_takes_long(self) -> bool:
        """Whether all environments are made in nodes."""
        return self._places.takes_long

    def start(self, num_cycles: int, second_version: int, while_idle: Callable[[], None]) -> None:
        """Start the Inferencers; the first networks have been published.

        Args:
          num_cycles: Async: how many cycles may begin.
          second_version: Lockstep: the policy version that the second cycle of each acts with.
          while_idle: Called whenever no trajectory has come for a moment.
        """
        self._while_idle = while_idle
        self._permits = CyclePermits(num_cycles)
        self._second_version = second_version
        inferencers = self._inferencers
        self._stops = [Stop(self._soon, threading.Event()) for _ in inferencers]
        for inferencer in inferencers:
            inferencer.failure = None
        patient = self._schedule == "async" and self._max_replaced > 0
        self._places.started(self._counters.policy_version, self._hang_timeout_s, patient=patient)
        if self._inline:
            # One item of each in turn: the order that threads of equal speed would have.
            self._turns = itertools.cycle([(i, self._cycles(i)) for i in inferencers])
            return
        self.threads = [self._thread(inferencer) for inferencer in inferencers]
        for thread in self.threads:
            thread.start()

    def _cycles(self, inferencer: Inferencer) -> Iterator[Item]:
        index = inferencer.index
        staged = inferencer.staging.newest()
        assert staged is not None, "publishing comes first"
        # Not 0 if this Inferencer replaces one that has made items in this run.
        num_made = self._num_items[index] + self.queue.count(lambda item: item.inferencer == index)
        return run_cycles(
            inferencer,
            staged,
            self._hand_off,
            self._schedule,
            self._second_version + num_made,
            self._permits,
            self._stops[index],
        )

    def _thread(self, inferencer: Inferencer) -> Task:
        stop = self._stops[inferencer.index]
        cycles = self._cycles(inferencer)
        assert isinstance(inferencer.env_thread, EnvThread), "it would be inline"
        return inferencer.env_thread.task(inferencer_thread, inferencer, cycles, self.queue, stop)

    # Collecting what they make.

    @property
    def fullness(self) -> float:
        """The share of the queue that is taken, 0 to 1."""
        return len(self.queue) / self.queue.size

    def next_item(self, wait_s: float) -> Item | None:
        """Return the next trajectory of any Inferencer.

        Args:
          wait_s: Seconds to wait for it after a stop was requested.

        Returns:
          None if a stop was requested and nothing came.

        Raises:
          RuntimeError: All threads have ended without an error or a stop.
          BaseException: An Inferencer raised it.
        """
        if self._turns is not None:
            return _next_inline(*next(self._turns))
        deadline = None
        while True:
            self._start_replaced()
            nobody_left = not (self._replacements or any(t.is_alive() for t in self.threads))
            try:
                item = self.queue.get()
            except Exception as error:
                if not self._mend(error):
                    raise
                continue
            if item is not None:
                self._num_items[item.inferencer] += 1
                return item
            if nobody_left:
                raise RuntimeError("all Inferencer threads ended without an error or a stop")
            if self._stop_requested.is_set() or self._soon.is_set():
                deadline = deadline or time.monotonic() + wait_s
                if time.monotonic() >= deadline:
                    return None
            else:
                self._while_idle()

    def next_round(self, end_takes_long: Callable[[], None]) -> list[Item]:
        """Return one trajectory of each Inferencer, in their order; the rest as ``next_item``.

        Args:
          end_takes_long: Called if a stop was requested and the round is slow to come.

        Raises:
          HangError: A stop was requested, and no Inferencer gets on any more.
        """
        items = [self._next_of_round(end_takes_long) for _ in self._inferencers]
        return sorted(items, key=lambda item: item.inferencer)

    def _next_of_round(self, end_takes_long: Callable[[], None]) -> Item:
        """Return the next item; at a stop wait for it as long as any Inferencer gets on."""
        item = self.next_item(wait_s=hangs.SAVE_FIRST_S)
        if item is None:
            end_takes_long()
        while item is None:
            item = self.next_item(wait_s=hangs.JOIN_S)
            if item is None and not self._are_getting_on(hangs.JOIN_S):
                raise hangs.hang_error(self.threads, hangs.JOIN_S)
        return item

    def give_permit(self) -> None:
        """Permit one more cycle in the place of one whose trajectory was not consumed."""
        self._permits.give()

    def _are_getting_on(self, within_s: float) -> bool:
        """Tell whether any Inferencer works, and has been in its phase for less than this."""
        at_work = [
            inferencer.timer.present()
            for inferencer, thread in zip(self._inferencers, self.threads, strict=True)
            if thread.is_alive()
        ]
        return any(
            present is None or (present[0] not in WAITING_PHASES and present[1] < within_s)
            for present in at_work
        )

    def is_compiling(self, threads: Sequence[AnyThread]) -> bool:
        """Tell whether one of these threads of Inferencers is in a compile."""
        pairs = zip(self._inferencers, self.threads, strict=False)  # there are none inline
        phases = [inferencer.timer.present() for inferencer, thread in pairs if thread in threads]
        return any(present is not None and present[0] == "compile" for present in phases)

    # Replacing an environment that failed.

    def _mend(self, error: BaseException, *, goes_on: bool = True) -> bool:
        """Replace the Inferencer that ``error`` ended; False if the error has to be raised."""
        restarts = self._counters.env_restarts
        guilty = next((i for i in self._inferencers if i.failure is error), None)
        if guilty is None or not self._max_replaced or not is_env_failure(error):
            return False
        if isinstance(error, EnvHangError):
            self._places.kill(guilty.env)  # its node is lost from here on
        if restarts >= self._max_replaced:
            error.add_note(
                f"{restarts} environments were replaced before this one; "
                f"max_env_restarts={self._max_replaced}"
            )
            return False
        warnings.warn(
            f"the environment of Inferencer {guilty.index} failed and gets replaced by a new one "
            f"(restart {restarts + 1} of {self._max_replaced}): "
            f"{text_of(error)}",
            RuntimeWarning,
            stacklevel=2,
        )
        # A thread that hangs is left behind; what it still makes is dropped.
        self._stops[guilty.index].now.set()
        self.queue.forgive(error)
        if not goes_on and self._places.takes_long:  # which a stop must not
            if not isinstance(error, EnvHangError):  # whose own thread closes it
                guilty.env_thread.call(guilty.env.close)
            return True
        self._count_restart(guilty)
        if self._replaces_beside:
            self._replacements.begin(guilty, error)
            return True
        new = self._put_in_place_of(guilty, error)
        if goes_on:
            self._start(new)
        return True

    def _count_restart(self, guilty: Inferencer) -> None:
        self._counters.env_restarts += 1
        if not guilty.needs_reset:  # it was in a cycle
            self._counters.dropped_env_cycles += 1
            self._permits.give()

    def _put_in_place_of(self, guilty: Inferencer, error: BaseException) -> Inferencer:
        while True:
            try:
                with self._timer.phase("restart"):
                    new = self._replace(guilty)
                break
            except Exception as failure:
                if not self._tries_again(failure):
                    raise _explained_failure(failure, guilty, error) from failure.__cause__
        self._inferencers[guilty.index] = new
        return new

    def _tries_again(self, failure: BaseException) -> bool:
        """Tell whether to replace an Inferencer once more, and count it: its new node was lost."""
        counters = self._counters
        if not isinstance(failure, LostNodeError) or counters.env_restarts >= self._max_replaced:
            return False
        counters.env_restarts += 1
        return True

    def _start(self, new: Inferencer) -> None:
        self._stops[new.index] = Stop(self._soon, threading.Event())
        self.threads[new.index] = self._thread(new)
        self.threads[new.index].start()

    def _start_replaced(self) -> None:
        """Start the Inferencers that were replaced beside the others, and are ready."""
        for old, error, new in self._replacements.take():
            if isinstance(new, Inferencer):
                self._inferencers[new.index] = new
                self._start(new)
            elif self._tries_again(new):
                self._replacements.begin(old, error)
            else:
                raise _explained_failure(new, old, error)

    def end_replacements(self) -> None:
        """Wait for those that are under way; keep the Inferencers that are ready for the next run.

        The place of one that is not stays empty, as that of one that failed while ending: its
        first cycle fails then, and it is replaced.
        """
        hangs.join(self._replacements.threads, hangs.JOIN_S)
        for _, _, new in self._replacements.take():
            if isinstance(new, Inferencer):
                self._inferencers[new.index] = new

    @property
    def replacing_threads(self) -> list[AnyThread]:
        """Those that replace Inferencers, and have not ended."""
        return list(self._replacements.threads)

    def fail(self, inferencer: Inferencer, error: HangError) -> None:
        """Report an Inferencer whose thread is silent: it is replaced, or the run ends."""
        if inferencer.fail(error):
            self.silent.append(self.threads[inferencer.index])
            self.queue.fail(error)

    def raise_failures(self) -> None:
        """Raise the errors of Inferencers that failed while ending and cannot be replaced."""
        while True:
            try:
                self.queue.raise_failure()
            except Exception as error:
                if not self._mend(error, goes_on=False):
                    raise
            else:
                return

    # Ending.

    def begin_no_more(self) -> None:
        """Tell every Inferencer to end after the cycle it is in; do not wait for that."""
        self._soon.set()

    def stop(self) -> None:
        """Tell every Inferencer to end after the program it is in; cycles in flight are dropped."""
        self.begin_no_more()
        for stop in self._stops:
            stop.now.set()
        self._permits.wake()
        self._places.stop()
        # Draining also wakes Inferencers that wait for room in the queue.
        self._counters.dropped_stop_cycles += len(self.queue.drain())


def _explained_failure(
    failure: BaseException, guilty: Inferencer, error: BaseException
) -> BaseException:
    """Return the error of a replacement with a note that says what it was for."""
    failure.add_note(
        f"while Inferencer {guilty.index} was to get new environments, because its own had "
        f"failed: {text_of(error)}"
    )
    return failure


def _next_inline(inferencer: Inferencer, cycles: Iterator[Item]) -> Item:
    try:
        return next(cycles)
    except BaseException as raised:
        error = explained(raised, "the calling thread", inferencer)
        inferencer.fail(error)
        raise error from error.__cause__

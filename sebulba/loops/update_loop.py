"""The update loop of one run: pops trajectories, updates, publishes, counts."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from sebulba.agent import Agent
from sebulba.errors import ActionError, HangError
from sebulba.loops.counters import Counters
from sebulba.loops.evaluator import Evaluations, Evaluator
from sebulba.loops.metric_window import MetricWindow, RecentEpisodes, time_shares
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
from sebulba.runtime.staging import Staged, Staging
from sebulba.runtime.timer import PhaseTimer
from sebulba.runtime.trajectory_queue import TrajectoryQueue
from sebulba.runtime.update import Updater, on_device
from sebulba.types import MetricWriter, PyTree, StepInfos, Trajectory

LEARNER_PHASES = ("get", "observe", "update", "publish", "metrics")
JOIN_S = 60.0
"""How long a stop waits for the program or the compile in flight in a thread."""

ObserveCycle = Callable[[Trajectory, StepInfos], Mapping[str, Any] | None]


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How a loop runs; see ``GymnasiumLoop``."""

    schedule: Schedule
    inline: bool
    inference_only: bool
    max_policy_lag: int | None
    queue_size: int
    metric_writer: MetricWriter | None
    metrics_interval_s: float
    observe_cycle: ObserveCycle | None
    evaluator: Evaluator | None


@dataclasses.dataclass
class Session:
    """What goes on over several runs of one loop."""

    inferencers: list[Inferencer]
    staging: Mapping[jax.Device, Staging]
    counters: Counters = dataclasses.field(default_factory=Counters)
    episodes: RecentEpisodes = dataclasses.field(default_factory=RecentEpisodes)
    kept_round: list[Item] = dataclasses.field(default_factory=list)
    """Lockstep: the round that was in flight when the last run stopped."""


class UpdateLoop:
    """Runs the Inferencers and consumes what they make, until a number of cycles is reached."""

    def __init__(
        self,
        options: LoopOptions,
        agent: Agent,
        session: Session,
        updater: Updater,
        hand_off: HandOff,
        stop_requested: threading.Event,
    ) -> None:
        """Prepare a run; ``updater`` holds the state to train."""
        self._options = options
        self._agent = agent
        self._session = session
        self._updater = updater
        self._hand_off = hand_off
        self._stop_requested = stop_requested
        self._acting: PyTree | None = None
        """Acting networks as they are now; None where they have to be asked for."""
        self._stop = Stop.new()
        self._queue: TrajectoryQueue[Item] = TrajectoryQueue(options.queue_size)
        self._timer = PhaseTimer(*LEARNER_PHASES)
        self._threads: list[threading.Thread] = []
        self._inline_cycles: Iterator[Iterator[Item]] | None = None
        self._evaluations = Evaluations(
            options.evaluator,
            session.counters.env_steps,
            stop_requested,
            self._queue.fail,
            skips=options.schedule == "async",
            inline=options.inline,
        )

    @property
    def hangs(self) -> bool:
        """A thread of this run is still alive; true after the run only where one hangs."""
        return bool(self._alive())

    def _alive(self) -> list[threading.Thread]:
        threads = self._threads + self._evaluations.threads
        return [thread for thread in threads if thread.is_alive()]

    @property
    def stopped(self) -> bool:
        """A stop ended the run before its last cycle."""
        return self._session.counters.cycles < self._target

    # The run.

    def run(self, num_cycles: int, steps_per_cycle: int, began: float) -> dict[str, Any]:
        """Consume ``num_cycles`` trajectories, or fewer if a stop was requested.

        Args:
          num_cycles: How many to consume in this run.
          steps_per_cycle: T.
          began: ``time.perf_counter()`` from which ``seconds`` count.

        Returns:
          The record of the last window.
        """
        counters = self._session.counters
        self._env_steps_per_cycle = steps_per_cycle * self._session.inferencers[0].env.num_envs
        self._target = counters.cycles + num_cycles
        self._window = MetricWindow(counters, began)
        self._readings = self._read_timers()
        self._permits = CyclePermits(num_cycles)
        self._last_record: dict[str, Any] | None = None
        self._publish()
        try:
            self._start()
            if self._options.schedule == "lockstep":
                self._consume_rounds()
            else:
                self._consume_stream()
            self._join(self._threads)
            self._queue.raise_failure()  # of the cycle that was in flight at the end
            record = self._finish_evaluations(self._close_last_window())
        except HangError:
            self._tell_to_stop()  # the threads that do not hang, and those that will not for ever
            self._evaluations.end()
            raise
        except BaseException as error:
            try:
                self._join_all()
            except HangError as hang:
                error.add_note(str(hang))
            if isinstance(error, ActionError):
                # Not the environment's fault if the networks that acted were not finite.
                self._window.check_finite(self._updater.take_metrics())
            raise
        return record

    def _start(self) -> None:
        session, options = self._session, self._options
        cycles = []
        for inferencer in session.inferencers:
            staged = inferencer.staging.newest()
            assert staged is not None, "publishing comes first"
            cycles.append(
                run_cycles(
                    inferencer,
                    staged,
                    self._hand_off,
                    options.schedule,
                    bool(session.kept_round),
                    self._permits,
                    self._stop,
                )
            )
        if options.inline:
            # One item of each in turn: the order that threads of equal speed would have.
            self._inline_cycles = itertools.cycle(cycles)
            return
        self._threads = [
            threading.Thread(
                target=inferencer_thread,
                args=(inferencer, its_cycles, self._queue, self._stop),
                name=inferencer.thread_name,
                daemon=True,
            )
            for inferencer, its_cycles in zip(session.inferencers, cycles, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        self._evaluations.start()

    def _join(self, threads: list[threading.Thread]) -> None:
        """Stop the Inferencers and wait for ``threads``; each ends with the program it is in."""
        self._tell_to_stop()
        deadline = time.monotonic() + JOIN_S
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            raise self._hang_error()

    def _join_all(self) -> None:
        self._evaluations.end()
        self._join(self._threads + self._evaluations.threads)

    def _tell_to_stop(self) -> None:
        self._stop.soon.set()
        self._stop.now.set()
        self._permits.wake()
        counters = self._session.counters
        counters.dropped_stop_cycles += len(self._queue.drain())  # and wakes who waits to put

    def _hang_error(self) -> HangError:
        """Say which threads still run, and where they are."""
        alive = self._alive()
        frames = sys._current_frames()
        stacks = "\n".join(
            f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
            for thread in alive
            if thread.ident in frames
        )
        return HangError(
            f"{len(alive)} threads did not end within {JOIN_S:.0f} s of being stopped; an "
            f"environment that does not return from step is the usual cause. They are in:\n"
            f"{stacks}"
        )

    # Consuming.

    def _next_item(self, wait_s: float) -> Item | None:
        """Return the next trajectory, whoever made it; raises what its maker raised.

        Args:
          wait_s: How long to wait on after a stop was requested.

        Returns:
          None if a stop was requested and nothing came.

        Raises:
          RuntimeError: Nobody is left to make one.
        """
        if self._inline_cycles is not None:
            return next(next(self._inline_cycles))
        deadline = None
        while True:
            nobody_left = not any(thread.is_alive() for thread in self._threads)
            item = self._queue.get()
            if item is not None:
                return item
            if nobody_left:
                raise RuntimeError("all Inferencer threads ended without an error or a stop")
            if self._stop_requested.is_set() or self._stop.soon.is_set():
                deadline = deadline or time.monotonic() + wait_s
                if time.monotonic() >= deadline:
                    return None

    def _consume_stream(self) -> None:
        """Async: first come, first served; publish after each trajectory that had updates due."""
        counters = self._session.counters
        while counters.cycles < self._target and not self._stop_requested.is_set():
            with self._timer.phase("get"):
                item = self._next_item(wait_s=0.0)
            if item is not None and self._consume(item):
                counters.policy_version += 1
                self._publish()
            self._evaluate_when_due()
            self._write_when_due()

    def _consume_rounds(self) -> None:
        """Lockstep: one trajectory of each Inferencer, in their order, then one publish.

        Nothing is published after the last round, so every Inferencer finishes exactly the round
        that is in flight, and finds no networks for another; that round is kept for the next run.
        """
        counters, session = self._session.counters, self._session
        while True:
            items = session.kept_round or self._collect_round()
            session.kept_round = []
            for item in items:
                self._consume(item)
            counters.policy_version += 1
            if counters.cycles >= self._target or self._stop_requested.is_set():
                break
            self._publish()
            self._evaluate_when_due()
            self._write_when_due()
        self._stop.soon.set()
        session.kept_round = self._collect_round()

    def _collect_round(self) -> list[Item]:
        items = []
        with self._timer.phase("get"):
            for _ in self._session.inferencers:
                item = self._next_item(wait_s=JOIN_S)
                if item is None:
                    raise self._hang_error()
                items.append(item)
        return sorted(items, key=lambda item: item.inferencer)

    def _consume(self, item: Item) -> bool:
        """Count, show and learn from one trajectory; True if updates were due."""
        options, counters, timer = self._options, self._session.counters, self._timer
        lag = counters.policy_version - item.policy_version
        if options.max_policy_lag is not None and lag > options.max_policy_lag:
            counters.dropped_lag_cycles += 1
            self._permits.give()
            return False
        self._count(item)
        self._window.add_cycle(lag, len(self._queue) / self._queue.size)
        if options.observe_cycle is not None:
            with timer.phase("observe"):
                observed = options.observe_cycle(item.trajectory, item.step_infos)
                self._window.add_observed(observed)
        if options.inference_only:
            return False
        due = self._agent.num_off_policy_optims_per_cycle(counters.cycles)
        with timer.phase("update"):
            self._acting = self._updater.consume(
                item.trajectory,
                item.initial_step_state,
                item.final_step_state,
                updates=counters.updates,
                due=due,
            )
        counters.updates += due
        return due > 0

    def _count(self, item: Item) -> None:
        counters, session = self._session.counters, self._session
        counters.cycles += 1
        counters.env_steps += self._env_steps_per_cycle
        frame_skip = session.inferencers[item.inferencer].env.spec.frame_skip
        counters.frames += self._env_steps_per_cycle * frame_skip
        counters.episodes += len(item.step_infos.episode_returns)
        counters.masked_truncations += int(item.step_infos.masked_truncation.sum())
        session.episodes.add(item.step_infos)

    def _publish(self) -> None:
        with self._timer.phase("publish"):
            if self._acting is None:
                self._acting = self._updater.acting_networks()
            for device, staging in self._session.staging.items():
                version = self._session.counters.policy_version
                staging.publish(Staged(version, on_device(self._acting, device)))

    # Evaluation.

    def _evaluate_when_due(self) -> None:
        self._evaluations.when_due(self._session.counters.env_steps, self._take_networks)

    def _take_networks(self) -> PyTree:
        """Return a copy of the acting networks, on the first inference device."""
        with self._timer.phase("publish"):
            acting = self._updater.acting_networks()
            return on_device(acting, self._session.inferencers[0].device)

    def _finish_evaluations(self, record: dict[str, Any]) -> dict[str, Any]:
        """Have the trained networks played, and write a record of every evaluation still missing.

        A stop that was requested ends this too.
        """
        self._evaluations.at_the_end(self._session.counters.env_steps, self._take_networks)
        while evaluation := self._evaluations.wait():
            record = record | evaluation | {"seconds": self._window.seconds}
            self._write(record)
        self._join_all()
        self._queue.raise_failure()
        return record

    # Metrics.

    def _read_timers(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds so far: of the learner's phases, and of the mean Inferencer's."""
        readings = [i.timer.seconds() for i in self._session.inferencers]
        mean = {name: sum(r[name] for r in readings) / len(readings) for name in readings[0]}
        return self._timer.seconds(), mean

    def _write_when_due(self) -> None:
        first = self._session.counters.updates > 0 and self._last_record is None
        if first or self._window.age_s >= self._options.metrics_interval_s:
            self._write_record()

    def _close_last_window(self) -> dict[str, Any]:
        """Return the record of the end of the run."""
        counters = self._session.counters
        for inferencer in self._session.inferencers:
            counters.dropped_stop_cycles += inferencer.dropped_cycles
            inferencer.dropped_cycles = 0
        if self._window.is_empty and self._last_record is not None:
            return self._last_record | {"dropped_cycles": counters.dropped_cycles}
        return self._write_record()

    def _write_record(self) -> dict[str, Any]:
        """Close the window and write its record, with an evaluation that is done."""
        with self._timer.phase("metrics"):
            # First, since it waits for the updates in flight, whose time belongs to this window.
            metrics = self._updater.take_metrics()
            elapsed_s = self._window.age_s
            readings = self._read_timers()
            shares = {
                f"time/{who}/{phase}": share
                for who, before, after in zip(
                    ("learner", "inferencer"), self._readings, readings, strict=True
                )
                for phase, share in time_shares(before, after, elapsed_s).items()
            }
            self._readings = readings
            record = self._window.close(
                metrics,
                self._session.episodes,
                {"total_cycles": self._target, **shares, **self._evaluations.pop()},
            )
            self._write(record)
        self._last_record = record
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        """Give a record to the writer, whose errors only warn."""
        if self._options.metric_writer is None:
            return
        try:
            self._options.metric_writer.write(record)
        except Exception as error:
            warnings.warn(
                f"the metric writer raised, and the run goes on without this record: "
                f"{''.join(traceback.format_exception(error))}",
                RuntimeWarning,
                stacklevel=2,
            )

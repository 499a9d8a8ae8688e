"""The update loop of one run: pops trajectories, updates, publishes, counts."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sebulba.agent import Agent
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.checkpoints.run_checkpoints import About, RunCheckpoints
from sebulba.errors import ActionError, HangError
from sebulba.inference.hangs import JOIN_S, SAVE_FIRST_S, hang_error, join
from sebulba.inference.inferencer import Inferencer
from sebulba.inference.running_inferencers import Replace, RunningInferencers
from sebulba.inference.session import Session
from sebulba.learning.update import Updater
from sebulba.loops.evaluator import Evaluations, Evaluator
from sebulba.loops.run_records import RunRecords
from sebulba.loops.supervisor import OnHang, Supervisor
from sebulba.metrics.timer import PhaseTimer
from sebulba.metrics.window import MetricWindow
from sebulba.transport.item import HandedOver, HandOff, Item
from sebulba.transport.permits import Schedule
from sebulba.transport.staging import Staged
from sebulba.trees import on_device
from sebulba.types import MetricWriter, PyTree, StepInfos, Trajectory

LEARNER_PHASES = ("get", "restart", "observe", "update", "publish", "metrics", "checkpoint")

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
    checkpointer: Checkpointer | None
    max_env_restarts: int
    max_skipped_updates: int
    hang_timeout_s: float | None
    on_hang: OnHang | None


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
        replace: Replace,
        about: About,
    ) -> None:
        """Prepare a run.

        Args:
          options: How to run.
          agent: The algorithm.
          session: Goes on over runs.
          updater: Holds the state to train.
          hand_off: Places what a cycle made on the update devices.
          stop_requested: By the user.
          replace: Makes an Inferencer anew whose environment failed.
          about: Returns what checkpoints say of the loop.
        """
        self._options = options
        self._agent = agent
        self._session = session
        self._updater = updater
        self._stop_requested = stop_requested
        self._replace = replace
        self._acting: PyTree | None = None
        """Acting networks as they are now; None where they have to be asked for."""
        self._timer = PhaseTimer(*LEARNER_PHASES)
        self._running = RunningInferencers(
            session,
            hand_off,
            options.schedule,
            options.queue_size,
            stop_requested,
            self._replace_inferencer,
            options.max_env_restarts,
            self._while_idle,
            inline=options.inline,
        )
        self._evaluations = Evaluations(
            options.evaluator,
            session.counters.evaluated_at,
            stop_requested,
            self._running.queue.fail,
            skips=options.schedule == "async",
            inline=options.inline,
        )
        self._checkpoints = RunCheckpoints(
            options.checkpointer, session, updater, about, lambda: self._records.window.seconds
        )
        self._supervisor = Supervisor(
            # Inline is for debuggers, which may keep any phase as long as they like.
            None if options.inline else options.hang_timeout_s,
            self._timer,
            session,
            self._running,
            self._evaluations,
            options.on_hang,
        )

    @property
    def threads(self) -> list[threading.Thread]:
        """The Inferencers' in their order, then others; after the run only those that hang live."""
        return self._running.threads + self._evaluations.threads

    @property
    def stopped(self) -> bool:
        """A stop ended the run before its last cycle."""
        return self._session.counters.cycles < self._target

    # The run.

    def run(
        self,
        num_cycles: int,
        steps_per_cycle: int,
        began: float,
        expected: HandedOver | None,
    ) -> dict[str, Any]:
        """Consume ``num_cycles`` trajectories, or fewer if a stop was requested.

        Args:
          num_cycles: How many to consume in this run.
          steps_per_cycle: T.
          began: ``time.perf_counter()`` from which ``seconds`` count.
          expected: Shapes of what the Inferencers will hand over; None: not known.

        Returns:
          The record of the last window.
        """
        counters = self._session.counters
        self._env_steps_per_cycle = steps_per_cycle * self._session.inferencers[0].env.num_envs
        self._target = counters.cycles + num_cycles
        self._expected = None if self._options.inference_only else expected
        self._records = RunRecords(
            self._options.metric_writer,
            self._options.metrics_interval_s,
            self._options.max_skipped_updates,
            self._session,
            self._updater,
            self._timer,
            self._evaluations,
            MetricWindow(counters, began),
            self._target,
        )
        try:
            with self._supervisor:
                self._publish()
                self._running.start(num_cycles)
                if not self._options.inline:
                    self._evaluations.start()
                if self._options.schedule == "lockstep":
                    self._consume_rounds()
                else:
                    self._consume_stream()
                self._end_inferencers()
                record = self._records.close()
                self._save_at_the_end()
                record = self._finish_evaluations(record)
        except BaseException as error:
            self._end_after(error)
            raise
        return record

    def _end_inferencers(self) -> None:
        if self._stop_requested.is_set():
            self._evaluations.end()  # now: saving may take longer than its worker processes live
        self._running.stop()
        if join(self._not_silent(self._running.threads), SAVE_FIRST_S):
            self._save_learner()
        self._join(self._running.threads)
        self._running.raise_failures()  # of the cycles that were in flight at the end

    def _join_all(self) -> None:
        self._evaluations.end()
        self._running.stop()
        self._join(self.threads)

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for threads that were told to end, but for those that are known to hang.

        Raises:
          HangError: One does not.
        """
        if alive := join(self._not_silent(threads), JOIN_S):
            self._running.silent += alive
            raise hang_error(alive, JOIN_S)

    def _not_silent(self, threads: Sequence[threading.Thread]) -> list[threading.Thread]:
        return [thread for thread in threads if thread not in self._running.silent]

    def _end_after(self, error: BaseException) -> None:
        """End what runs and keep what was learned; nothing here may hide ``error``."""
        try:
            self._join_all()
        except HangError as hang:
            error.add_note(str(hang))
        if isinstance(error, ActionError):
            # Not the environment's fault if the networks that acted were not finite.
            self._records.window.check_finite(self._updater.take_metrics())
        self._checkpoints.save_after(error)

    def _save_learner(self) -> None:
        """Save what was learned; whoever asked for the end may not wait for the Inferencers."""
        with self._timer.phase("checkpoint"):
            self._checkpoints.save_learner()

    def _save_at_the_end(self) -> None:
        with self._timer.phase("checkpoint"):
            self._checkpoints.save_at_the_end()

    # Consuming.

    def _while_idle(self) -> None:
        """Prepare the update, once, while the Inferencers compile and play their first cycles."""
        expected, self._expected = self._expected, None
        if expected is not None:
            due = self._due_after(self._session.counters.cycles + 1)
            with self._timer.phase("update"):
                self._updater.prepare(*expected, due=due)

    def _consume_stream(self) -> None:
        """Async: first come, first served; publish after each trajectory that had updates due."""
        counters = self._session.counters
        while counters.cycles < self._target and not self._stop_requested.is_set():
            with self._timer.phase("get"):
                item = self._running.next_item(wait_s=0.0)
            if item is not None and self._consume(item):
                counters.policy_version += 1
                self._publish()
            self._evaluate_when_due()
            self._records.write_when_due()
            self._checkpoint_when_due()
            self._finish_checkpoint([])

    def _consume_rounds(self) -> None:
        """Lockstep: one trajectory of each Inferencer, in their order, then one publish.

        Nothing is published after the last round, so every Inferencer finishes exactly the round
        that is in flight, and finds no networks for another; that round is kept for the next run.
        """
        counters, session = self._session.counters, self._session
        while True:
            items = session.kept_round or self._collect_round()
            session.kept_round = []
            self._finish_checkpoint(items)
            for item in items:
                self._consume(item)
            counters.policy_version += 1
            if counters.cycles >= self._target or self._stop_requested.is_set():
                break
            # Before the publish that lets the Inferencers go on: where they stand after the round
            # that they are in belongs to where the learner stands now.
            self._checkpoint_when_due()
            self._publish()
            self._evaluate_when_due()
            self._records.write_when_due()
        self._running.begin_no_more()
        session.kept_round = self._collect_round()

    def _collect_round(self) -> list[Item]:
        items = []
        with self._timer.phase("get"):
            for _ in self._session.inferencers:
                items.append(self._next_of_round())
        return sorted(items, key=lambda item: item.inferencer)

    def _next_of_round(self) -> Item:
        """Return one more; at the end of a run, however slow the environments play it."""
        item = self._running.next_item(wait_s=SAVE_FIRST_S)
        if item is None:
            self._save_learner()
        while item is None:
            item = self._running.next_item(wait_s=JOIN_S)
            if item is None and not self._running.are_getting_on(JOIN_S):
                raise hang_error(self._running.threads, JOIN_S)
        return item

    def _consume(self, item: Item) -> bool:
        """Count, show and learn from one trajectory; True if updates were due."""
        options, counters, timer = self._options, self._session.counters, self._timer
        self._checkpoints.consumed(item)
        lag = counters.policy_version - item.policy_version
        if options.max_policy_lag is not None and lag > options.max_policy_lag:
            counters.dropped_lag_cycles += 1
            self._running.give_permit()
            return False
        self._count(item)
        queue = self._running.queue
        self._records.window.add_cycle(lag, len(queue) / queue.size)
        if options.observe_cycle is not None:
            with timer.phase("observe"):
                observed = options.observe_cycle(item.trajectory, item.step_infos)
                self._records.window.add_observed(observed)
        if options.inference_only:
            return False
        due = self._due_after(counters.cycles)
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

    def _due_after(self, cycles: int) -> int:
        """Return how many updates are due after that trajectory, counted from 1."""
        warm_up_from = self._session.counters.warm_up_from
        return self._agent.num_off_policy_optims_per_cycle(cycles - warm_up_from)

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

    # Checkpoints.

    def _checkpoint_when_due(self) -> None:
        if self._checkpoints.is_due:
            with self._timer.phase("checkpoint"):
                self._checkpoints.begin()

    def _finish_checkpoint(self, items: list[Item]) -> None:
        """Save what was begun, once every Inferencer has said where it stands."""
        if self._checkpoints.is_ready:
            with self._timer.phase("checkpoint"):
                self._checkpoints.finish(items)

    def _replace_inferencer(self, old: Inferencer) -> Inferencer:
        with self._timer.phase("restart"):
            return self._replace(old)

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
            record = record | evaluation | {"seconds": self._records.window.seconds}
            self._records.write(record)
        self._running.queue.raise_failure()
        self._join_all()
        self._running.queue.raise_failure()
        return record

"""One run of a loop: Inferencers, update loop and what goes beside them, started and ended."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from sebulba.agent import Agent
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.cluster.hosts.rounds import Rounds
from sebulba.cluster.inferencers.node_figures import NodeFigures
from sebulba.cluster.inferencers.workers import Workers
from sebulba.errors import ActionError, HangError
from sebulba.inference import hangs
from sebulba.inference.hangs import AnyThread
from sebulba.inference.inferencer import Inferencer
from sebulba.inference.inferencer_pool import RunningInferencers
from sebulba.inference.replacements import Replace
from sebulba.learning.update import Updater
from sebulba.loops.evaluation_thread import Evaluations, Evaluator
from sebulba.loops.records import RunRecords
from sebulba.loops.saving import About, RunCheckpoints
from sebulba.loops.session import Session
from sebulba.loops.supervisor import OnHang, Supervisor
from sebulba.loops.update_loop import LEARNER_PHASES, ObserveCycle, UpdateLoop
from sebulba.metrics.timer import PhaseTimer
from sebulba.metrics.window import MetricWindow
from sebulba.options import LoopOptions
from sebulba.support.trees import on_device
from sebulba.transport.item import HandedOver, HandOff, Item
from sebulba.types import Callback, MetricWriter, PyTree


@dataclasses.dataclass(frozen=True)
class Attached:
    """What a user attaches to a loop; see ``GymnasiumLoop``."""

    metric_writer: MetricWriter | None
    """Gets the records of metrics."""
    callbacks: tuple[Callback, ...]
    """Get them after it, and may end the run."""
    observe_cycle: ObserveCycle | None
    """Sees every trajectory."""
    evaluator: Evaluator | None
    """Plays the acting networks now and then."""
    checkpointer: Checkpointer | None
    """Saves the run."""
    on_hang: OnHang | None
    """Is called if the update loop hangs."""


class Run:
    """Runs the Inferencers and the update loop; evaluates, saves and writes metrics for it.

    The update loop says when, through the methods of ``Beside``.

    Args as for ``UpdateLoop`` and:
      attached: What the user attached to the loop.
      session: What goes on over several runs of the loop.
      hand_off: Places what a cycle made on the update devices.
      replace: Returns a new Inferencer in the place of one whose environment failed.
      about: Returns what checkpoints say of the loop.
      workers: Where Inferencers are elsewhere; None where all are threads.
    """

    def __init__(
        self,
        options: LoopOptions,
        attached: Attached,
        agent: Agent,
        session: Session,
        updater: Updater,
        hand_off: HandOff,
        stop_requested: threading.Event,
        replace: Replace,
        about: About,
        *,
        inference_only: bool,
        workers: Workers | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        """Prepare a run; nothing starts yet."""
        self._rounds = rounds
        self._checkpoint_due = False
        self._options = options
        self._attached = attached
        self._session = session
        self._updater = updater
        self._stop_requested = stop_requested
        self._nodes = (
            None if workers is None else NodeFigures(workers, session.counters.policy_version)
        )
        self._replace = replace
        self._timer = PhaseTimer(*LEARNER_PHASES)
        self._update_loop = UpdateLoop(
            options,
            attached.observe_cycle,
            agent,
            session,
            updater,
            self._timer,
            stop_requested,
            inference_only=inference_only,
            rounds=rounds,
        )
        self._running = RunningInferencers(
            options,
            session.inferencers,
            session.counters,
            hand_off,
            stop_requested,
            self._replace_in_phase,
            self._update_loop.prepare_while_idle,
            workers,
            replace if workers is not None else None,
        )
        self._evaluations = Evaluations(
            attached.evaluator,
            session.counters.evaluated_at,
            stop_requested,
            self._running.queue.fail,
            # Other hosts would wait, in a collective, for one that waits for its evaluations.
            skips=options.schedule == "async" or rounds is not None,
            inline=options.inline,
        )
        self._checkpoints = RunCheckpoints(
            attached.checkpointer, session, updater, about, lambda: self.window.seconds
        )

    def _replace_in_phase(self, old: Inferencer) -> Inferencer:
        with self._timer.phase("restart"):
            return self._replace(old)

    def _make_supervisor(self) -> Supervisor:
        # Inline is for debuggers, which may keep any phase as long as they like.
        limit_s = None if self._options.inline else self._options.faults.hang_timeout_s
        watched = self._timer, self._session, self._running, self._evaluations
        return Supervisor(limit_s, *watched, self._attached.on_hang, self._nodes is not None)

    @property
    def threads(self) -> list[AnyThread]:
        """The Inferencers' in their order, then others; after the run only those that hang live."""
        others = [*self._evaluations.threads, *self._running.replacing_threads]
        return [*self._running.threads, *others]

    @property
    def stopped(self) -> bool:
        """A stop ended the run before its last cycle."""
        return self._update_loop.stopped

    @property
    def stop_reason(self) -> str | None:
        """What a callback said that ended the run early."""
        return self._records.stop_reason if self.stopped else None

    def __call__(
        self, num_cycles: int, began: float, expected: HandedOver | None
    ) -> dict[str, Any]:
        """Consume ``num_cycles`` trajectories, or fewer if a stop was requested.

        Args:
          num_cycles: How many to consume in this run.
          began: ``time.perf_counter()`` from which ``seconds`` count.
          expected: Shapes of what the Inferencers will hand over; None if they are not known.

        Returns:
          The record of the last window.
        """
        session = self._session
        counters, frame_skip = session.counters, session.inferencers[0].env.spec.frame_skip
        # The update loop begins with the round kept from the last run, and publishes after it.
        second_version = counters.policy_version + bool(session.kept_round)
        self.window = MetricWindow(counters, began)
        self._records = RunRecords(
            self._options,
            self._attached.metric_writer,
            self._attached.callbacks,
            self._stop_requested,
            session,
            self._updater,
            self._timer,
            self._evaluations,
            self.window,
            counters.cycles + num_cycles,
            self._nodes,
        )
        try:
            with self._make_supervisor():
                self._update_loop.begin(num_cycles, frame_skip, expected)
                self._running.start(num_cycles, second_version)
                if not self._options.inline:
                    self._evaluations.start()
                self._update_loop.consume(self._running, self)
                self._end_with_others()
                record = self._records.close()
                with self._timer.phase("checkpoint"):
                    self._checkpoints.save_at_the_end()
                return self._finish_evaluations(record)
        except BaseException as error:
            self._end_after(error)
            raise

    # Beside learning.

    def consumed(self, item: Item) -> None:
        """Tell the checkpoints; see ``Beside``."""
        self._checkpoints.consumed(item)

    def checkpoint_when_due(self) -> None:
        """Begin a checkpoint; see ``Beside``."""
        if self._checkpoints.is_due:
            with self._timer.phase("checkpoint"):
                self._checkpoints.begin(with_experience=self.experience_is_due())

    def checkpoint_is_due(self) -> bool:
        """Tell whether a checkpoint is due; see ``Beside``."""
        self._checkpoint_due = self._checkpoint_due or self._checkpoints.is_due
        return self._checkpoint_due

    def checkpoint_is_busy(self) -> bool:
        """Tell whether one is being made; see ``Beside``."""
        return self._checkpoints.is_busy

    def experience_is_due(self) -> bool:
        """Tell whether the experience is due, too; see ``Beside``."""
        return self._checkpoints.experience_is_due

    def begin_checkpoint(self, *, with_experience: bool) -> None:
        """Begin a checkpoint now; see ``Beside``."""
        self._checkpoint_due = False
        if self._checkpoints.are_wanted:
            with self._timer.phase("checkpoint"):
                self._checkpoints.begin(with_experience=with_experience)

    def finish_checkpoint(self, round_in_flight: list[Item]) -> None:
        """Save what was begun; see ``Beside``."""
        if self._checkpoints.is_ready:
            with self._timer.phase("checkpoint"):
                self._checkpoints.finish(round_in_flight)

    def evaluate_and_write_when_due(self) -> None:
        """Begin an evaluation and write metrics, each if it is due; see ``Beside``."""
        self._evaluations.when_due(self._session.counters.env_steps, self._take_networks)
        self._records.write_when_due()

    def end_takes_long(self) -> None:
        """Save what was learned: whoever asked for the end may not wait for the Inferencers.

        Several hosts save together or not at all.
        """
        if self._rounds is not None:
            return
        with self._timer.phase("checkpoint"):
            self._checkpoints.save_learner()

    def _take_networks(self) -> PyTree:
        """Return a copy of the acting networks, on the first inference device.

        One host of several takes what was just published: to make a copy is a program of them all.
        """
        device = self._session.inferencers[0].device
        if self._rounds is not None and (staged := self._session.staging[device].newest()):
            return staged.networks
        with self._timer.phase("publish"):
            return on_device(self._updater.acting_networks(), device)

    # The end.

    def _end_with_others(self) -> None:
        """End the Inferencers; of several hosts none saves before all have ended theirs."""
        if self._rounds is None:
            self._end_inferencers()
            return
        error: Exception | None = None
        try:
            self._end_inferencers()
        except Exception as raised:
            error = raised
        self._rounds.end(error)

    def _end_inferencers(self) -> None:
        if self._stop_requested.is_set():
            self._evaluations.end()  # now: saving may take longer than its worker processes live
        self._running.stop()
        ending = [*self._running.threads, *self._running.replacing_threads]
        if hangs.join(self._not_silent(ending), hangs.SAVE_FIRST_S):
            self.end_takes_long()
        self._join(self._running.threads)
        self._running.end_replacements()
        self._running.raise_failures()  # of the cycles that were in flight at the end

    def _finish_evaluations(self, record: dict[str, Any]) -> dict[str, Any]:
        """Have the trained networks played, and write a record of every evaluation still missing.

        A stop that was requested ends this too.
        """
        take = self._take_networks
        if self._rounds is not None:  # what is not published any more: all hosts are here
            device = self._session.inferencers[0].device
            trained = on_device(self._updater.acting_networks(), device)
            take = lambda: trained  # noqa: E731
        self._evaluations.at_the_end(self._session.counters.env_steps, take)
        while evaluation := self._evaluations.wait():
            record = record | evaluation | {"seconds": self.window.seconds}
            self._records.write(record)
        self._running.queue.raise_failure()
        self._join_all()
        self._running.queue.raise_failure()
        return record

    def _end_after(self, error: BaseException) -> None:
        """End what runs and keep what was learned; nothing here may hide ``error``."""
        try:
            self._join_all()
        except HangError as hang:
            error.add_note(str(hang))
        if isinstance(error, ActionError):
            # Not the environment's fault if the networks that acted were not finite.
            self.window.check_finite(self._updater.take_metrics())
        if self._rounds is None or self._rounds.ended_together:
            self._checkpoints.save_after(error)

    def _join_all(self) -> None:
        self._evaluations.end()
        self._running.stop()
        self._running.end_replacements()
        self._join([*self._running.threads, *self._evaluations.threads])

    def _join(self, threads: Sequence[AnyThread]) -> None:
        """Wait for threads that were told to end, but for those that are known to hang.

        Raises:
          HangError: One does not.
        """
        waited = self._not_silent(threads)
        alive = hangs.join(waited, hangs.JOIN_S)
        while self._running.is_compiling(alive):  # XLA cannot be told to stop
            alive = hangs.join(waited, hangs.JOIN_S)
        if alive:
            self._running.silent += alive
            raise hangs.hang_error(alive, hangs.JOIN_S)

    def _not_silent(self, threads: Sequence[AnyThread]) -> list[AnyThread]:
        return [thread for thread in threads if thread not in self._running.silent]

"""One run of a loop: Inferencers, update loop and what goes beside them, started and ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sebulba.agent import without_bank
from sebulba.cluster.parts import Parts
from sebulba.errors import ActionError, HangError
from sebulba.inference import hangs
from sebulba.inference.hangs import AnyThread
from sebulba.inference.inferencer_pool import RunningInferencers
from sebulba.inference.replacements import Replace
from sebulba.loops.evaluation_thread import Evaluations
from sebulba.loops.records import Records
from sebulba.loops.saving import Saving
from sebulba.loops.session import Session
from sebulba.loops.supervisor import Supervisor
from sebulba.loops.update_loop import UpdateLoop
from sebulba.support.trees import on_device


class Run:
    """Makes the parts of a run, starts them, learns in the calling thread, and ends them."""

    def __init__(
        self,
        session: Session,
        parts: Parts,
        replace: Replace,
    ) -> None:
        """Prepare a run; nothing starts yet."""
        options, counters, stop = session.options, session.counters, session.stop_requested
        self._session = session
        self._updater = updater = parts.updater
        self._peers = peers = parts.peers
        self._running = RunningInferencers(
            options,
            session.inferencers,
            counters,
            session.timer,
            parts.hand_off,
            stop,
            replace,
            parts.inferencers,
        )
        self._evaluations = Evaluations(
            session.attached.evaluator,
            counters.evaluated_at,
            stop,
            self._running.queue.fail,
            # Other hosts would wait, in a collective, for one that waits for its evaluations.
            skips=options.schedule == "async" or peers.number > 1,
            inline=options.inline,
        )
        self._records = Records(session, updater, self._evaluations, parts.inferencers)
        self._saving = Saving(session, updater)
        self._update_loop = UpdateLoop(
            session,
            updater,
            self._running,
            self._saving,
            self._records,
            self._evaluations,
            peers,
        )
        self._supervisor = Supervisor(session, self._running, self._evaluations)

    def __call__(self) -> dict[str, Any]:
        """Consume trajectories up to ``session.target``, or fewer if a stop was requested."""
        session, counters = self._session, self._session.counters
        # The update loop begins with the round kept from the last run, and publishes after it.
        second_version = counters.policy_version + bool(session.kept_round)
        try:
            with self._supervisor:
                self._update_loop.publish()
                self._running.start(
                    session.target - counters.cycles,
                    second_version,
                    self._update_loop.prepare_while_idle,
                )
                if not session.options.inline:
                    self._evaluations.start()
                self._update_loop.consume()
                self._end_with_others()
                record = self._records.close()
                self._saving.save_at_the_end()
                return self._finish_evaluations(record)
        except BaseException as error:
            self._end_after(error)
            raise

    @property
    def threads(self) -> list[AnyThread]:
        """The Inferencers' in their order, then others; after the run only those that hang live."""
        others = [*self._evaluations.threads, *self._running.replacing_threads]
        return [*self._running.threads, *others]

    # The end.

    def _end_with_others(self) -> None:
        """End the Inferencers; of several hosts none saves before all have ended theirs."""
        error: Exception | None = None
        try:
            self._end_inferencers()
        except Exception as raised:
            error = raised
        self._peers.end(error)

    def _end_inferencers(self) -> None:
        if self._session.stop_requested.is_set():
            self._evaluations.end()  # now: saving may take longer than its worker processes live
        self._running.stop()
        ending = [*self._running.threads, *self._running.replacing_threads]
        if hangs.join(self._not_silent(ending), hangs.SAVE_FIRST_S):
            self._saving.save_learner()
        self._join(self._running.threads)
        self._running.end_replacements()
        self._running.raise_failures()  # of the cycles that were in flight at the end

    def _finish_evaluations(self, record: dict[str, Any]) -> dict[str, Any]:
        """Have the trained networks played, and write a record of every evaluation still missing.

        A stop that was requested ends this too.
        """
        # What is not published any more; of several hosts all make it, and host 0 plays it.
        device = self._session.inferencers[0].device
        trained = on_device(without_bank(self._updater.acting_networks()), device)
        self._evaluations.at_the_end(self._session.counters.env_steps, lambda: trained)
        while evaluation := self._evaluations.wait():
            record = record | evaluation | {"seconds": self._session.seconds}
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
            self._records.window.check_finite(self._updater.take_metrics())
        if self._peers.ended_together:
            self._saving.save_after(error)

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

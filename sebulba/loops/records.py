"""The records of one run: a window of updates each, with where its time went."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping
from typing import Any

from sebulba.errors import NotFiniteError, UsageError, shown
from sebulba.inference.places import Places
from sebulba.learning.update import Updater
from sebulba.loops.evaluation_thread import Evaluations
from sebulba.loops.session import Session
from sebulba.metrics.window import MetricWindow, time_shares
from sebulba.types import MetricWriter

MOST_SKIPPED_UPDATES = 100
"""A run that skips more has gone wrong, and ends."""
FIRST_WINDOW_SHARE = 1 / 16
"""The window after the first record lasts this share of the others, and each lasts twice as long as
the one before until they are whole: a run of seconds has most to show at its beginning."""


class Records:
    """Closes windows of metrics when they are due, and gives their records to the writer."""

    def __init__(
        self,
        session: Session,
        updater: Updater,
        evaluations: Evaluations,
        places: Places,
    ) -> None:
        """Open the first window."""
        self._session = session
        self._updater = updater
        self._evaluations = evaluations
        self._places = places
        self._window_share = 1.0
        """How long the open window lasts, as a share of the interval."""
        self.window = MetricWindow(session.counters, session.began)
        """The one that is open."""
        self._readings = self._read_timers()
        self._last: dict[str, Any] | None = None

    def write_when_due(self) -> None:
        """Close the window if it is old enough, or has the first updates."""
        first = self._session.counters.updates > 0 and self._last is None
        lasts_s = self._window_share * self._session.options.metrics_interval_s
        if first or self.window.age_s >= lasts_s:
            share = FIRST_WINDOW_SHARE if self._last is None else 2 * self._window_share
            self._window_share = min(share, 1.0)
            self._close_window()

    def close(self) -> dict[str, Any]:
        """Return the record of the end of the run."""
        counters = self._session.counters
        for inferencer in self._session.inferencers:
            counters.dropped_stop_cycles += inferencer.dropped_cycles
            inferencer.dropped_cycles = 0
        if self.window.is_empty and self._last is not None:
            return self._last | {"dropped_cycles": counters.dropped_cycles}
        self._updater.wait()  # for all that belongs to this record
        return self._close_window()

    def _close_window(self) -> dict[str, Any]:
        """Close the window and write its record, with an evaluation that is done."""
        with self._session.timer.phase("metrics"):
            # First, because it waits for the updates in flight: their time belongs to this window.
            metrics = self._updater.take_metrics()
            self._count_skipped()
            elapsed_s = self.window.age_s
            readings = self._read_timers()
            shares = {
                f"time/{who}/{phase}": share
                for who, before, after in zip(
                    ("learner", "inferencer"), self._readings, readings, strict=True
                )
                for phase, share in time_shares(before, after, elapsed_s).items()
            }
            self._readings = readings
            more = {"total_cycles": self._session.target, **shares}
            envs = [inferencer.env for inferencer in self._session.inferencers]
            more |= getattr(type(envs[0]), "metrics_of", lambda envs: {})(envs)
            more |= self._places.figures(elapsed_s, self._session.counters.policy_version)
            record = self.window.close(
                metrics, self._session.episodes, more | self._evaluations.pop()
            )
            self.write(record)
        self._last = record
        return record

    def _read_timers(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds in each phase so far: of the update loop, of the mean Inferencer."""
        readings = [i.timer.seconds() for i in self._session.inferencers]
        mean = {name: sum(r[name] for r in readings) / len(readings) for name in readings[0]}
        return self._session.timer.seconds(), mean

    def _count_skipped(self) -> None:
        """Raise NotFiniteError if too many updates had to be skipped."""
        counters = self._session.counters
        counters.skipped_updates += self._updater.pop_skipped()
        if counters.skipped_updates > MOST_SKIPPED_UPDATES:
            raise NotFiniteError(
                f"{counters.skipped_updates} of {counters.updates} updates were skipped because "
                f"their loss or gradient was not finite, and a run may skip "
                f"{MOST_SKIPPED_UPDATES}. A lower learning rate, gradient clipping, or scaled "
                "rewards are the usual remedies"
            )

    def write(self, record: Mapping[str, Any]) -> None:
        """Give a record to the writer, whose errors only warn, and then to the callbacks."""
        session, counters = self._session, self._session.counters
        counters.evaluated_at = record.get("eval_env_steps", counters.evaluated_at)
        if session.attached.metric_writer is not None:
            self._give(session.attached.metric_writer, record)
        for callback in session.attached.callbacks:
            reason = _checked(callback(record))
            if reason is not None:
                session.stop_reason = session.stop_reason or reason
                session.stop_requested.set()

    @staticmethod
    def _give(writer: MetricWriter, record: Mapping[str, Any]) -> None:
        try:
            writer.write(record)
        except Exception as error:
            warnings.warn(
                f"the metric writer raised, and the run continues without this record: "
                f"{''.join(traceback.format_exception(error))}",
                RuntimeWarning,
                stacklevel=2,
            )


def _checked(reason: Any) -> str | None:
    """Return what a callback returned."""
    if reason is None or isinstance(reason, str):
        return reason
    raise UsageError(
        f"a callback returned {shown(reason)}; it must return None, or a sentence with the reason "
        "to end the run"
    )

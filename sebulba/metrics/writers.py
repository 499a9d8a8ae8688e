"""Writers of metrics: JSON lines, TensorBoard, plain lines.

Every writer opens its file at the first record, so that a run that never starts leaves no file.
The live panel has its own module, :mod:`sebulba.metrics.live_panel`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from sebulba.errors import text_of
from sebulba.metrics.counters import EPISODES_AVERAGED, of_groups
from sebulba.metrics.short_text import count, duration, number
from sebulba.support.files import absolute
from sebulba.types import EndWriter, MetricWriter, RunEnd

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

MOST_GROUPS_IN_A_LINE = 4
"""With more groups of agents, a line has the mean over all of them."""


class CompositeWriter:
    """Gives every record to several writers; warns of one that raises, and tries it again."""

    def __init__(self, *writers: MetricWriter, before: Callable[[], None] = lambda: None) -> None:
        """Write to these writers, in order; ``before`` is called before each record."""
        self._writers = list(writers)
        self._before = before
        self.last: Mapping[str, Any] = {}
        """The newest record."""
        self._failing: list[MetricWriter] = []

    def add(self, writer: MetricWriter) -> None:
        """Write to this writer too."""
        self._writers.append(writer)

    def write(self, metrics: Mapping[str, Any]) -> None:
        self.last = metrics
        self._before()
        self._each(lambda writer: writer.write(metrics))

    def end(self, end: RunEnd) -> None:
        """Say how the run ended to every writer that has a method for it."""
        self._each(lambda writer: writer.end(end), EndWriter)

    def close(self) -> None:
        self._each(lambda writer: writer.close())

    def _each(self, act: Callable[[Any], None], kind: type = object) -> None:
        for writer in (writer for writer in self._writers if isinstance(writer, kind)):
            try:
                act(writer)
            except Exception as error:
                if writer not in self._failing:
                    self._failing.append(writer)
                    warnings.warn(
                        f"{type(writer).__name__} failed, and is tried again with the next record: "
                        f"{text_of(error)}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            else:
                if writer in self._failing:
                    self._failing.remove(writer)


RECORDS_IN_A_RUNS_AGE = 3000
"""The age of a run over the least time between two records in its file."""


class JsonLinesWriter:
    """Writes each record as a JSON object; unknown or not finite numbers are null, no images."""

    def __init__(self, path: str | Path) -> None:
        """Write to ``path``, which is made at the first record."""
        self._path = absolute(path)
        self._file: IO[str] | None = None

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one line with what has a form for JSON."""
        self.write_line(
            {name: to_json(value) for name, value in metrics.items() if np.ndim(value) == 0}
        )

    def write_line(self, record: Mapping[str, Any]) -> None:
        """Write one line and flush it, so that a reader sees whole lines at once.

        If the line cannot be written whole, as on a full disk, the part written is removed.
        """
        if self._file is not None and not self._path.exists():
            self.close()  # somebody deleted it: begin it again
        if self._file is None:
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        line = json.dumps(record, allow_nan=False) + "\n"
        whole = os.path.getsize(self._path)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):  # its buffer still has the line
                self.close()
            self._file = None
            os.truncate(self._path, whole)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class SpacedJsonLinesWriter(JsonLinesWriter):
    """Writes records that are the further apart, the older the run is.

    With a record every half second the first 25 minutes have all of them, a day has 13,600 and a
    month 24,000: the file grows with the logarithm of the run's length. Evaluations and the last
    record are always written.
    """

    def __init__(self, path: str | Path) -> None:
        """Write to ``path``, which is made at the first record."""
        super().__init__(path)
        self._written_at_s = -math.inf
        self._newest: Mapping[str, Any] | None = None
        """The newest record, if it was left out."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write the record, or leave it out if the one before is too near."""
        now_s = float(metrics.get("seconds", math.inf))
        is_evaluated = metrics.get("eval_return_mean") is not None
        if now_s - self._written_at_s < now_s / RECORDS_IN_A_RUNS_AGE and not is_evaluated:
            self._newest = metrics
            return
        self._newest, self._written_at_s = None, now_s
        super().write(metrics)

    def close(self) -> None:
        """Write the newest record, and close the file."""
        newest, self._newest = self._newest, None
        try:
            if newest is not None:
                super().write(newest)
        finally:
            super().close()


def to_json(value: Any) -> Any:
    """Return a scalar, or a dict of scalars, in a form for JSON: NaN and infinities are None."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, str | bool | None):
        return value
    number = value.item() if hasattr(value, "item") else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


class TensorBoardWriter:
    """Writes TensorBoard events, over environment steps."""

    FLUSH_S = 10.0
    """Seconds between flushes, which make records visible to TensorBoard."""
    RETRY_S = 60.0
    """After an error, records are dropped for this many seconds."""

    def __init__(self, folder: str | Path, resumed_at: int | None = None) -> None:
        """Write into ``folder``, which is made at the first record.

        Args:
          folder: Folder of the event files.
          resumed_at: Environment steps at which a run is resumed; TensorBoard hides the events of
            later steps that an earlier process wrote.
        """
        self._folder = absolute(folder)
        self._resumed_at = resumed_at
        self._events: EventsWriter | None = None
        self._flush_at = self._retry_at = 0.0

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write numbers as scalars and ``[H, W, C]`` uint8 arrays as images.

        After an error a new file is begun, since TensorBoard reads no file beyond half a record.
        """
        if time.monotonic() < self._retry_at:
            return
        try:
            self._write(metrics)
        except OSError:
            self._retry_at = time.monotonic() + self.RETRY_S
            with contextlib.suppress(OSError):
                self.close()
            raise

    def _write(self, metrics: Mapping[str, Any]) -> None:
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        if self._events is None:
            self._events = self._open()
        # Results of an evaluation are written at the step at which its networks were taken.
        events = {"eval_env_steps": Event(), "env_steps": Event()}
        for name, value in metrics.items():
            if np.ndim(value) == 3:
                what = summary.image(name, np.asarray(value), dataformats="HWC")
            elif is_number(value):
                what = summary.scalar(name, float(value))
            else:
                continue
            when = "eval_env_steps" if name.startswith("eval_") else "env_steps"
            events[when].summary.value.extend(what.value)
        for when, event in events.items():
            if event.summary.value:
                event.wall_time, event.step = time.time(), int(metrics.get(when) or 0)
                self._events.write_event(event)
        if time.monotonic() >= self._flush_at:
            self._flush_at = time.monotonic() + self.FLUSH_S
            self._events.flush()

    def _open(self) -> EventsWriter:
        # tensorboardX's SummaryWriter would not do: on a full disk its thread ends, and the next
        # write waits for that thread for ever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder.mkdir(parents=True, exist_ok=True)
        events = EventsWriter(str(self._folder / "events"))
        if self._resumed_at is not None:
            start = SessionLog(status=SessionLog.START)
            events.write_event(Event(step=self._resumed_at + 1, session_log=start))
            self._resumed_at = None  # only the first file hides later steps
        return events

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()


def is_number(value: Any) -> bool:
    """Tell whether a value of a record is one known number."""
    return np.ndim(value) == 0 and isinstance(value, int | float | np.number)


class LinesWriter:
    """Writes a plain line now and then, for logs."""

    MIN_S, MAX_S = 1.0, 30.0
    """Limits of the seconds between lines, which are a twentieth of the run so far."""

    def __init__(self, stream: IO[str], describe: Callable[[], str] = str) -> None:
        """Write to ``stream``, and what ``describe()`` returns before the first line."""
        self._stream = stream
        self._describe = describe
        self._next_s = 0.0
        self._last: Mapping[str, Any] | None = None
        self._shown_at: int | None = -1
        """Env steps in the last line, after which only evaluations may come."""
        self._is_first = True

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write a line if one is due."""
        self._is_first = self._last is None
        if self._is_first and (about := self._describe()):
            print(about, file=self._stream, flush=True)
        self._last = metrics
        if metrics.get("eval_return_mean") is not None:
            print(evaluation_line(metrics), file=self._stream, flush=True)
        seconds = metrics.get("seconds") or 0.0
        if seconds >= self._next_s:
            self._next_s = seconds + min(self.MAX_S, max(self.MIN_S, seconds / 20))
            self._show()

    def _show(self) -> None:
        if self._last is None or self._last.get("env_steps") == self._shown_at:
            return
        # The first window is mostly compiling, so its pace says nothing about the time left.
        line = plain_line(self._last, with_time_left=not self._is_first)
        print(line, file=self._stream, flush=True)
        self._shown_at = self._last.get("env_steps")

    def close(self) -> None:
        """Write the last record if it has not been written."""
        self._show()


def plain_line(metrics: Mapping[str, Any], *, with_time_left: bool = True) -> str:
    """Return the main numbers of a record in one line."""
    parts = [
        f"{duration(metrics.get('seconds') or 0.0):>8}",
        f"{count(metrics.get('env_steps')):>7} env steps",
        f"return {returned(metrics):>8}{few_episodes(metrics)}",
        f"{count(metrics.get('env_steps_per_s')):>6} env steps/s",
        f"loss {number(metrics.get('loss')):>9}",
        f"lag {number(metrics.get('policy_lag_mean'))}",
    ]
    if (fill := metrics.get("queue_fill")) is not None:
        parts.append(f"queue {fill:.0%}")
    if with_time_left and (left := seconds_left(metrics)) is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def returned(metrics: Mapping[str, Any], metric: str = "episode_return_mean") -> str:
    """Return the mean return, or those of a few groups or seats by their names."""
    groups = _few_groups(metrics, metric)
    if not groups:
        return number(metrics.get(metric))
    return ", ".join(f"{name} {number(mean)}" for name, mean in groups.items())


def evaluated(metrics: Mapping[str, Any]) -> str:
    """Return what the evaluation in a record returned; several groups without a deviation."""
    mean = returned(metrics, "eval_return_mean")
    if _few_groups(metrics, "eval_return_mean"):
        return mean
    return f"{mean} ± {number(metrics.get('eval_return_std'))} (standard deviation)"


def _few_groups(metrics: Mapping[str, Any], metric: str) -> dict[str, float]:
    groups = of_groups(metrics, metric)
    return groups if len(groups) <= MOST_GROUPS_IN_A_LINE else {}


def few_episodes(metrics: Mapping[str, Any]) -> str:
    """Return of how many episodes the mean return is, while they are fewer than it may be."""
    averaged = metrics.get("episodes_averaged")
    if not averaged or averaged >= EPISODES_AVERAGED:
        return ""
    return f" (of {averaged} episode{'s' if averaged > 1 else ''})"


def evaluation_line(metrics: Mapping[str, Any]) -> str:
    """Return one line with the evaluation that a record contains."""
    cut = metrics.get("eval_cut_episodes")
    of_them = f", {count(cut)} of them cut as they did not end," if cut else ""
    return (
        f"{duration(metrics.get('seconds') or 0.0):>8}  evaluation: "
        f"return {evaluated(metrics)} over "
        f"{count(metrics.get('eval_episodes'))} episodes{of_them} "
        f"at {count(metrics.get('eval_env_steps'))} env steps"
    )


def seconds_left(metrics: Mapping[str, Any]) -> float | None:
    """Return the seconds left at the pace of the last window; None if they are not known."""
    names = ("cycles", "total_cycles", "env_steps", "env_steps_per_s")
    cycles, total, env_steps, pace = (metrics.get(name) for name in names)
    if not (cycles and total and env_steps and pace):
        return None
    return max(0.0, (total - cycles) * (env_steps / cycles) / pace)

"""What a run folder says of its run: what, when, how far, how well, how it ended. Free of JAX.

Nothing that a folder names is imported or run here, whoever made it.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sebulba.errors import UsageError, refusing, shown
from sebulba.metrics.counters import of_groups
from sebulba.runs.exit_codes import MEANINGS
from sebulba.runs.folder import BEST_RETURN_FILE, RunFolder
from sebulba.runs.metrics_file import Metrics, is_number, open_regular, read_all
from sebulba.support.files import check_no_link, check_regular, flat

RUNNING = "running"
KILLED = "killed"
MOST_CONFIG_BYTES = 2**20
"""Bytes of a ``config.json`` that is read; those of a run have some thousands."""
LAST_MOMENT = 2**37
"""Seconds since 1970 of the latest time that is shown: a file may say that it is of any."""
MOST_GROUPS = 8
"""Groups of agents, or seats, that are shown."""
_NAME = re.compile(r"[\w ./:-]{1,40}")
"""What is shown as the name of a group: a file may have any."""
_ENDED = re.compile(r"^\S+ \S+  exit code (\d+): ")
_NOT_CONFIGURED = {
    *("run_id", "command", "environment", "links", "sha256", "signature", "sebulba"),
    *("member_configs", "code_folders"),
}
"""Keys of ``config.json`` that no option sets."""


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """One run, as its folder has it."""

    folder: Path
    """Folder of the run."""
    config: Mapping[str, Any]
    """What was configured, by dotted name: ``agent.learning_rate``."""
    versions: Mapping[str, str]
    """Versions of Sebulba and of the environment's package."""
    changed: datetime.datetime
    """When metrics were last written."""
    metrics: Metrics
    """What was read of ``metrics.jsonl``."""
    best_return: float | None
    """Mean return of the best evaluation; None where there was none."""
    ended: str
    """``done``, ``running``, ``killed``, or what the exit code says: ``hang``, ``SIGTERM``."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """Lines of ``metrics.jsonl`` that were read."""
        return self.metrics.records

    @property
    def agent(self) -> Any:
        """The agent: ``module:class`` of one's own, or the name of the hyper-parameters."""
        return self.config.get("agent_class") or self.config.get("agent_config")

    @property
    def agent_name(self) -> str:
        """The agent in a word; empty where it is unknown."""
        return str(self.agent or "").rpartition(":")[2].removesuffix("Config")

    @property
    def env_steps(self) -> int:
        """Environment steps that were trained for."""
        return int(self._last("env_steps") or 0)

    @property
    def seconds(self) -> float:
        """Seconds that the run has lasted."""
        return float(self._last("seconds") or 0.0)

    @property
    def last_return(self) -> float | None:
        """Mean return of the last training episodes; None if none has ended."""
        return self._last("episode_return_mean")

    @property
    def last_evaluation(self) -> float | None:
        """Mean return of the last evaluation; None where there was none."""
        return self._last("eval_return_mean")

    @property
    def last_groups(self) -> dict[str, float]:
        """Mean returns of the groups, or seats, in the last training episodes, if there are any."""
        return self._groups("episode_return_mean")

    @property
    def evaluated_groups(self) -> dict[str, float]:
        """The same of the last evaluation."""
        return self._groups("eval_return_mean")

    @property
    def best_groups(self) -> dict[str, float]:
        """The same of the best evaluation, where its record is found."""
        best = self.best_return
        return {} if best is None else self._groups("eval_return_mean", best)

    def _groups(self, metric: str, mean: float | None = None) -> dict[str, float]:
        """Return those of the newest record with a metric; with ``mean``, if that is its value."""

        def fits(value: Any) -> bool:
            return is_number(value) and (mean is None or math.isclose(value, mean, abs_tol=1e-9))

        evaluated = (record for record in reversed(self.records) if fits(record.get(metric)))
        groups = of_groups(next(evaluated, {}), metric)
        shown = [one for one in groups.items() if _NAME.fullmatch(one[0]) and is_number(one[1])]
        return dict(shown[:MOST_GROUPS])

    def _last(self, name: str) -> Any:
        values = (record.get(name) for record in reversed(self.records))
        return next((value for value in values if is_number(value)), None)


def run_folders(places: Sequence[str | Path]) -> list[Path]:
    """Return the run folders among ``places`` and directly below them, in the order of names.

    Raises:
      UsageError: A place does not exist, or there is no run in it.
    """
    found: list[Path] = []
    for place in map(Path, places):
        if not os.path.isdir(place):  # False for names that no folder can have, too
            raise UsageError(
                f"{shown(str(place))} is not a folder; give the folder of a run, such as "
                "runs/NAME, or one with runs in it"
            )
        here = runs_in(place)
        if not here:
            raise UsageError(f"{shown(str(place))} holds no run (no config.json); give another")
        found += here
    return found


def runs_in(place: Path) -> list[Path]:
    """Return a folder if it is a run's, otherwise the run folders in it, in the order of names."""
    return [place] if _is_run(place) else [p for p in sorted(place.iterdir()) if _is_run(p)]


def read_run(folder: Path, read: Callable[[Path], Metrics] = read_all) -> RunSummary:
    """Return what a folder says of its run.

    Raises:
      UsageError: A file is missing, a link, too large, or damaged; or the run vanished.
    """
    with refusing(f"{folder} cannot be read", "give another run"):
        return _read_run(RunFolder(folder), read)


def _read_run(run: RunFolder, read: Callable[[Path], Metrics]) -> RunSummary:
    check_regular(run.config, links=False, most=MOST_CONFIG_BYTES)
    record = run.record()
    newest = run.metrics if run.metrics.exists() else run.config
    return RunSummary(
        folder=run.path,
        config=dict(flat({k: v for k, v in record.items() if k not in _NOT_CONFIGURED})),
        versions=_versions(record),
        changed=moment(newest.stat().st_mtime),
        metrics=read(run.metrics) if run.metrics.exists() else Metrics([]),
        best_return=_best_return(run),
        ended=_ended(run),
    )


def plain(text: str) -> str:
    """Return a name or a value that may come from anybody as a terminal can safely show it."""
    return text if text.isprintable() else repr(text)


def moment(seconds: float) -> datetime.datetime:
    """Return the time that a file says, in local time."""
    return datetime.datetime.fromtimestamp(min(max(seconds, 0.0), LAST_MOMENT))


def _is_run(place: Path) -> bool:
    try:
        return (place / "config.json").is_file()
    except OSError as error:  # others than those of a file that is not there
        warnings.warn(plain(f"left out: {place} ({error.strerror})"), stacklevel=3)
        return False


def _versions(record: Mapping[str, Any]) -> dict[str, str]:
    environment = record.get("environment")
    packages = environment.get("versions") if isinstance(environment, dict) else None
    of_packages = packages if isinstance(packages, dict) else {}
    named = {"sebulba": record.get("sebulba", "unknown"), **of_packages}
    return {str(name): str(version) for name, version in named.items()}


def _best_return(run: RunFolder) -> float | None:
    check_no_link(run.best_policy)
    check_no_link(run.best_policy / BEST_RETURN_FILE)
    best = run.best_return()
    return best if is_number(best) else None


def _ended(run: RunFolder) -> str:
    """Return how the run ended: its exit code is the first thing in ``ended.txt``."""
    if not run.ended.exists():
        return RUNNING if is_locked(run.path) else KILLED
    with open_regular(run.ended) as file:
        code = _ENDED.match(file.readline(200).decode(errors="replace"))
    if code is None:
        return "unknown"
    meaning = MEANINGS.get(int(code[1]), f"exit code {code[1]}")
    return meaning.partition(":")[0].partition(" (")[0].removeprefix("stopped by ")


def is_locked(folder: Path) -> bool:
    """Tell whether a process holds the lock of a run, without taking it from one that begins."""
    try:
        wanted = os.lstat(folder / ".lock").st_ino
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:  # no lock, or a system that does not list them
        return False
    return any(
        "FLOCK" in line and part.rpartition(":")[2] == str(wanted)
        for line in locks
        for part in line.split()
        if part.count(":") == 2
    )

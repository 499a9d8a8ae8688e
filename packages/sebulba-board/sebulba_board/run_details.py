"""What the page of a run says beyond the table of runs. Free of JAX; nothing named is run."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import heapq
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sebulba.checkpoints.manifest import MANIFEST_FILE, check_sizes, read_manifest
from sebulba.checkpoints.part_files import RECORD_FILE
from sebulba.checkpoints.store import NUMBER_DIGITS, CheckpointStore
from sebulba.configs.presets import PRESETS
from sebulba.errors import CheckpointError, UsageError
from sebulba.metrics.live_panel import KNOWN
from sebulba.runs.folder import RunFolder
from sebulba.runs.metrics_file import Metrics, is_number, open_regular
from sebulba.runs.summary import RunSummary, moment, read_run
from sebulba.support.files import check_no_link, check_regular, flat, read_json_object
from sebulba_board.records import read_sample

MOST_RECORDS = 500
"""Records of a page, evenly over the run."""
MOST_CHECKPOINTS = 50
"""Checkpoints of a page, the newest."""
MOST_FILMS = 8
"""Films of a training on a page, the newest."""
AFTERWARDS = "video.mp4"
"""What ``sebulba video`` writes if it is not told otherwise."""
_FILM = re.compile(r"[0-9]{12}\.mp4")
MOST_NAMES = 200
"""Metrics of a record that are looked at."""
MOST_FILES = 100_000
"""Files in ``videos/`` whose names are looked at."""
MOST_END_BYTES = 2**16
"""Bytes of ``ended.txt`` that are read."""
MOST_RECORD_BYTES = 2**24
"""Bytes of a file of a checkpoint that is read."""
FAULTS = {
    "env_restarts": "environments were replaced after they had failed",
    "skipped_updates": "updates were skipped because they were not finite",
    "dropped_cycles": "trajectories were dropped",
    "masked_truncations": "steps before a truncation were left out of the loss",
    "eval_cut_episodes": "episodes of one evaluation were cut because they did not end",
    "eval_env_restarts": "environments of one evaluation were replaced",
    "eval_skipped": "evaluations were left out because the one before had not ended",
}
"""Metrics that count what went wrong, with what they say; the highest of a run counts."""
SIDES = ("learner", "inferencer")
"""Whose time the metrics measure."""


class Film(NamedTuple):
    """A film of a run's policy, as a page lists it."""

    file: Path
    """A regular file in the run folder."""
    env_steps: int | None
    """Environment steps at which it was made during training; None for one made afterwards."""
    num_bytes: int
    """Its size."""


class CheckpointLine(NamedTuple):
    """A checkpoint, as a page lists it."""

    env_steps: int
    """Environment steps at which it was taken."""
    saved: datetime.datetime
    """When."""
    num_bytes: int | None
    """Size of its files; None where it is damaged."""
    score: float | None
    """The score of its networks; None if there is none."""
    problem: str | None
    """What is wrong with it; None if all its files are there with their sizes."""


class RunDetails:
    """A run as its page shows it."""

    def __init__(self, folder: Path) -> None:
        """Read what the folder of a run says; errors are those of ``read_run``."""
        files = RunFolder(folder)
        self.run = read_run(folder, lambda file: read_sample(file, MOST_RECORDS))
        """What the table shows, with a sample of the records."""
        self.differences = _differences(self.run.config)
        """Options by dotted name that differ from the preset: (of the preset, of the run). None
        where this Sebulba has no such preset."""
        self.checkpoints = _checkpoints(files)
        """The newest first."""
        self.versions = {**self.run.versions, **_versions(files, self.checkpoints)}
        """Versions of packages."""
        self.end = _end(files.ended)
        """``ended.txt``; empty where the run has not ended."""
        self.faults = _faults(files, self.run.metrics)
        """What went wrong, a sentence each."""
        self.policies = _policies(files, self.run)
        """Name of the folder of a policy to what is known of it."""
        self.films = films_of(folder)
        """That which was made afterwards first, then the newest of those made during training."""


def _differences(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
    preset = config.get("preset")
    if not isinstance(preset, str) or preset not in PRESETS:
        return None
    fields = json.loads(json.dumps(dataclasses.asdict(PRESETS[preset].make())))
    before = dict(flat(fields))
    before["agent_config"] = type(PRESETS[preset].make().agent).__name__
    # Of an option that the run does not know, an older Sebulba wrote nothing.
    names = sorted(config.keys() - {"preset", "name", "run_dir"})
    pairs = {name: (before.get(name), config[name]) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _versions(files: RunFolder, checkpoints: Sequence[CheckpointLine]) -> dict[str, str]:
    """Return the versions that the newest whole checkpoint names: those of JAX, too."""
    whole = [checkpoint for checkpoint in checkpoints if checkpoint.problem is None]
    if not whole:
        return {}
    folder = _folder_of(files.checkpoints, whole[0].env_steps)
    try:
        check_regular(folder / RECORD_FILE, links=False, most=MOST_RECORD_BYTES)
        versions = read_json_object(folder / RECORD_FILE).get("versions")
    except UsageError:
        return {}
    return {k: str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def _end(file: Path) -> str:
    if not file.exists():
        return ""
    with open_regular(file) as opened:
        return opened.read(MOST_END_BYTES).decode(errors="replace")


def _faults(files: RunFolder, metrics: Metrics) -> list[str]:
    found = []
    for name, what in FAULTS.items():
        counts = [record[name] for record in metrics.records if is_number(record.get(name))]
        if counts and max(counts) > 0:
            found.append(f"{max(counts):,.0f} {what} ({name})")
    if files.last_transition.exists():
        found.append(
            f"an environment failed: {files.last_transition.name} has what it was given last"
        )
    if metrics.num_damaged:
        found.append(f"{metrics.num_damaged:,} lines of {files.metrics.name} are damaged")
    return found


def _checkpoints(files: RunFolder) -> list[CheckpointLine]:
    try:
        check_no_link(files.checkpoints)
        numbers = CheckpointStore(files.checkpoints).numbers()
    except (UsageError, CheckpointError):  # of a run that keeps them elsewhere
        return []
    newest = reversed(numbers[-MOST_CHECKPOINTS:])
    return [_checkpoint(_folder_of(files.checkpoints, number), number) for number in newest]


def _folder_of(checkpoints: Path, number: int) -> Path:
    return checkpoints / f"{number:0{NUMBER_DIGITS}d}"


def _checkpoint(folder: Path, number: int) -> CheckpointLine:
    saved = moment(folder.lstat().st_mtime if folder.exists() else 0.0)
    try:
        for path in (folder, folder / MANIFEST_FILE):
            check_no_link(path)
        if (folder / MANIFEST_FILE).is_file():
            check_regular(folder / MANIFEST_FILE, links=False, most=MOST_RECORD_BYTES)
        manifest = read_manifest(folder, number)
        check_sizes(folder, manifest.files)
    except (CheckpointError, UsageError) as error:
        return CheckpointLine(number, saved, None, None, str(error))
    num_bytes = sum(entry.num_bytes for entry in manifest.files)
    score = manifest.score if is_number(manifest.score) else None
    return CheckpointLine(number, saved, num_bytes, score, None)


def _policies(files: RunFolder, run: RunSummary) -> dict[str, str]:
    best = "of the best evaluation" if run.best_return is not None else "without its return"
    known = {files.policy: "of the end, or of the newest checkpoint", files.best_policy: best}
    return {
        path.name: what for path, what in known.items() if path.is_dir() and not path.is_symlink()
    }


def films_of(folder: Path) -> list[Film]:
    """Return the films in a run folder, which are regular files with the names that we give."""
    files = RunFolder(folder)
    found: list[tuple[Path, int | None]] = [(folder / AFTERWARDS, None)]
    if files.videos.is_dir() and not files.videos.is_symlink():
        # No more than a run makes: a folder may hold anything.
        listed = islice(files.videos.iterdir(), MOST_FILES)
        named = (path for path in listed if _FILM.fullmatch(path.name))
        found += [(path, int(path.stem)) for path in heapq.nlargest(MOST_FILMS, named)]
    films = []
    for file, env_steps in found:
        with contextlib.suppress(UsageError, OSError), open_regular(file) as opened:
            films.append(Film(file, env_steps, os.fstat(opened.fileno()).st_size))
    return films


def points(
    records: Sequence[Mapping[str, Any]], name: str, at: str = "env_steps"
) -> list[tuple[float, float]]:
    """Return a metric over environment steps, where both are numbers."""
    pairs = [(record.get(at), record.get(name)) for record in records]
    return sorted((x, y) for x, y in pairs if is_number(x) and is_number(y))


def agent_metrics(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the loss, of what the agent measures, and of the returns of groups."""
    names = {name: None for record in records for name in islice(record, MOST_NAMES)}
    of_agent = [
        name
        for name in names
        if name not in KNOWN and name not in FAULTS and not name.startswith("time/")
    ]
    return [name for name in ("loss", *of_agent[:MOST_NAMES]) if points(records, name)]


def time_shares(records: Sequence[Mapping[str, Any]], side: str) -> dict[str, float]:
    """Return the share of a side's time that each phase took over the run, the largest first.

    Records are weighted with the seconds since the one before. The evaluations of the end have
    records without an update, which repeat the shares of the last one.
    """
    prefix = f"time/{side}/"
    total, sums, before, updates = 0.0, dict[str, float](), 0.0, None
    for record in records:
        is_repeated = updates is not None and record.get("updates") == updates
        updates = record.get("updates")
        if is_repeated or not is_number(record.get("seconds")):
            continue
        seconds = record["seconds"]
        elapsed = seconds - before if seconds >= before else seconds  # of another process
        before = seconds
        total += elapsed
        for name, share in islice(record.items(), MOST_NAMES):
            if name.startswith(prefix) and is_number(share):
                phase = name.removeprefix(prefix)
                sums[phase] = sums.get(phase, 0.0) + max(share, 0.0) * elapsed
    shares = {phase: time / total for phase, time in sums.items()} if total else {}
    return dict(sorted(shares.items(), key=lambda item: item[1], reverse=True))

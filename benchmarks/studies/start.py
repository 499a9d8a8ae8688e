"""``benchmarks start``: seconds to the first update of ``sebulba train``, compiled programs kept.

It is measured from outside, as a user waits for it: from the start of the process to its first
record, which is written right after the first update. It is compared, in turn, with an interpreter
that only imports what training cannot do without. The first round, which does not count, fills the
compile cache.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.tables import differences
from sebulba.errors import UsageError
from sebulba.runs.huge_pages import environment_before_restart

# Only functions import JAX here: `train_with_marks` runs in a process whose start is measured.

IMPORTS = "import jax, flax, optax, gymnasium, envpool"
POLL_S = 0.005
LONGEST_S = 300.0
"""Seconds after which a start without a first update counts as a hang."""

MARKS = (
    ("sebulba.runs.train:set_up_jax", "JAX configured"),
    ("sebulba.runs.train:build_envs", "environment described"),
    ("sebulba.loops.gymnasium_loop:GymnasiumLoop.__init__", "environments made"),
    ("sebulba.loops.gymnasium_loop:GymnasiumLoop.new_state", "agent state made"),
    ("sebulba.runs.folder:RunFolder.write_config", "run folder made"),
    ("sebulba.learning.update:Updater.place", "agent state placed"),
    ("sebulba.learning.update:Updater.acting_networks", "first networks published"),
    ("sebulba.transport.trajectory_queue:TrajectoryQueue.put", "first trajectory made"),
    ("sebulba.learning.update:Updater.consume", "first update dispatched"),
    ("sebulba.metrics.writers:JsonLinesWriter.write", "first update done, record written"),
)
"""Functions, and what has been reached when each returns for the first time."""


def run(*, repeats: int = 5, preset: str = "cartpole", json_file: str | None = None) -> dict:
    """Measure, print tables, write JSON.

    The command has options for ``repeats`` and ``json_file``.

    Raises:
      UsageError: The training ended or hung before its first update.
    """
    from sebulba.tools.bench import harness

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sebulba", *train_arguments(preset, folder)]
        cases = {
            "train": lambda: seconds_to_first_record(command, Path(folder)),
            "imports": seconds_to_import,
        }
        figures = harness.interleave(cases, repeats)
        marks = marks_of_a_start(preset, Path(folder))
    figures["beyond imports"] = differences(figures, "train", "imports")
    keys = keys_of(figures)
    harness.print_table(
        f"benchmarks start: sebulba train {preset}, compiled programs kept, to the first update",
        "s",
        figures,
        [
            f"first_update_beyond_imports_s: {keys['first_update_beyond_imports_s']:.2f}",
            f"imports: {IMPORTS}",
        ],
    )
    harness.print_rows(
        "one more start, with marks", ["at, s", "after the one before, s"], mark_rows(marks)
    )
    settings = {"preset": preset, "repeats": repeats}
    result = harness.record({**keys, "marks_s": marks}, figures, settings)
    harness.write_json(json_file, result)
    return result


def keys_of(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the keys of the JSON, which are medians."""
    return {
        "first_update_beyond_imports_s": statistics.median(figures["beyond imports"]),
        "first_update_s": statistics.median(figures["train"]),
        "imports_s": statistics.median(figures["imports"]),
    }


def mark_rows(marks: Mapping[str, float]) -> dict[str, list[str]]:
    """Return a row for each mark: its seconds, and those after the mark before it."""
    rows, before = {}, 0.0
    for name, at in sorted(marks.items(), key=lambda mark: mark[1]):
        rows[name] = [f"{at:.2f}", f"{at - before:.2f}"]
        before = at
    return rows


def train_arguments(preset: str, folder: str) -> list[str]:
    """Return the arguments of ``sebulba`` that train in a folder and keep compiled programs."""
    cache, run_dir = os.path.join(folder, "cache"), os.path.join(folder, "run")
    return ["train", preset, "--run-dir", run_dir, "--compile-cache", cache]


def child_environment() -> dict[str, str]:
    """Return a user's environment: byte code is kept, and huge pages are not yet asked for."""
    environ = environment_before_restart(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


def seconds_to_import() -> float:
    """Return the seconds in which an interpreter starts and imports what training needs."""
    began = time.time()
    code = f"{IMPORTS}; import time; print(time.time())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout) - began


def seconds_to_first_record(command: Sequence[str], folder: Path) -> float:
    """Start a training, end it at its first record, and return the seconds until then.

    Args:
      command: Command that trains in ``folder / "run"``, which is removed again.
      folder: Folder of that run and of the compile cache.

    Raises:
      UsageError: The training ended or hung before its first record.
    """
    metrics = folder / "run" / "metrics.jsonl"
    with open(folder / "output", "w+") as output:
        began = time.time()
        with subprocess.Popen(
            command, env=child_environment(), stdout=output, stderr=subprocess.STDOUT
        ) as process:
            try:
                seconds = _wait_for_line(metrics, process, began)
                process.terminate()  # as with Ctrl-C, it saves its policy and ends
                process.wait(LONGEST_S)
            except UsageError as error:
                output.seek(0)
                raise UsageError(f"{error}; it said: {output.read()[-2000:].strip()}") from None
            finally:
                process.kill()  # no effect if it has ended
    shutil.rmtree(folder / "run")
    return seconds


def _wait_for_line(file: Path, process: subprocess.Popen, began: float) -> float:
    """Return the seconds from ``began`` until the first line of ``file`` was whole."""
    while True:
        # Ask the process first: it may write and end before the file is read.
        has_ended = process.poll() is not None
        if file.exists() and b"\n" in file.read_bytes():
            return time.time() - began
        if has_ended or time.time() - began > LONGEST_S:
            how = f"ended with exit code {process.returncode}" if has_ended else "hung"
            raise UsageError(f"sebulba train {how} before its first update; mend that first")
        time.sleep(POLL_S)


def marks_of_a_start(preset: str, folder: Path) -> dict[str, float]:
    """Start a training that notes its own progress; return the seconds to each mark."""
    file = folder / "marks.json"
    call = f"train_with_marks({train_arguments(preset, str(folder))!r}, {str(file)!r})"
    code = f"from benchmarks.studies.start import train_with_marks; {call}"
    command = [sys.executable, "-c", code]
    began = time.time()
    seconds_to_first_record(command, folder)
    return {name: at - began for name, at in json.loads(file.read_text()).items()}


def train_with_marks(arguments: Sequence[str], file: str) -> None:
    """Run ``sebulba`` in this process and note when it reaches each mark.

    Args:
      arguments: Arguments of ``sebulba``.
      file: JSON to write when the last of ``MARKS`` is reached: ``{mark: time.time()}``.
    """
    marks = {"interpreter started": time.time()}
    importlib.import_module("sebulba.runs.train")
    marks["sebulba imported"] = time.time()

    def note(name: str) -> None:
        if name not in marks:
            marks[name] = time.time()
            if name == MARKS[-1][1]:
                Path(file).write_text(json.dumps(marks))

    for target, name in MARKS:
        owner, attribute = find(target)
        setattr(owner, attribute, _noting(getattr(owner, attribute), functools.partial(note, name)))
    sys.argv[1:] = arguments
    importlib.import_module("sebulba.commands.cli").entry_point()


def find(target: str) -> tuple[Any, str]:
    """Return the module or class that holds ``module:attribute``, and the attribute's name."""
    module, _, path = target.partition(":")
    *owners, attribute = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), attribute


def _noting(function: Callable, note: Callable[[], None]) -> Callable:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note()
        return result

    return noting

"""Does a preset learn, how soon, how surely: ``python -m sebulba.benchmarks.learning cartpole``.

Each seed trains in a process of its own through the command line, as a user would, one after the
other. What is reported is when ``episode_return_mean`` first reached a threshold, in the run's own
environment steps and ``seconds``, and where it ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sebulba.plots import read_records


@dataclasses.dataclass(frozen=True)
class SeedResult:
    """One run."""

    seed: int
    """Its seed."""
    exit_code: int
    """Of the process; what follows is None if there was no record."""
    env_steps_to_threshold: int | None
    """Environment steps at the first record whose mean return reached the threshold."""
    seconds_to_threshold: float | None
    """Its ``seconds``: from the start of the run, compile included."""
    final_mean: float | None
    """Mean return of the last 100 episodes at the end."""
    seconds: float | None
    """Of the whole run."""
    wall_s: float
    """From starting the process to its end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train every seed, print a table; 0 if every run ended well and reached the threshold."""
    parser = argparse.ArgumentParser(prog="python -m sebulba.benchmarks.learning")
    parser.add_argument("config", help="a configuration of sebulba train")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threshold", type=float, required=True, help="mean return to reach")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder")
    arguments, options = parser.parse_known_args(argv)

    results = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            folder = (arguments.keep or Path(temporary)) / f"{arguments.config}-seed{seed}"
            result = train_seed(arguments.config, seed, arguments.threshold, folder, options)
            print(table_row(result), flush=True)
            results.append(result)
    print(summary(results, arguments.threshold))
    if arguments.json is not None:
        record = {
            "config": arguments.config,
            "options": options,
            "threshold": arguments.threshold,
            "results": [dataclasses.asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(any(r.exit_code != 0 or r.seconds_to_threshold is None for r in results))


def train_seed(
    config: str, seed: int, threshold: float, folder: Path, options: Sequence[str]
) -> SeedResult:
    """Train in a new process and read what it left."""
    command = [sys.executable, "-m", "sebulba", "train", config, "--seed", str(seed)]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--run-dir", str(folder), *options], stdout=subprocess.DEVNULL, check=False
    )
    wall_s = time.perf_counter() - began
    metrics = folder / "metrics.jsonl"
    return seed_result(
        read_records(metrics) if metrics.exists() else [], seed, done.returncode, threshold, wall_s
    )


def seed_result(
    records: Sequence[dict], seed: int, exit_code: int, threshold: float, wall_s: float
) -> SeedResult:
    """Reduce the records of a run."""
    reached = next(
        (
            record
            for record in records
            if (mean := record["episode_return_mean"]) is not None and mean >= threshold
        ),
        {},
    )
    last = records[-1] if records else {}
    return SeedResult(
        seed=seed,
        exit_code=exit_code,
        env_steps_to_threshold=reached.get("env_steps"),
        seconds_to_threshold=reached.get("seconds"),
        final_mean=last.get("episode_return_mean"),
        seconds=last.get("seconds"),
        wall_s=wall_s,
    )


HEADER = " seed exit   env steps  seconds     final   run s  wall s"


def table_row(result: SeedResult) -> str:
    """Return a run as a line under ``HEADER``."""

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'never' if value is None else format(value, form):>{width}}"

    return " ".join(
        [
            f"{result.seed:>5} {result.exit_code:>4}",
            cell(result.env_steps_to_threshold, 11, ",d"),
            cell(result.seconds_to_threshold, 8, ".1f"),
            cell(result.final_mean, 9, ".1f"),
            cell(result.seconds, 7, ".1f"),
            cell(result.wall_s, 7, ".1f"),
        ]
    )


def summary(results: Sequence[SeedResult], threshold: float) -> str:
    """Return how many seeds reached the threshold, and the median of when."""
    seconds = [r.seconds_to_threshold for r in results if r.seconds_to_threshold is not None]
    text = f"{len(seconds)} of {len(results)} seeds reached {threshold:g}"
    if seconds:
        text += f"; median {statistics.median(seconds):.1f} s, slowest {max(seconds):.1f} s"
    return text


if __name__ == "__main__":
    sys.exit(main())

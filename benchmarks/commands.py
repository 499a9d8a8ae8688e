"""``python -m benchmarks``: the studies and their options. Free of JAX.

It has the benchmarks of ``sebulba bench`` too, where ``train`` can compare with a prototype.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.studies import learn
from benchmarks.studies.learning_goals import GOALS, GROUPS
from sebulba.commands import bench
from sebulba.commands.bench import JSON, REPEATS, Benchmark, words
from sebulba.commands.options import number, option
from sebulba.errors import UsageError
from sebulba.runs.read_config import read_config

PROGRAM = "python -m benchmarks"
KINDS = (*bench.KINDS, "prototype")
RIVAL_AGENTS = ("sac", "dqn")

_RUNS = "folder that keeps the runs; finished seeds are not repeated"
_GOALS = (
    f"a configuration, or a goal: {', '.join(GOALS)}; "
    f"or several of them: {', '.join(GROUPS)}, each agent on tasks that nothing was chosen for"
)
_PYTHON = "Python of an environment that has {}; default: this one"


def read_goals(given: dict[str, Any], options: list[str], command: str) -> None:
    """Replace names by goals with their configurations: any error shows before the training."""
    if given["seeds"] is not None and given["seeds"] < 1:
        raise UsageError(f"seeds={given['seeds']} must be at least 1; use 3")
    given["options"] = options
    names = [name for word in given.pop("names") for name in GROUPS.get(word, (word,))]
    given["goals"] = {name: GOALS.get(name) for name in names}
    given["configs"] = {
        name: read_config([*learn.train_words(name, goal), *options], f"{command} {name}")[1]
        for name, goal in given["goals"].items()
    }


STUDIES: dict[str, Benchmark] = {
    "learn": Benchmark(
        "returns of presets over several seeds: JSON and curves",
        "benchmarks.studies.learn",
        [
            option("names", metavar="NAME", nargs="+", help=_GOALS),
            option(
                "--seeds", type=int, help="number of seeds, from 0; default: that of the goal, or 3"
            ),
            option(
                "--results",
                metavar="FOLDER",
                default=learn.RESULTS,
                help="folder to write; default: %(default)s",
            ),
            option("--runs", metavar="DIR", help=_RUNS),
        ],
        prepare=read_goals,
    ),
    "inference": Benchmark(
        "speed of acting, fused and stepped, against a bare loop",
        "benchmarks.studies.inference",
        [REPEATS, JSON],
    ),
    "overhead": Benchmark(
        "microseconds of Sebulba's own code in a vector step of one Inferencer",
        "benchmarks.studies.overhead",
        [REPEATS, JSON],
    ),
    "start": Benchmark(
        "seconds from a second start to the first update, without imports",
        "benchmarks.studies.start",
        [REPEATS, JSON],
    ),
    "rivals": Benchmark(
        "speed of SAC and DQN against stable-baselines3 and sbx, each in a process",
        "benchmarks.studies.rivals",
        [
            *(REPEATS, JSON),
            number("--seconds", 5.0, "seconds of training per round"),
            words("--agents", RIVAL_AGENTS, "agents to measure; default: all"),
            option("--sb3-python", default=sys.executable, help=_PYTHON.format("sb3")),
            option("--sbx-python", default=sys.executable, help=_PYTHON.format("sbx")),
        ],
    ),
    "report": Benchmark(
        "a page of tables and pictures from the JSON of the last results",
        "benchmarks.studies.report",
        [
            option("--results", dest="folder", default=learn.RESULTS, help="folder of the results"),
            option("--page", metavar="FILE", help="page to write; default: print it"),
            option("--gallery", metavar="FILE", help="page of the presets to write"),
        ],
    ),
}
BENCHMARKS = {
    **STUDIES,
    **bench.BENCHMARKS,
    "train": bench.train_benchmark("benchmarks.studies.train", KINDS),
}
"""What there is, by name."""


def main(argv: list[str]) -> int:
    """Run a study; returns the exit code.

    Raises:
      UsageError: An option breaks a rule.
      SystemExit: argparse has printed what is wrong, or the help.
    """
    return bench.run_benchmark(argv, BENCHMARKS, PROGRAM, "Measure this project.")

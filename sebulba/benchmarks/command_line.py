"""``sebulba bench``: which benchmarks there are and what they are given. Free of JAX.

Options are checked here, before JAX is imported; a benchmark is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sebulba.benchmarks import learn, report
from sebulba.benchmarks.learning_goals import GOALS
from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError

ReadConfig = Callable[[list[str], str], tuple[str, ExperimentConfig]]
"""Reads (words of CONFIG [options], the command); returns the preset's name and the experiment."""

LEAST_REPEATS = 5
DEFAULT_CONFIGS = {"scale": "cartpole", "memory": "pong"}
KINDS = ("stepped", "fused", "prototype")
TUNED = ("num-envs", "steps-per-cycle", "num-inferencers-per-device", "devices")
AXES = (
    "num-envs",
    "steps-per-cycle",
    "num-inferencers-per-device",
    "devices",
    "hidden-sizes",
    "image-features",
)


def main(argv: list[str], read_config: ReadConfig) -> int:
    """Run a benchmark; returns the exit code.

    Args:
      argv: Words after ``sebulba bench``.
      read_config: Of the command line, for benchmarks of a configuration.

    Raises:
      UsageError: An option breaks a rule.
      SystemExit: argparse has printed what is wrong, or the help.
    """
    parser = _parser()
    if argv and argv[0] in DEFAULT_CONFIGS and (len(argv) == 1 or argv[1].startswith("-")):
        argv = [argv[0], DEFAULT_CONFIGS[argv[0]], *argv[1:]]
    arguments, more = parser.parse_known_args(argv)
    given = vars(arguments)
    name, config = given.pop("benchmark"), given.pop("config", None)
    if name == "learn":
        _read_goals(given, more, read_config)
    elif more and config is None:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    _check(given)
    if config is not None:
        given["preset"], given["config"] = read_config([config, *more], f"sebulba bench {name}")
    importlib.import_module(f"sebulba.benchmarks.{name}").run(**given)
    return 0


def _read_goals(given: dict[str, Any], options: list[str], read_config: ReadConfig) -> None:
    """Read what is to be learned: all of it, before the first hour of training."""
    if given["seeds"] is not None and given["seeds"] < 1:
        raise UsageError(f"seeds={given['seeds']} must be at least 1; use 3")
    given["options"] = options
    words = {name: [*learn.train_words(name), *options] for name in given["names"]}
    given["configs"] = {
        name: read_config(its_words, f"sebulba bench learn {name}")[1]
        for name, its_words in words.items()
    }


def _check(given: dict[str, Any]) -> None:
    """Raise UsageError unless repeats, numbers and files keep their rules."""
    if (repeats := given.get("repeats", LEAST_REPEATS)) < LEAST_REPEATS:
        raise UsageError(
            f"repeats={repeats} must be at least {LEAST_REPEATS}; use {LEAST_REPEATS} or more"
        )
    for name, value in given.items():
        if isinstance(value, float) and not value > 0:
            raise UsageError(f"{name}={value} must be above 0")
    for name, option in (
        ("json_file", "--json"),
        ("png_file", "--png"),
        ("output", "--output"),
        ("page", "--page"),
        ("results", "--results"),
    ):
        file = given.get(name)
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise UsageError(f"{option} {file} is in a folder that does not exist; make it")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sebulba bench", description="Measure this machine.")
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)

    def add(name: str, help_: str, *, config: bool = False) -> argparse.ArgumentParser:
        more = " Takes the options of sebulba train CONFIG too." if config else ""
        one = benchmarks.add_parser(
            name, help=help_, description=help_ + "." + more, allow_abbrev=False
        )
        if config:
            default = DEFAULT_CONFIGS.get(name)
            may = f", and may be left out: {default}" if default else ""
            one.add_argument("config", metavar="CONFIG", help=f"as for sebulba train{may}")
        return one

    one = add("inference", "the loop's acting, fused and stepped, against a bare loop")
    _add_common(one)
    one = add(
        "train", "a run against what the machine could do: ceiling and bottleneck", config=True
    )
    _add_common(one, png="also draw the stages there")
    _add_seconds(one, "--seconds", 8.0, "of training in a round")
    _add_seconds(one, "--stage-seconds", 1.0, "of each stage alone, a round")
    one.add_argument(
        "--compare",
        nargs="+",
        choices=KINDS,
        default=(),
        help="also measure the same run so, interleaved",
    )
    one = add("overhead", "microseconds of our own code in a vector step of one Inferencer")
    _add_common(one)
    one = add("scale", "speed and memory as the work grows, one axis at a time", config=True)
    _add_common(one, png="also draw speed and memory there")
    _add_seconds(one, "--seconds", 1.0, "of training in a measurement")
    one.add_argument(
        "--axes", nargs="+", choices=AXES, default=(), help="axes to measure; default: all"
    )
    one = add("memory", "memory of a long run against what it implies", config=True)
    _add_common(one, repeats=False, png="also draw memory over time there")
    one.add_argument(
        "--minutes", type=float, default=10.0, help="minutes of training; default: %(default)s"
    )
    one = add("start", "seconds to the first update of a second start, beyond the imports")
    _add_common(one)
    one = add("tune", "the fastest setting for this machine, as a configuration file", config=True)
    _add_common(one, repeats=False)
    one.add_argument("--output", metavar="FILE", required=True, help="ends in .json")
    one.add_argument(
        "--memory-limit-gb",
        type=float,
        help="most a process may take, on host and device; default: 0.8 of what is free",
    )
    _add_seconds(one, "--seconds-per-trial", 3.0, "measured of each candidate")
    _add_seconds(one, "--budget-s", 300.0, "that it may take, about")
    one.add_argument("--keep", nargs="+", choices=TUNED, default=(), help="what must stay as it is")
    one.add_argument(
        "--max-batch-growth",
        type=float,
        default=4.0,
        help="a trajectory may become this many times as large; default: %(default)s",
    )
    one = add("learn", "what presets learn, with several seeds: JSON and curves")
    goals = ", ".join(GOALS)
    one.add_argument(
        "names", metavar="NAME", nargs="+", help=f"a configuration, or a goal: {goals}"
    )
    one.add_argument("--seeds", type=int, help="how many, from 0; default: of the goal, or 3")
    one.add_argument(
        "--results", default=report.RESULTS, help="folder to write; default: %(default)s"
    )
    one.add_argument(
        "--runs", metavar="DIR", help="keep the run folders there; what is finished is not repeated"
    )
    one = add("report", "a page of tables and pictures from the JSON of the last results")
    one.add_argument("--results", dest="folder", default=report.RESULTS, help="its folder")
    one.add_argument("--page", default=report.PAGE, help="default: %(default)s")
    return parser


def _add_common(
    parser: argparse.ArgumentParser, *, repeats: bool = True, png: str | None = None
) -> None:
    if repeats:
        parser.add_argument(
            "--repeats",
            type=int,
            default=LEAST_REPEATS,
            help="interleaved rounds; default: %(default)s",
        )
    parser.add_argument(
        "--json", metavar="FILE", dest="json_file", help="also write figures and machine there"
    )
    if png is not None:
        parser.add_argument("--png", metavar="FILE", dest="png_file", help=png)


def _add_seconds(parser: argparse.ArgumentParser, name: str, default: float, what: str) -> None:
    parser.add_argument(
        name, type=float, default=default, help=f"seconds {what}; default: %(default)s"
    )

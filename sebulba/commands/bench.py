"""``sebulba bench``: the benchmarks and their options. Free of JAX.

Options are checked here, before JAX is imported; a benchmark is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from sebulba.benchmarks import learn
from sebulba.benchmarks.learning_goals import GOALS, GROUPS
from sebulba.benchmarks.project import gallery, report
from sebulba.errors import UsageError
from sebulba.runs.configurations import config_first
from sebulba.runs.read_config import read_config

LEAST_REPEATS = 5
OF_THE_PROJECT = ("inference", "overhead", "rivals", "start", "report")
"""Benchmarks that measure the project itself, not a configuration of the user's."""
DEFAULT_CONFIGS = {"scale": "cartpole", "memory": "pong"}
"""Configurations of the benchmarks that can be called without one."""
KINDS = ("stepped", "fused", "prototype", "threads", "processes")
TUNED = ("num-envs", "steps-per-cycle", "num-inferencers-per-device", "devices")
RIVAL_AGENTS = ("sac", "dqn")
AXES = (*TUNED, "hidden-sizes", "image-features")

Option = tuple[str, dict[str, Any]]
"""Name of an argument, and the keywords of ``add_argument``."""


def _option(name: str, **keywords: Any) -> Option:
    return name, keywords


def _number(name: str, default: float, what: str) -> Option:
    return _option(name, type=type(default), default=default, help=f"{what}; default: %(default)s")


def _words(name: str, choices: tuple[str, ...], what: str) -> Option:
    return _option(name, nargs="+", choices=choices, default=(), help=what)


def _file(name: str, what: str) -> Option:
    return _option(f"--{name}", metavar="FILE", dest=f"{name}_file", help=what)


_CONFIG = _option("config", metavar="CONFIG", help="as for sebulba train")
_REPEATS = _number("--repeats", LEAST_REPEATS, "interleaved rounds")
_JSON = _file("json", "also write figures and machine there")
_GROWTH = "a trajectory may become this many times as large; at 1 nothing changes that is learned"
_MEMORY = "most a process may take, on host and device; default: 0.8 of what is free"
_RUNS = "keep the run folders there; what is finished is not repeated"
_GOALS = (
    f"a configuration, or a goal: {', '.join(GOALS)}; "
    f"or several of them: {', '.join(GROUPS)}, each agent on tasks that nothing was chosen for"
)
_PYTHON = "Python of an environment that has {}; default: this one"
BENCHMARKS: dict[str, tuple[str, list[Option]]] = {
    "train": (
        "a run against what the machine could do: ceiling and bottleneck",
        [
            *(_CONFIG, _REPEATS, _JSON, _file("png", "also draw the stages there")),
            _number("--seconds", 8.0, "seconds of training in a round"),
            _number("--stage-seconds", 1.0, "seconds of each stage alone, a round"),
            _words("--compare", KINDS, "also measure the same run so, interleaved"),
        ],
    ),
    "scale": (
        "speed and memory as the work grows, one axis at a time",
        [
            *(_CONFIG, _REPEATS, _JSON, _file("png", "also draw speed and memory there")),
            _number("--seconds", 1.0, "seconds of training in a measurement"),
            _words("--axes", AXES, "axes to measure; default: all"),
        ],
    ),
    "memory": (
        "memory of a long run against what it implies",
        [
            *(_CONFIG, _JSON, _file("png", "also draw memory over time there")),
            _number("--minutes", 10.0, "minutes of training"),
        ],
    ),
    "tune": (
        "the fastest setting for this machine, as a configuration file",
        [
            *(_CONFIG, _JSON),
            _option("--output", metavar="FILE", required=True, help="ends in .json"),
            _option("--memory-limit-gb", type=float, help=_MEMORY),
            _number("--seconds-per-trial", 3.0, "seconds measured of each candidate"),
            _number("--budget-s", 300.0, "seconds that it may take, about"),
            _words("--keep", TUNED, "what must stay as it is"),
            _number("--max-batch-growth", 1.0, _GROWTH),
        ],
    ),
    "learn": (
        "what presets learn, with several seeds: JSON and curves",
        [
            _option("names", metavar="NAME", nargs="+", help=_GOALS),
            _option("--seeds", type=int, help="how many, from 0; default: of the goal, or 3"),
            _option(
                "--results", default=learn.RESULTS, help="folder to write; default: %(default)s"
            ),
            _option("--runs", metavar="DIR", help=_RUNS),
        ],
    ),
    "inference": ("the loop's acting, fused and stepped, against a bare loop", [_REPEATS, _JSON]),
    "overhead": (
        "microseconds of our own code in a vector step of one Inferencer",
        [_REPEATS, _JSON],
    ),
    "start": (
        "seconds to the first update of a second start, beyond the imports",
        [_REPEATS, _JSON],
    ),
    "rivals": (
        "SAC and DQN beside those of stable-baselines3 and sbx, each in its own process",
        [
            *(_REPEATS, _JSON),
            _number("--seconds", 5.0, "seconds of training in a round"),
            _words("--agents", RIVAL_AGENTS, "agents to measure; default: all"),
            _option("--sb3-python", default=sys.executable, help=_PYTHON.format("sb3")),
            _option("--sbx-python", default=sys.executable, help=_PYTHON.format("sbx")),
        ],
    ),
    "report": (
        "a page of tables and pictures from the JSON of the last results",
        [
            _option("--results", dest="folder", default=learn.RESULTS, help="its folder"),
            _option("--page", default=report.PAGE, help="default: %(default)s"),
            _option("--gallery", default=gallery.GALLERY, help="default: %(default)s"),
        ],
    ),
}
"""What a benchmark measures and its arguments, by its name."""


def main(argv: list[str]) -> int:
    """Run a benchmark; returns the exit code.

    Args:
      argv: Words after ``sebulba bench``.

    Raises:
      UsageError: An option breaks a rule.
      SystemExit: argparse has printed what is wrong, or the help.
    """
    parser = _parser()
    argv = [*argv[:1], *config_first(argv[1:])]
    if argv and argv[0] in DEFAULT_CONFIGS and (len(argv) == 1 or argv[1].startswith("-")):
        argv = [argv[0], DEFAULT_CONFIGS[argv[0]], *argv[1:]]
    arguments, more = parser.parse_known_args(argv)
    given = vars(arguments)
    name, config = given.pop("benchmark"), given.pop("config", None)
    if name == "learn":
        _read_goals(given, more)
    elif more and config is None:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    _check(given)
    if config is not None:
        given["preset"], given["config"] = read_config([config, *more], f"sebulba bench {name}")
    importlib.import_module(module_of(name)).run(**given)
    return 0


def module_of(name: str) -> str:
    """Return the module of a benchmark, which has a function ``run``."""
    if name in OF_THE_PROJECT:
        return f"sebulba.benchmarks.project.{name}"
    return f"sebulba.benchmarks.{name}" if name == "learn" else f"sebulba.tools.bench.{name}"


def _read_goals(given: dict[str, Any], options: list[str]) -> None:
    """Replace names by goals with their configurations: any error shows before the training."""
    if given["seeds"] is not None and given["seeds"] < 1:
        raise UsageError(f"seeds={given['seeds']} must be at least 1; use 3")
    given["options"] = options
    names = [name for word in given.pop("names") for name in GROUPS.get(word, (word,))]
    given["goals"] = {name: GOALS.get(name) for name in names}
    given["configs"] = {
        name: read_config(
            [*learn.train_words(name, goal), *options], f"sebulba bench learn {name}"
        )[1]
        for name, goal in given["goals"].items()
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
    for name, (what, options) in BENCHMARKS.items():
        more = ""
        if _CONFIG in options:
            more = " Takes the options of sebulba train CONFIG too."
        if name in DEFAULT_CONFIGS:
            more += f" Without CONFIG it takes {DEFAULT_CONFIGS[name]}."
        one = benchmarks.add_parser(
            name, help=what, description=f"{what}.{more}", allow_abbrev=False
        )
        for option, keywords in options:
            one.add_argument(option, **keywords)
    return parser

"""``sebulba bench``: the benchmarks and their options. Free of JAX.

Options are checked here, before JAX is imported; a benchmark is imported when it runs. The
studies of the project itself are in ``benchmarks/`` of a checkout, and use the same code.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from sebulba.commands.options import Option, number, option
from sebulba.errors import UsageError
from sebulba.runs.configurations import config_first
from sebulba.runs.read_config import read_config
from sebulba.support import plugins
from sebulba.support.checks import at_least
from sebulba.support.files import check_folder_of

LEAST_REPEATS = 5
KINDS = ("stepped", "fused", "threads", "processes")
TUNED = ("num-envs", "steps-per-cycle", "num-inferencers-per-device", "devices")
AXES = (*TUNED, "hidden-sizes", "image-features")
STUDIES = ("learn", "inference", "overhead", "start", "rivals", "report")
"""What a checkout measures or writes by ``python -m benchmarks``."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark as the command line knows it."""

    what: str
    """What it measures."""
    module: str
    """Module with a function ``run``, which takes the options by name."""
    options: Sequence[Option]
    """Arguments."""
    default_config: str | None = None
    """Configuration that it takes if it is called without one."""
    prepare: Callable[[dict[str, Any], list[str], str], None] | None = None
    """Takes the values by their names, which it may change, further words, which only it can read,
    and the command."""


def words(name: str, choices: Sequence[str], what: str) -> Option:
    """Return an option for some of several words."""
    return option(name, what, nargs="+", choices=choices, default=())


def file(name: str, what: str) -> Option:
    """Return an option for a file to write."""
    return option(f"--{name}", what, metavar="FILE", dest=f"{name}_file")


CONFIG = option("config", "a configuration, as for sebulba train", metavar="CONFIG")
REPEATS = number("--repeats", LEAST_REPEATS, "interleaved rounds")
JSON = file("json", "also write figures and machine to FILE")
_GROWTH = "largest growth of a trajectory; above 1 the settings change learning"
_MEMORY = "memory limit of a process, on host and device; default: 0.8 of the free memory"


def train_benchmark(module: str, kinds: Sequence[str]) -> Benchmark:
    """Return ``bench train``, which can compare with ``kinds``."""
    return Benchmark(
        "throughput as a share of the limit of this machine, and the bottleneck",
        module,
        [
            *(CONFIG, REPEATS, JSON, file("png", "also draw the stages in FILE")),
            number("--seconds", 8.0, "seconds of training per round"),
            number("--stage-seconds", 1.0, "seconds of each stage alone, per round"),
            number("--budget-s", 60.0, "seconds in total, compilation included"),
            words("--compare", kinds, "also measure the run with these settings, interleaved"),
        ],
    )


BENCHMARKS: dict[str, Benchmark] = {
    "train": train_benchmark("sebulba.tools.bench.train", KINDS),
    "scale": Benchmark(
        "speed and memory against environments, devices, network size, ... (package sebulba-sweep)",
        "sebulba_sweep.scale",
        [
            *(CONFIG, REPEATS, JSON, file("png", "also draw speed and memory in FILE")),
            number("--seconds", 1.0, "seconds of training per measurement"),
            words("--axes", AXES, "axes to measure; default: all"),
        ],
        default_config="cartpole",
    ),
    "memory": Benchmark(
        "memory of a long run, compared with its expected size",
        "sebulba.tools.bench.memory",
        [
            *(CONFIG, JSON, file("png", "also draw memory over time in FILE")),
            number("--minutes", 10.0, "minutes of training"),
        ],
        default_config="pong",
    ),
    "tune": Benchmark(
        "find the fastest settings for this machine, and write a configuration file",
        "sebulba.tools.bench.tune",
        [
            *(CONFIG, JSON),
            option("--output", "configuration to write, NAME.json", metavar="FILE", required=True),
            option("--memory-limit-gb", _MEMORY, type=float),
            number("--seconds-per-trial", 3.0, "measured seconds per candidate"),
            number("--budget-s", 60.0, "seconds in total, compilation included"),
            words("--keep", TUNED, "settings that must not change"),
            number("--max-batch-growth", 1.0, _GROWTH),
        ],
    ),
}
"""What measures a user's configuration on this machine, by its name."""


def main(argv: list[str]) -> int:
    """Run a benchmark; returns the exit code.

    Raises:
      UsageError: An option breaks a rule, or the benchmark is one of ``STUDIES``.
      SystemExit: argparse has printed what is wrong, or the help.
    """
    if argv[:1] and argv[0] in STUDIES:
        raise UsageError(
            f"sebulba bench {argv[0]} has moved, because it measures the project itself; use "
            f"python -m benchmarks {argv[0]} in a checkout of sebulba"
        )
    return run_benchmark(
        argv, BENCHMARKS, "sebulba bench", "Measure speed and memory on this machine."
    )


def run_benchmark(
    argv: list[str],
    benchmarks: Mapping[str, Benchmark],
    program: str,
    description: str,
) -> int:
    """Run one of ``benchmarks``, the name of which is the first word; returns the exit code.

    Raises:
      UsageError: An option breaks a rule.
      SystemExit: argparse has printed what is wrong, or the help.
    """
    parser = _parser(benchmarks, program, description)
    argv = [*argv[:1], *config_first(argv[1:])]
    if argv and argv[0] in benchmarks and (len(argv) == 1 or argv[1].startswith("-")):
        default = benchmarks[argv[0]].default_config
        argv = [argv[0], *([default] if default else []), *argv[1:]]
    arguments, more = parser.parse_known_args(argv)
    given = vars(arguments)
    name, config = given.pop("benchmark"), given.pop("config", None)
    benchmark, command = benchmarks[name], f"{program} {name}"
    if benchmark.prepare is not None:
        benchmark.prepare(given, more, command)
    elif more and config is None:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    _check(given, benchmark.options)
    if config is not None:
        given["preset"], given["config"] = read_config([config, *more], command)
    _imported(benchmark.module, command).run(**given)
    return 0


def _imported(module: str, command: str) -> ModuleType:
    """Import the module of a benchmark; UsageError if it is of a package that is missing."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        missing = plugins.not_installed(package.replace("_", "-"))
        raise plugins.NotInstalledError(f"{command} is {missing}")
    return importlib.import_module(module)


def _check(given: Mapping[str, Any], options: Sequence[Option]) -> None:
    """Raise UsageError unless repeats, numbers and files keep their rules."""
    at_least(LEAST_REPEATS, "repeats", given.get("repeats"))
    for name, value in given.items():
        if isinstance(value, float) and not value > 0:
            raise UsageError(f"{name}={value} must be above 0")
    for word, keywords in options:
        value = given.get(keywords.get("dest", word.removeprefix("--").replace("-", "_")))
        if keywords.get("metavar") in ("FILE", "FOLDER"):
            check_folder_of(value, word)


def _parser(
    benchmarks: Mapping[str, Benchmark], program: str, description: str
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=description)
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, benchmark in benchmarks.items():
        more = ""
        if CONFIG in benchmark.options:
            more = " Also takes the options of sebulba train CONFIG."
        if benchmark.default_config:
            more += f" CONFIG defaults to {benchmark.default_config}."
        one = commands.add_parser(
            name,
            help=benchmark.what,
            description=f"{benchmark.what[0].upper()}{benchmark.what[1:]}.{more}",
            allow_abbrev=False,
        )
        for word, keywords in benchmark.options:
            one.add_argument(word, **keywords)
    return parser

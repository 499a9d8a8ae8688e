"""What the benchmarks share: interleaved rounds, tables, and a record of what ran where."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from sebulba.agent import Agent
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
from sebulba.loops.devices import place
from sebulba.runs import build as experiment
from sebulba.runs import huge_pages
from sebulba.support import files
from sebulba.tools.bench.budget import Budget
from sebulba.tools.bench.worker import WorkerError
from sebulba.tools.compare import tables
from sebulba.types import EnvFactory

K = TypeVar("K")
T = TypeVar("T")
PACKAGES = ("sebulba", "jax", "jaxlib", "flax", "envpool", "gymnasium", "numpy")


def interleave(
    cases: Mapping[K, Callable[[], T]],
    repeats: int,
    failed: dict[K, str] | None = None,
    budget: Budget | None = None,
) -> dict[K, list[T]]:
    """Measure the cases in turn, A B C A B C ..., because a machine's speed drifts.

    Args:
      cases: Functions, by name, that measure once and return the figure.
      repeats: Rounds that count. One more round goes before them, to compile and to warm up.
      failed: Receives the message of a case's ``WorkerError``; that case is then not in the result.
        None lets the error through.
      budget: Ends the rounds before the time would be over; where only the first fits, it counts.

    Returns:
      The figures of each case, in the order of the rounds.
    """
    figures: dict[K, list[T]] = {name: [] for name in cases}
    budget = budget or Budget()
    budget.mark()
    for number in range(repeats + 1):
        if number and not budget.fits_again():
            break
        if math.isfinite(budget.left()):
            budget.doing(f"round {number} of {repeats}" if number else "a round to warm up")
        for name in list(figures):
            try:
                figure = cases[name]()
            except WorkerError as error:
                if failed is None:
                    raise
                failed[name] = str(error)
                del figures[name]
                continue
            if number == 1:
                figures[name].clear()  # of the round to warm up
            figures[name].append(figure)
    return figures


def ratio(figures: Mapping[str, list[float]], over: str, under: str) -> float:
    """Return the median of the ratios ``over / under``, each taken within a round."""
    pairs = zip(figures[over], figures[under], strict=True)
    return statistics.median(a / b for a, b in pairs)


def count_for(seconds: float, speed: Callable[[int], float], count: int) -> int:
    """Return how many units of work take about ``seconds``.

    Args:
      seconds: Wanted duration.
      speed: Does a number of units of work and returns its units per second.
      count: The number of units to try first; it grows until it tells enough of the speed.
    """
    while True:
        wanted = math.ceil(seconds * speed(count))
        if wanted <= 4 * count:
            return wanted
        count *= 4


def env_and_agent(config: ExperimentConfig) -> tuple[EnvFactory, Agent]:
    """Return the environment factory and the agent of a configuration, as a run makes them."""
    factory = make_env_factory(config.env.id, **config.env.factory_arguments())
    return factory, experiment.build_agent(config, env_spec(factory))


def with_inferencers(config: ExperimentConfig) -> ExperimentConfig:
    """Return the configuration with the number of Inferencers that a run here has."""
    if config.num_inferencers_per_device is not None:
        return config
    number = place(config, *env_and_agent(config), config.num_envs).options
    return dataclasses.replace(config, num_inferencers_per_device=number.num_inferencers_per_device)


def print_table(
    title: str, unit: str, figures: Mapping[str, Sequence[float]], notes: Sequence[str] = ()
) -> None:
    """Print the median, lowest and highest figure of each case, then the notes."""
    rows = {
        name: [number(x) for x in (statistics.median(values), min(values), max(values))]
        for name, values in figures.items()
    }
    print_rows(title, [f"{column}, {unit}" for column in ("median", "lowest", "highest")], rows)
    print_notes(notes)


def print_rows(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """Print a table; the first column, without a heading, has the names of the rows."""
    names = ("", *(f">{column}" for column in columns))
    tables.print_table(names, ((name, *cells) for name, cells in rows.items()), title)


def print_notes(notes: Iterable[str]) -> None:
    """Print lines as they are: neither wrapped nor coloured."""
    for note in notes:
        tables.console().print(note, soft_wrap=True)


def number(value: float) -> str:
    """Return a figure as tables show it: with fewer decimals the larger it is."""
    places = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{places}f}"


def record(keys: Mapping[str, Any], figures: Mapping[str, Any], config: Mapping[str, Any]) -> dict:
    """Return what a benchmark writes to its JSON file; ``figures`` has one a round, by case."""
    hash_, commit_date, is_modified = commit()
    return {
        **keys,
        "command": _command(),
        "figures": dict(figures),
        "config": dict(config),
        "machine": machine(),
        "versions": {name: _version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "commit": hash_,
        "commit_date": commit_date,
        "is_modified": is_modified,
    }


def machine() -> dict[str, Any]:
    """Return what figures depend on: cores, processor, memory, JAX's devices, huge pages."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "processor_model": _processor_model(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "devices": [device.device_kind for device in jax.devices()],
        "huge_pages": huge_pages.are_used(),
    }


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write a benchmark's record to ``path``, or nowhere if that is None."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, result)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command() -> str | None:
    """Return the command line of this process, or None if it did not start as ``sebulba``."""
    program, *arguments = sys.argv
    is_ours = Path(program).name in ("sebulba", "__main__.py")
    return shlex.join(["sebulba", *arguments]) if is_ours else None


def _processor_model() -> str | None:
    """Return the processor's name, or None if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


CODE = ("*.py", ":/benchmarks/*.py")
"""What git is asked for changes of: the package and the studies."""


def commit() -> tuple[str | None, str | None, bool | None]:
    """Return the checkout's (commit, its date, whether Python files differ from it).

    All three are None if the package does not run from a checkout of its own, for example where it
    is installed inside the checkout of another project.
    """
    if not _git("ls-files", "tools/bench/harness.py"):
        return None, None, None
    described = _git("show", "-s", "--format=%H %cs", "HEAD").split()
    is_modified = bool(_git("status", "--porcelain", "--untracked-files=no", "--", *CODE))
    return described[0], described[1], is_modified


def _git(*arguments: str) -> str:
    """Return what git prints in the package's folder, or "" if it fails or is not installed."""
    command = ["git", "-C", str(Path(__file__).parents[2]), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

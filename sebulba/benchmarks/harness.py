"""What every benchmark shares: interleaved repeats, a table, and a record of what ran where."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

PACKAGES = ("sebulba", "jax", "jaxlib", "flax", "envpool", "gymnasium", "numpy")


def interleave(cases: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure the cases in turn, A B C A B C ..., since machines drift.

    Args:
      cases: By name, what runs once and returns its figure.
      repeats: Rounds that count; one more goes before them, to compile and to warm up.

    Returns:
      The figures of each case, in the order of the rounds.
    """
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(repeats + 1):
        for name, run in cases.items():
            figure = run()
            if number:
                figures[name].append(figure)
    return figures


def ratio(figures: Mapping[str, list[float]], over: str, under: str) -> float:
    """Return the median of the ratios ``over / under``, round by round."""
    pairs = zip(figures[over], figures[under], strict=True)
    return statistics.median(a / b for a, b in pairs)


def print_table(
    title: str, unit: str, figures: Mapping[str, list[float]], notes: list[str]
) -> None:
    """Print median and spread of each case, then the notes."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("median", "lowest", "highest"):
        table.add_column(f"{column}, {unit}", justify="right")
    for name, values in figures.items():
        row = (statistics.median(values), min(values), max(values))
        table.add_row(
            name, *(f"{value:,.1f}" if value < 1000 else f"{value:,.0f}" for value in row)
        )
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note)


def record(keys: Mapping[str, Any], figures: Mapping[str, Any], config: Mapping[str, Any]) -> dict:
    """Return what a benchmark writes: its keys, all figures, configuration, machine, versions."""
    devices = jax.devices()
    return {
        **keys,
        "figures": dict(figures),
        "config": dict(config),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": platform.machine(),
            "devices": [device.device_kind for device in devices],
        },
        "versions": {name: _version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "commit": _commit(),
    }


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write a benchmark's record, if a path is given."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout that this runs from, None where there is none."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None

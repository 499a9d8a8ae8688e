"""What takes turns with our trainings: a table for each task, and the ratios."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sebulba.configs.presets import PRESETS
from sebulba.tools.bench import harness

Speeds = Mapping[str, list[float]]
"""Env steps a second, one a round, by who takes turns; ours is the first."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all have."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)


def tell(tasks: Iterable[str], measure: Callable[[str], Speeds], file: Path | None) -> None:
    """Measure the tasks, which are presets; print tables and ratios, and keep them."""
    keys: dict[str, float] = {}
    figures: dict[str, list[float]] = {}
    about: dict[str, Any] = {}
    for task in tasks:
        speeds = measure(task)
        harness.print_table(task, "env steps/s", speeds)
        first, *others = speeds
        keys |= {f"{task}, over {other}": harness.ratio(speeds, first, other) for other in others}
        figures |= {f"{task}, {name}": values for name, values in speeds.items()}
        about[task] = dataclasses.asdict(PRESETS[task].make())
    print(json.dumps(keys, indent=1))
    print({name: round(statistics.median(values)) for name, values in figures.items()})
    if file:
        harness.write_json(str(file), harness.record(keys, figures, about))

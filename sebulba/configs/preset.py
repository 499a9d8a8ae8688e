"""What a ready experiment is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sebulba.configs.experiment import ExperimentConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    """A ready experiment."""

    summary: str
    """What it is, in a line."""
    make: Callable[[], ExperimentConfig]
    """Makes its configuration."""
    goal: float | None = None
    """Mean return by which it is said to have learned; None where no such is known."""

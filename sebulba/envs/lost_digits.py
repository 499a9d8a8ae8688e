"""Whether float32 tells apart what an environment observes in float64."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

WATCHED_ROWS = 256
"""Observations of one environment that are looked at."""
WATCHED_COMPONENTS = 64
"""Of each array."""
FEWEST_VALUES = 8
"""Different values of a component, of which some may be lost."""


class LostDigits:
    """Keeps the first observations, then warns once if half of their values are lost."""

    def __init__(self, name: str) -> None:
        """Watch the environment ``name``."""
        self._name = name
        self._rows: list[list[np.ndarray]] | None = []

    @property
    def is_looking(self) -> bool:
        """Tell whether it wants more observations."""
        return self._rows is not None

    def look(self, obs: Any) -> None:
        """Look at an observation, an array or a dict of them, as the environment gives it."""
        if self._rows is None:
            return
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(obs)]
        row = [
            array.reshape(-1)[:WATCHED_COMPONENTS].copy()
            for array in arrays
            if array.dtype == np.float64
        ]
        if not row:
            self._rows = None
            return
        self._rows.append(row)
        if len(self._rows) == WATCHED_ROWS:
            rows, self._rows = self._rows, None
            self._tell([np.stack(columns) for columns in zip(*rows, strict=True)])

    def _tell(self, arrays: list[np.ndarray]) -> None:
        for values in arrays:
            for component, column in enumerate(values.T):
                number = len(np.unique(column))
                with np.errstate(over="ignore"):
                    left = len(np.unique(column.astype(np.float32)))
                if number >= FEWEST_VALUES and left <= number / 2:
                    warnings.warn(
                        f"environment {self._name!r}: component {component} of an observation, "
                        f"{column[0]!r} at first, had {number} different values in "
                        f"{len(column)} rows, and policies, which see float32, can tell {left} of "
                        "them apart; let it observe differences, such as the time since the "
                        "episode began",
                        stacklevel=2,
                    )
                    return

"""What a sweep searches: a JSON file of options and the values that each may take. Free of JAX.

``{"learning-rate": {"low": 1e-4, "high": 1e-2, "log": true}, "num-envs": [16, 32, 64]}``

The names are those of the options of ``sebulba train``, without the dashes. A list has the values
to choose from. A range whose ends are both integers holds integers; 1 is one and 1.0 is not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from sebulba.errors import UsageError, shown
from sebulba.support.files import read_json_object

Value: TypeAlias = bool | int | float | str
"""Of an option in a trial."""
KEYS = ("low", "high", "log", "step")
NOT_SEARCHED = (
    *("seed", "total-env-steps", "eval-every-env-steps", "name", "run-dir", "resume"),
    *("drop-replay", "strict", "trust"),
)
"""Options that are alike in all trials, which could not be compared otherwise, or that say where a
run is."""


class Choices(NamedTuple):
    """Values to choose from, without an order."""

    values: tuple[Value, ...]
    """All of them."""

    def ends(self) -> tuple[Value, ...]:
        """Return the values that have to be right for all others to be."""
        return self.values


class Range(NamedTuple):
    """Numbers between two ends, which belong to it."""

    low: float
    """Least value; with ``high`` an integer where all values are."""
    high: float
    """Largest value."""
    log: bool = False
    """Whether every factor is as likely as any other, rather than every difference."""
    step: float | None = None
    """Distance between values; None is 1 for integers and no limit for others."""

    def ends(self) -> tuple[Value, ...]:
        """Return the values that have to be right for all others to be."""
        return self.low, self.high

    @property
    def is_integer(self) -> bool:
        """Whether all values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Space: TypeAlias = Mapping[str, Choices | Range]
"""Values by option."""


def read_space(file: Path) -> dict[str, Choices | Range]:
    """Return what a file says is to be searched.

    Raises:
      UsageError: It is missing or damaged, or an entry is neither a list nor a range.
    """
    if not os.path.isfile(file):
        raise UsageError(
            f"--space {shown(str(file))} does not exist; write one, such as "
            '{"learning-rate": {"low": 1e-4, "high": 1e-2, "log": true}, "num-envs": [16, 32]}'
        )
    return space_of(read_json_object(file), str(file))


def space_of(record: Mapping[str, Any], file: str) -> dict[str, Choices | Range]:
    """Return what a JSON object says is to be searched.

    Raises:
      UsageError: It is empty, or an entry is neither a list nor a range.
    """
    if not record:
        raise UsageError(f"{file} names no option; name at least one, such as learning-rate")
    return {name: _domain(name, value, f"{file}: {name}") for name, value in record.items()}


def _domain(name: str, value: Any, where: str) -> Choices | Range:
    if name.startswith("-") or name.replace("_", "-") in NOT_SEARCHED:
        raise UsageError(
            f"{where} cannot be searched; name an option of sebulba train without its dashes, "
            f"except {', '.join(NOT_SEARCHED)}"
        )
    if isinstance(value, list):
        return _choices(value, where)
    if isinstance(value, dict):
        return _range(value, where)
    raise UsageError(
        f"{where} is {shown(value)}, which must be a list of values or a range; use "
        '[1, 2] or {"low": 0.1, "high": 1.0}'
    )


def _choices(values: list[Any], where: str) -> Choices:
    kinds = [type(value) for value in values]
    if not values or not all(kind in (bool, int, float, str) for kind in kinds):
        raise UsageError(
            f"{where} is {shown(values)}, which must be a list of numbers, words, true or false, "
            "with at least one value"
        )
    if len({repr(value) for value in values}) < len(values):
        raise UsageError(f"{where} is {shown(values)}, which has a value twice; leave one out")
    return Choices(tuple(values))


def _range(record: Mapping[str, Any], where: str) -> Range:
    if unknown := sorted(set(record) - set(KEYS)):
        raise UsageError(f"{where} has the unknown key {unknown[0]!r}; use {', '.join(KEYS)}")
    for key in ("low", "high", *(("step",) if "step" in record else ())):
        number: Any = record.get(key)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not (is_number and math.isfinite(number)):
            raise UsageError(f"{where}: {key}={shown(number)} must be a finite number; give one")
    log = record.get("log", False)
    if not isinstance(log, bool):
        raise UsageError(f"{where}: log={shown(log)} must be true or false")
    found = Range(record["low"], record["high"], log, record.get("step"))
    _check_range(found, where)
    return found


def _check_range(found: Range, where: str) -> None:
    if not found.low < found.high:
        raise UsageError(f"{where}: low={found.low} must be less than high={found.high}")
    if found.log and (found.low <= 0 or found.step is not None):
        raise UsageError(
            f"{where}: a range with log=true must begin above 0 (low={found.low}) and have no step"
        )
    if found.step is not None and (
        found.step <= 0 or (found.is_integer and not isinstance(found.step, int))
    ):
        raise UsageError(
            f"{where}: step={found.step} must be above 0, and an integer where both ends are"
        )

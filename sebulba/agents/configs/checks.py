"""Checks of configurations: an error has the name, the value, the rule and a remedy."""

from __future__ import annotations

import math
from typing import Any

from sebulba.errors import UsageError, shown


def require(ok: bool, name: str, value: Any, rule: str, remedy: str) -> None:
    if not ok:
        raise UsageError(f"{name}={shown(value)} {rule}; {remedy}")


def require_number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    bound = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
    require(ok, name, value, f"must be a number {bound}", remedy)


def require_positive(name: str, value: Any, remedy: str) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    require(ok, name, value, "must be a positive number", remedy)


def require_size(name: str, value: Any, low: int, remedy: str) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
    require(ok, name, value, f"must be a whole number of at least {low}", remedy)


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    require(value in choices, name, value, "is not known", f"use one of {', '.join(choices)}")

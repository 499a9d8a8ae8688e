"""How often a fault is injected: a few times in every run of the tests, many times now and then."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
LONG = "SEBULBA_LONG_FAULTS"
"""Environment variable that asks for the long counts, as ``make test-faults`` does."""

asked: list[int] = []
"""What ``rounds`` returned since a test began."""


def is_long() -> bool:
    """Tell whether the long counts are asked for."""
    return bool(os.environ.get(LONG))


def rounds(short: T, long: T) -> T:
    """Return ``short``, or ``long`` where the long counts are asked for."""
    asked.append(long if is_long() else short)
    return asked[-1]

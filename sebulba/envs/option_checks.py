"""Checks of the names and values of options."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from sebulba.errors import UsageError
from sebulba.support.checks import nearest


def check_option_names(options: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise UsageError for an option that ``what`` does not have."""
    for name in options:
        if name not in known:
            hint = nearest(name, known) or f"; it has {', '.join(sorted(known)) or 'none'}"
            raise UsageError(f"{what} has no option {name!r}{hint}")


def check_number(
    where: str,
    value: Any,
    *,
    default: float,
    is_int: bool = True,
    smallest: float | None = None,
    largest: float | None = None,
) -> None:
    """Raise UsageError unless ``value`` is a number of the right kind and size.

    Args:
      where: Name and value, with which the message begins.
      value: Value to check.
      default: Default that the message names as the remedy.
      is_int: It must be an int of 32 bits (a bool is none); otherwise any finite number.
      smallest: Smallest allowed value; None for no bound.
      largest: Largest allowed value; None for no bound.
    """
    kind = "an integer" if is_int else "a finite number"
    allowed = (int, np.integer) if is_int else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, allowed) or not _is_finite(value):
        raise UsageError(f"{where} must be {kind}; the default is {default!r}")
    if is_int:
        smallest = -(2**31) if smallest is None else smallest
        largest = 2**31 - 1 if largest is None else largest
    if smallest is not None and value < smallest:
        raise UsageError(f"{where} must be at least {smallest}; the default is {default!r}")
    if largest is not None and value > largest:
        raise UsageError(f"{where} must be at most {largest}; the default is {default!r}")


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return True

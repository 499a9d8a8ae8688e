"""Checks of the names and values of options."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from sebulba.errors import UsageError, shown
from sebulba.support.checks import nearest


def check_option_names(options: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise UsageError for an option that ``what`` does not have."""
    for name in options:
        if name not in known:
            hint = nearest(name, known) or f"; it has {', '.join(sorted(known)) or 'none'}"
            raise UsageError(f"{what} has no option {name!r}{hint}")


def check_number(
    name: str,
    value: Any,
    *,
    default: float,
    of: str = "",
    is_int: bool = True,
    smallest: float | None = None,
    largest: float | None = None,
) -> None:
    """Raise UsageError unless ``value`` is a number of the right kind and size.

    Args:
      name: Name of the option, with which the message begins.
      value: Value to check.
      default: Default that the message names as the remedy.
      of: What has the option, for the message.
      is_int: It must be an int of 32 bits (a bool is none); otherwise any finite number.
      smallest: Smallest allowed value; None for no bound.
      largest: Largest allowed value; None for no bound.
    """
    where = _named(name, value, of)
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


def check_like(
    name: str, value: Any, default: Any, of: str, *, smallest: Any = None, largest: Any = None
) -> None:
    """Raise UsageError unless ``value`` is of the kind of ``default``; see ``check_number``."""
    if isinstance(default, int | float) and not isinstance(default, bool):
        is_int, bounds = isinstance(default, int), {"smallest": smallest, "largest": largest}
        check_number(name, value, default=default, of=of, is_int=is_int, **bounds)
    elif not isinstance(value, type(default)) and not isinstance(default, list | tuple | dict):
        kind = "True or False" if isinstance(default, bool) else f"a {type(default).__name__}"
        raise UsageError(f"{_named(name, value, of)} must be {kind}; the default is {default!r}")


def _named(name: str, value: Any, of: str) -> str:
    return f"option {name}={shown(value)} of {of}" if of else f"{name}={shown(value)}"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return True

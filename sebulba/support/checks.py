"""Rules that arguments and the fields of configurations are held to. Free of JAX.

Each raises a UsageError with the name, the value, the rule and a remedy. Python does not hold
anyone to type hints, and a value of the wrong type fails far from where it was written.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Iterable
from typing import Any

from sebulba.errors import UsageError, shown

LARGEST_INT = 2**53
"""Beyond this no count of anything is meant, and floats cannot tell integers apart."""


def require(ok: bool, name: str, value: Any, rule: str, remedy: str) -> None:
    """Raise UsageError, ``name=value rule; remedy``, unless ``ok``."""
    if not ok:
        raise UsageError(f"{name}={shown(value)} {rule}; {remedy}")


def require_number(name: str, value: float, low: float, high: float, remedy: str) -> None:
    """Raise UsageError unless ``value`` is from ``low`` to ``high``; NaN is not."""
    bound = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
    require(low <= value <= high, name, value, f"must be a number {bound}", remedy)


def require_positive(name: str, value: float, remedy: str) -> None:
    """Raise UsageError unless ``value`` is above 0 and finite."""
    require(0 < value < math.inf, name, value, "must be a positive number", remedy)


def require_size(name: str, value: int, low: int, remedy: str) -> None:
    """Raise UsageError unless ``value`` is at least ``low``."""
    require(value >= low, name, value, f"must be a whole number of at least {low}", remedy)


def check_positive(config: Any, *names: str, prefix: str = "") -> None:
    """Raise UsageError for the first of these fields of a dataclass that is not positive."""
    for name in names:
        remedy = f"use {getattr(type(config), name)}"
        require_positive(prefix + name, getattr(config, name), remedy)


def check_ranges(config: Any, prefix: str = "", **ranges: tuple[float, float] | int) -> None:
    """Raise UsageError for the first field of a dataclass that is out of its range.

    Args:
      config: The dataclass; the remedy is its default.
      prefix: Before the name of a field, in messages.
      **ranges: Least and greatest number of a field, or the least of a whole number.
    """
    for name, limits in ranges.items():
        value, remedy = getattr(config, name), f"use {getattr(type(config), name)}"
        if isinstance(limits, tuple):
            require_number(prefix + name, value, *limits, remedy)
        else:
            require_size(prefix + name, value, limits, remedy)


def check_divisible(name: str, value: int, divisor: int, what: str) -> None:
    """Raise UsageError unless ``value`` divides evenly by ``divisor``, which is ``what``."""
    if value % divisor:
        below = value // divisor * divisor
        fits = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise UsageError(f"{name}={value} must be divisible by {what}; use {fits}")


def at_least(least: int, name: str, value: float | None) -> None:
    """Raise UsageError if ``value`` is below ``least``, or NaN; None is not."""
    if value is not None and not value >= least:
        raise UsageError(f"{name}={shown(value)} must be at least {least}; use {least} or more")


def at_most(most: int, name: str, value: int) -> None:
    """Raise UsageError if ``value`` is above ``most``."""
    if value > most:
        raise UsageError(f"{name}={shown(value)} must be at most {most}; use {most} or less")


def check_count(name: str, value: Any, most: int = LARGEST_INT) -> None:
    """Raise UsageError unless ``value`` is an int from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name}={shown(value)} must be an int; got a {type(value).__name__}")
    at_least(1, name, value)
    at_most(most, name, value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; the nearest are A, B"``, or nothing if none is near."""
    by_lower: dict[str, str] = {}
    for one in known:
        by_lower.setdefault(one.lower(), one)
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f"; the nearest are {', '.join(by_lower[one] for one in near)}" if near else ""


def check_types(config: Any, prefix: str = "", *, open_fields: Collection[str] = ()) -> None:
    """Raise UsageError for the first field of a dataclass that is not of its declared type.

    An int will do for a float, a bool for no number. Integers are at most ``LARGEST_INT``.

    Args:
      prefix: Before the name of a field, in messages.
      open_fields: Those that take more than their hint says.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if field.name not in open_fields and not _fits(value, hint):
            raise UsageError(
                f"{prefix}{field.name}={shown(value)} must be {_words(hint)}; use {_remedy(field)}"
            )


def _hints(cls: type, known: dict[type, dict[str, Any]] = {}) -> dict[str, Any]:  # noqa: B006
    if cls not in known:  # evaluating them is slow
        known[cls] = typing.get_type_hints(cls)
    return known[cls]


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return any(isinstance(value, type(one)) and value == one for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items()
        )
    if hint in (int, float) and isinstance(value, int):
        is_count = hint is float or abs(value) <= LARGEST_INT
        return not isinstance(value, bool) and is_count
    return isinstance(value, type(None) if hint is None else hint)


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def _words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        comma = ", or " if any(typing.get_origin(one) is tuple for one in arguments) else " or "
        return comma.join(_words(one) for one in arguments)
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        return f"a tuple, each of it {_words(arguments[0])}"
    if origin is dict:
        return f"a dict of names and {_words(arguments[1])}"
    if hint is type(None):
        return "None"
    return _WORDS.get(hint, f"a {getattr(hint, '__name__', hint)}")


def _remedy(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"for example {shown(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"for example {shown(field.default_factory())}"
    return "one of that type"

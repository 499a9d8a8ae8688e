"""Configurations whose fields have the types that they are declared with; free of JAX.

Python does not hold anyone to type hints, and what has the wrong type fails far from where it was
written.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection
from typing import Any

from sebulba.errors import UsageError, shown

LARGEST_INT = 2**53
"""Beyond this no count of anything is meant, and floats cannot tell integers apart."""


def check_types(config: Any, prefix: str = "", *, open_fields: Collection[str] = ()) -> None:
    """Raise UsageError for the first field of a dataclass that is not of its declared type.

    An int will do for a float, a bool for no number. Integers are at most ``LARGEST_INT``.

    Args:
      config: The dataclass.
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
        return any(type(value) is type(one) and value == one for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items()
        )
    if hint in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= LARGEST_INT
    return isinstance(value, type(None) if hint is None else hint)


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def _words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(one) for one in arguments)
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple:
        return f"a tuple of {_words(arguments[0])} each"
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

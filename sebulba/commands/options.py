"""Options of a command line as tyro reads them."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from typing import Annotated, Any

import docstring_parser
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from sebulba.errors import UsageError

ENV_OPTIONS = "--env.options"
NO_OPTIONS = ("agent_class",)
"""Fields that have another spelling on the command line."""

registry = ConstructorRegistry()
"""How tyro reads dataclasses: with help that flows over the width of the terminal."""


@registry.struct_rule
def dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Return the fields of a dataclass, the docstring of each without the source's line breaks."""
    if not dataclasses.is_dataclass(info.type) or not dataclasses.is_dataclass(info.default):
        return None
    hints = typing.get_type_hints(info.type)
    texts = _field_docstrings(info.type)

    def field_spec(name: str) -> StructFieldSpec:
        value = getattr(info.default, name)
        # An agent of one's own may have hyper-parameters of any class.
        hint: Any = type(value) if dataclasses.is_dataclass(value) else hints[name]
        if name in NO_OPTIONS:
            hint = Annotated[hint, tyro.conf.Fixed, tyro.conf.Suppress]
        return StructFieldSpec(name, hint, value, texts.get(name, ""))

    names = [field.name for field in dataclasses.fields(info.type) if field.init]
    return StructConstructorSpec(info.type, tuple(map(field_spec, names)))


def _field_docstrings(cls: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        for param in docstring_parser.parse_from_object(base).params:
            texts[param.arg_name] = " ".join((param.description or "").split())
    return texts


def gather_env_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Take the options of the environment out of ``words``, however they are written.

    Args:
      words: Among them ``--env.options NAME VALUE NAME VALUE``, ``--env.options.NAME VALUE`` and
        ``--env.options.NAME=VALUE``.

    Returns:
      The other words; and names and values, in turns.

    Raises:
      UsageError: A name has no value.
    """
    others: list[str] = []
    pairs: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        if option == ENV_OPTIONS and not equals:
            given = list(itertools.takewhile(lambda word: not word.startswith("--"), left))
            del left[: len(given)]
            pairs += given
        elif option.startswith(f"{ENV_OPTIONS}."):
            if not equals and (not left or left[0].startswith("--")):
                raise UsageError(f"{option} needs a value; use {option} VALUE")
            name = option.removeprefix(f"{ENV_OPTIONS}.").replace("-", "_")
            pairs += [name, value if equals else left.pop(0)]
        else:
            others.append(word)
    return others, pairs

"""Options that several commands take, and how the words of a command are read. Free of JAX."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from sebulba.support.files import check_folder_of

Option = tuple[str, dict[str, Any]]
"""Name of an argument, and the keywords of ``add_argument``."""


def option(name: str, what: str | None = None, **keywords: Any) -> Option:
    """Return an argument; ``what`` is its help."""
    return name, {"help": what, **keywords}


def flag(name: str, what: str) -> Option:
    """Return an option without a value."""
    return option(name, what, action="store_true")


def number(name: str, default: float, what: str = "", **keywords: Any) -> Option:
    """Return an option for a number, N or X; its help ends with the default."""
    what = f"{what}; default: %(default)s" if what else "default: %(default)s"
    kind = type(default)
    keywords = {"metavar": "N" if kind is int else "X", **keywords}
    return option(name, what, type=kind, default=default, **keywords)


def json_of(what: str) -> Option:
    """Return the option that writes ``what`` to a file of JSON, too."""
    return option("--json", f"also write {what} to FILE", metavar="FILE")


BEST = flag("--best", "the policy with the highest evaluation return, not the last one")
TRUST = flag("--trust", "run the code that an untrusted run names")
PLATFORM = option("--platform", "platform of JAX", choices=("cpu", "cuda", "tpu"))


def parse(
    command: str, description: str, argv: Sequence[str], options: Iterable[Option]
) -> argparse.Namespace:
    """Return the values of the words of a command.

    Raises:
      UsageError: The file of ``--json`` is in a folder that does not exist.
      SystemExit: argparse has printed what is wrong, or the help.
    """
    parser = argparse.ArgumentParser(prog=f"sebulba {command}", description=description)
    for name, keywords in options:
        parser.add_argument(name, **keywords)
    arguments = parser.parse_args(argv)
    check_folder_of(getattr(arguments, "json", None), "--json")
    return arguments

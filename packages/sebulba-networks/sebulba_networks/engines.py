"""Engines by name: the native one, and those that other distributions bring."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

from sebulba.errors import UsageError, shown
from sebulba.support.checks import nearest

NATIVE = "native"
GROUP = "sebulba.network_engines"
"""Entry points of this group are functions that return the library of an engine, which has the C
ABI of ``engine/abi.h``; they compile it at its first use, and raise UsageError if they cannot."""


def engine_names() -> list[str]:
    """Return the names of the engines that are installed."""
    return [NATIVE, *sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})]


def find_engine(name: str) -> Callable[[], Path]:
    """Return what returns the library of an engine that is not the native one.

    Raises:
      UsageError: There is none of that name.
    """
    found = importlib.metadata.entry_points(group=GROUP, name=name)
    for entry in found:
        return entry.load()
    names = engine_names()
    hint = nearest(name, names) or f"; there is {', '.join(names)}"
    if name == "ns3":
        hint = "; `pip install ./packages/sebulba-ns3` in a checkout of sebulba installs it"
    raise UsageError(f"engine={shown(name)} is not installed{hint}")

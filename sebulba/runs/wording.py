"""How notes of a run name options: as keywords where the run was begun from Python."""

from __future__ import annotations

import contextlib
import contextvars
import shlex
from collections.abc import Iterator
from pathlib import Path

_in_python = contextvars.ContextVar("in_python", default=False)


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Name keywords within this, and not options of the command line."""
    token = _in_python.set(True)
    try:
        yield
    finally:
        _in_python.reset(token)


def setting(name: str, value: str | bool) -> str:
    """Return how a user gives a field a value: ``--num-envs N``, or ``num_envs=N``.

    Args:
      name: Of a field of ``ExperimentConfig``; dots lead to fields of a field.
      value: It, or a word that stands for it.
    """
    if _in_python.get():
        first, *inner = name.split(".")
        for one in reversed(inner):
            value = f'{{"{one}": {value}}}'
        return f"{first}={value}"
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value}"


def resuming(folder: Path) -> str:
    """Return how a user resumes the run in ``folder``."""
    if _in_python.get():
        return f'sebulba.resume("{folder}")'
    return f"sebulba resume {shlex.quote(str(folder))}"

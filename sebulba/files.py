"""Reads JSON files, and writes files and folders that are whole even if the process is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sebulba.errors import UsageError

PARTIAL = ".partial-"
"""Prefix of the name of a file or folder that is being written; nothing ever reads such a one."""


def check_regular(file: Path, *, links: bool = True) -> None:
    """Raise UsageError if a file is a pipe or a device, reading which might never end.

    Args:
      file: It need not exist.
      links: Let it be a link, which may lead anywhere.
    """
    if not links and file.is_symlink():
        raise UsageError(f"{file} is a link, which no run makes; put the file itself there")
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} is not a regular file; give the folder of a run")


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run.

    Raises:
      UsageError: The file is missing or damaged.
    """
    check_regular(file)
    try:
        record = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror}); give the folder of a run, such as runs/NAME"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is damaged ({error}); restore it or train again") from error
    if not isinstance(record, dict):
        raise UsageError(f"{file} is damaged (not a JSON object); restore it or train again")
    return record


def write_whole(file: Path, text: str) -> None:
    """Write a file such that it is never there in part, even if the process is killed."""
    partial = file.with_name(f"{PARTIAL}{file.name}")
    with open(partial, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)


def dataclass_from_json(cls: type, fields: Mapping[str, Any]) -> Any:
    """Rebuild a dataclass from ``dataclasses.asdict`` after a trip through JSON."""
    hints = typing.get_type_hints(cls)

    def restore(hint: Any, value: Any) -> Any:
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
            return dataclass_from_json(hint, value)
        # A list was a tuple: JSON has no tuples, and frozen configurations have no lists.
        return tuple(restore(None, item) for item in value) if isinstance(value, list) else value

    return cls(**{name: restore(hints[name], value) for name, value in fields.items()})


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` make a folder, which then takes the place of ``folder``.

    Args:
      folder: The folder to replace; it need not exist yet.
      write: Makes and fills the folder at the path it is given; if it raises, ``folder`` stays.
    """
    new, old = folder.with_name(f"{PARTIAL}{folder.name}"), _aside(folder)
    shutil.rmtree(new, ignore_errors=True)
    try:
        write(new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def put_right(folder: Path) -> None:
    """Put the old ``folder`` back if ``replace_folder`` was killed after moving it aside."""
    if _aside(folder).exists() and not folder.exists():
        _aside(folder).rename(folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{PARTIAL}old-{folder.name}")

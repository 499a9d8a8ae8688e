"""Folders in a run that are replaced as a whole, even if the process is killed meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

PARTIAL = ".partial-"
"""Begins the name of what is being written; nothing ever reads it."""


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` make a folder, which then takes the place of ``folder``.

    Args:
      folder: There already, or not.
      write: Makes and fills the folder that it is given; what it raises leaves ``folder`` alone.
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
    """Put ``folder`` back if ``replace_folder`` was killed between taking and replacing it."""
    if _aside(folder).exists() and not folder.exists():
        _aside(folder).rename(folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{PARTIAL}old-{folder.name}")

"""The runs of a folder, read again only where their files have changed. Free of JAX."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sebulba.errors import UsageError
from sebulba.runs.folder import BEST_RETURN_FILE
from sebulba.runs.summary import RunSummary, is_locked, read_run, runs_in
from sebulba_board.records import read_newest

STAMPED = (
    *("config.json", "metrics.jsonl", "ended.txt", "checkpoints", "policy", "best_policy"),
    *(f"best_policy/{BEST_RETURN_FILE}", "last_transition.npz", "videos", "video.mp4"),
)
"""Files of a run by whose times and sizes it is seen that it has changed."""
MOST_PAGES = 50
"""Pages that are kept."""
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")

Stamp = tuple[Any, ...]
"""Differs from an earlier one where a run has changed."""


class Shelf:
    """The runs directly in one folder; whatever else is asked for, there is none."""

    def __init__(self, root: Path) -> None:
        """Look at ``root``, which exists."""
        self._root = root.resolve()
        self._rows: dict[tuple[Path, Stamp], RunSummary | UsageError] = {}  # as shown last
        self._page = functools.lru_cache(MOST_PAGES)(_made)

    def runs(self) -> dict[str, Path]:
        """Return the run folders by the words that name them in addresses."""
        return {word_of(folder.name): folder for folder in runs_in(self._root)}

    def folder(self, word: str) -> Path | None:
        """Return the run folder of a word; None if there is none, or it leads out of ours."""
        folder = self.runs().get(word)
        is_inside = folder is not None and folder.resolve().is_relative_to(self._root)
        return folder if is_inside else None

    def table(self) -> dict[str, RunSummary | UsageError]:
        """Return every run, or why it is not shown, by its word; the newest first."""
        keys = {word: (folder, self._stamp(folder)) for word, folder in self.runs().items()}
        self._rows = rows = {k: self._rows.get(k) or self._read(k[0]) for k in keys.values()}
        found = {word: rows[key] for word, key in keys.items()}
        return dict(sorted(found.items(), key=lambda item: _changed(item[1]), reverse=True))

    def page(self, make: Callable[..., str], folders: tuple[Path, ...]) -> str:
        """Return ``make(*folders)``, or what it returned before these runs changed.

        Raises:
          UsageError: A run leads out of the folder, or cannot be read.
        """
        for folder in folders:
            self._check_inside(folder)
        return self._page(make, folders, tuple(map(self._stamp, folders)))

    def _read(self, folder: Path) -> RunSummary | UsageError:
        try:
            self._check_inside(folder)
            return read_run(folder, read_newest)
        except UsageError as error:
            return error

    def _check_inside(self, folder: Path) -> None:
        """Raise UsageError if a run folder is a link that leads out of the folder."""
        if not folder.resolve().is_relative_to(self._root):
            raise UsageError(f"{folder} is a link that leads out of {self._root}; it is not read")

    def _stamp(self, folder: Path) -> Stamp:
        times = tuple(map(_time_and_size, (folder / name for name in STAMPED)))
        has_ended = times[STAMPED.index("ended.txt")] is not None
        return (*times, not has_ended and is_locked(folder))


def _made(make: Callable[..., str], folders: tuple[Path, ...], stamps: tuple[Stamp, ...]) -> str:
    del stamps
    return make(*folders)


def word_of(name: str) -> str:
    """Return what a folder is called in addresses: its name, or ``~`` and a hash if it is odd."""
    if _PLAIN.fullmatch(name):
        return name
    return f"~{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


def _changed(run: RunSummary | UsageError) -> float:
    return run.changed.timestamp() if isinstance(run, RunSummary) else 0.0


def _time_and_size(file: Path) -> tuple[int, int, int] | None:
    try:
        seen = os.lstat(file)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino

"""How far an evaluation, or a film, is, for people who wait for it."""

from __future__ import annotations

import contextlib
import time
from typing import IO

from sebulba.metrics.writers import duration


class EpisodeProgress:
    """Says now and then how far episodes are: in one line of a terminal, else line by line."""

    TERMINAL_S, LINES_S = 0.5, 10.0
    """Seconds between two signs, on a terminal and elsewhere; there is none before the first."""

    def __init__(self, num_episodes: int, stream: IO[str] | None) -> None:
        """Begin; nothing is written yet.

        Args:
          num_episodes: How many will be played.
          stream: Where to write; None, as ``sys.stderr`` may be, writes nothing.
        """
        self._num_episodes = num_episodes
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        self._every_s = self.TERMINAL_S if self._is_terminal else self.LINES_S
        self._began = time.monotonic()
        self._due = self._began + self._every_s
        self._width = 0
        """Characters in the line of the terminal."""

    def __call__(self, num_done: int, longest: int) -> None:
        """Write, if it is time, how many episodes are done and the steps of the longest."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        line = (
            f"{num_done} of {self._num_episodes} episodes done, the longest that runs has "
            f"{longest:,} steps, {duration(now - self._began)}"
        )
        self._write(f"\r{line:<{self._width}}" if self._is_terminal else f"{line}\n")
        self._width = len(line)

    def __enter__(self) -> EpisodeProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the line from the terminal, also where an error will be written."""
        if self._is_terminal and self._width:
            self._write(f"\r{'':<{self._width}}\r")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            self._stream.write(text)
            self._stream.flush()

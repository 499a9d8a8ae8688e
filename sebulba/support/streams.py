"""Standard output and error that cannot end a command: closed, broken, full, or not Unicode."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

STDOUT, STDERR = 1, 2


_notice: Callable[[str], None] | None = None
"""Shows a notice in the panel that has the terminal; None while there is none."""


def show_notices_by(panel: Callable[[str], None] | None) -> None:
    """Let ``notify`` give its words to a panel that redraws itself on the terminal, or to none."""
    global _notice
    _notice = panel


def notify(words: str) -> None:
    """Say something at once, also from a signal handler, which may have interrupted a print.

    A panel would be torn by a line on its terminal, so it shows the words itself.
    """
    if _notice is not None:
        _notice(words)
        if os.isatty(STDERR):
            return
    with contextlib.suppress(OSError):
        os.write(STDERR, f"sebulba: {words}\n".encode())


class Output(io.FileIO):
    """A descriptor to which writing never fails: from the first failure on, all is dropped."""

    failure: OSError | None = None
    """The first failure."""
    says_so = False
    """Say on standard error that something is lost."""

    def write(self, data: Any) -> int:
        """Write, or drop what cannot be written any more."""
        try:
            while (written := super().write(data)) is None:  # a full pipe that does not block
                select.select((), (self,), ())
            return written
        except OSError as error:
            self.failure = error
            with contextlib.suppress(OSError):  # of a process with too many open files
                _open_null(self.fileno())
            if self.is_lost and self.says_so:
                words = f"sebulba: standard output is lost from here on: {error.strerror}\n"
                with contextlib.suppress(OSError):
                    os.write(STDERR, words.encode())
            return len(data)

    @property
    def is_lost(self) -> bool:
        """Something was dropped, and not because the reader wanted no more of it."""
        return self.failure is not None and self.failure.errno != errno.EPIPE


def make_streams_safe(*, says_so: bool = True) -> Output:
    """Replace the standard streams by some to which every text can be written at any time.

    A closed one is opened on the null device, also because the next file that is opened would take
    its number. What an encoding does not have is written as an escape, such as ``\\xe4``.

    Args:
      says_so: Say on standard error that standard output cannot be written.

    Returns:
      What is below ``sys.stdout``.
    """
    for descriptor in (0, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            _open_null(descriptor)
    stdout = Output(STDOUT, "w", closefd=False)
    stdout.says_so = says_so
    sys.stdout = _text(stdout, sys.stdout)
    sys.stderr = _text(Output(STDERR, "w", closefd=False), sys.stderr)
    return stdout


def _open_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    os.set_inheritable(descriptor, True)


class _Text(io.TextIOWrapper):
    """A text stream that nobody can close, such as an environment that closes ``sys.stdout``."""

    def close(self) -> None:
        """Write what is still to be written."""
        self.flush()


def _text(output: Output, before: Any) -> TextIO:
    """Return a text stream in the manner of the one before, which is None if it was closed."""
    at_once = getattr(before, "write_through", False)
    return _Text(
        output if at_once else io.BufferedWriter(output),  # type: ignore[arg-type]
        encoding=getattr(before, "encoding", None),
        errors="backslashreplace",
        line_buffering=getattr(before, "line_buffering", True),
        write_through=at_once,
    )

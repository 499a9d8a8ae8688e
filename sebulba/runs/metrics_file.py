"""Reads a ``metrics.jsonl`` of any size, whoever wrote it, in bounded memory. Free of JAX."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

from sebulba.errors import UsageError
from sebulba.metrics.plots import read_records, record_of
from sebulba.support.files import check_regular

MOST_LINE_BYTES = 2**18
"""Bytes of a line that is read; those of a run have about two thousand."""
MOST_BYTES = 2**30
"""Bytes of a file that are looked at, the last ones: a day of a run has some 35 MB."""
BUFFER_BYTES = 2**20
"""Bytes that are read at once."""
TAIL_BYTES = 2**16
"""Bytes at the end of a file that hold the newest records."""
MOST_NEWEST = 8
"""Of them that are read."""
MOST_NUMBER = 1e30
"""Size of a number that is shown or drawn."""
EVALUATED = b'"eval_return_mean": '
"""What lines of records with an evaluation contain."""


class Metrics(NamedTuple):
    """What was read of a ``metrics.jsonl``."""

    records: list[dict[str, Any]]
    """Records in the order of the file."""
    num_damaged: int = 0
    """Lines among those read that are no records."""
    is_sample: bool = False
    """Whether there are more records in the file."""


def is_number(value: Any) -> TypeGuard[float]:
    """Tell whether a value of a record is a number that can be shown: finite, at most 1e30."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= MOST_NUMBER  # False for NaN, too


def open_regular(file: Path) -> IO[bytes]:
    """Open a file of a run for reading.

    Raises:
      UsageError: It is a link, a pipe or a device, or cannot be read.
    """
    try:
        # Without O_NONBLOCK to open a pipe waits for somebody who writes into it.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror}); a run writes a file, not a link"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{file} is not a regular file; give the folder of a run")
    return open(descriptor, "rb", buffering=BUFFER_BYTES)


def read_all(file: Path) -> Metrics:
    """Return all records of a ``metrics.jsonl``, with a warning of damaged lines."""
    check_regular(file, links=False)
    return Metrics(read_records(file))


def read_newest(file: Path) -> Metrics:
    """Return the newest records of a ``metrics.jsonl``, at most ``MOST_NEWEST``."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        begin = max(0, size - TAIL_BYTES)
        opened.seek(begin)
        lines = opened.read(TAIL_BYTES).split(b"\n")
    lines = lines[1 if begin else 0 : -1]  # half a line at either end
    found = [record_of(line) for line in lines[-MOST_NEWEST:] if line]
    return _metrics(found, begin > 0 or len(lines) > MOST_NEWEST)


def read_sample(file: Path, most: int) -> Metrics:
    """Return about ``most`` records, evenly over the file, its last one and all evaluations.

    Args:
      file: A ``metrics.jsonl``; an incomplete last line is ignored.
      most: How many of the records without an evaluation, and how many with one.
    """
    found: list[dict[str, Any] | None] = []
    num_evaluated, left_out = 0, b""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        due = begin = max(0, size - MOST_BYTES)
        opened.seek(begin)
        is_sample = begin > 0
        for position, line in _lines(opened):
            is_evaluated = EVALUATED in line and EVALUATED + b"null" not in line
            num_evaluated += is_evaluated
            if position >= due:
                due += (size - begin) // most
            elif not is_evaluated or num_evaluated > most:
                is_sample, left_out = True, line
                continue
            found.append(record_of(line))
            left_out = b""
    return _metrics([*found, *([record_of(left_out)] if left_out else [])], is_sample)


def _metrics(found: list[dict[str, Any] | None], is_sample: bool) -> Metrics:
    records = [record for record in found if record is not None]
    return Metrics(records, len(found) - len(records), is_sample)


def _lines(opened: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each whole line with where it begins; of one that is too long, pieces of it."""
    position = opened.tell()
    while (line := opened.readline(MOST_LINE_BYTES)) and (
        line.endswith(b"\n") or len(line) == MOST_LINE_BYTES
    ):
        if line != b"\n":
            yield position, line
        position += len(line)

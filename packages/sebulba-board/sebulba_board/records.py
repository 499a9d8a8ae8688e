"""Reads a part of a ``metrics.jsonl`` of any size, whoever wrote it, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sebulba.metrics.plots import record_of
from sebulba.runs.metrics_file import Metrics, open_regular

MOST_LINE_BYTES = 2**18
"""Bytes of a line that is read; those of a run have about two thousand."""
MOST_BYTES = 2**30
"""Bytes of a file that are looked at, the last ones: a day of a run has some 35 MB."""
TAIL_BYTES = 2**16
"""Bytes at the end of a file that hold the newest records."""
MOST_NEWEST = 8
"""Of them that are read."""
EVALUATED = b'"eval_return_mean": '
"""What lines of records with an evaluation contain."""


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

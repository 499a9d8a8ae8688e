"""Reads the ``metrics.jsonl`` of a run, whoever wrote it. Free of JAX."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

from sebulba.errors import UsageError, refusing
from sebulba.metrics.plots import read_records
from sebulba.support.files import check_regular

BUFFER_BYTES = 2**20
"""Bytes that are read at once."""
MOST_NUMBER = 1e30
"""Size of a number that is shown or drawn."""


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
    with refusing(f"{file} cannot be read", "a run writes a file, not a link"):
        # Without O_NONBLOCK to open a pipe waits for somebody who writes into it.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{file} is not a regular file; give the folder of a run")
    return open(descriptor, "rb", buffering=BUFFER_BYTES)


def read_all(file: Path) -> Metrics:
    """Return all records of a ``metrics.jsonl``, with a warning of damaged lines."""
    check_regular(file, links=False)
    return Metrics(read_records(file))

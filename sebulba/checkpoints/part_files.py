"""The content of one checkpoint: writes its parts to the disk, and reads them back."""

from __future__ import annotations

import hashlib
import json
import os
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sebulba.checkpoints.arrays import read_arrays, write_arrays
from sebulba.checkpoints.manifest import (
    DamageError,
    Manifest,
    UnreadableError,
    describe_files,
    write_manifest,
)
from sebulba.errors import CheckpointError

RECORD_FILE = "record.json"
ARRAYS_FOLDER = "arrays"
BLOBS_FOLDER = "blobs"


class Snapshot(NamedTuple):
    """Everything that training needs to go on, as plain data on the host."""

    record: Mapping[str, Any]
    """What JSON can hold: counters, versions, the configuration. Tuples come back as lists, and
    keys as strings."""
    arrays: Mapping[str, np.ndarray]
    """By name, such as ``networks/params/Dense_0/kernel``. Any shape, also ``()`` or empty; dtypes
    are booleans, numbers of up to 8 bytes (complex: 16) and those of ml_dtypes, such as bfloat16.
    Nobody may write to them until they are saved."""
    blobs: Mapping[str, bytes] = types.MappingProxyType({})
    """Bytes by name that only their maker can read, such as pickled environments."""


def write_parts(
    folder: Path, number: int, snapshot: Snapshot, score: float | None, *, by_orbax: bool = True
) -> None:
    """Write a snapshot into the new ``folder``, and its manifest last.

    ``by_orbax`` is as for ``write_arrays``.

    Raises:
      CheckpointError: The snapshot has a record or an array that cannot be saved.
      Exception: An OSError, or whatever orbax raises instead of it.
    """
    try:
        record = json.dumps(dict(snapshot.record), indent=1)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {number} cannot be saved: its record is not JSON ({error}); `about` must "
            "return only what JSON can hold"
        ) from error
    (folder / RECORD_FILE).write_text(record + "\n")
    (folder / BLOBS_FOLDER).mkdir()
    blobs = {name: f"{BLOBS_FOLDER}/{i:06d}" for i, name in enumerate(snapshot.blobs)}
    for name, path in blobs.items():
        (folder / path).write_bytes(snapshot.blobs[name])
    arrays = write_arrays(folder / ARRAYS_FOLDER, snapshot.arrays, by_orbax=by_orbax)
    write_manifest(folder, Manifest(number, score, arrays, blobs, describe_files(folder)))


def read_parts(folder: Path, manifest: Manifest) -> Snapshot:
    """Read what ``write_parts`` wrote; call ``check_files`` before.

    What is read is compared with its checksum, so that nobody can exchange it after that check.

    Raises:
      DamageError: Something is not what was saved.
      UnreadableError: Anything else goes wrong.
    """
    sums = {entry.path: entry.sha256 for entry in manifest.files}

    def read(path: str) -> bytes:
        content = (folder / path).read_bytes()
        if hashlib.sha256(content).hexdigest() != sums.get(path):
            raise DamageError(folder, f"the content of {path} has another checksum")
        return content

    try:
        return Snapshot(
            record=json.loads(read(RECORD_FILE)),
            arrays=read_arrays(folder / ARRAYS_FOLDER, manifest.arrays),
            blobs={name: read(path) for name, path in manifest.blobs.items()},
        )
    except DamageError:
        raise
    except Exception as error:  # orbax may raise any; no damage, since the files were checked
        raise UnreadableError(folder, cause_of(error)) from error


def cause_of(error: Exception) -> str:
    """Return in a few words why reading or writing failed."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # Native code below orbax puts the system's error number at the end of a long message.
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code is not None:
        return os.strerror(int(code[1]))
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

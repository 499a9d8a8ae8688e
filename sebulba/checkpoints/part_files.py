"""Writes the parts of one checkpoint to the disk, and reads them back."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from sebulba.checkpoints.arrays import read_arrays, write_arrays
from sebulba.checkpoints.manifest import (
    DamageError,
    Manifest,
    UnreadableError,
    describe_files,
    write_manifest,
)
from sebulba.checkpoints.snapshot import Snapshot
from sebulba.errors import CheckpointError

RECORD_FILE = "record.json"
ARRAYS_FOLDER = "arrays"
BLOBS_FOLDER = "blobs"


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

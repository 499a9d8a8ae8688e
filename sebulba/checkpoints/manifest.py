"""The manifest of a checkpoint: its content, with a checksum for every part and for itself.

``manifest.json`` is ``{"sha256": ..., "signature": ..., "manifest": {"format": ..., ...}}``. Every
format keeps this frame, so that a checkpoint of another format is not taken for a damaged one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from sebulba.errors import CheckpointError
from sebulba.support.trust import signed, trust_of

MANIFEST_FILE = "manifest.json"
FORMAT = 1
KIND = "checkpoint"
"""What the signature is of; see ``sebulba.support.trust``."""


class DamageError(CheckpointError):
    """A checkpoint is not as it was saved."""

    rule = "is damaged"
    remedy = "delete that folder, and an older checkpoint is used"

    def __init__(self, folder: Path, what: str) -> None:
        """Say ``what`` is wrong with the checkpoint in ``folder``."""
        self.problem = f"checkpoint {folder} {self.rule}: {what}"
        super().__init__(f"{self.problem}; {self.remedy}")


class UnreadableError(DamageError):
    """A checkpoint cannot be read now; it may be whole and must not be deleted."""

    rule = "cannot be read"
    remedy = "see that the disk and the permissions let this process read it"


class ArrayEntry(NamedTuple):
    """What the manifest says of one array."""

    name: str
    """Its name in the snapshot."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Name of its dtype."""
    num_bytes: int
    """Size of its elements."""
    sha256: str
    """Checksum of its elements in C order."""


class FileEntry(NamedTuple):
    """What the manifest says of one file."""

    path: str
    """Its path relative to the folder of the checkpoint."""
    num_bytes: int
    """Its size."""
    sha256: str
    """Checksum of its content."""


class Manifest(NamedTuple):
    """The content of a checkpoint."""

    number: int
    """Env steps at which it was taken; its folder is named after them."""
    score: float | None
    """The higher the better; None if there is none, as in a run's first episodes."""
    arrays: tuple[ArrayEntry, ...]
    """Every array, in the order of the snapshot."""
    blobs: dict[str, str]
    """Name of each blob to the path of its file."""
    files: tuple[FileEntry, ...]
    """Every file except the manifest."""
    doubt: str | None = None
    """Why it may be a stranger's; None if the key of this user signed it."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``."""
    body = {
        "format": FORMAT,
        "number": manifest.number,
        "score": manifest.score,
        "arrays": [entry._asdict() for entry in manifest.arrays],
        "blobs": manifest.blobs,
        "files": [entry._asdict() for entry in manifest.files],
    }
    signature = signed(KIND, body)["signature"]
    outer = {"sha256": _checksum(body), "signature": signature, "manifest": body}
    (folder / MANIFEST_FILE).write_text(json.dumps(outer, indent=1) + "\n")


def read_manifest(folder: Path, number: int) -> Manifest:
    """Return the manifest of the checkpoint in ``folder``.

    Raises:
      DamageError: The manifest is missing, damaged, or that of a checkpoint of another number.
      CheckpointError: Another version of Sebulba wrote it, in another format.
    """
    try:
        outer = json.loads(_read(folder, MANIFEST_FILE))
        body = dict(outer["manifest"])
        is_whole = outer["sha256"] == _checksum(body)
        format_, number_ = body["format"], body["number"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{MANIFEST_FILE} cannot be parsed ({type(error).__name__}: {error})"
        raise DamageError(folder, what) from error
    if not is_whole:
        what = f"{MANIFEST_FILE} does not have the checksum that it states"
        raise DamageError(folder, what)
    if format_ != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {format_}, and this Sebulba reads {FORMAT}; "
            "resume with the version of Sebulba that wrote it"
        )
    if number_ != number:
        what = f"{MANIFEST_FILE} is of checkpoint {number_}"
        raise DamageError(folder, what)
    try:
        manifest = Manifest(
            number=number,
            score=body["score"],
            arrays=tuple(
                ArrayEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in body["arrays"]
            ),
            blobs=dict(body["blobs"]),
            files=tuple(FileEntry(**entry) for entry in body["files"]),
            doubt=trust_of(KIND, {**body, "signature": outer.get("signature")}).doubt,
        )
        _check_paths(folder, manifest)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{MANIFEST_FILE} is not one ({type(error).__name__}: {error})"
        raise DamageError(folder, what) from error
    return manifest


def _check_paths(folder: Path, manifest: Manifest) -> None:
    """Raise DamageError if a path leads out of ``folder``, or a blob is not one of the files."""
    files = {entry.path for entry in manifest.files}
    for path in (*files, *manifest.blobs.values()):
        parts = PurePosixPath(path).parts
        steps = [folder.joinpath(*parts[: i + 1]) for i in range(len(parts))]
        if PurePosixPath(path).is_absolute() or ".." in parts or "\0" in path:
            raise DamageError(folder, f"the path {path!r} leads out of the folder")
        if any(step.is_symlink() for step in steps):
            raise DamageError(folder, f"{path} is a link, and none was saved")
    if strange := sorted(set(manifest.blobs.values()) - files):
        raise DamageError(folder, f"{strange[0]} is not among the files of {MANIFEST_FILE}")


def describe_files(folder: Path) -> tuple[FileEntry, ...]:
    """Return an entry for every file in ``folder`` and below."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(
        FileEntry(str(path.relative_to(folder)), path.stat().st_size, _checksum_of_file(path))
        for path in files
    )


def check_sizes(folder: Path, files: Sequence[FileEntry]) -> None:
    """Check that every file is there and has its size; no content is read.

    Raises:
      DamageError: A file, which it names, is missing or has another size.
    """
    for entry in files:
        num_bytes = _size(folder, entry.path)
        if num_bytes != entry.num_bytes:
            what = f"{entry.path} has {num_bytes} of {entry.num_bytes} bytes"
            raise DamageError(folder, what)


def check_files(folder: Path, files: Sequence[FileEntry]) -> None:
    """Check that every file has the size and the checksum that it was written with."""
    check_sizes(folder, files)
    for entry in files:
        with _says_what_is_unreadable(folder, entry.path):
            sha256 = _checksum_of_file(folder / entry.path)
        if sha256 != entry.sha256:
            what = f"the content of {entry.path} has another checksum"
            raise DamageError(folder, what)


def _size(folder: Path, path: str) -> int:
    """Return the size of a regular file; reading anything else, such as a pipe, might not end."""
    with _says_what_is_unreadable(folder, path):
        if (folder / path).is_symlink():
            raise DamageError(folder, f"{path} is a link, and none was saved")
        if (folder / path).is_file():
            return (folder / path).stat().st_size
    raise DamageError(folder, f"{path} is missing")


def _read(folder: Path, path: str) -> bytes:
    _size(folder, path)
    with _says_what_is_unreadable(folder, path):
        return (folder / path).read_bytes()


@contextlib.contextmanager
def _says_what_is_unreadable(folder: Path, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{path} ({error.strerror})"
        raise UnreadableError(folder, what) from error


def _checksum(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

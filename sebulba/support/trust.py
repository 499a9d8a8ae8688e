"""Tells what a run of this user wrote from what a stranger wrote: signatures, and ``--trust``.

A run folder can name Python code, such as an environment, and hold pickles, such as the state of
one. Both can run anything. So a run signs (HMAC-SHA256, with a key of its user) its configuration,
its policies and its checkpoints, and code is imported and pickles are opened only where the
signature is good, or where the user says so. The module is free of JAX.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sebulba.errors import UsageError

KEY_VARIABLE = "SEBULBA_KEY_FILE"
"""Environment variable that names the file of the key."""
LEAST_KEY_BYTES = 16
OWN_ENTRIES = ("sha256", "signature")
"""What ``signed`` adds to a record."""


class Trust(NamedTuple):
    """Whether code that a record names may run, and pickles that belong to it may be opened."""

    doubt: str | None
    """Why the record may be a stranger's; None if the key of this user signed it."""
    is_given: bool = False
    """The user said that it is to be trusted all the same."""

    @property
    def is_trusted(self) -> bool:
        """Whether code may run."""
        return self.doubt is None or self.is_given

    def check(self, what: str) -> None:
        """Refuse what only trusted records may do; say it first where trust was given.

        Args:
          what: A sentence that names what would run.

        Raises:
          UsageError: The record is not trusted.
        """
        if self.doubt is None:
            return
        if not self.is_given:
            raise UsageError(
                f"{what}, and {self.doubt}. If you trust its author, use --trust (in Python: "
                "trust=True)"
            )
        with contextlib.suppress(OSError, ValueError):  # no standard error to print to
            print(f"sebulba: trusted, as you say: {what}", file=sys.stderr, flush=True)


def signed(kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a checksum of itself and a signature by this user's key.

    Args:
      kind: What the record is, so that none is taken for one of another kind.

    Returns:
      The object and two entries: ``sha256``, and ``signature``, which is None where there is no
      key and none can be made (``key_problem`` says why).
    """
    body = _body(record)
    key, _ = _key(make=True)
    signature = None if key is None else {"key": _name_of(key), "hmac": _hmac(key, kind, body)}
    return {**record, "sha256": _sha256(body), "signature": signature}


def trust_of(kind: str, record: Mapping[str, Any], is_given: bool = False) -> Trust:
    """Return whether this user's key signed a record that was read.

    Args:
      record: A JSON object, with the entries of ``signed`` if it has them.
      is_given: The user says that it is to be trusted all the same.
    """
    return Trust(_doubt(kind, record), is_given)


def _doubt(kind: str, record: Mapping[str, Any]) -> str | None:
    signature = record.get("signature")
    if not isinstance(signature, dict) or not all(
        isinstance(signature.get(name), str) for name in ("key", "hmac")
    ):
        return "it is not signed: an older Sebulba wrote it, or one that had no key"
    key, problem = _key(make=False)
    if key is None:
        return f"whether you signed it cannot be seen: {problem}"
    if signature["key"] != _name_of(key):
        return (
            f"another key signed it ({signature['key'][:8]!r}, and the one in {key_file()} is "
            f"{_name_of(key)!r})"
        )
    expected = _hmac(key, kind, _body(record))
    if not hmac.compare_digest(expected.encode(), signature["hmac"].encode(errors="replace")):
        return "it was changed after it had been signed"
    return None


def was_changed(record: Mapping[str, Any]) -> bool:
    """Tell whether a record that was read has a checksum, and another content."""
    return "sha256" in record and record["sha256"] != _sha256(_body(record))


def links_in(folder: Path) -> dict[str, str]:
    """Return every symbolic link in a folder and below, by relative path, with where it leads."""
    found = {}
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            entry = Path(path, name)
            if entry.is_symlink():
                found[str(entry.relative_to(folder))] = os.readlink(entry)
    return dict(sorted(found.items()))


def key_file() -> Path:
    """Return the file of this user's key: ``$SEBULBA_KEY_FILE``, or ~/.config/sebulba/key.

    ``$XDG_CONFIG_HOME`` takes the place of ~/.config where it is set.
    """
    if named := os.environ.get(KEY_VARIABLE):
        return Path(os.path.expanduser(named))
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder, "sebulba", "key")


def key_problem() -> str | None:
    """Return why there is no key to sign with, which is made if there is none; None if there is."""
    return _key(make=True)[1]


def _key(*, make: bool) -> tuple[bytes | None, str | None]:
    """Return the key, or None and why there is none."""
    file = key_file()
    if str(file).startswith("~"):
        return None, f"there is no home folder for {file}; set HOME or {KEY_VARIABLE}"
    try:
        if make and not file.exists():
            _make_key(file)
        key = file.read_bytes().strip()
    except FileNotFoundError:
        return None, f"there is no key in {file}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return None, f"the key in {file} cannot be read or made ({reason})"
    if len(key) < LEAST_KEY_BYTES:
        return None, f"the key in {file} has {len(key)} bytes, and needs {LEAST_KEY_BYTES}"
    return key, None


def _make_key(file: Path) -> None:
    """Write a new key that only this user can read; if another process has just made one, keep it.

    Raises:
      OSError: It cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".partial-") as partial:  # mode 600
        partial.write(f"{secrets.token_hex(32)}\n".encode())
        partial.flush()
        os.fsync(partial.fileno())
        try:
            os.link(partial.name, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links, such as an object store
            with contextlib.suppress(FileExistsError), open(file, "xb", opener=_private) as opened:
                opened.write(Path(partial.name).read_bytes())


def _private(file: str, flags: int) -> int:
    return os.open(file, flags, 0o600)


def _body(record: Mapping[str, Any]) -> bytes:
    own = {name: value for name, value in record.items() if name not in OWN_ENTRIES}
    return json.dumps(own, sort_keys=True, separators=(",", ":")).encode()


def _name_of(key: bytes) -> str:
    """Return a short name by which a key is known, and from which it cannot be guessed."""
    return hashlib.sha256(b"sebulba key name\0" + key).hexdigest()[:8]


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _hmac(key: bytes, kind: str, body: bytes) -> str:
    return hmac.digest(key, kind.encode() + b"\0" + body, "sha256").hex()

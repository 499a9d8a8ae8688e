"""Saved states as bytes that reveal damage, and whether they belong to something else."""

from __future__ import annotations

import hashlib
from typing import Any

from sebulba.envs.saving.plain_data import pack, unpack
from sebulba.errors import EnvError

VERSION = 2
_MAGIC = b"sebulba state "
_DIGEST_BYTES = hashlib.sha256().digest_size


def seal(content: Any, *, of: str, num_envs: int) -> bytes:
    """Return ``content`` as bytes with a version, a checksum, and whose state it is.

    Args:
      content: Plain data (``sebulba.envs.saving.plain_data``).
      of: Description of what has this state; ``unseal`` compares it.
      num_envs: Number of environments with this state; ``unseal`` compares it.
    """
    payload = pack((of, num_envs, content))
    return b"%s%d\n%s%s" % (_MAGIC, VERSION, hashlib.sha256(payload).digest(), payload)


def unseal(data: bytes, *, of: str, num_envs: int) -> Any:
    """Return what was sealed.

    The checksum protects against damage, not against malice.

    Raises:
      EnvError: ``data`` is not a sealed state, has another version, is damaged, or is the state of
        something else or of another number of environments.
    """
    if not isinstance(data, bytes) or not data.startswith(_MAGIC):
        raise EnvError(f"this is not the saved state of {of}; use the state that the run saved")
    version, _, rest = data[len(_MAGIC) :].partition(b"\n")
    if version != b"%d" % VERSION:
        raise EnvError(
            f"the saved state of {of} has version {version!r}, not {VERSION}; resume with the "
            "version of Sebulba that saved it"
        )
    digest, payload = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise EnvError(f"the saved state of {of} is damaged: its checksum is wrong; use another")
    try:
        found_of, found_num_envs, content = unpack(payload)
    except ValueError as error:
        raise EnvError(f"the saved state of {of} is damaged ({error}); use another") from error
    if found_of != of:
        raise EnvError(f"the saved state is of {found_of}, not of {of}; use the same environment")
    if found_num_envs != num_envs:
        raise EnvError(
            f"the saved state of {of} is of num_envs={found_num_envs}, not of {num_envs}; use "
            f"num_envs={found_num_envs}"
        )
    return content

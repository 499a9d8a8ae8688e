"""States of environments and cycles as bytes that show when they are damaged or of another."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

from sebulba.errors import EnvError

VERSION = 1
_MAGIC = b"sebulba state "
_DIGEST_BYTES = hashlib.sha256().digest_size


def seal(content: Any, *, of: str, num_envs: int) -> bytes:
    """Return ``content`` as bytes, with a version, a checksum, and whose state it is.

    Args:
      content: Anything that can be pickled.
      of: What it is the state of, in words; ``unseal`` compares it.
      num_envs: Of how many environments; ``unseal`` compares it.
    """
    payload = pickle.dumps((of, num_envs, content), pickle.HIGHEST_PROTOCOL)
    return b"%s%d\n%s%s" % (_MAGIC, VERSION, hashlib.sha256(payload).digest(), payload)


def unseal(data: bytes, *, of: str, num_envs: int) -> Any:
    """Return what was sealed.

    The content is a pickle, and unpickling runs what it says: give this nothing but what a run of
    your own has saved. The checksum guards against damage, not against malice.

    Raises:
      EnvError: It is no sealed state, one of another version, a damaged one, or that of something
        else or of another number of environments.
    """
    if not isinstance(data, bytes) or not data.startswith(_MAGIC):
        raise EnvError(f"this is not the saved state of {of}; give what a run has saved")
    version, _, rest = data[len(_MAGIC) :].partition(b"\n")
    if version != b"%d" % VERSION:
        raise EnvError(
            f"the saved state of {of} has version {version!r}, not {VERSION}; resume with the "
            "version of Sebulba that saved it"
        )
    digest, payload = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise EnvError(f"the saved state of {of} is damaged: its checksum is wrong; use another")
    found_of, found_num_envs, content = pickle.loads(payload)
    if found_of != of:
        raise EnvError(f"the saved state is of {found_of}, not of {of}; use the same environment")
    if found_num_envs != num_envs:
        raise EnvError(
            f"the saved state of {of} is of num_envs={found_num_envs}, not of {num_envs}; use "
            f"num_envs={found_num_envs}"
        )
    return content

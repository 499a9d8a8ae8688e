"""Short texts that hosts leave for each other at the coordinator."""

from __future__ import annotations

import json
from typing import Any

_PREFIX = "sebulba"


class Notes:
    """Notes in the store of keys and values of ``jax.distributed``, a JSON text for each host.

    JAX has no public name for it; orbax and flax use the same one.
    """

    def __init__(self) -> None:
        """Use the client of this process, which has joined the others.

        Raises:
          RuntimeError: It has not.
        """
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise RuntimeError("jax.distributed has not been initialised")
        self._client: Any = client

    def leave(self, topic: str, host: int, about: Any) -> None:
        """Leave ``about`` in the place of what this host left under ``topic`` before."""
        key = f"{_PREFIX}/{topic}/{host}"
        self._client.key_value_set(key, json.dumps(about), allow_overwrite=True)

    def read(self, topic: str) -> dict[int, Any]:
        """Return what hosts left under ``topic``, by host."""
        found = self._client.key_value_dir_get(f"{_PREFIX}/{topic}/")
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}

"""What adapters of an envpool share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from sebulba.errors import EnvError
from sebulba.types import PyTree


class PoolAdapter:
    """Holds a pool, which one thread at a time may use: two threads abort the process."""

    spec: Any

    def __init__(self, pool: Any) -> None:
        """Take over ``pool``, made in synchronous mode with ``env_type="gymnasium"``."""
        self._pool = pool
        self.num_envs = int(pool.config["num_envs"])

    def state(self) -> str:
        """Return why there is no state."""
        return "envpool cannot save its environments"

    def put_back(self, state: bytes) -> None:
        raise EnvError(f"{self.state()}; reset {self.spec.name!r} instead")

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _open_pool(self) -> Any:
        if self._pool is None:
            raise EnvError(f"environment {self.spec.name!r} is closed; make a new one")
        return self._pool


def scattered(tree: PyTree, order: np.ndarray) -> PyTree:
    """Return rows in order; row i of them belongs to place ``order[i]``."""

    def scatter(rows: np.ndarray) -> np.ndarray:
        in_order = np.empty_like(rows)
        in_order[order] = rows
        return in_order

    return jax.tree.map(scatter, tree)

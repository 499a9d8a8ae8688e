"""What hosts that learn together agree on before the updates of every round.

Each round begins with one small collective, in which every host tells all others its word. So all
of them stop, save or give up at the same update, and none waits in an update for one that has
stopped. It also tells which host the others had to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.cluster.hosts.mesh import HostMesh
from sebulba.learning.peers import Agreed, Word

WINDOW_S = 30.0
"""Over so many seconds of rounds it is judged whether hosts wait for one of them."""
LATE_SHARE = 0.25
"""A host for which the others wait for a larger share of that time is named."""


class Gather:
    """Tells the words of all hosts to all hosts, by one collective."""

    def __init__(self, mesh: HostMesh) -> None:
        """Prepare the program; nothing is compiled before the first call."""
        self._num_local = mesh.local.size
        self._sharding = NamedSharding(mesh.whole, P(LEARNER_AXIS))
        self._gather = jax.jit(
            jax.shard_map(
                lambda row: jax.lax.all_gather(row, LEARNER_AXIS, tiled=True),
                mesh=mesh.whole,
                in_specs=P(LEARNER_AXIS),
                out_specs=P(),
                check_vma=False,
            )
        )

    def __call__(self, word: Word) -> Agreed:
        """Return the words of all hosts, once all have called this."""
        rows = np.tile(np.array(word, np.float32), (self._num_local, 1))
        given = jax.make_array_from_process_local_data(self._sharding, rows)
        words = np.asarray(self._gather(given))[:: self._num_local]
        return Agreed(tuple(Word(*map(float, row)) for row in words))


class Lateness:
    """Finds the host whose trajectories come late: in a round, all others wait for it."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._late_s: np.ndarray | None = None

    def add(self, waited_s: Sequence[float], now: float) -> tuple[int, float] | None:
        """Note a round; return a host that is late, and its share, at the end of a window.

        Args:
          waited_s: How long each host waited for its own trajectories. The least of these they all
            wait for, since the Inferencers of all take time.
          now: Time of a clock, in seconds.
        """
        late = np.asarray(waited_s) - min(waited_s)
        if self._began is None or self._late_s is None:
            self._began, self._late_s = now, np.zeros_like(late)
            return None  # the first round compiles
        self._late_s += late
        elapsed_s = now - self._began
        if elapsed_s < WINDOW_S:
            return None
        shares = self._late_s / elapsed_s
        self._began, self._late_s = now, np.zeros_like(late)
        host = int(np.argmax(shares))
        return (host, float(shares[host])) if shares[host] > LATE_SHARE else None

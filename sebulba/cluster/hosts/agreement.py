"""What hosts that learn together agree on before the updates of every round.

Each round begins with one small collective, in which every host tells all others its word. So all
of them stop, save or give up at the same update, and none waits in an update for one that has
stopped. It also tells which host the others had to wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.cluster.hosts.mesh import HostMesh

WINDOW_S = 30.0
"""Over so many seconds of rounds it is judged whether hosts wait for one of them."""
LATE_SHARE = 0.25
"""A host for which the others wait for a larger share of that time is named."""


class Word(NamedTuple):
    """What one host says before the updates of a round; numbers, since a collective carries it."""

    failed: float = 0.0
    """1: it has no round, and ends."""
    stop: float = 0.0
    """1: it was asked to stop after this round."""
    due: float = 0.0
    """1: a checkpoint is due."""
    busy: float = 0.0
    """1: it still writes the last checkpoint."""
    with_experience: float = 0.0
    """1: the experience is due with the next checkpoint, if it is kept apart."""
    waited_s: float = 0.0
    """Seconds that it waited for the trajectories of its own Inferencers."""
    episodes: float = 0.0
    """Episodes that ended in this round."""
    masked: float = 0.0
    """Transitions of this round that are masked, as ``Counters.masked_truncations``."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all hosts do, the same on each of them."""

    words: tuple[Word, ...]
    """The word of every host."""

    def hosts_with(self, name: str) -> list[int]:
        """Return the hosts whose word has something else than 0 in this field."""
        return [host for host, word in enumerate(self.words) if getattr(word, name)]

    @property
    def failed(self) -> list[int]:
        """The hosts that have no round and end."""
        return self.hosts_with("failed")

    @property
    def stop(self) -> bool:
        """All end after this round."""
        return bool(self.hosts_with("stop"))

    @property
    def checkpoint(self) -> bool:
        """All begin a checkpoint after this round: one is due, and nobody still writes another."""
        return bool(self.hosts_with("due")) and not self.hosts_with("busy")

    @property
    def with_experience(self) -> bool:
        """A checkpoint that begins now has the experience, if that is kept apart.

        It is due for one host alone if that could not write the last one.
        """
        return bool(self.hosts_with("with_experience"))

    def total(self, name: str) -> int:
        """Return the sum of a field over the hosts."""
        return round(sum(getattr(word, name) for word in self.words))


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

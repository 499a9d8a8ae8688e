"""The hosts that learn together, as a loop sees them; see ``Peers``.

Each round begins with one small collective, in which every host tells all others its word. So all
of them stop, save or give up at the same update, and none waits in an update for one that has
stopped. It also tells which host the others had to wait for.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.cluster.hosts.hosts import Hosts
from sebulba.cluster.hosts.mesh import HostMesh
from sebulba.cluster.hosts.watch import STOP
from sebulba.errors import HostError
from sebulba.learning.peers import Agreed, Peers, Wants, Word

T = TypeVar("T")
WINDOW_S = 30.0
"""Over so many seconds of rounds it is judged whether hosts wait for one of them."""
LATE_SHARE = 0.25
"""A host for which the others wait for a larger share of that time is named."""


class Rounds(Peers):
    """Agrees with the other hosts before the updates of every round."""

    ended_together = False

    def __init__(self, hosts: Hosts, mesh: HostMesh) -> None:
        """Prepare; ``check_same`` compiles the collective."""
        self.hosts = hosts
        self.index, self.number = hosts.index, hosts.number
        self._gather = Gather(mesh)
        self._lateness = Lateness()
        self._agreed = Agreed(())
        self._is_due = False

    def __str__(self) -> str:
        return f"; {self.hosts}, alike on each"

    def run(self, run: Callable[[], T], on_lost: Any) -> T:
        """Return what ``run`` does, once all hosts have ended theirs.

        Raises:
          HostError: Another host is gone or has failed.
          BaseException: What ``run`` raised.
        """
        hosts = self.hosts
        hosts.watch.on_lost = on_lost
        try:
            result = run()
            # The checkpoint is whole once all have saved. Host 0 may still evaluate, and JAX would
            # end all if a host left before it.
            hosts.meet("the end", math.inf)
            return result
        except BaseException as error:
            hosts.watch.on_lost = None  # this thread is not stuck
            explained = hosts.explained(error)
            hosts.end_after(explained)
            if explained is error:
                raise
            raise explained from error
        finally:
            hosts.watch.on_lost = None

    def check_same(self, about: Mapping[str, Any]) -> None:
        self.hosts.check_same(about)
        # All are here now. In the first round one may come so late that gloo gives up (30 s).
        self._gather(Word())

    def agree(
        self,
        word: Word,
        error: Exception | None,
        stop_requested: threading.Event,
        wants: Callable[[], Wants],
        ready: Callable[[], None],
    ) -> Agreed:
        if error is not None:
            self.hosts.note_reason(error)
        wanted = wants()
        self._is_due = self._is_due or wanted.due  # until all begin it
        ready()
        stops, watch = stop_requested.is_set(), self.hosts.watch
        if stops:  # another may still wait for its trajectory
            watch.note(STOP, watch.round)
        word = word._replace(**wanted._replace(due=self._is_due)._asdict(), stop=stops)
        self._agreed = agreed = self._gather(word)
        watch.round += 1
        self._end_if(agreed.failed, error)
        self._warn_of_late(agreed)
        return agreed

    def ends(self, stop_requested: threading.Event) -> bool:
        self.hosts.watch.stop_requested = stop_requested
        if self._agreed.stop:
            stop_requested.set()
        return self._agreed.stop

    def checkpoint(self, wants: Callable[[], Wants]) -> Wants:
        """Tell whether all hosts begin one now; they have said what they want in their words."""
        agreed = self._agreed
        begins = agreed.checkpoint and not agreed.stop
        self._is_due = self._is_due and not begins
        return Wants(begins, False, agreed.with_experience)

    def end(self, error: Exception | None) -> None:
        """Wait until no host has anything more to do but to save; see ``Peers.end``.

        Not by a collective: a host that fails elsewhere lets the others know, but does not come.
        """
        if error is not None:
            self.hosts.note_reason(error)
        failed = self.hosts.meet(error is not None, math.inf)
        self._end_if([host for host, has_failed in enumerate(failed) if has_failed], error)

    def _end_if(self, failed: list[int], error: Exception | None) -> None:
        """Raise what ended this host, or the error of the first of those that have failed."""
        if not failed:
            return
        self.ended_together = True
        watch = self.hosts.watch
        watch.on_lost = None  # who now saves is not to be ended
        of_other = HostError(f"{watch.name_of(failed[0])} has failed")
        raise error or watch.failure_of(failed[0]) or of_other

    def _warn_of_late(self, agreed: Agreed) -> None:
        waited_s = [word.waited_s for word in agreed.words]
        late = self._lateness.add(waited_s, time.monotonic())
        if late is not None:
            host, share = late
            warnings.warn(
                f"{self.hosts.watch.name_of(host)} is slow: for {share:.0%} of the time the other "
                "hosts wait for its trajectories; give it more cores, or fewer environments to "
                "all hosts",
                RuntimeWarning,
                stacklevel=2,
            )


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

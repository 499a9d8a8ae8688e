"""The rounds of hosts that learn together, as the update loop sees them."""

from __future__ import annotations

import math
import time
import warnings

from sebulba.cluster.hosts.agreement import Agreed, Gather, Lateness, Word
from sebulba.cluster.hosts.hosts import Hosts
from sebulba.cluster.hosts.mesh import HostMesh
from sebulba.errors import HostError


class Rounds:
    """Agrees with the other hosts before the updates of every round."""

    def __init__(self, hosts: Hosts, mesh: HostMesh) -> None:
        """Prepare; the first round compiles the collective."""
        self.hosts = hosts
        self._gather = Gather(mesh)
        self._lateness = Lateness()
        self.ended_together = False
        """Whether a host failed and all of them ended before the same round: what was learned then
        is the same everywhere, and can be saved."""

    def agree(self, word: Word, error: BaseException | None) -> Agreed:
        """Tell this host's word and return those of all.

        Args:
          word: What this host says.
          error: Why this host has no round, if it has failed.

        Raises:
          HostError: Another host has failed.
          BaseException: ``error``, once the others know.
        """
        if error is not None:
            self.hosts.note_reason(error)
        agreed = self._gather(word)
        if agreed.failed:
            self.ended_together = True
            self.hosts.watch.on_lost = None  # who now saves is not to be ended
            raise error if error is not None else self._failure(agreed.failed[0])
        self._warn_of_late(agreed)
        return agreed

    def end(self, error: BaseException | None) -> None:
        """Wait until no host has anything more to do but to save.

        Not by a collective: a host that fails elsewhere lets the others know, but does not come.

        Args:
          error: What this host failed with as it ended.

        Raises:
          HostError: Another host has failed.
          BaseException: ``error``, once the others know.
        """
        if error is not None:
            self.hosts.note_reason(error)
        failed = self.hosts.meet(error is not None, math.inf)
        if any(failed):
            self.ended_together = True
            self.hosts.watch.on_lost = None  # who now saves is not to be ended
            raise error if error is not None else self._failure(failed.index(True))

    def _failure(self, host: int) -> HostError:
        watch = self.hosts.watch
        return watch.failure_of(host) or HostError(f"{watch.name_of(host)} has failed")

    def _warn_of_late(self, agreed: Agreed) -> None:
        waited_s = [word.waited_s for word in agreed.words]
        late = self._lateness.add(waited_s, time.monotonic())
        if late is not None:
            host, share = late
            warnings.warn(
                f"{self.hosts.watch.name_of(host)} is late: for {share:.0%} of the time the others "
                "wait for its trajectories; give it more cores, or all hosts fewer environments",
                RuntimeWarning,
                stacklevel=2,
            )

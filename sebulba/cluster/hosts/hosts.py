"""This process as one of the hosts that learn together."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from sebulba.cluster.hosts.watch import DONE, FAILED, REASON, Notes, Watch
from sebulba.errors import HostError, UsageError, text_of

POLL_S = 0.1
STATUS = re.compile("(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): ")
"""How the errors begin with which collectives fail."""
LINGER_S = 60.0
"""How long a host 0 that failed stays, so that the others can read why."""


class Hosts:
    """Which host this is, how many there are, and what they tell each other outside of updates."""

    def __init__(
        self, index: int, number: int, notes: Notes, *, start_timeout_s: float, watch: Watch
    ) -> None:
        """Keep the arguments; the hosts have met."""
        self.index = index
        self.number = number
        self.watch = watch
        self.has_failed = False
        """Whether this host or another has, so that the hosts do not end together."""
        self._notes = notes
        self._start_timeout_s = start_timeout_s
        self._meetings = 0

    def __str__(self) -> str:
        return f"host {self.index} of {self.number}"

    def meet(self, about: Any, wait_s: float | None = None) -> list[Any]:
        """Return what every host gave to its call of this, by host; wait for all of them.

        Calls are counted, and the n-th of every host belong together.

        Args:
          about: JSON.
          wait_s: How long to wait; None is the time in which hosts have to start.

        Raises:
          HostError: A host has failed, is gone, or did not come in time.
        """
        topic = f"meeting-{self._meetings}"
        self._meetings += 1
        self._notes.leave(topic, self.index, about)
        wait_s = self._start_timeout_s if wait_s is None else wait_s
        deadline = time.monotonic() + wait_s
        while len(there := self._notes.read(topic)) < self.number:
            if error := self.watch.lost():
                raise error
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.number)) - there.keys())
                raise HostError(
                    f"{self.watch.name_of(missing[0])} did not arrive within "
                    f"{wait_s:.0f} s; check its output, or raise distributed.start_timeout_s"
                )
            time.sleep(POLL_S)
        return [there[host] for host in range(self.number)]

    def check_same(self, about: Mapping[str, Any]) -> None:
        """Raise UsageError, on every host, unless all give the same."""
        of_first, *others = self.meet(dict(about))
        for host, of_host in enumerate(others, start=1):
            different = [
                f"{name} is {of_host.get(name)!r} on host {host} and {of_first.get(name)!r} on "
                "host 0"
                for name in sorted(of_first.keys() | of_host.keys())
                if of_first.get(name) != of_host.get(name)
            ]
            if different:
                raise UsageError(
                    f"hosts that learn together differ: {'; '.join(different)}. Start all hosts "
                    "with the same options and versions"
                )

    def explained(self, error: BaseException) -> BaseException:
        """Return why this host ends: ``error``, or that another host is gone, if that caused it."""
        self.has_failed = True
        if isinstance(error, HostError) or not _is_of_xla(error):
            return error
        return self.watch.explain() or error

    def note_reason(self, error: BaseException) -> None:
        """Leave word why this host has no round, before it says so in the collective."""
        self.watch.note(REASON, _first_line(error))

    def end_after(self, error: BaseException) -> None:
        """Tell the others that this host ends, and why; host 0 stays until they know."""
        self.has_failed = True
        self.watch.note(DONE if isinstance(error, HostError) else FAILED, _first_line(error))
        if self.index == 0:
            self.watch.wait_for_others((DONE, FAILED), LINGER_S)

    def finish(self) -> None:
        """Tell the other hosts that this one has done its part; may be called twice."""
        self.watch.note(DONE, "")
        self.watch.stop()


def _first_line(error: BaseException) -> str:
    return text_of(error).partition("\n")[0]


def _is_of_xla(error: BaseException) -> bool:
    """Tell whether XLA raised it, as it does where a collective fails.

    From a compiled program that is called directly it comes as a ValueError (JAX 0.10.2).
    """
    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        return True
    return isinstance(error, ValueError) and STATUS.match(str(error)) is not None

"""The factory of environments elsewhere: it starts hosts, and gives each Inferencer a place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from sebulba.errors import EnvError
from sebulba.inference.hosts import Host, Worker
from sebulba.inference.remote import RemoteEnv


class Workers:
    """An environment factory that makes each vector environment in a worker of its own."""

    def __init__(
        self, new_host: Callable[[int], Host], number: int, per_host: int, min_hosts: int = 0
    ) -> None:
        """Start hosts for ``number`` Inferencers, which import in the background.

        Args:
          new_host: Starts a host with room for so many Inferencers.
          number: How many Inferencers there will be.
          per_host: How many of them share a host.
          min_hosts: With so many left, a lost host is waited for without a limit.
        """
        self._new_host = new_host
        self._per_host = per_host
        self.min_hosts = min_hosts
        self._lock = threading.Lock()
        self._closed = False
        self.hosts: list[Host] = []
        """All that were started, in this order; those that have ended too."""
        self.stopping = threading.Event()
        """Nobody waits any more for a host that has not been placed."""
        try:
            for first in range(0, number, per_host):
                self.hosts.append(new_host(min(per_host, number - first)))
        except BaseException:
            self.close()
            raise

    def __call__(self, num_envs: int, seeds: list[int]) -> RemoteEnv:
        """Make the environments in the next free worker; in a new host where all are taken."""
        worker = self._take()
        try:
            return RemoteEnv(worker, num_envs, seeds)
        except BaseException:
            worker.close()
            raise

    def _take(self) -> Worker:
        with self._lock:
            for host in self.hosts:
                if worker := host.take():
                    return worker
            if self._closed:
                raise EnvError("no process is started for it any more: the loop is closed")
            host = self._new_host(self._per_host)
            self.hosts.append(host)
        worker = host.take()
        if worker is None:
            raise EnvError(f"the {host.name} ended before it had an Inferencer")
        return worker

    @property
    def num_living(self) -> int:
        """Hosts that Inferencers may run in."""
        return sum(host.lives for host in self.hosts)

    def goes_on_without(self, host: Host) -> bool:
        """Tell whether ``host`` may be waited for without a limit: there are enough others."""
        return 0 < self.min_hosts <= self.num_living - host.lives

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all hosts, as of the last answer of each."""
        return sum(host.traffic.cpu_s for host in self.hosts)

    def close(self) -> None:
        """End all hosts; may be called twice."""
        self.stopping.set()
        with self._lock:
            self._closed = True
        with contextlib.ExitStack() as stack:  # ends the others even if one raises
            for host in self.hosts:
                stack.callback(host.close)

"""What the processes and actors of Inferencers do: figures for metrics, and lines for people."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sebulba.inference.hosts import Host
from sebulba.inference.inferencer import Inferencer
from sebulba.inference.remote import RemoteEnv
from sebulba.inference.workers import Workers

MOST_LINES = 8
"""Hosts that have a line of their own."""


class NodeFigures:
    """Reads the traffic of all hosts, window by window."""

    def __init__(self, workers: Workers) -> None:
        """Begin with all that has gone to and fro so far."""
        self._workers = workers
        self._before = self._read()
        self._published = 0

    def _read(self) -> dict[str, float]:
        traffic = [host.traffic for host in self._workers.hosts]
        return {
            "items": sum(one.items for one in traffic),
            "bytes": sum(one.bytes_in + one.bytes_out for one in traffic),
            "relay_s": sum(one.relay_s for one in traffic),
            "versions": sum(one.versions for one in traffic),
        }

    def take(self, elapsed_s: float, policy_version: int) -> dict[str, Any]:
        """Return the metrics of a window, which the next one follows.

        Args:
          elapsed_s: How long it lasted.
          policy_version: Number of publishes so far.
        """
        now, before = self._read(), self._before
        since = {name: now[name] - before[name] for name in now}
        hosts, living = self._workers.hosts, self._workers.num_living
        published = (policy_version - self._published) * living
        self._before, self._published = now, policy_version
        skipped = max(0.0, 1 - since["versions"] / published) if published else None
        return {
            "nodes": living,
            "nodes_lost": sum(host.is_lost for host in hosts),
            "relay_ms": 1e3 * since["relay_s"] / since["items"] if since["items"] else None,
            "relay_bytes_per_s": since["bytes"] / max(elapsed_s, 1e-9),
            "relay_skipped_networks": skipped,
        }


def node_lines(workers: Workers, inferencers: Sequence[Inferencer]) -> list[str]:
    """Return what each process or actor does, and what became of those that were lost."""
    hosts = [host for host in workers.hosts if host.lives or host.is_lost]
    lines = [_line(host, inferencers) for host in hosts[-MOST_LINES:]]
    if more := len(hosts) - len(lines):
        lines.insert(0, f"{more} more processes or actors")
    return lines


def _line(host: Host, inferencers: Sequence[Inferencer]) -> str:
    traffic = host.traffic
    if host.is_lost:
        return f"{host.name}: lost after {traffic.items} trajectories"
    rate = (traffic.bytes_in + traffic.bytes_out) / max(time.monotonic() - host.began, 1e-9)
    way = f", {1e3 * traffic.relay_s / traffic.items:.1f} ms each" if traffic.items else ""
    return (
        f"{host.name}: {_phases(host, inferencers)}; {traffic.items} trajectories{way}, "
        f"{traffic.versions} networks, {rate / 1e6:.2f} MB/s"
    )


def _phases(host: Host, inferencers: Sequence[Inferencer]) -> str:
    """Return in which phases the Inferencers of ``host`` are, such as "2 cycle, 1 take"."""
    phases = collections.Counter(_present(i) for i in inferencers if _host_of(i) is host)
    shown: Iterator[str] = (f"{number} {phase}" for phase, number in phases.most_common())
    return ", ".join(shown) or "no Inferencer"


def _host_of(inferencer: Inferencer) -> Host | None:
    return inferencer.env.worker.host if isinstance(inferencer.env, RemoteEnv) else None


def _present(inferencer: Inferencer) -> str:
    present = inferencer.timer.present()
    return present[0] if present else "between phases"

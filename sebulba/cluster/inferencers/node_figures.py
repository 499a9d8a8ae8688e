"""What the nodes with Inferencers do: figures for metrics, and lines for people."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sebulba.cluster.inferencers.nodes import Node
from sebulba.cluster.inferencers.remote_inferencer import RemoteEnv
from sebulba.cluster.inferencers.workers import Workers
from sebulba.inference.inferencer import Inferencer

MOST_LINES = 8
"""Nodes that have a line of their own."""


class NodeFigures:
    """Reads the traffic of all nodes, window by window."""

    def __init__(self, workers: Workers, policy_version: int = 0) -> None:
        """Begin with all that has gone to and fro so far, and so many publishes."""
        self._workers = workers
        self._before = self._read()
        self._published = policy_version

    def _read(self) -> dict[str, float]:
        traffic = [node.traffic for node in self._workers.nodes]
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
        nodes, living = self._workers.nodes, self._workers.num_living
        published = (policy_version - self._published) * living
        self._before, self._published = now, policy_version
        skipped = max(0.0, 1 - since["versions"] / published) if published else None
        return {
            "nodes": living,
            "nodes_lost": sum(node.is_lost for node in nodes),
            "relay_ms": 1e3 * since["relay_s"] / since["items"] if since["items"] else None,
            "relay_bytes_per_s": since["bytes"] / max(elapsed_s, 1e-9),
            "relay_skipped_networks": skipped,
        }


def node_lines(workers: Workers, inferencers: Sequence[Inferencer]) -> list[str]:
    """Return what each node does, and what became of those that were lost."""
    # Those that live come last, of which fewer are left out.
    living = [node for node in workers.nodes if node.lives]
    nodes = [node for node in workers.nodes if node.is_lost and node not in living] + living
    lines = [_line(node, inferencers) for node in nodes[-MOST_LINES:]]
    if more := len(nodes) - len(lines):
        lines.insert(0, f"{more} more node{'s' if more > 1 else ''}")
    return lines


def _line(node: Node, inferencers: Sequence[Inferencer]) -> str:
    traffic = node.traffic
    if node.is_lost:
        return f"{node.name}: lost after {traffic.items} trajectories"
    rate = (traffic.bytes_in + traffic.bytes_out) / max(time.monotonic() - node.began, 1e-9)
    way = f", {1e3 * traffic.relay_s / traffic.items:.1f} ms each" if traffic.items else ""
    return (
        f"{node.name}: {_phases(node, inferencers)}; {traffic.items} trajectories{way}, "
        f"{traffic.versions} networks, {rate / 1e6:.2f} MB/s"
    )


def _phases(node: Node, inferencers: Sequence[Inferencer]) -> str:
    """Return in which phases the Inferencers of ``node`` are, such as "2 cycle, 1 take"."""
    phases = collections.Counter(_present(i) for i in inferencers if _node_of(i) is node)
    shown: Iterator[str] = (f"{number} {phase}" for phase, number in phases.most_common())
    return ", ".join(shown) or "no Inferencer"


def _node_of(inferencer: Inferencer) -> Node | None:
    return inferencer.env.worker.node if isinstance(inferencer.env, RemoteEnv) else None


def _present(inferencer: Inferencer) -> str:
    present = inferencer.timer.present()
    return present[0] if present else "between phases"

"""Inferencers elsewhere: starts their nodes, replaces lost ones, and tells what they do."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from sebulba.cluster.inferencers.nodes import Node, Worker
from sebulba.cluster.inferencers.remote_inferencer import RemoteInferencer
from sebulba.errors import EnvError, LostNodeError
from sebulba.inference.cores import Cores
from sebulba.inference.cycle import Cycle, CyclePrograms
from sebulba.inference.inferencer import Inferencer
from sebulba.inference.places import Places
from sebulba.metrics.timer import PhaseTimer

T = TypeVar("T")
MOST_LINES = 8
"""Nodes that have a line of their own."""


class RemotePlaces(Places):
    """Has each Inferencer in a worker of its own; several workers may share a node."""

    takes_long = True

    def __init__(
        self, new_node: Callable[[int], Node], number: int, per_node: int, most_restarts: int = 0
    ) -> None:
        """Start nodes for ``number`` Inferencers, which import in the background.

        Args:
          most_restarts: How many nodes may be lost before the run has begun.
        """
        self._new_node = new_node
        self._number = number
        self._per_node = per_node
        self._most_restarts = most_restarts
        self._lock = threading.Lock()
        self._closed = False
        self._patient = False
        self.nodes: list[Node] = []
        """All that were started, in this order; those that have ended too."""
        self.stopping = threading.Event()
        """Nobody waits any more for a node that has not been placed."""
        self.limit_s: float | None = None
        """Seconds that the new environments of one Inferencer may take to be made; None waits for
        ever."""
        self._published = 0
        self._before = self._read()
        try:
            for first in range(0, number, per_node):
                self.nodes.append(new_node(min(per_node, number - first)))
        except BaseException:
            self.close()
            raise

    def cores(self, number: int, *, pin: bool) -> list[Cores | None]:
        """Pin nothing: a process in the place of one that was lost would have its cores, too."""
        return [None] * number

    def make(self, num_envs: int, seeds: list[int]) -> RemoteInferencer:  # type: ignore[override]
        """Make environments in the next free worker; in a new node where all are taken."""
        worker = self._take()
        worker.limit_s = self.limit_s
        worker.stopping = self.stopping
        try:
            return RemoteInferencer(worker, num_envs, seeds)
        except BaseException:
            worker.close()
            raise

    def _take(self) -> Worker:
        with self._lock:
            for node in self.nodes:
                if worker := node.take():
                    return worker
            if self._closed:
                raise EnvError("no process is started for it any more: the loop is closed")
            # No more room than is missing: Ray has to find as many CPUs of one machine.
            missing = self._number - sum(node.room for node in self.nodes if node.lives)
            node = self._new_node(max(1, min(self._per_node, missing)))
            self.nodes.append(node)
            worker = node.take()
        if worker is None:
            raise LostNodeError(f"the {node.name} ended before it had an Inferencer")
        return worker

    def make_cycle(
        self, env: Any, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> tuple[Cycle, str]:
        env.begin(programs, device, timer)
        return env, env.why

    def start(self, make: Callable[[], T], make_again: Callable[[], T] | None = None) -> T:
        """Make what a run begins with, again and again while nodes are lost with it.

        Raises:
          LostNodeError: A node was lost once more than is allowed.
        """
        while True:
            try:
                return make()
            except LostNodeError as error:
                self._count_restart(error)
            make = make_again or make

    def _count_restart(self, error: LostNodeError) -> None:
        most = self._most_restarts
        if self.num_restarts >= most:
            if most:
                error.add_note(
                    f"{self.num_restarts} processes were replaced before this one; "
                    f"max_env_restarts={most}"
                )
            raise error
        self.num_restarts += 1
        warnings.warn(
            f"{error} before the run began, and is replaced by a new one "
            f"(restart {self.num_restarts} of {most})",
            RuntimeWarning,
            stacklevel=2,
        )

    def begin(self) -> None:
        self.stopping.clear()

    def started(self, policy_version: int, limit_s: float | None, *, patient: bool) -> None:
        self.limit_s, self._patient = limit_s, patient
        self._published, self._before = policy_version, self._read()

    def stop(self) -> None:
        self.stopping.set()

    def waits_for(self, node: Node) -> bool:
        """Tell whether ``node`` may be waited for without a limit, since the run has others."""
        return self._patient and self.num_living > (node.lives and node.is_placed)

    def kill(self, env: Any) -> None:
        env.kill()

    def close(self) -> None:
        self.stopping.set()
        with self._lock:
            self._closed = True
        with contextlib.ExitStack() as stack:  # ends the others even if one raises
            for node in self.nodes:
                stack.callback(node.close)

    # What nodes do.

    @property
    def num_living(self) -> int:
        """Nodes that Inferencers may run in, without those that wait for a machine."""
        return sum(node.lives and node.is_placed for node in self.nodes)

    @property
    def cpu_s(self) -> float:  # type: ignore[override]
        """CPU seconds of all nodes, as of the last answer of each."""
        return sum(node.traffic.cpu_s for node in self.nodes)

    def _read(self) -> dict[str, float]:
        traffic = [node.traffic for node in self.nodes]
        return {
            "items": sum(one.items for one in traffic),
            "bytes": sum(one.bytes_in + one.bytes_out for one in traffic),
            "relay_s": sum(one.relay_s for one in traffic),
            "versions": sum(one.versions for one in traffic),
        }

    def figures(self, elapsed_s: float, policy_version: int) -> dict[str, Any]:
        now, before = self._read(), self._before
        since = {name: now[name] - before[name] for name in now}
        living = self.num_living
        published = (policy_version - self._published) * living
        self._before, self._published = now, policy_version
        skipped = max(0.0, 1 - since["versions"] / published) if published else None
        return {
            "nodes": living,
            "nodes_lost": sum(node.is_lost for node in self.nodes),
            "relay_ms": 1e3 * since["relay_s"] / since["items"] if since["items"] else None,
            "relay_bytes_per_s": since["bytes"] / max(elapsed_s, 1e-9),
            "relay_skipped_networks": skipped,
        }

    def lines(self, inferencers: Sequence[Inferencer]) -> list[str]:
        # Those that live come last, of which fewer are left out.
        living = [node for node in self.nodes if node.lives]
        nodes = [node for node in self.nodes if node.is_lost and node not in living] + living
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
    of_node: list[Any] = [one for one in inferencers if one.env.worker.node is node]  # type: ignore[attr-defined]
    present = (one.timer.present() for one in of_node)
    phases = collections.Counter(one[0] if one else "between phases" for one in present)
    return ", ".join(f"{n} {phase}" for phase, n in phases.most_common()) or "no Inferencer"

"""The factory of environments elsewhere: it starts nodes, and gives each Inferencer a place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from sebulba.cluster.inferencers.nodes import LostNodeError, Node, Worker
from sebulba.cluster.inferencers.remote_inferencer import RemoteEnv
from sebulba.errors import EnvError


class Workers:
    """An environment factory that makes each vector environment in a worker of its own."""

    def __init__(
        self, new_node: Callable[[int], Node], number: int, per_node: int, min_nodes: int = 0
    ) -> None:
        """Start nodes for ``number`` Inferencers, which import in the background.

        Args:
          new_node: Starts a node with room for so many Inferencers.
          number: How many Inferencers there will be.
          per_node: How many of them share a node.
          min_nodes: With so many left, a lost node is waited for without a limit.
        """
        self._new_node = new_node
        self._number = number
        self._per_node = per_node
        self.min_nodes = min_nodes
        self._lock = threading.Lock()
        self._closed = False
        self.nodes: list[Node] = []
        """All that were started, in this order; those that have ended too."""
        self.stopping = threading.Event()
        """Nobody waits any more for a node that has not been placed."""
        self.limit_s: float | None = None
        """Seconds that the new environments of one Inferencer may take to be made; None waits for
        ever."""
        try:
            for first in range(0, number, per_node):
                self.nodes.append(new_node(min(per_node, number - first)))
        except BaseException:
            self.close()
            raise

    def __call__(self, num_envs: int, seeds: list[int]) -> RemoteEnv:
        """Make the environments in the next free worker; in a new node where all are taken."""
        worker = self._take()
        worker.limit_s = self.limit_s
        worker.stopping = self.stopping
        try:
            return RemoteEnv(worker, num_envs, seeds)
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
            node = self._new_node(self._room_of_a_new_one())
            self.nodes.append(node)
            worker = node.take()
        if worker is None:
            raise LostNodeError(f"the {node.name} ended before it had an Inferencer")
        return worker

    def _room_of_a_new_one(self) -> int:
        """Return how much room a node needs: Ray has to find as many CPUs of one machine."""
        missing = self._number - sum(node.room for node in self.nodes if node.lives)
        return max(1, min(self._per_node, missing))

    @property
    def num_living(self) -> int:
        """Nodes that Inferencers may run in, without those that wait for a machine."""
        return sum(node.lives and node.is_placed for node in self.nodes)

    def goes_on_without(self, node: Node) -> bool:
        """Tell whether ``node`` may be waited for without a limit: there are enough others."""
        return 0 < self.min_nodes <= self.num_living - (node.lives and node.is_placed)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all nodes, as of the last answer of each."""
        return sum(node.traffic.cpu_s for node in self.nodes)

    def close(self) -> None:
        """End all nodes; may be called twice."""
        self.stopping.set()
        with self._lock:
            self._closed = True
        with contextlib.ExitStack() as stack:  # ends the others even if one raises
            for node in self.nodes:
                stack.callback(node.close)

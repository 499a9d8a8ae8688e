"""Nodes: processes and actors in which Inferencers run, several in each where that is asked for.

A ``Node`` has room for some ``Worker``s, which share one copy of the networks. Hosts that learn
together (``sebulba/hosts/``) are something else: each runs a loop of its own.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import cloudpickle
import jax

from sebulba.cluster.inferencers.inferencer_server import Failure, Spent
from sebulba.errors import EnvError
from sebulba.support.trees import num_bytes
from sebulba.types import PyTree

STOP_S = 60.0
"""How long a worker may take to end the program or the environment step that it is in."""
CLOSE_S = 5.0
"""How long it may take to free its environments."""


@dataclasses.dataclass
class Traffic:
    """What went to a node and came back, since it was started."""

    items: int = 0
    """Cycles that were answered."""
    bytes_out: int = 0
    """Bytes of networks and step states that were sent."""
    bytes_in: int = 0
    """Bytes of trajectories and step states that came."""
    versions: int = 0
    """Versions of the networks that were sent."""
    relay_s: float = 0.0
    """Seconds that their way took: from each request to its answer, without the cycle itself."""
    cpu_s: float = 0.0
    """CPU seconds of its process."""


class Version(NamedTuple):
    """The networks as a node knows them."""

    number: int
    """Their number there, from 1."""
    is_new: bool
    """They have not been sent."""
    keep: AbstractSet[int]
    """Numbers that its Inferencers may still ask for."""


class Versions:
    """Numbers the networks of a node, so that each version is sent to it once."""

    def __init__(self, room: int) -> None:
        """Begin with none, for a node with room for so many Inferencers."""
        self._room = room
        self._numbers: list[tuple[PyTree, int]] = []
        """Networks that may still be asked for, and their numbers."""
        self._named: dict[int, int] = {}
        """The number that each Inferencer was given last."""
        self._last = 0
        self._lock = threading.Lock()

    def of(self, slot: int, networks: PyTree) -> Version:
        """Return the version of ``networks``, for which the Inferencer in ``slot`` asks."""
        with self._lock:
            number = next((n for known, n in self._numbers if known is networks), 0)
            if is_new := not number:
                self._last = number = self._last + 1
                self._numbers.append((networks, number))
            self._named[slot] = number
            keep = {*self._named.values(), self._last}
            if [*self._named.values()].count(self._last) < self._room:
                # In lockstep an Inferencer that comes later asks for those before the newest.
                keep.add(self._last - 1)
            self._numbers = [known for known in self._numbers if known[1] in keep]
            return Version(number, is_new, {known[1] for known in self._numbers})

    def forget(self, slot: int) -> None:
        """Have no Inferencer in ``slot`` any more that may ask again."""
        with self._lock:
            self._named.pop(slot, None)


class Node(abc.ABC):
    """A process or an actor with room for some Inferencers, and one copy of the networks."""

    where: str
    """For people, such as "in processes"."""
    name: str
    """Which it is, such as "process 4711"."""

    def __init__(self, room: int) -> None:
        """Have room for so many."""
        self.room = room
        self.traffic = Traffic()
        self.began = time.monotonic()
        """When it was started."""
        self.cycle_numbers = itertools.count(1)
        """Numbers the cycles of all its Inferencers. None is given twice, so that a stop of one
        never stops a later one, also not of who gets its place."""
        self.is_lost = False
        """It has ended, and not because it was closed."""
        self.is_closed = False
        """``close`` was called, or its last worker was closed."""
        self._free = list(range(room))
        self._leaving: dict[int, Worker] = {}
        """Closed workers that have not freed their places yet."""
        self._num_taken = 0
        self.num_preparing = 0
        """Workers that wait for environments or programs, which are made one after the other."""
        self._lock = threading.Lock()
        """Of what its workers share here."""
        self._sending = threading.Lock()
        self._versions = Versions(room)

    @property
    def lives(self) -> bool:
        """Whether Inferencers may run in it."""
        return not (self.is_lost or self.is_closed) and self.runs()

    @property
    def is_placed(self) -> bool:
        """Whether it has begun, and does not wait for a machine with room for it."""
        return True

    def runs(self) -> bool:
        """Tell whether it is there, as far as that can be seen from here."""
        return True

    def take(self) -> Worker | None:
        """Return a worker in it; None if it has no room."""
        with self._lock:
            if not self.lives:
                return None
            for slot in [slot for slot, worker in self._leaving.items() if worker.is_free()]:
                del self._leaving[slot]
                bisect.insort(self._free, slot)
            if not self._free:
                return None
            self._num_taken += 1
            return self.worker(self._free.pop(0))

    def release(self, slot: int, worker: Worker | None) -> None:
        """Let another have the place of a worker that was closed; the last ends the node."""
        self._versions.forget(slot)
        with self._lock:
            if worker is None:
                bisect.insort(self._free, slot)
            else:
                self._leaving[slot] = worker
            self._num_taken -= 1
            is_empty = not self._num_taken
            self.is_closed = self.is_closed or is_empty
        if is_empty:
            self.end()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Count one more worker that prepares, meanwhile."""
        with self._lock:
            self.num_preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_preparing -= 1

    def close(self) -> None:
        """End it; may be called twice."""
        with self._lock:
            self.is_closed = True
        self.end()

    def version(self, slot: int, networks: PyTree, device: jax.Device) -> object:
        """See to it that ``networks`` are there, or on their way; return what names them."""
        with self._sending:
            version = self._versions.of(slot, networks)
            if version.is_new:
                self.traffic.versions += 1
                self.traffic.bytes_out += num_bytes(networks)
            return self.send(version, networks, device)

    def note(self, spent: Spent, wall_s: float, bytes_out: int, bytes_in: int) -> None:
        """Note a cycle that was answered after ``wall_s`` seconds."""
        with self._lock:
            traffic = self.traffic
            traffic.items += 1
            traffic.relay_s += max(0.0, wall_s - spent.seconds)
            traffic.cpu_s = max(traffic.cpu_s, spent.cpu_s)
            traffic.bytes_out += bytes_out
            traffic.bytes_in += bytes_in

    @abc.abstractmethod
    def worker(self, slot: int) -> Worker:
        """Return the worker in a place, which is free."""

    @abc.abstractmethod
    def send(self, version: Version, networks: PyTree, device: jax.Device) -> object:
        """Send networks if they are new; one thread at a time calls it."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it, whatever it is doing; any thread may, also while others wait for answers."""

    @abc.abstractmethod
    def end(self) -> None:
        """End it once nobody uses it any more; may be called twice."""


class Worker(abc.ABC):
    """A ``Server`` elsewhere, and the way to it. One thread at a time may ask."""

    def __init__(self, node: Node, slot: int) -> None:
        """Be the way to the server in a place of ``node``."""
        self.node = node
        self.limit_s: float | None = None
        """Seconds that it may take to make environments and to compile, times the workers of its
        node that do so at once; None waits for ever."""
        self.stopping = threading.Event()
        """Nobody waits any more for its environments."""
        self._slot = slot
        self._closing = threading.Lock()
        self._closed = False

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer to a request, which is a method of ``Server``."""
        self.begin(name, *arguments)
        return self.answer()

    def prepare(self, name: str, *arguments: Any) -> Any:
        """``ask`` for what comes before the cycles, which nobody else watches.

        Raises:
          EnvError: There is no answer after ``limit_s``, and its node has been killed; or the run
            ended.
        """
        self.begin(name, *arguments)
        with self.node.preparing():
            self._wait_for(name)
        return self.answer()

    def _wait_for(self, name: str) -> None:
        began, most = time.monotonic(), 1
        while not self.has_answer():
            if self.stopping.is_set():
                if self.node.room == 1:
                    self.node.close()
                self.close()  # an answer that still comes is nobody's
                raise EnvError(f"the run ended before the {self.node.name} had answered {name!r}")
            most = max(most, self.node.num_preparing)
            if self.limit_s is not None and time.monotonic() > began + self.limit_s * most:
                self.kill()
                raise EnvError(
                    f"the {self.node.name} did not answer {name!r} for {self.limit_s * most:.0f} s "
                    "and was killed; repair the environment, or raise faults.hang_timeout_s if it "
                    "is only slow"
                )

    def begin(self, name: str, *arguments: Any) -> None:
        """Send a request, to which ``answer`` will return the answer.

        Raises:
          EnvError: The node has ended, or the worker was closed, and another may have its place.
        """
        if self._closed:
            raise EnvError(f"the environments in the {self.node.name} were closed")
        self.send(name, *arguments)

    def answer(self, stop: threading.Event | None = None, number: int = 0) -> Any:
        """Wait for the answer; where ``stop`` is set, tell the worker to stop cycle ``number``.

        Raises:
          EnvError: The node ended, or the cycle does not stop.
        """
        stopped_at = None
        while not self.has_answer():
            if stop is not None and stop.is_set():
                if stopped_at is None:
                    stopped_at = time.monotonic()
                    self.stop(number)
                elif time.monotonic() > stopped_at + STOP_S:
                    self.kill()
        answer = self.receive()
        if isinstance(answer, Failure):
            raised: BaseException = cloudpickle.loads(answer.error)
            raised.add_note(f"in {self.node.name}:\n{answer.stack}")
            raise raised
        return answer

    @abc.abstractmethod
    def send(self, name: str, *arguments: Any) -> None:
        """Send a request."""

    @abc.abstractmethod
    def has_answer(self) -> bool:
        """Wait a moment for the answer; tell whether it is there, or will not come."""

    @abc.abstractmethod
    def receive(self) -> Any:
        """Return the answer, which is there, or raise EnvError if it will not come."""

    @abc.abstractmethod
    def stop(self, number: int) -> None:
        """Tell it to stop this cycle."""

    def version(self, networks: PyTree, device: jax.Device) -> object:
        """Return what names networks, which are on ``device``, as an argument of ``begin``."""
        return self.node.version(self._slot, networks, device)

    def kill(self) -> None:
        """End its node with all Inferencers in it; any thread may, also while another waits."""
        self.node.kill()

    def close(self) -> None:
        """Let the environments be freed; the last worker of a node ends it. May be called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        is_free = self.node.lives and self.free()
        self.node.release(self._slot, None if is_free else self)

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._closed or not self.node.lives

    @abc.abstractmethod
    def free(self) -> bool:
        """Have the environments freed; tell at the latest after ``CLOSE_S`` whether they are."""

    @abc.abstractmethod
    def is_free(self) -> bool:
        """Tell, without waiting, whether they are freed after ``free`` said that they were not."""

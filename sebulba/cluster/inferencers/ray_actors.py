"""Inferencers in actors of Ray, on this machine or on others. Nothing else imports ``ray``.

An actor is a ``Node`` (``nodes.py``). What Ray itself calls a node is called a machine here.

The networks of a version are put into Ray's object store once; every machine fetches them once, and
every actor has one copy of them, whatever the number of its Inferencers. A trajectory is what a
call of its actor returns.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import os
import platform
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from sebulba.cluster.inferencers.nodes import CLOSE_S, Node, Version, Worker
from sebulba.cluster.inferencers.remote_inferencer import CYCLES, make_servers, worker_config
from sebulba.cluster.inferencers.remote_places import RemotePlaces
from sebulba.errors import EnvError, LostNodeError, UsageError
from sebulba.options import ClusterOptions
from sebulba.support.user_code import search_path, use_search_path
from sebulba.transport.permits import WAKE_S
from sebulba.types import PyTree

KEPT_VERSIONS = 4
"""Newest versions of the networks that the driver keeps in the object store."""
PLACED_S = 120.0
"""How long Ray may take to find a machine for an actor, and to start it there."""
ANSWER_S = 10.0
"""How long the head of a cluster may take to answer."""
MACHINES_S = 120.0
"""How long machines are waited for that the cluster does not have yet."""
SAME = ("jax", "jaxlib", "numpy", "sebulba")
"""Packages whose versions must be the same everywhere."""
_PATHS = ("jax_compilation_cache_dir",)
"""Settings of JAX that are a path of this machine."""


class About(NamedTuple):
    """Where an actor runs."""

    machine: str
    """Its name."""
    pid: int
    """Its process."""
    machine_id: str
    """What Ray calls it."""
    versions: dict[str, str]
    """Of Python and of ``SAME``."""


class Sent(NamedTuple):
    """A version of the networks, as an argument."""

    number: int
    """Of the version."""
    reference: list[Any]
    """One reference to its leaves: within a list, so that Ray leaves fetching them to the actor."""
    keep: frozenset[int]
    """Numbers that may still be asked for."""


class CycleActor:
    """What Ray runs in a process of a machine: ``Server``s, or that of a trajectory manager."""

    def __init__(
        self,
        path: tuple[list[str], list[str]],
        config: dict[str, Any],
        given: bytes,
        server: str,
        room: int,
    ) -> None:
        """Prepare the servers; folders of ``path`` that this machine has are where it imports."""
        use_search_path(*path)
        there = {k: v for k, v in config.items() if k not in _PATHS or (v and os.path.isdir(v))}
        self._servers = make_servers(server, given, there, room)

    def about(self) -> About:
        """Return where it runs."""
        machine_id = _import_ray().get_runtime_context().get_node_id()
        return About(platform.node(), os.getpid(), machine_id, _versions())

    def answer(self, slot: int, name: str, *arguments: Any) -> Any:
        """Answer a request; see ``Server.answer``."""
        arguments = tuple(self._received(slot, a) if isinstance(a, Sent) else a for a in arguments)
        return self._servers[slot].answer(name, arguments)

    def _received(self, slot: int, sent: Sent) -> int:
        """Fetch networks unless they are here; return their number."""
        shared = self._servers[slot].shared
        shared.put(sent.number, lambda: _import_ray().get(sent.reference[0]), sent.keep)
        return sent.number

    def stop(self, slot: int, number: int) -> None:
        """Stop this cycle, which another thread runs."""
        self._servers[slot].stop(number)


CURRENT_CLUSTER = "/tmp/ray/ray_current_cluster"
"""Where Ray notes the cluster that this machine is part of."""


class Machine(NamedTuple):
    """A machine of a cluster."""

    name: str
    """Its own."""
    cpus: float
    """What Ray counts of it."""


def known_cluster() -> str | None:
    """Return the address of the cluster that ``auto`` would take; None if there is none."""
    if address := os.environ.get("RAY_ADDRESS"):
        return None if address == "local" else address
    try:
        with open(CURRENT_CLUSTER) as file:
            return file.read().strip() or None
    except OSError:
        return None


def machines_of(address: str) -> tuple[list[Machine], float]:
    """Return the machines of the cluster whose head is at HOST:PORT, and the CPUs that are free."""
    ray = _import_ray()
    is_ours = _connect(ray, ClusterOptions(address=address), 0)
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        machines = [
            Machine(node["NodeManagerHostname"], node["Resources"].get("CPU", 0.0))
            for node in alive
        ]
        return machines, ray.available_resources().get("CPU", 0.0)
    finally:
        if is_ours:
            with _signals_kept():
                ray.shutdown()


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in SAME},
    }


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UsageError(
            "cluster.address puts Inferencers into actors of Ray, which is not installed; run: "
            "pip install 'sebulba[cluster]'"
        ) from None
    return ray


class ActorPlaces(RemotePlaces):
    """Has each Inferencer in an actor, or shares of them."""

    def __init__(
        self, given: bytes, cluster: ClusterOptions, number: int, most_restarts: int
    ) -> None:
        """Connect to the cluster, or start one here, and start the actors; see ``RemotePlaces``."""
        self._ray = _import_ray()
        self._is_ours = _connect(self._ray, cluster, number + cluster.trajectory_managers)
        self._store = NetworkStore(self._ray)
        try:
            super().__init__(
                lambda room: ActorNode(self._ray, self._store, given, room, self),
                number,
                cluster.inferencers_per_node,
                most_restarts,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the actors that nobody took, and the cluster if it was started here."""
        super().close()
        if self._is_ours:
            self._is_ours = False
            with _signals_kept():
                self._ray.shutdown()


def _connect(ray: Any, cluster: ClusterOptions, number: int) -> bool:
    """Connect; return whether to disconnect at the end."""
    if ray.is_initialized():  # by the user's own program
        return False
    quiet = {"log_to_driver": False, "logging_level": "error"}
    with _signals_kept():
        if cluster.address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            own = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            with warnings.catch_warnings():
                # Its processes are forked, and run their own program at once.
                warnings.filterwarnings("ignore", ".*os.fork", RuntimeWarning)
                ray.init("local", num_cpus=number, **own, **quiet)
            return True
        try:
            if cluster.address != "auto":
                # Ray itself would wait for minutes.
                host, _, port = cluster.address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
            ray.init(cluster.address, **quiet)
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise UsageError(
                f"cluster.address={cluster.address!r}: no Ray cluster answers ({error}); start "
                "one with `ray start --head` on one machine and `ray start --address=HOST:6379` "
                "on the others, and train on one of them; if the cluster asks for a token (`ray "
                "get-auth-token`), set RAY_AUTH_MODE=token, or use auto on its machines"
            ) from error
    try:
        _wait_for_machines(ray, cluster)
    except BaseException:
        ray.shutdown()
        raise
    return True


def _wait_for_machines(ray: Any, cluster: ClusterOptions) -> None:
    deadline = time.monotonic() + MACHINES_S
    while (there := sum(node["Alive"] for node in ray.nodes())) < cluster.nodes:
        if time.monotonic() > deadline:
            raise UsageError(
                f"cluster.nodes={cluster.nodes} machines are needed, but the cluster at "
                f"{cluster.address!r} has had {there} for {MACHINES_S:.0f} s; start `ray start "
                "--address=HOST:6379` on other machines, or ask for fewer"
            )
        time.sleep(WAKE_S)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep what this process does at signals: Ray replaces it where it connects."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that is not Python's
                signal.signal(number, handler)


def new_actor(given: bytes, room: int, server: str, of: str) -> ActorNode:
    """Start an actor of no Inferencer, once ``ActorPlaces`` has connected to Ray."""
    ray = _import_ray()
    return ActorNode(ray, NetworkStore(ray), given, room, None, server, of)


class NetworkStore:
    """Puts the networks of each version into the object store once."""

    def __init__(self, ray: Any) -> None:
        """Begin with none."""
        self._ray = ray
        self._lock = threading.Lock()
        self._newest: dict[jax.Device, collections.deque[tuple[PyTree, Any]]] = {}
        self.transfers = 0
        """Versions that were put."""

    def put(self, networks: PyTree, device: jax.Device) -> Any:
        """Return the reference of networks, which are on ``device``."""
        with self._lock:
            # In async, one actor may ask for a version when another has had a newer one.
            newest = self._newest.setdefault(device, collections.deque(maxlen=KEPT_VERSIONS))
            for known, reference in newest:
                if known is networks:
                    return reference
            reference = self._ray.put(jax.device_get(jax.tree.leaves(networks)))
            newest.append((networks, reference))
            self.transfers += 1
            return reference


class ActorNode(Node):
    """An actor of Ray, wherever the cluster has room; several go to different machines."""

    def __init__(
        self,
        ray: Any,
        store: NetworkStore,
        given: bytes,
        room: int,
        places: ActorPlaces | None,
        server: str = CYCLES,
        of: str = "an Inferencer",
    ) -> None:
        """Ask Ray to start it; that it cannot be placed is raised by the first answer.

        Args:
          places: Say whether it is waited for, if it cannot be placed; None has no others.
        """
        super().__init__(room)
        self.ray, self._store, self._places = ray, store, places
        self._of = of if room == 1 else f"{room} Inferencers"
        self.where = "in actors"
        self.name = f"actor of {self._of}"
        self.machine_id = ""
        """What Ray calls its machine, once it has one."""
        options = {
            "num_cpus": room,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # the loop makes new ones, with seeds of their own
            # A thread for each Inferencer, and one that tells them to stop.
            "concurrency_groups": {"stop": 1, **{f"slot{slot}": 1 for slot in range(room)}},
        }
        self.actor = ray.remote(**options)(CycleActor).remote(
            search_path(), worker_config(), given, server, room
        )
        self._about = self.actor.about.remote()
        self._placing = threading.Lock()
        self._ended = threading.Event()

    def worker(self, slot: int) -> ActorWorker:
        return ActorWorker(self, slot)

    def send(self, version: Version, networks: PyTree, device: jax.Device) -> Sent:
        """Return a reference: a machine fetches each version once, and this actor takes it once."""
        reference = [self._store.put(networks, device)]
        return Sent(version.number, reference, frozenset(version.keep))

    @property
    def is_placed(self) -> bool:
        return self._about is None

    def wait_until_placed(self) -> None:
        """Wait until its process is there, and check its versions."""
        with self._placing:
            if self._about is None:
                return
            self._wait_for_place()
            about: About = self.got(self._about)
            self._about = None
        self.name = f"actor on {about.machine} (process {about.pid})"
        self.where = f"in actors on {about.machine}"
        self.machine_id = about.machine_id
        ours = _versions()
        if about.versions != ours:
            different = [
                f"{name} {about.versions[name]} there and {ours[name]} here"
                for name in ours
                if about.versions[name] != ours[name]
            ]
            raise UsageError(
                f"the machine {about.machine} has other versions: {'; '.join(different)}; install "
                "the same on all machines"
            )

    def _wait_for_place(self) -> None:
        deadline: float = time.monotonic() + PLACED_S
        while not self.ray.wait([self._about], timeout=WAKE_S)[0]:
            if self._places and self._places.stopping.is_set():
                raise EnvError("the run ended before Ray had started an actor for it")
            if time.monotonic() > deadline:
                if self._places and self._places.waits_for(self):
                    continue
                cpus = self.ray.available_resources().get("CPU", 0)
                raise EnvError(
                    f"Ray has not started the actor of {self._of} for {PLACED_S:.0f} s; it "
                    f"needs {self.room} CPUs of one machine, and {cpus:g} are free on all; add "
                    "machines, or use fewer Inferencers"
                )

    def got(self, reference: Any) -> Any:
        """Return what a call returned, or raise LostNodeError if the actor ended."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            self.is_lost = True
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise LostNodeError(f"the {self.name} ended: {words[0]}") from error

    def kill(self) -> None:
        self.is_lost = True
        self.ray.kill(self.actor)

    def end(self) -> None:
        """Kill it, once."""
        if not self._ended.is_set():
            self._ended.set()
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.kill(self.actor)


class ActorWorker(Worker):
    """The way to the server of one Inferencer in an actor."""

    node: ActorNode

    def __init__(self, node: ActorNode, slot: int) -> None:
        """Ask the server in this place."""
        super().__init__(node, slot)
        self._asked: Any = None
        self._slot_group = f"slot{slot}"

    def send(self, name: str, *arguments: Any) -> None:
        """Call it; once its process is there."""
        self.node.wait_until_placed()
        self._asked = self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        answer = self.node.actor.answer.options(concurrency_group=self._slot_group)
        return answer.remote(self._slot, name, *arguments)

    def has_answer(self) -> bool:
        return bool(self.node.ray.wait([self._asked], timeout=WAKE_S)[0])

    def receive(self) -> Any:
        """Return it as arrays of its own: those of Ray are read-only views of its store."""
        return jax.tree.map(
            lambda x: np.array(x) if isinstance(x, np.ndarray) else x, self.node.got(self._asked)
        )

    def stop(self, number: int) -> None:
        """Call it while another call runs."""
        stop = self.node.actor.stop.options(concurrency_group="stop")
        stop.remote(self._slot, number)

    def free(self) -> bool:
        """Have the environments freed; whoever gets this place next would wait for it.

        Where they are not in time, the actor is killed: a new one needs its CPUs. At a stop nobody
        does.
        """
        if not self.node.is_placed:
            return True  # nothing has been asked
        with contextlib.suppress(self.node.ray.exceptions.RayError):
            self._asked = self._call("close")
            if self.is_free(CLOSE_S):
                return True
        if not self.stopping.is_set():
            self.node.kill()
        return False

    def is_free(self, wait_s: float = 0.0) -> bool:
        return bool(self.node.ray.wait([self._asked], timeout=wait_s)[0])

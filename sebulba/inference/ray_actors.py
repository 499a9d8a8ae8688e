"""Inferencers in actors of Ray, on this machine or on others. Nothing else imports ``ray``.

The networks of a version are put into Ray's object store once; every node fetches them once,
whatever the number of its Inferencers. A trajectory is what a call of its actor returns.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from sebulba.errors import EnvError, UsageError
from sebulba.inference.cycle_server import Given
from sebulba.inference.remote import (
    CLOSE_S,
    CYCLES,
    Worker,
    Workers,
    pickled,
    server_class,
    worker_config,
)
from sebulba.options import ClusterOptions
from sebulba.transport.permits import WAKE_S
from sebulba.types import PyTree

PLACED_S = 120.0
"""How long Ray may take to find a node for an actor, and to start it there."""
ANSWER_S = 10.0
"""How long the head of a cluster may take to answer."""
NODES_S = 120.0
"""How long nodes are waited for that the cluster does not have yet."""
SAME = ("jax", "jaxlib", "numpy", "sebulba")
"""Packages whose versions must be the same everywhere."""
_PATHS = ("jax_compilation_cache_dir",)
"""Settings of JAX that are a path of this machine."""


class About(NamedTuple):
    """Where an actor runs."""

    host: str
    """Name of the machine."""
    pid: int
    """Its process."""
    node: str
    """Ray's name of the node."""
    versions: dict[str, str]
    """Of Python and of ``SAME``."""


class CycleActor:
    """What Ray runs in a process of a node: a ``Server``, or that of a trajectory manager."""

    def __init__(self, path: list[str], config: dict[str, Any], given: bytes, server: str) -> None:
        """Prepare the server; folders of ``path`` that this machine has are where it imports."""
        sys.path.extend(p for p in path if p not in sys.path and os.path.exists(p))
        there = {k: v for k, v in config.items() if k not in _PATHS or (v and os.path.isdir(v))}
        self._server = server_class(server)(given, there)

    def about(self) -> About:
        """Return where it runs."""
        node = _import_ray().get_runtime_context().get_node_id()
        return About(platform.node(), os.getpid(), node, _versions())

    def answer(self, name: str, *arguments: Any) -> Any:
        """Answer a request; see ``Server.answer``."""
        return self._server.answer(name, arguments)

    def stop(self, number: int) -> None:
        """Stop this cycle, which another thread runs."""
        self._server.stop(number)


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


class ActorWorkers(Workers):
    """Makes each vector environment in an actor of its own."""

    def __init__(self, given: Given, cluster: ClusterOptions, number: int) -> None:
        """Connect to the cluster, or start one here, and start ``number`` actors.

        Raises:
          UsageError: Ray is missing, there is no such cluster, or something cannot be sent.
        """
        sent = pickled(given, cluster.address)
        self._ray = _import_ray()
        self._is_ours = _connect(self._ray, cluster, number + cluster.trajectory_managers)
        self._store = NetworkStore(self._ray)
        try:
            super().__init__(lambda: ActorWorker(self._ray, self._store, sent), number)
        except BaseException:
            self.close()
            raise

    @property
    def transfers(self) -> int:
        """Versions of the networks that were put into the object store."""
        return self._store.transfers

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
                f"cluster.address={cluster.address!r}: no cluster of Ray answers ({error}); start "
                "one with `ray start --head` on one machine and `ray start --address=HOST:6379` on "
                "the others, and train on one of them"
            ) from error
    try:
        _wait_for_nodes(ray, cluster)
    except BaseException:
        ray.shutdown()
        raise
    return True


def _wait_for_nodes(ray: Any, cluster: ClusterOptions) -> None:
    deadline = time.monotonic() + NODES_S
    while (nodes := sum(node["Alive"] for node in ray.nodes())) < cluster.nodes:
        if time.monotonic() > deadline:
            raise UsageError(
                f"cluster.nodes={cluster.nodes} must be there, and the cluster at "
                f"{cluster.address!r} has had {nodes} for {NODES_S:.0f} s; start `ray start "
                "--address=HOST:6379` on the others, or ask for fewer"
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


def manager_worker(given: bytes, server: str) -> ActorWorker:
    """Start the actor of a trajectory manager, once ``ActorWorkers`` has connected to Ray."""
    ray = _import_ray()
    return ActorWorker(ray, NetworkStore(ray), given, server, "a trajectory manager")


class NetworkStore:
    """Puts the networks of each version into the object store once."""

    def __init__(self, ray: Any) -> None:
        """Begin with none."""
        self._ray = ray
        self._lock = threading.Lock()
        self._newest: dict[jax.Device, tuple[PyTree, Any]] = {}
        self.transfers = 0
        """Versions that were put."""

    def put(self, networks: PyTree, device: jax.Device) -> Any:
        """Return the reference of networks, which are on ``device``."""
        with self._lock:
            newest, reference = self._newest.get(device, (None, None))
            if newest is not networks:
                reference = self._ray.put(jax.device_get(jax.tree.leaves(networks)))
                self._newest[device] = (networks, reference)
                self.transfers += 1
            return reference


class ActorWorker(Worker):
    """An actor of Ray, wherever the cluster has room; several go to different nodes."""

    where = "in actors"

    def __init__(
        self,
        ray: Any,
        store: NetworkStore,
        given: bytes,
        server: str = CYCLES,
        of: str = "an Inferencer",
    ) -> None:
        """Ask Ray to start it; that it cannot be placed is raised by the first answer.

        Args:
          ray: The module, connected.
          store: Of the networks that are sent.
          given: What the server works with, pickled.
          server: The class of it, as ``module:class``.
          of: Whose actor it is, for people.
        """
        self._ray, self._store, self._of = ray, store, of
        self.name = f"actor of {of}"
        self.node = ""
        options = {
            "num_cpus": 1,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # the loop makes new ones, with seeds of their own
            "concurrency_groups": {"stop": 1},
        }
        self._actor = ray.remote(**options)(CycleActor).remote(
            list(sys.path), worker_config(), given, server
        )
        self._about = self._actor.about.remote()
        self._asked: Any = None
        self._closed = threading.Event()

    def begin(self, name: str, *arguments: Any) -> None:
        """Call it; once its process is there."""
        self._wait_until_placed()
        self._asked = self._actor.answer.remote(name, *arguments)

    def _wait_until_placed(self) -> None:
        if self._about is None:
            return
        deadline = time.monotonic() + PLACED_S
        while not self._ray.wait([self._about], timeout=WAKE_S)[0]:
            if time.monotonic() > deadline:
                cpus = self._ray.available_resources().get("CPU", 0)
                raise EnvError(
                    f"Ray has not started the actor of {self._of} for {PLACED_S:.0f} s; it "
                    f"needs one CPU, and {cpus:g} are free; add nodes, or use fewer Inferencers"
                )
        about: About = self._got(self._about)
        self._about = None
        self.name = f"actor on {about.host} (process {about.pid})"
        self.where = f"in actors on {about.host}"
        self.node = about.node
        ours = _versions()
        if about.versions != ours:
            different = [
                f"{name} {about.versions[name]} there and {ours[name]} here"
                for name in ours
                if about.versions[name] != ours[name]
            ]
            raise UsageError(
                f"the machine {about.host} has other versions: {'; '.join(different)}; install "
                "the same on all nodes"
            )

    def has_answer(self) -> bool:
        """Tell whether it is there, within ``WAKE_S``."""
        return bool(self._ray.wait([self._asked], timeout=WAKE_S)[0])

    def receive(self) -> Any:
        """Return it as arrays of its own: those of Ray are read-only views of its store."""
        return jax.tree.map(
            lambda x: np.array(x) if isinstance(x, np.ndarray) else x, self._got(self._asked)
        )

    def _got(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise EnvError(f"the {self.name} ended: {words[0]}") from error

    def stop(self, number: int) -> None:
        """Call it while another call runs."""
        self._actor.stop.options(concurrency_group="stop").remote(number)

    def networks(self, networks: PyTree, device: jax.Device) -> Any:
        """Return a reference: a node fetches each version once."""
        return self._store.put(networks, device)

    def kill(self) -> None:
        """Kill it."""
        self._ray.kill(self._actor)

    def close(self) -> None:
        """Free the environments, and kill it."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.wait([self._actor.answer.remote("close")], timeout=CLOSE_S)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)

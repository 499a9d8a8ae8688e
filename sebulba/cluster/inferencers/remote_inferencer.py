"""Inferencers whose cycles run elsewhere: in a process of this machine, or on another machine.

The thread of such an Inferencer stays in the process that trains: permits, rounds, hangs, restarts
and checkpoints are those of any other. Only its cycle runs elsewhere: ``RemoteInferencer`` sends
the networks, if they are new there, and the step state, and gets the trajectory back. What is asked
there is a ``Server`` (``inferencer_server.py``); a ``Worker`` is the way to it, in a ``Node``
(``nodes.py``).
"""

from __future__ import annotations

import contextlib
import pkgutil
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np

from sebulba.cluster.inferencers.nodes import Worker
from sebulba.errors import EnvError, LostNodeError, UsageError
from sebulba.inference.cycle import CyclePrograms
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.trees import num_bytes, owned_copy
from sebulba.transport.item import Item
from sebulba.types import PyTree, Trajectory

CYCLES = "sebulba.cluster.inferencers.inferencer_server:Server"
"""What runs the cycles of an Inferencer in a worker."""
COPIED_CONFIG = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_default_matmul_precision", "jax_numpy_rank_promotion", "jax_debug_nans"),
    *("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"),
    "jax_persistent_cache_min_entry_size_bytes",
)
"""Settings of JAX that workers take over."""


def make_servers(name: str, given: bytes, config: Mapping[str, Any], number: int) -> list[Any]:
    """Return the servers of a process, which share what they can; see ``Server.another``."""
    first = pkgutil.resolve_name(name)(given, config)
    return [first, *(first.another() for _ in range(number - 1))]


def worker_config() -> dict[str, Any]:
    """Return the settings of JAX for workers: those of this process, but on the CPU."""
    config = {name: getattr(jax.config, name) for name in COPIED_CONFIG}
    # Programs run in the thread that calls them: no other has work while they do.
    return config | {"jax_platforms": "cpu", "jax_cpu_enable_async_dispatch": False}


def pickled(given: Any, address: str) -> bytes:
    """Return what servers work with as bytes.

    Raises:
      UsageError: The environment factory or the agent cannot be sent.
    """
    try:
        return cloudpickle.dumps(given)
    except Exception as error:
        raise UsageError(
            f"cluster.address={address!r} sends the environment factory and the agent to other "
            f"processes, and they cannot be pickled: {error}; make them of functions and classes "
            "at the top of a module"
        ) from error


class RemoteInferencer:
    """An Inferencer elsewhere, as this process has it: its environments, and its cycle (``Cycle``).

    Nothing here steps the environments. ``LoopEnvs`` checks their spec and closes them.
    """

    def __init__(self, worker: Worker, num_envs: int, seeds: Sequence[int]) -> None:
        """Have the environments made there; ``begin`` comes next."""
        self.worker = worker
        self.num_envs = num_envs
        self.spec, self.draws = worker.prepare("make", num_envs, list(seeds))
        self.why = worker.node.where
        """Where it is, and the reason for the kind of its cycles."""

    def begin(self, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer) -> None:
        """Prepare cycles there; ``device`` holds networks and step states here."""
        self._device = device
        self._timer = timer
        self._use(programs)

    def kill(self) -> None:
        """End its process, in which it hangs."""
        self.worker.kill()

    def close(self) -> None:
        """Free the environments, and end their process if nobody else is in it."""
        self.worker.close()

    def use(self, programs: CyclePrograms) -> None:
        if not self.worker.is_gone:
            with contextlib.suppress(LostNodeError):  # its next cycle fails, and it is replaced
                self._use(programs)

    def _use(self, programs: CyclePrograms) -> None:
        self._programs = programs
        self.kind, why = self.worker.prepare("use", programs.run)
        if why:
            self.why = f"{self.worker.node.where}; {why}"
        self._sent: PyTree = None
        shapes = programs.shapes
        self._structure = jax.tree.structure((shapes.env_step, shapes.action, shapes.extras))

    def reset(self) -> None:
        self.worker.ask("reset")

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        keys, number = self._programs.keys, next(self.worker.node.cycle_numbers)
        with self._timer.phase("act"):
            initial = self._programs.copy(step_state)
            given = jax.device_get(keys.unwrap(step_state))
        with self._timer.phase("cycle"):
            began = time.perf_counter()
            version = None
            if networks is not self._sent:
                version = self.worker.version(networks, self._device)
            self.worker.begin("run", number, version, given)
            self._sent = networks
            made, after, spent = self.worker.answer(stop, number)
            wall_s = time.perf_counter() - began
        with self._timer.phase("finish"):
            step_state = keys.wrap(owned_copy(after, self._device))
            self.worker.node.note(
                spent,
                wall_s,
                num_bytes(given),
                num_bytes(after) + num_bytes(made[0] if made else ()),
            )
            if made is None:
                return None, step_state
            leaves, step_infos = made
            trajectory = Trajectory(*jax.tree.unflatten(self._structure, leaves))
            final = self._programs.copy(step_state)
        return Item(trajectory, initial, final, step_infos), step_state

    def position(self) -> bytes | str:
        return self.worker.ask("position")

    def put_back(self, position: bytes) -> None:
        self.worker.ask("put_back", position)

    def last_transition(self) -> dict[str, np.ndarray]:
        """Return the latest observation and action; empty where the worker ended."""
        try:
            return self.worker.ask("last_transition")
        except EnvError:
            return {}

"""Inferencers whose cycles run elsewhere: in a process of this machine, or on another machine.

The thread of such an Inferencer stays in the process that trains: permits, rounds, hangs, restarts
and checkpoints are those of any other. Only its cycle runs elsewhere: ``RemoteCycle`` sends the
networks, if they are new, and the step state, and gets the trajectory back. What is asked there is
a ``Server`` (``cycle_server.py``); a ``Worker`` is the way to it.
"""

from __future__ import annotations

import abc
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np

from sebulba.errors import EnvError, UsageError
from sebulba.inference.cycle import CycleOutput, CyclePrograms
from sebulba.inference.cycle_server import Failure
from sebulba.metrics.timer import PhaseTimer
from sebulba.trees import owned_copy
from sebulba.types import EnvOutput, FusedEnv, PyTree

STOP_S = 60.0
"""How long a worker may take to end the program or the environment step that it is in."""
CLOSE_S = 5.0
"""How long it may take to free its environments."""
CYCLES = "sebulba.inference.cycle_server:Server"
"""What runs the cycles of an Inferencer in a worker."""
COPIED_CONFIG = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_default_matmul_precision", "jax_numpy_rank_promotion", "jax_debug_nans"),
    *("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"),
    "jax_persistent_cache_min_entry_size_bytes",
)
"""Settings of JAX that workers take over."""


def server_class(name: str) -> Any:
    """Return the class named ``module:class``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def worker_config() -> dict[str, Any]:
    """Return the settings of JAX for workers: those of this process, but on the CPU."""
    config = {name: getattr(jax.config, name) for name in COPIED_CONFIG}
    # Programs run in the thread that calls them: no other has work while they do.
    return config | {"jax_platforms": "cpu", "jax_cpu_enable_async_dispatch": False}


class Worker(abc.ABC):
    """A ``Server`` elsewhere, and the way to it. One thread at a time may ask."""

    where: str
    """For people, such as "in processes"."""
    name: str
    """Which it is, such as "process 4711"."""

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer to a request, which is a method of ``Server``."""
        self.begin(name, *arguments)
        return self.answer()

    def answer(self, stop: threading.Event | None = None, number: int = 0) -> Any:
        """Wait for the answer; where ``stop`` is set, tell the worker to stop cycle ``number``.

        Raises:
          EnvError: The worker ended, or does not stop.
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
            raised.add_note(f"in {self.name}:\n{answer.stack}")
            raise raised
        return answer

    @abc.abstractmethod
    def begin(self, name: str, *arguments: Any) -> None:
        """Send a request, to which ``answer`` will return the answer."""

    @abc.abstractmethod
    def has_answer(self) -> bool:
        """Wait a moment for the answer; tell whether it is there, or will not come."""

    @abc.abstractmethod
    def receive(self) -> Any:
        """Return the answer, which is there, or raise EnvError if it will not come."""

    @abc.abstractmethod
    def stop(self, number: int) -> None:
        """Tell it to stop this cycle."""

    def networks(self, networks: PyTree, device: jax.Device) -> Any:
        """Return networks, which are on ``device``, as an argument of ``begin``."""
        del device
        return jax.device_get(jax.tree.leaves(networks))

    @abc.abstractmethod
    def kill(self) -> None:
        """End the worker, whatever it is doing; any thread may, also while another waits."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let the environments be freed, and end the worker; may be called twice."""


class Workers:
    """An environment factory that makes each vector environment in a worker of its own."""

    def __init__(self, new_worker: Callable[[], Worker], number: int) -> None:
        """Start ``number`` workers, which import in the background."""
        self._new_worker = new_worker
        self._ready: list[Worker] = []
        try:
            self._ready.extend(new_worker() for _ in range(number))
        except BaseException:
            self.close()
            raise

    def __call__(self, num_envs: int, seeds: list[int]) -> RemoteEnv:
        """Make the environments in the next worker; in a new one when all are taken."""
        worker = self._ready.pop(0) if self._ready else self._new_worker()
        try:
            return RemoteEnv(worker, num_envs, seeds)
        except BaseException:
            worker.close()
            raise

    def close(self) -> None:
        """End the workers that nobody took; may be called twice."""
        while self._ready:
            self._ready.pop().close()


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


class RemoteEnv:
    """A vector environment in another process. Only ``RemoteCycle`` steps it."""

    def __init__(self, worker: Worker, num_envs: int, seeds: Sequence[int]) -> None:
        """Make it; the spec comes from there."""
        self.worker = worker
        self.num_envs = num_envs
        self.spec, self.draws = worker.ask("make", num_envs, list(seeds))

    def reset(self) -> EnvOutput:
        """Not here: its cycle does it."""
        raise NotImplementedError("its process resets it")

    def step(self, action: Any) -> EnvOutput:
        """Not here: its cycle does it."""
        raise NotImplementedError("its process steps it")

    def fused(self) -> FusedEnv | str:
        """Return why it is not JAX functions here."""
        return "it is in another process"

    def state(self) -> bytes | str:
        """Not here: its cycle keeps it."""
        raise NotImplementedError("its process keeps its state")

    def put_back(self, state: bytes) -> None:
        """Not here: its cycle does it."""
        raise NotImplementedError("its process puts it back")

    def kill(self) -> None:
        """End its process, in which it hangs."""
        self.worker.kill()

    def close(self) -> None:
        """Free it, and end its process."""
        self.worker.close()


class RemoteCycle:
    """Has the cycles of an Inferencer run in its worker; see ``Cycle``."""

    def __init__(
        self, env: RemoteEnv, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> None:
        """Prepare cycles there; ``device`` holds networks and step states here."""
        self._worker = env.worker
        self._device = device
        self._timer = timer
        self._sent: PyTree = None
        self._number = 0
        self.why = env.worker.where
        self.use(programs)

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs from the next cycle on."""
        self._programs = programs
        self.kind, why = self._worker.ask("use", programs.run)
        if why:
            self.why = f"{self._worker.where}; {why}"
        self._sent = None
        shapes = programs.shapes
        self._structure = jax.tree.structure((shapes.env_step, shapes.action, shapes.extras))

    def reset(self) -> None:
        """Begin new episodes."""
        self._worker.ask("reset")

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[CycleOutput | None, PyTree]:
        """Run one cycle; see ``Cycle.run``."""
        keys, self._number = self._programs.keys, self._number + 1
        with self._timer.phase("act"):
            initial = self._programs.copy(step_state)
            given = jax.device_get(keys.unwrap(step_state))
            new = None
            if networks is not self._sent:
                new = self._worker.networks(networks, self._device)
            self._worker.begin("run", self._number, new, given)
            self._sent = networks
        with self._timer.phase("cycle"):
            made, after = self._worker.answer(stop, self._number)
        with self._timer.phase("finish"):
            step_state = keys.wrap(owned_copy(after, self._device))
            if made is None:
                return None, step_state
            leaves, step_infos = made
            env_step, action, extras = jax.tree.unflatten(self._structure, leaves)
            final = self._programs.copy(step_state)
        return CycleOutput(env_step, action, extras, initial, final, step_infos), step_state

    def position(self) -> bytes | str:
        """Return where the environment stands; see ``Cycle.position``."""
        return self._worker.ask("position")

    def put_back(self, position: bytes) -> None:
        """Go on from ``position``; see ``Cycle.put_back``."""
        self._worker.ask("put_back", position)

    def last_transition(self) -> dict[str, np.ndarray]:
        """Return the latest observation and action; empty where the worker ended."""
        try:
            return self._worker.ask("last_transition")
        except EnvError:
            return {}

"""Inferencers in processes of their own, each with an interpreter of its own.

The thread of such an Inferencer stays in the process that trains: permits, rounds, hangs, restarts
and checkpoints are those of any other. Only its cycle runs elsewhere: ``ProcessCycle`` sends the
networks, if they are new, and the step state, and gets the trajectory back.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import jax
import numpy as np

from sebulba.errors import EnvError, UsageError
from sebulba.inference.cycle import CycleOutput, CyclePrograms
from sebulba.inference.inferencer_process import Failure, Given
from sebulba.metrics.timer import PhaseTimer
from sebulba.transport.permits import WAKE_S
from sebulba.trees import owned_copy
from sebulba.types import EnvOutput, FusedEnv, PyTree

STOP_S = 60.0
"""How long a process may take to end the program or the environment step that it is in."""
CLOSE_S = 5.0
"""How long it may take to free its environments."""
COPIED_CONFIG = (
    *("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable"),
    *("jax_default_matmul_precision", "jax_numpy_rank_promotion", "jax_debug_nans"),
    *("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"),
    "jax_persistent_cache_min_entry_size_bytes",
)
"""Settings of JAX that the processes take over."""


class Processes:
    """An environment factory that makes each vector environment in a process of its own.

    A context manager, which ends the processes that are started ahead and that nobody took.
    """

    def __init__(self, given: Given, number: int) -> None:
        """Start ``number`` processes, which import in the background.

        Raises:
          UsageError: The environment factory or the agent cannot be sent to them.
        """
        try:
            self._given = cloudpickle.dumps(given)
        except Exception as error:
            raise UsageError(
                "cluster.address='processes' sends the environment factory and the agent to other "
                f"processes, and they cannot be pickled: {error}; make them of functions and "
                "classes at the top of a module"
            ) from error
        self._started = [_Process(self._given) for _ in range(number)]

    def __call__(self, num_envs: int, seeds: list[int]) -> ProcessEnv:
        """Make the environments in the next process; in a new one when all are taken."""
        process = self._started.pop(0) if self._started else _Process(self._given)
        try:
            return ProcessEnv(process, num_envs, seeds)
        except BaseException:
            process.close()
            raise

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._started:
            self._started.pop().close()


class _Process:
    """A process and the socket to it. One thread at a time may ask."""

    def __init__(self, given: bytes) -> None:
        ours, its = socket.socketpair()
        with its:
            module = "sebulba.inference.inferencer_process"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._closing = threading.Lock()
        config = {name: getattr(jax.config, name) for name in COPIED_CONFIG}
        # Programs run in the thread that calls them: no other has work while they do.
        own = {"jax_platforms": "cpu", "jax_cpu_enable_async_dispatch": False}
        self._send((list(sys.path), config | own, given))

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer to a request."""
        self.begin(name, *arguments)
        return self.answer()

    def begin(self, name: str, *arguments: Any) -> None:
        """Send a request, to which ``answer`` will return the answer."""
        self._send((name, arguments))

    def answer(self, stop: threading.Event | None = None, number: int = 0) -> Any:
        """Wait for the answer; where ``stop`` is set, tell the process to stop cycle ``number``.

        Raises:
          EnvError: The process ended, or does not stop.
        """
        stopped_at = None
        while not self._has_answer():
            if stop is not None and stop.is_set():
                if stopped_at is None:
                    stopped_at = time.monotonic()
                    self._send(("stop", (number,)))
                elif time.monotonic() > stopped_at + STOP_S:
                    self.kill()
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._raise_ended(error)
        if isinstance(answer, Failure):
            raised: BaseException = cloudpickle.loads(answer.error)
            raised.add_note(f"in process {self._process.pid}:\n{answer.stack}")
            raise raised
        return answer

    def _has_answer(self) -> bool:
        try:
            return self._connection.poll(WAKE_S)
        except OSError as error:
            self._raise_ended(error)

    def _send(self, message: tuple) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            self._raise_ended(error)

    def _raise_ended(self, cause: BaseException) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        code = self._process.returncode
        how = f"by {signal.Signals(-code).name}" if code and code < 0 else f"with code {code}"
        raise EnvError(f"the process {self._process.pid} of an Inferencer ended {how}") from cause

    def kill(self) -> None:
        """End the process, whatever it is doing; any thread may, also while another waits."""
        self._process.kill()

    def close(self) -> None:
        """Let the environments be freed, and end the process; may be called twice."""
        with self._closing:
            if self._process.returncode is not None:
                return
            with contextlib.suppress(OSError, ValueError):
                self._connection.send(("close", ()))
                self._connection.poll(CLOSE_S)
            self._connection.close()
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class ProcessEnv:
    """A vector environment in another process. Only ``ProcessCycle`` steps it."""

    def __init__(self, process: _Process, num_envs: int, seeds: Sequence[int]) -> None:
        """Make it; the spec comes from there."""
        self.process = process
        self.num_envs = num_envs
        self.spec, self.draws = process.ask("make", num_envs, list(seeds))

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
        self.process.kill()

    def close(self) -> None:
        """Free it, and end its process."""
        self.process.close()


class ProcessCycle:
    """Has the cycles of an Inferencer run in its process; see ``Cycle``."""

    def __init__(
        self, env: ProcessEnv, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> None:
        """Prepare cycles there; ``device`` holds networks and step states here."""
        self._process = env.process
        self._device = device
        self._timer = timer
        self._sent: PyTree = None
        self._number = 0
        self.why = ""
        self.use(programs)

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs from the next cycle on."""
        self._programs = programs
        self.kind, why = self._process.ask("use", programs.run)
        self.why = self.why or why
        self._sent = None
        shapes = programs.shapes
        self._structure = jax.tree.structure((shapes.env_step, shapes.action, shapes.extras))

    def reset(self) -> None:
        """Begin new episodes."""
        self._process.ask("reset")

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[CycleOutput | None, PyTree]:
        """Run one cycle; see ``Cycle.run``."""
        keys, self._number = self._programs.keys, self._number + 1
        with self._timer.phase("act"):
            initial = self._programs.copy(step_state)
            given = jax.device_get(keys.unwrap(step_state))
            new = None if networks is self._sent else jax.device_get(jax.tree.leaves(networks))
            self._process.begin("run", self._number, new, given)
            self._sent = networks
        with self._timer.phase("cycle"):
            made, after = self._process.answer(stop, self._number)
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
        return self._process.ask("position")

    def put_back(self, position: bytes) -> None:
        """Go on from ``position``; see ``Cycle.put_back``."""
        self._process.ask("put_back", position)

    def last_transition(self) -> dict[str, np.ndarray]:
        """Return the latest observation and action; empty where the process ended."""
        try:
            return self._process.ask("last_transition")
        except EnvError:
            return {}

"""Inferencers in processes of this machine, each with an interpreter of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from sebulba.errors import EnvError
from sebulba.inference.cycle_server import Given
from sebulba.inference.remote import (
    CLOSE_S,
    CYCLES,
    Worker,
    Workers,
    pickled,
    worker_config,
)
from sebulba.transport.permits import WAKE_S


def manager_worker(given: bytes, server: str) -> ProcessWorker:
    """Start the process of a trajectory manager."""
    return ProcessWorker(given, server, "a trajectory manager")


def process_workers(given: Given, number: int) -> Workers:
    """Return the factory of environments in processes, ``number`` of which start at once.

    Raises:
      UsageError: The environment factory or the agent cannot be sent to them.
    """
    sent = pickled(given, "processes")
    return Workers(lambda: ProcessWorker(sent), number)


class ProcessWorker(Worker):
    """A process, which runs ``inferencer_process.py``, and the socket to it."""

    where = "in processes"

    def __init__(self, given: bytes, server: str = CYCLES, of: str = "an Inferencer") -> None:
        """Start it.

        Args:
          given: What the server works with, pickled.
          server: The class of it, as ``module:class``.
          of: Whose process it is, for people.
        """
        ours, its = socket.socketpair()
        with its:
            module = "sebulba.inference.inferencer_process"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.name = f"process {self._process.pid}"
        self._connection = Connection(ours.detach())
        self._closing = threading.Lock()
        self._of = of
        self._send((list(sys.path), worker_config(), given, server))

    def begin(self, name: str, *arguments: Any) -> None:
        """Send it over the socket."""
        self._send((name, arguments))

    def has_answer(self) -> bool:
        """Tell whether it is there, within ``WAKE_S``."""
        try:
            return self._connection.poll(WAKE_S)
        except OSError as error:
            self._raise_ended(error)

    def receive(self) -> Any:
        """Take it from the socket."""
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self._raise_ended(error)

    def stop(self, number: int) -> None:
        """Say it over the socket."""
        self._send(("stop", (number,)))

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
        raise EnvError(f"the {self.name} of {self._of} ended {how}") from cause

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()

    def close(self) -> None:
        """Ask it to end, and wait; see ``Worker.close``."""
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

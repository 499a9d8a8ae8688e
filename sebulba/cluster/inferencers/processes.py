"""Inferencers in processes of this machine, with an interpreter for each or for some of them."""

from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jax

from sebulba.cluster.inferencers.nodes import CLOSE_S, Node, Version, Worker
from sebulba.cluster.inferencers.remote_inferencer import CYCLES, worker_config
from sebulba.errors import EnvError, LostNodeError, signal_name
from sebulba.support.user_code import search_path
from sebulba.transport.permits import WAKE_S
from sebulba.types import PyTree


def _send(connection: Connection, message: tuple) -> None:
    """Send a message, as ``connection.send`` does.

    That keeps a view of its buffer in its frame, so in the traceback of a pipe that is broken; and
    CPython 3.12.1 crashes where the garbage collector finds such a view (its issue 111049).
    """
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class ProcessNode(Node):
    """A process, which runs ``inferencer_process.py``, and the sockets to it."""

    def __init__(
        self, given: bytes, room: int, server: str = CYCLES, of: str = "an Inferencer"
    ) -> None:
        """Start it; one that ends at once has no worker to take.

        Args:
          server: The class of them, as ``module:class``.
        """
        super().__init__(room)
        self.where = "in processes" if room == 1 else f"in processes with {room} each"
        pairs = [socket.socketpair() for _ in range(room + 1)]
        with contextlib.ExitStack() as stack:
            numbers = [stack.enter_context(its).fileno() for _, its in pairs]
            module = "sebulba.cluster.inferencers.inferencer_process"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
            )
        self.name = f"process {self._process.pid}"
        self.of = of if room == 1 else f"{room} Inferencers"
        self._control, *self._connections = (Connection(ours.detach()) for ours, _ in pairs)
        self._ending = threading.Lock()
        try:
            self._send_given((search_path(), worker_config(), given, server))
        except LostNodeError:
            self.end()
        except BaseException:
            self.end()
            raise

    def _send_given(self, message: tuple) -> None:
        try:
            _send(self._control, message)
        except OSError as error:
            self.raise_ended(error)

    def runs(self) -> bool:
        return self._process.poll() is None

    def worker(self, slot: int) -> ProcessWorker:
        return ProcessWorker(self, slot, self._connections[slot])

    def send(self, version: Version, networks: PyTree, device: jax.Device) -> int:
        """Send them over the socket for all; whoever asks with the number waits for them there."""
        if version.is_new:
            leaves = jax.device_get(jax.tree.leaves(networks))
            try:
                _send(self._control, (version.number, leaves, version.keep))
            except OSError as error:
                self.raise_ended(error)
        return version.number

    def raise_ended(self, cause: BaseException) -> NoReturn:
        """Raise LostNodeError that says how it ended."""
        self.is_lost = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        code, how = self._process.returncode, "has closed its sockets, and goes on"
        if code is not None:
            how = f"ended by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        raise LostNodeError(f"the {self.name} of {self.of} {how}") from cause

    def kill(self) -> None:
        self.is_lost = True
        self._process.kill()

    def end(self) -> None:
        """Close the sockets, which ends it, and wait."""
        with self._ending:
            if self._process.returncode is not None and self._control.closed:
                return
            for connection in (self._control, *self._connections):
                connection.close()
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class ProcessWorker(Worker):
    """The end of a socket of one Inferencer."""

    node: ProcessNode

    def __init__(self, node: ProcessNode, slot: int, connection: Connection) -> None:
        """Ask at ``connection``."""
        super().__init__(node, slot)
        self._connection = connection
        self._unanswered = 0

    def send(self, name: str, *arguments: Any) -> None:
        self._send((name, arguments))
        self._unanswered += 1

    def has_answer(self) -> bool:
        try:
            return self._connection.poll(WAKE_S)
        except OSError as error:
            self.node.raise_ended(error)

    def receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.node.raise_ended(error)
        self._unanswered -= 1
        return answer

    def stop(self, number: int) -> None:
        self._send(("stop", (number,)))

    def _send(self, message: tuple) -> None:
        try:
            _send(self._connection, message)
        except OSError as error:
            self.node.raise_ended(error)

    def free(self) -> bool:
        """Ask it to, and wait until everything is answered, for whoever gets this place next."""
        with contextlib.suppress(OSError, ValueError, EnvError):
            self.send("close")
        return self.is_free(CLOSE_S)

    def is_free(self, wait_s: float = 0.0) -> bool:
        """Take the answers that are there, and tell whether none is missing."""
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(OSError, ValueError, EnvError):
            while self._unanswered and self._connection.poll(max(0, deadline - time.monotonic())):
                self.receive()
        return not self._unanswered

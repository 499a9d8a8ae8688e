"""Listens, welcomes clients to seats, and answers all who ask at once."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import sebulba
from sebulba_external import protocol
from sebulba_external.desk import Answer, Desk
from sebulba_external.protocol import ProtocolError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_CONNECTIONS = 256
"""Beside one for each seat."""
HELLO_WITHIN_S = 5.0
"""A connection has to say hello, and end a frame that it began, within so many seconds."""
WAKE_S = 0.05


class Watcher:
    """What follows the seats while a listener answers, in its thread; this one does nothing."""

    def reported(self, seat: int) -> None:
        """Take the row that a client reported."""

    def answered(self, asked: np.ndarray, answer: Answer) -> None:
        """Take what was chosen for the seats in ``asked [B]``."""

    def left(self, seat: int) -> None:
        """Take note that an episode broke off: its client is gone, or began another."""


class _Connection:
    """A client: its socket, what of a frame has come, and its seat."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.data = bytearray()
        self.due = time.monotonic() + HELLO_WITHIN_S
        """When it is dropped, unless a hello or the rest of a frame comes; 0: never."""
        self.seat = -1
        """-1 before the hello."""


class Listener:
    """An address at which clients take the seats of a desk."""

    def __init__(self, address: str, token: str | None) -> None:
        """Listen at ``unix:PATH`` or ``HOST:PORT``; a port of 0 takes a free one.

        Args:
          address: Clients that connect wait until it has started.
          token: Clients have to say it; None makes one.

        Raises:
          UsageError: An address beyond this machine with an empty token.
        """
        self.token = secrets.token_urlsafe(24) if token is None else token
        is_local = address.startswith("unix:") or address.rpartition(":")[0] in LOOPBACK
        if not self.token and not is_local:
            raise sebulba.UsageError(
                f"address={address!r} is open to other machines, and token is empty; "
                "leave token out to have one made"
            )
        self._socket, self.address = _listen(address)
        self.counts = dict.fromkeys(("welcomed", "asked", "batches", "refused", "broke_off"), 0)
        """Clients that took a seat, requests, calls of the policy, clients refused, episodes that
        nobody ended."""
        self.closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, desk: Desk, watcher: Watcher) -> None:
        """Answer clients in a thread of its own, until closed."""
        self._desk, self._watcher = desk, watcher
        self._thread = threading.Thread(target=self._serve, name="seats", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread that answers."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop to answer, and close all connections."""
        if self.closed.is_set():
            return
        self.closed.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        if self.address.startswith("unix:"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.removeprefix("unix:"))

    def _serve(self) -> None:
        self._taken: dict[int, _Connection] = {}
        with selectors.DefaultSelector() as selector:
            try:
                # Compiles the policy before the first client is welcomed.
                self._desk.answer(np.zeros(self._desk.num_seats, np.bool_))
                selector.register(self._socket, selectors.EVENT_READ)
                while not self.closed.is_set():
                    self._poll(selector)
            except BaseException as error:
                self._error = error
            finally:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        key.data.socket.close()

    def _poll(self, selector: selectors.BaseSelector) -> None:
        asking: list[_Connection] = []
        for key, _ in selector.select(WAKE_S):
            if key.data is None:
                self._accept(selector)
                continue
            try:
                if self._read(key.data):
                    asking.append(key.data)
            except (ProtocolError, OSError) as error:
                self._drop(selector, key.data, error)
        now = time.monotonic()
        for key in list(selector.get_map().values()):
            if key.data is not None and 0 < key.data.due < now:
                self._drop(selector, key.data, ProtocolError("no whole message came in time"))
        if asking:
            self._answer(selector, asking)

    def _answer(self, selector: selectors.BaseSelector, asking: list[_Connection]) -> None:
        asked = np.zeros(self._desk.num_seats, np.bool_)
        asked[[client.seat for client in asking]] = True
        answer = self._desk.answer(asked)
        self._watcher.answered(asked, answer)
        dtype = answer.action.dtype.newbyteorder("<")
        for client in asking:
            data = answer.action[client.seat].astype(dtype).tobytes()
            try:
                client.socket.sendall(protocol.pack({"type": "action", "action": data}))
            except OSError as error:
                self._drop(selector, client, error)
        self.counts["asked"] += len(asking)
        self.counts["batches"] += 1

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it is gone again, or no file descriptors are left
            return
        if len(selector.get_map()) > MOST_CONNECTIONS + self._desk.num_seats:
            connection.close()
            self.counts["refused"] += 1
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, _Connection(connection))

    def _drop(
        self, selector: selectors.BaseSelector, client: _Connection, error: Exception
    ) -> None:
        """Close a connection, after a word about why."""
        if isinstance(error, ProtocolError):
            self.counts["refused"] += 1
            with contextlib.suppress(OSError):
                client.socket.sendall(protocol.pack({"type": "error", "message": str(error)}))
        selector.unregister(client.socket)
        client.socket.close()
        if self._taken.pop(client.seat, None) is not None:
            self._break_off(client.seat)

    def _break_off(self, seat: int) -> None:
        if self._desk.in_episode[seat]:
            self._desk.in_episode[seat] = False
            self.counts["broke_off"] += 1
            self._watcher.left(seat)

    def _read(self, client: _Connection) -> bool:
        """Take what has come; return whether the client asks for an action."""
        data = client.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("closed")
        client.data += data
        asks, longest = False, self._desk.longest_frame
        is_due = client.due > 0
        while len(client.data) >= protocol.LENGTH.size:
            (length,) = protocol.LENGTH.unpack_from(client.data)
            if length > longest:
                raise ProtocolError(f"a frame has {length} bytes; at most {longest} are allowed")
            end = protocol.LENGTH.size + length
            if len(client.data) < end:
                break
            if asks:
                raise ProtocolError("a message came before the last one was answered")
            message = protocol.unpack(bytes(client.data[protocol.LENGTH.size : end]))
            del client.data[:end]
            asks = self._handle(client, message)
            is_due = False
        if client.seat >= 0 and not client.data:
            client.due = 0
        elif not is_due:
            client.due = time.monotonic() + HELLO_WITHIN_S
        return asks

    def _handle(self, client: _Connection, message: dict[str, Any]) -> bool:
        kind = message["type"]
        if client.seat < 0:
            if kind != "hello":
                raise ProtocolError(f"the first message is {kind!r}; it must be 'hello'")
            self._welcome(client, message)
            return False
        if kind == "begin":
            self._break_off(client.seat)
        self._desk.report(client.seat, message)
        self._watcher.reported(client.seat)
        return kind != "end"

    def _welcome(self, client: _Connection, message: dict[str, Any]) -> None:
        token, version = message.get("token"), message.get("version")
        if not isinstance(token, str) or not hmac.compare_digest(
            token.encode(), self.token.encode()
        ):
            raise ProtocolError("the token is wrong")
        if version != protocol.VERSION:
            raise ProtocolError(f"version={version!r}; this side has {protocol.VERSION}")
        num_seats = self._desk.num_seats
        free = next((seat for seat in range(num_seats) if seat not in self._taken), None)
        if free is None:
            raise ProtocolError(f"all {num_seats} seats are taken")
        client.seat, self._taken[free] = free, client
        welcome = {"type": "welcome", "version": protocol.VERSION, "seat": free}
        client.socket.sendall(protocol.pack(welcome | self._desk.shapes()))
        self.counts["welcomed"] += 1


def _listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket and its address; a Unix socket is open to its owner alone.

    Raises:
      UsageError: It is no address, or nobody can listen there.
    """
    is_unix = address.startswith("unix:")
    try:
        host, port = ("", 0) if is_unix else protocol.host_and_port(address)
        if is_unix:
            listener = _unix_socket(address.removeprefix("unix:"))
        else:
            listener = socket.create_server((host, port))
            address = f"{host}:{listener.getsockname()[1]}"
    except ProtocolError as error:
        raise sebulba.UsageError(str(error)) from None
    except OSError as error:
        raise sebulba.UsageError(
            f"nobody can listen at {address} ({error.strerror or error}); use another address, "
            "such as 127.0.0.1:0 for a free port, and one Inferencer "
            "(--num-inferencers-per-device 1) where the address is fixed"
        ) from None
    listener.listen(MOST_CONNECTIONS)
    listener.setblocking(False)
    return listener, address


def _unix_socket(path: str) -> socket.socket:
    """Return a bound socket; one that nobody listens at any more is replaced."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as left_behind:
        try:
            left_behind.connect(path)
        except ConnectionRefusedError:
            if Path(path).is_socket():  # a file of another kind refuses as well
                os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener

"""Listens, welcomes clients to seats, and answers all who ask at once."""

from __future__ import annotations

import collections
import contextlib
import hmac
import os
import secrets
import selectors
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sebulba
from sebulba_external import protocol
from sebulba_external.desk import Answer, Desk
from sebulba_external.protocol import ProtocolError

if TYPE_CHECKING:
    from sebulba_external.local import Rows

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_CONNECTIONS = 256
"""Beside one for each seat."""
COUNTS = (
    *("welcomed", "resumed", "asked", "batches", "refused", "broke_off"),
    *("rows", "rows_refused"),
)
"""Clients that were welcomed, of them in a session that went on, requests, calls of the policy,
clients refused, episodes that nobody ended, and rows that clients acted in themselves: taken, and
refused."""
GRACE_S = 10.0
"""So long the seat of a session waits for its client to come back."""
HELLO_WITHIN_S = 5.0
"""A connection has to say hello, and end a frame that it began, within so many seconds."""
WAKE_S = 0.05
RECENT = 4096
"""Answers whose latencies are kept."""


class Watcher:
    """What follows the seats while a listener answers, in its thread; this one does nothing."""

    def played(self, seat: int, rows: Rows) -> str:
        """Take what a client played in a seat's stream; return why not, or ""."""
        return "nothing is learned here"

    def reported(self, seat: int) -> None:
        """Take the row that a client reported."""

    def answered(self, asked: np.ndarray, answer: Answer) -> None:
        """Take what was chosen for the seats in ``asked [B]``."""

    def left(self, seat: int) -> None:
        """Take note that an episode broke off: its client is gone, or began another."""


WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Connection:
    """A client: its socket, what of a frame has come, and its seat."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.data = bytearray()
        """Of a frame that has not come as a whole."""
        self.unsent = bytearray()
        """What the client has not taken yet."""
        self.waits_to_write = False
        self.due = time.monotonic() + HELLO_WITHIN_S
        """When it is dropped, unless a hello or the rest of a frame comes; 0: never."""
        self.is_local = False
        """Whether it acts itself."""
        self.is_welcome = False
        self.session = ""
        """Id with which it may come back to its episode; "" if it did not ask for one."""
        self.seat = -1
        """-1 before the hello, and for one without experience."""


class Listener:
    """An address at which clients take the seats of a desk."""

    def __init__(self, address: str, token: str | None, tls: ssl.SSLContext | None = None) -> None:
        """Listen at ``unix:PATH`` or ``HOST:PORT``; a port of 0 takes a free one.

        Args:
          address: Clients that connect wait until it has started.
          token: Clients have to say it; None makes one.
          tls: With a certificate, to encrypt TCP; None does not.

        Raises:
          UsageError: An address beyond this machine with an empty token.
        """
        self.token = secrets.token_urlsafe(24) if token is None else token
        is_unix = address.startswith("unix:")
        host = address.rpartition(":")[0].strip("[]")
        if not self.token and not is_unix and host not in LOOPBACK:
            raise sebulba.UsageError(
                f"address={address!r} is open to other machines, and token is empty; "
                "leave token out to have one made"
            )
        self._tls = None if is_unix else tls
        self._socket, self.address = _listen(address)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.latencies: collections.deque[float] = collections.deque(maxlen=RECENT)
        """Seconds from the time that requests were seen to their answers, of the latest."""
        self._taken: dict[int, _Connection] = {}
        self.closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def num_clients(self) -> int:
        """How many seats have a client."""
        return len(self._taken)

    def start(self, desk: Desk, watcher: Watcher) -> None:
        """Answer clients in a thread of its own, until closed."""
        self._desk, self._watcher = desk, watcher
        self._error = None
        self.closed.clear()
        self._thread = threading.Thread(target=self._serve, name="seats", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread that answers."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop to answer, and close all connections; clients that connect wait for a start."""
        self.closed.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop, and give the address back."""
        self.stop()
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        if self.address.startswith("unix:"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.removeprefix("unix:"))

    def _serve(self) -> None:
        self._taken = {}
        self._held: dict[str, tuple[int, float]] = {}
        """Seats of sessions whose clients are gone, and until when they wait."""
        self._reports = [0] * self._desk.num_seats
        """Of the episode in each seat."""
        self._actions: list[bytes | None] = [None] * self._desk.num_seats
        """The last answer to each seat."""
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
        ready = selector.select(WAKE_S)
        begin = time.perf_counter()
        for key, events in ready:
            if key.data is None:
                self._accept(selector)
                continue
            try:
                if events & selectors.EVENT_WRITE:
                    self._send(selector, key.data, b"")
                if events & selectors.EVENT_READ and self._read(selector, key.data):
                    asking.append(key.data)
            except (ProtocolError, OSError) as error:
                self._drop(selector, key.data, error)
        now = time.monotonic()
        for key in list(selector.get_map().values()):
            if key.data is not None and 0 < key.data.due < now:
                self._drop(selector, key.data, ProtocolError("no whole message came in time"))
        for session, (seat, due) in list(self._held.items()):
            if due < now:
                del self._held[session]
                self._break_off(seat)
        for explores in (True, False):  # a call each
            of_kind = [
                one
                for one in asking
                if self._desk.explores[one.seat] == explores and one.socket.fileno() >= 0
            ]
            if of_kind:
                self._answer(selector, of_kind)
                self.latencies.extend([time.perf_counter() - begin] * len(of_kind))

    def _answer(self, selector: selectors.BaseSelector, asking: list[_Connection]) -> None:
        asked = np.zeros(self._desk.num_seats, np.bool_)
        asked[[client.seat for client in asking]] = True
        answer = self._desk.answer(asked)
        self._watcher.answered(asked, answer)
        # Before the answers leave: whoever has one finds it counted.
        self.counts["asked"] += len(asking)
        self.counts["batches"] += 1
        dtype = answer.action.dtype.newbyteorder("<")
        for client in asking:
            data = answer.action[client.seat].astype(dtype).tobytes()
            self._actions[client.seat] = data
            try:
                frame = protocol.pack({"type": "action", "action": data})
                self._send(selector, client, frame)
            except OSError as error:
                self._drop(selector, client, error)

    def _send(self, selector: selectors.BaseSelector, client: _Connection, frame: bytes) -> None:
        """Send what the client takes now; the rest when it takes more."""
        client.unsent += frame
        before = len(client.unsent)
        while client.unsent:
            try:
                sent = client.socket.send(client.unsent)
            except WAITS:
                break
            del client.unsent[:sent]
        if client.unsent:
            if len(client.unsent) < before or not client.due:
                client.due = time.monotonic() + HELLO_WITHIN_S
        elif not client.data:
            client.due = 0
        if client.waits_to_write != bool(client.unsent):
            client.waits_to_write = bool(client.unsent)
            write = selectors.EVENT_WRITE if client.unsent else 0
            selector.modify(client.socket, selectors.EVENT_READ | write, client)

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
        try:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
        except OSError:  # it is gone again
            connection.close()
            return
        selector.register(connection, selectors.EVENT_READ, _Connection(connection))

    def _drop(
        self, selector: selectors.BaseSelector, client: _Connection, error: Exception
    ) -> None:
        """Close a connection, after a word about why."""
        if client.socket.fileno() < 0:
            return
        if isinstance(error, ProtocolError):
            with contextlib.suppress(OSError):
                if not client.unsent:
                    client.socket.send(protocol.pack({"type": "error", "message": str(error)}))
        if isinstance(error, ProtocolError | ssl.SSLError):
            self.counts["refused"] += 1
        selector.unregister(client.socket)
        client.socket.close()
        if self._taken.pop(client.seat, None) is None:
            return
        if client.session and self._desk.in_episode[client.seat]:
            self._held[client.session] = client.seat, time.monotonic() + GRACE_S
        else:
            self._break_off(client.seat)

    def _break_off(self, seat: int) -> None:
        if self._desk.in_episode[seat]:
            self._desk.in_episode[seat] = False
            self.counts["broke_off"] += 1
            self._watcher.left(seat)

    def _read(self, selector: selectors.BaseSelector, client: _Connection) -> bool:
        """Take what has come; return whether the client asks for an action."""
        asks, is_due = False, client.due > 0
        while True:
            try:
                data = client.socket.recv(1 << 16)
            except WAITS:
                break
            if not data:
                raise ConnectionError("closed")
            client.data += data
            while (frame := self._frame(client)) is not None:
                if asks or client.unsent:
                    raise ProtocolError("a message came before the last one was answered")
                asks = self._handle(selector, client, protocol.unpack(frame))
                is_due = False
            pending = getattr(client.socket, "pending", None)
            if pending is None or not pending():
                break
        if client.is_welcome and not client.data and not client.unsent:
            client.due = 0
        elif not is_due:
            client.due = time.monotonic() + HELLO_WITHIN_S
        return asks

    def _frame(self, client: _Connection) -> bytes | None:
        """Return the next whole frame that has come, without its length.

        Raises:
          ProtocolError: It is too long.
        """
        if len(client.data) < protocol.LENGTH.size:
            return None
        (length,) = protocol.LENGTH.unpack_from(client.data)
        longest = self._desk.longest_frame
        if client.is_local:
            longest = max(longest, self._desk.local.longest_frame)
        if length > longest:
            raise ProtocolError(f"a frame has {length} bytes; at most {longest} are allowed")
        end = protocol.LENGTH.size + length
        if len(client.data) < end:
            return None
        frame = bytes(client.data[protocol.LENGTH.size : end])
        del client.data[:end]
        return frame

    def _handle(
        self, selector: selectors.BaseSelector, client: _Connection, message: dict[str, Any]
    ) -> bool:
        kind = message["type"]
        if not client.is_welcome:
            if kind != "hello":
                raise ProtocolError(f"the first message is {kind!r}; it must be 'hello'")
            self._welcome(selector, client, message)
            return False
        if client.is_local:
            answer = self._of_local(client, message)
            self._send(selector, client, protocol.pack(answer))
            return False
        if kind == "begin":
            self._break_off(client.seat)
            self._reports[client.seat] = 0
        self._reports[client.seat] += 1
        self._actions[client.seat] = None
        self._desk.report(client.seat, message)
        self._watcher.reported(client.seat)
        return kind != "end"

    def _of_local(self, client: _Connection, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a client that acts itself."""
        kind, desk = message["type"], self._desk
        if kind == "policy":
            return desk.local.policy(message)
        if kind != "rows" or client.seat < 0:
            raise ProtocolError(f"type={kind!r} is unknown; a local client sends policy and rows")
        was_in_episode = desk.in_episode[client.seat]
        rows = desk.local.rows(client.seat, message)
        if was_in_episode and rows.env_step.is_first[0]:
            self.counts["broke_off"] += 1
            self._watcher.left(client.seat)
        refused = self._watcher.played(client.seat, rows)
        self.counts["rows_refused" if refused else "rows"] += int(rows.acted.sum())
        return {"type": "taken", "version": desk.acting.version, "refused": refused}

    def _welcome(
        self, selector: selectors.BaseSelector, client: _Connection, message: dict[str, Any]
    ) -> None:
        token, version = message.get("token"), message.get("version")
        if not isinstance(token, str) or not hmac.compare_digest(
            token.encode(), self.token.encode()
        ):
            raise ProtocolError("the token is wrong")
        if version != protocol.VERSION:
            raise ProtocolError(f"version={version!r}; this side has {protocol.VERSION}")
        desk, explore = self._desk, message.get("explore")
        client.is_local = message.get("local") is True
        welcome: dict[str, Any] = {"type": "welcome", "version": protocol.VERSION}
        session = message.get("session")
        if isinstance(session, str):
            welcome |= self._session(selector, client, session)
        if client.seat >= 0:
            self.counts["resumed"] += 1
        elif not (client.is_local and explore is False):  # else it only wants policies
            client.seat = self._free_seat()
            self._taken[client.seat] = client
            desk.explores[client.seat] = (
                desk.explores_by_default if explore is None else explore is True
            )
        client.is_welcome = True
        welcome["seat"] = client.seat
        self._send(selector, client, protocol.pack(welcome | desk.shapes()))
        self.counts["welcomed"] += 1

    def _session(
        self, selector: selectors.BaseSelector, client: _Connection, session: str
    ) -> dict[str, Any]:
        """Give a client the seat of its session, if it has one; return what the welcome says."""
        for old in list(self._taken.values()):
            if session and old.session == session:  # it knows first that its connection is gone
                self._drop(selector, old, ConnectionError("taken over"))
        seat, _ = self._held.pop(session, (-1, 0.0))
        client.session = session if seat >= 0 else secrets.token_urlsafe(16)
        if seat < 0:
            return {"session": client.session, "reports": 0}
        client.seat, self._taken[seat] = seat, client
        reports, action = self._reports[seat], self._actions[seat]
        return {"session": session, "reports": reports, "pending": action}

    def _free_seat(self) -> int:
        """Return a seat that nobody has.

        Raises:
          ProtocolError: There is none.
        """
        num_seats = self._desk.num_seats
        taken = self._taken.keys() | {seat for seat, _ in self._held.values()}
        free = next((seat for seat in range(num_seats) if seat not in taken), None)
        if free is None:
            raise ProtocolError(f"all {num_seats} seats are taken")
        return free


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
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
            host = f"[{host}]" if ":" in host else host
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

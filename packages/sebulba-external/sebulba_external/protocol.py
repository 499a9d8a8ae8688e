"""The messages between a client and the trainer: a length, then a map in msgpack.

A frame is an unsigned 32-bit length in network byte order and that many bytes of msgpack: one map
with a string ``type``. No extension types and no pickles. An array travels as the bytes of its
elements, little-endian and in C order; the ``welcome`` says dtype and shape of each. ``docs/
external.md`` lists the messages.
"""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Any

import msgpack
import numpy as np

VERSION = 1
"""Version of the protocol; another one is refused."""
FIRST, TERMINATED, TRUNCATED = 1, 2, 4
"""Flags of a row that a client played."""
MOST_ROWS = 256
"""Of one message."""
MOST_STREAMS = 256
"""Of one client that acts itself."""
LENGTH = struct.Struct("!I")
MOST_BYTES = 1 << 30
"""Of a frame that a client takes."""
PIECE_BYTES = 1 << 20
"""Most bytes that are made room for before they come."""
SPARE_BYTES = 1024
"""What a frame may have beside the bytes of its arrays and their names."""
SPARE_BYTES_A_PART = 10
"""What msgpack adds to a name and an array, at most."""


class ProtocolError(Exception):
    """A message that breaks the protocol; its text says which rule."""


def pack(message: dict[str, Any]) -> bytes:
    """Return the frame of a message."""
    body = msgpack.packb(message)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | memoryview, *, longest: int = 1024) -> dict[str, Any]:
    """Return the message of a frame without its length.

    Args:
      body: The frame.
      longest: Most elements of a map or an array.

    Raises:
      ProtocolError: It is not one map with a string ``type``, or has extension types.
    """
    try:
        message = msgpack.unpackb(
            body, ext_hook=_refuse, max_map_len=longest, max_array_len=longest
        )
    except Exception as error:
        raise ProtocolError(f"a frame is not valid msgpack: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a message must be a map with a string 'type'")
    return message


def _refuse(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not allowed")


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two of ``HOST:PORT``, or of ``[HOST]:PORT`` for IPv6.

    Raises:
      ProtocolError: It is something else.
    """
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")  # as what listens and connects does
        is_one = bool(host) and port.isdecimal() and int(port) < 65536
    except ValueError:  # too long
        is_one = False
    if not is_one:
        raise ProtocolError(
            f"address {address!r} must be HOST:PORT or unix:PATH, such as 127.0.0.1:7770"
        )
    return host.strip("[]"), int(port)


def connect(
    address: str, tls: ssl.SSLContext | None = None, timeout_s: float | None = None
) -> socket.socket:
    """Return a connection to ``unix:PATH`` or ``HOST:PORT``, encrypted if ``tls`` says how."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address.removeprefix("unix:"))
        except BaseException:
            connection.close()
            raise
        return connection
    host, port = host_and_port(address)
    connection = socket.create_connection((host, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        return tls.wrap_socket(connection, server_hostname=host)
    return connection


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for a message of the trainer.

    Raises:
      ConnectionError: The other side closed the connection.
      ProtocolError: The frame is too long; and see ``unpack``.
    """
    return unpack(received(connection, LENGTH, MOST_BYTES), longest=1 << 20)


def received(connection: socket.socket, length: struct.Struct, most: int) -> bytes:
    """Wait for a frame; return it without its length.

    Raises:
      ConnectionError: The other side closed the connection.
      ProtocolError: It has more than ``most`` bytes.
    """
    (size,) = length.unpack(_exactly(connection, length.size))
    if size > most:
        raise ProtocolError(f"a frame has {size} bytes; at most {most} are allowed")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), PIECE_BYTES))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        data += piece
    return bytes(data)


def array_bytes(array: Any, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return ``array`` as it travels.

    Raises:
      ValueError: Another shape.
      TypeError: A dtype that cannot be cast safely within its kind.
    """
    given = np.asarray(array)
    if given.shape != tuple(shape):
        raise ValueError(f"an array has shape {given.shape}; the welcome says {tuple(shape)}")
    return given.astype(np.dtype(dtype).newbyteorder("<"), casting="same_kind").tobytes()


def array_of(data: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array that ``array_bytes`` made.

    Raises:
      ProtocolError: Not bytes, or another number of them.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    expected = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if not isinstance(data, bytes) or len(data) != expected:
        got = f"{len(data)} bytes" if isinstance(data, bytes) else f"a {type(data).__name__}"
        raise ProtocolError(
            f"an array is {got}; {dtype} of shape {tuple(shape)} has {expected} bytes"
        )
    return np.frombuffer(data, kind).astype(np.dtype(dtype)).reshape(shape)


def finite_array_of(name: str, data: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array that ``array_bytes`` made of finite numbers.

    Raises:
      ProtocolError: See ``array_of``; or a number is not finite.
    """
    array = array_of(data, dtype.str, shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ProtocolError(f"{name} has a value that is not finite")
    return array

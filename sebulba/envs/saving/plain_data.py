"""Plain data as bytes: what can be read back without running anything, in contrast to a pickle.

Plain are None, booleans, numbers, text, bytes, arrays of those, and lists, tuples, dictionaries and
deques of plain data. The bytes are MessagePack. This module needs no JAX: worker processes import
it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgpack
import numpy as np

_TUPLE, _INTEGER, _ARRAY, _SCALAR, _DEQUE = range(1, 6)
_KINDS = "biufcmMSU"
"""Kinds of dtypes whose elements are plain: all but objects, records and raw bytes."""


class NotPlainError(TypeError):
    """Something is not plain data."""


def pack(value: Any) -> bytes:
    """Return plain data as bytes.

    Raises:
      NotPlainError: There is something else in it, such as an object of a user's class.
    """
    try:
        return msgpack.packb(value, default=_extended, strict_types=True)
    except NotPlainError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotPlainError(str(error)) from error


def check_copy(value: Any) -> None:
    """Raise NotPlainError if plain data, packed and unpacked, would not be as it was.

    A bytearray would be bytes, and an object that occurs twice would be two objects.
    """
    seen, rest = set(), [value]
    while rest:
        one = rest.pop()
        kind = type(one)
        if kind in (bytearray, memoryview):
            raise NotPlainError(f"{kind.__name__} is not plain data")
        if kind in (list, dict, deque, np.ndarray):
            if id(one) in seen:
                raise NotPlainError(f"a {kind.__name__} occurs twice")
            seen.add(id(one))
        if kind in (list, tuple, deque):
            rest.extend(one)
        elif kind is dict:
            rest.extend(one.values())


def unpack(data: bytes) -> Any:
    """Return what was packed; arrays are writable copies.

    Raises:
      ValueError: The bytes are damaged, or something else.
    """
    try:
        return msgpack.unpackb(data, ext_hook=_of_extended, strict_map_key=False)
    except Exception as error:  # damaged bytes may make it raise any
        raise ValueError(f"no plain data ({type(error).__name__}: {error})") from error


def _extended(value: Any) -> msgpack.ExtType:
    """Return what MessagePack does not know by itself."""
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if type(value) is int:  # of more than 64 bits, such as the state of a random generator
        return msgpack.ExtType(_INTEGER, str(value).encode())
    if type(value) is deque:
        return msgpack.ExtType(_DEQUE, pack([list(value), value.maxlen]))
    is_array = type(value) is np.ndarray or isinstance(value, np.generic)
    if is_array and value.dtype.kind in _KINDS and value.dtype.itemsize:  # no empty text
        kind = _ARRAY if type(value) is np.ndarray else _SCALAR
        return msgpack.ExtType(kind, pack([value.dtype.str, list(value.shape), value.tobytes()]))
    raise NotPlainError(f"{type(value).__name__} is not plain data")


def _of_extended(kind: int, data: bytes) -> Any:
    match kind:
        case 1:
            return tuple(unpack(data))
        case 2:
            return int(data)
        case 3 | 4:
            dtype, shape, elements = unpack(data)
            array = np.frombuffer(elements, np.dtype(dtype)).reshape(shape).copy()
            return array if kind == _ARRAY else array[()]
        case 5:
            items, maxlen = unpack(data)
            return deque(items, maxlen)
    raise ValueError(f"extension {kind} is unknown")

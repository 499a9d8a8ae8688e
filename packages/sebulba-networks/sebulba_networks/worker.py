# SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
"""One simulator in a process of its own, of nothing but the standard library.

``python worker.py LIBRARY NUM_BYTES NUM_INFO`` loads an engine and answers requests from its input,
one by one, until that ends. A request is ``HEADER``, of its kind and the size of what follows; an
answer is ``ANSWER``, of ``DONE`` or ``REFUSED`` and the size of what follows.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Any, BinaryIO

HEADER = struct.Struct("<cI")
ANSWER = struct.Struct("<cI")
NUMBER = struct.Struct("<q")
DONE, REFUSED = b"\1", b"\0"
CREATE, SEEK, RESET, STEP, TRACE, SPEC, REPORT = b"c", b"e", b"r", b"s", b"t", b"p", b"o"


class Simulator:
    """An environment of the engine, made by the first request."""

    def __init__(self, library: str, num_bytes: int, num_info: int) -> None:
        """Load the engine; the sizes are those of rows and of infos."""
        self._lib = ctypes.CDLL(library)
        self._lib.net_create.restype = ctypes.c_void_p
        self._lib.net_error.restype = ctypes.c_char_p
        for name in ("reset", "step", "trace", "seek"):
            getattr(self._lib, f"net_{name}").restype = ctypes.c_int64
        self._rows, self._info = (ctypes.create_string_buffer(n) for n in (num_bytes, num_info))
        self._handle: Any = None

    def do(self, kind: bytes, content: bytes) -> bytes:
        """Do what is asked for, and return the answer.

        Raises:
          ValueError: The engine refuses.
        """
        if kind == CREATE:
            return self._create(NUMBER.unpack_from(content)[0], content[NUMBER.size :])
        if kind == SEEK:
            episode = ctypes.c_int64(NUMBER.unpack(content)[0])
            self._checked(self._lib.net_seek(self._handle, episode))
            return b""
        if kind == TRACE:
            return self._trace()
        if kind == SPEC:  # of scenarios only
            self._lib.net_spec.restype = ctypes.c_char_p
            return self._checked_text(self._lib.net_spec(content))
        if kind == REPORT:  # of scenarios only
            self._lib.net_report.restype = ctypes.c_char_p
            return self._checked_text(self._lib.net_report(self._handle))
        info = self._info if content[:1] == b"\x01" else None
        if kind == RESET:
            self._checked(self._lib.net_reset(self._handle, self._rows, info))
        else:
            self._checked(self._lib.net_step(self._handle, content[1:], self._rows, info))
        return self._rows.raw + (info.raw if info is not None else b"")

    def _create(self, seed: int, config: bytes) -> bytes:
        if self._handle:
            self._lib.net_close(self._handle)
        seeds = (ctypes.c_int64 * 1)(seed)
        handle = self._lib.net_create(config, 1, seeds, 1)
        self._handle = ctypes.c_void_p(handle) if handle else None
        self._checked(0 if handle else -1)
        return b""

    def _trace(self) -> bytes:
        count = self._checked(self._lib.net_trace(self._handle, 0, None, ctypes.c_int64(0)))
        events = ctypes.create_string_buffer(32 * count)
        self._lib.net_trace(self._handle, 0, events, ctypes.c_int64(count))
        return events.raw

    def _checked_text(self, text: bytes | None) -> bytes:
        if text is None:
            raise ValueError(self._lib.net_error().decode(errors="replace"))
        return text

    def _checked(self, result: int) -> int:
        if result < 0:
            raise ValueError(self._lib.net_error().decode(errors="replace"))
        return result


def serve(simulator: Simulator, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests."""
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        kind, size = HEADER.unpack(header)
        try:
            flag, answer = DONE, simulator.do(kind, requests.read(size))
        except ValueError as error:
            flag, answer = REFUSED, str(error).encode()
        answers.write(ANSWER.pack(flag, len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    # What native code prints goes to standard error, where nobody takes it for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(Simulator(sys.argv[1], *map(int, sys.argv[2:])), sys.stdin.buffer, answers)

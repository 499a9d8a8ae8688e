"""Stands in for ``worker.py``: does one thing wrong, which the first argument (LIBRARY) names.

``WRONG`` or ``WRONG@N``: from request number N on, before which it answers as an engine would (3 is
the first step). ``once PATH@N`` closes its output, unless PATH is there, which it makes.
"""

from __future__ import annotations

import os
import struct
import sys
import time

HEADER, ANSWER = struct.Struct("<cI"), struct.Struct("<cI")
ROW = struct.Struct("<4ff5B")  # observation, reward; terminated, truncated, is_first, acting, over
GOOD = [0.5, 0.0, 0.0, 10.0, 0.25, 0, 0, 0, 1, 0]
NAN, INF = float("nan"), float("inf")
VALUES = {
    "NaN": {1: NAN},
    "infinite reward": {4: INF},
    "window of 0": {3: 0.0},
    "share of 7": {0: 7.0},
    "flag of 2": {5: 2},
    "both ends": {5: 1, 6: 1, 9: 1},
    "end without an end": {9: 1},
    "end": {6: 1, 8: 0, 9: 1},
    "begin": {7: 1},
    "no begin": {7: 0},
}


def row(kind: bytes, wrong: str) -> bytes:
    values = GOOD.copy()
    values[7] = int(kind == b"r")
    for place, value in VALUES.get(wrong, {}).items():
        values[place] = value
    return ROW.pack(*values)


def answer_to(kind: bytes, content: bytes, wrong: str) -> bytes:
    answer = row(kind, wrong) if kind in b"rs" else b""
    if kind in b"rs" and content[:1] == b"\1":
        answer += struct.pack("<22d", *[1.0] * 22)
    flag = b"\1"
    if wrong == "short":
        answer = answer[:-1]
    elif wrong == "empty":
        answer = b""
    elif wrong == "flag":
        flag = b"\7"
    elif wrong in ("latin", "long refusal"):
        flag, answer = b"\0", b"na\xefve" if wrong == "latin" else b"x" * 10**6
    return ANSWER.pack(flag, len(answer)) + answer


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def misbehave(wrong: str) -> None:
    """Do what is wrong beyond an answer."""
    if wrong == "half header":
        write(b"\1\31")
    elif wrong == "half answer":
        write(ANSWER.pack(b"\1", 25) + b"abc")
    elif wrong == "4 GB":
        write(ANSWER.pack(b"\1", 2**32 - 1))
    elif wrong == "garbage":
        write(b"Segmentation fault, core dumped\n")
    elif wrong == "trickle":
        for byte in ANSWER.pack(b"\1", 25) + bytes(25):
            write(bytes([byte]))
            time.sleep(0.1)
    elif wrong == "closed":
        os.close(1)
    elif wrong == "ends in an answer":
        write(ANSWER.pack(b"\1", 25) + b"abc")
        os._exit(7)
    elif wrong == "assertion":
        os.write(2, b'NS_ASSERT failed, cond="x > 0", msg="no x", +2.5s 0 file=x.cc, line=7\n')
        os.write(2, b"NS_FATAL, terminating\nterminate called without an active exception\n")
        os._exit(7)
    else:
        return
    time.sleep(600)


def main() -> None:
    wrong, _, first = sys.argv[1].partition("@")
    path = wrong.removeprefix("once ")
    if path != wrong:
        wrong = "well" if os.path.exists(path) else "closed"
    if wrong == "deaf":
        time.sleep(600)
    number = 0
    while len(header := sys.stdin.buffer.read(HEADER.size)) == HEADER.size:
        kind, size = HEADER.unpack(header)
        content = sys.stdin.buffer.read(size)
        now = wrong if number >= int(first or 0) else "well"
        if now == "closed" and path != "closed":
            open(path, "w").close()
        misbehave(now)
        write(answer_to(kind, content, now) * (2 if now == "twice" else 1))
        number += 1


if __name__ == "__main__":
    main()

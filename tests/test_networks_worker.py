"""Worker processes of network engines that do not answer as they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sebulba.envs.networks import process_pool, worker
from sebulba.envs.networks.native import NativePool
from sebulba.envs.networks.options import CongestionControlOptions
from sebulba.envs.networks.process_pool import ProcessPool
from sebulba.errors import EnvError

# It makes its simulator, and answers the first reset in the way that its first argument says.
FAKE = """
import os, struct, sys, time
how, size = sys.argv[1], int(sys.argv[2])
requests, answers = sys.stdin.buffer, sys.stdout.buffer
def answer(done, content, announced=None):
    announced = len(content) if announced is None else announced
    answers.write(struct.pack("<BI", done, announced) + content)
    answers.flush()
def sleep():
    while requests.read(1):
        pass
while header := requests.read(5):
    kind, length = struct.unpack("<cI", header)
    requests.read(length)
    if kind != b"r":
        answer(1, b"")
    elif how == "half":
        answers.write(b"\\1"); answers.flush(); sleep()
    elif how == "part":
        answer(1, b"x" * 3, size); sleep()
    elif how == "closes":
        os.close(1); sleep()
    elif how == "garbage":
        answers.write(b"hello, world\\n" * 100); answers.flush(); sleep()
    elif how == "long":
        answer(1, b"", 2**32 - 1); sleep()
    elif how == "short":
        answer(1, b"x" * (size - 1))
    elif how == "empty":
        answer(1, b"")
    elif how == "no text":
        answer(0, b"\\xff\\xfe no")
    elif how == "long refusal":
        answer(0, b"", 2**31)
    elif how == "nan":
        answer(1, b"\\xff" * (size - 5) + b"\\1" * 4 + b"\\0")
    elif how == "flags":
        answer(1, b"\\0" * (size - 5) + b"\\7" * 5)
"""


def made(how, monkeypatch, tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(worker, "__file__", str(tmp_path / "fake.py"))
    monkeypatch.setattr(process_pool, "CLOSE_S", 0.5)
    return ProcessPool(Path(how), CongestionControlOptions(), [1], timeout_s=1.0)


@pytest.mark.filterwarnings("ignore:environment 0 .* a new one repeats:RuntimeWarning")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("half", "gave no answer within 1 s"),
        ("part", "gave no answer within 1 s"),
        ("closes", "its process ended with its output closed"),
        ("garbage", "an answer of kind 104 and"),
        ("long", "4,294,967,295 bytes"),
        ("short", r"bytes, and not of \d+"),
        ("empty", r"0 bytes, and not of \d+"),
        ("no text", "the network engine: .* no"),
        ("long refusal", "not of at most|not of"),
        ("nan", "is not finite"),
        ("flags", "a flag is 7"),
    ],
)
def test_what_a_worker_answers_is_checked_and_ends_within_the_timeout(
    how, said, monkeypatch, tmp_path
):
    pool = made(how, monkeypatch, tmp_path)
    with pytest.raises(EnvError, match=said):
        pool.reset()
    pool.close()


def test_a_damaged_state_of_a_pool_of_processes_is_refused(monkeypatch, tmp_path):
    pool = made("half", monkeypatch, tmp_path)
    state = pool.state()
    pool.put_back(state)
    for i in range(len(state)):
        damaged = bytearray(state)
        damaged[i] ^= 0xFF
        try:
            saved = process_pool.unpack(bytes(damaged))
        except ValueError:
            saved = None
        if saved != process_pool.unpack(state) and _is_refused_state(saved):
            with pytest.raises(EnvError, match="damaged"):
                pool.put_back(bytes(damaged))
    for odd in (b"", process_pool.pack(7), process_pool.pack([(1, 2**63, True, [])])):
        with pytest.raises(EnvError, match="damaged"):
            pool.put_back(odd)
    pool.close()


def _is_refused_state(saved):
    """Tell whether it is of another shape; another seed is as good as this one."""
    return not (isinstance(saved, list) and all(isinstance(one, tuple) for one in saved))


def test_a_damaged_state_of_native_networks_is_refused():
    pool = NativePool(CongestionControlOptions(), [1, 2])
    pool.reset()
    pool.step(np.zeros(2, np.float32))
    state = pool.state()
    rng = np.random.default_rng(0)
    for i in rng.integers(4, len(state), 200).tolist():
        damaged = bytearray(state)
        damaged[i] ^= 0xFF
        with pytest.raises(EnvError, match="damaged"):
            pool.put_back(bytes(damaged))
    pool.put_back(state)
    pool.step(np.zeros(2, np.float32))
    pool.put_back(state[8:])  # as they were before there was a checksum
    pool.close()

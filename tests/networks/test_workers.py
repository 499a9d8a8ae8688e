"""Worker processes of network engines are not trusted: time, lengths, values, saved states."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from sebulba_networks import worker
from sebulba_networks.build import library
from sebulba_networks.native import NativePool
from sebulba_networks.options import CongestionControlOptions
from sebulba_networks.pools import make_pool
from sebulba_networks.process_pool import ProcessPool, ask_once

from sebulba.envs.saving.plain_data import pack, unpack
from sebulba.errors import EnvError
from tests.support import misbehaving_worker
from tests.support.needs import needs_compiler

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 1.0
SOON_S = 10 * TIMEOUT_S
WORKER = worker.__file__
FIRST_STEP = 3
"""Number of its request, after those that create, seek and reset."""
NOTHING = np.zeros(1, np.float32)


@pytest.fixture(autouse=True)
def misbehaving(monkeypatch):
    monkeypatch.setattr(worker, "__file__", misbehaving_worker.__file__)


@pytest.fixture
def make():
    pools = []

    def made(wrong: str, num_envs: int = 1, timeout_s: float = TIMEOUT_S) -> ProcessPool:
        options = CongestionControlOptions()
        pools.append(ProcessPool(Path(wrong), options, range(num_envs), timeout_s))
        return pools[-1]

    yield made
    for pool in pools:
        pool.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_step_fails(pool: ProcessPool, said: str) -> None:
    """Check that a step is an EnvError soon, without much memory, and leaves no process."""
    pool.reset()
    pids = [env.worker.process.pid for env in pool._envs]
    began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(EnvError, match=said):
        pool.step(np.zeros(pool.num_envs, np.float32))
    assert time.monotonic() - began < SOON_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000  # kB
    assert not any(map(is_alive, pids))
    with pytest.raises(EnvError, match="this network is closed"):
        pool.step(np.zeros(pool.num_envs, np.float32))


@needs_compiler
@pytest.mark.parametrize("features", ["paper", "relative"])
def test_an_engine_in_workers_passes_all_checks(monkeypatch, features):
    monkeypatch.setattr(worker, "__file__", WORKER)
    options = CongestionControlOptions(
        max_episode_steps=12, features=features, random_loss=0.02, num_cubic=1, trace=True
    )
    low, high = (np.array(bounds, np.float32) for bounds in options.obs_bounds)
    pools = NativePool(options, [3, 4]), ProcessPool(library(), options, [3, 4], 60.0, (low, high))
    rng = np.random.default_rng(0)
    rows = [pool.reset(with_info=True) for pool in pools]
    for number in range(40):
        for native, other in zip(*rows, strict=True):
            assert np.array_equal(native, other)
        if number == 17:
            os.kill(pools[1]._envs[1].worker.process.pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning) if number == 17 else contextlib.nullcontext():
            actions = rng.uniform(-2, 2, 2).astype(np.float32)
            rows = [pool.step(actions, with_info=True) for pool in pools]
    assert np.array_equal(pools[0].trace(1), pools[1].trace(1)) and len(pools[1].trace(0))
    pools[1].put_back(pools[1].state())
    assert np.array_equal(*(pool.step(actions).obs for pool in pools))
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("wrong", ["half header", "half answer", "trickle"])
def test_an_answer_that_is_not_whole_in_time_is_an_error(make, wrong):
    said = r"environment 0 of engine 'native' gave no answer within 1 s; pass a larger step_timeout"
    check_step_fails(make(f"{wrong}@{FIRST_STEP}"), said)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("4 GB", "sent the length 4294967295 of an answer of 25 bytes; correct the engine"),
        ("garbage", "sent b'S' for whether it could be done, which is 0 or 1; correct"),
        ("flag", r"sent b'\\x07' for whether"),
        ("short", "sent the length 24 of an answer of 25 bytes"),
        ("empty", "sent the length 0 of an answer of 25 bytes"),
        ("long refusal", "sent the length 1000000 of an answer of at most 65536 bytes"),
        ("latin", "the network engine: na\ufffdve"),
    ],
)
def test_what_is_no_answer_is_an_error(make, wrong, said):
    check_step_fails(make(f"{wrong}@{FIRST_STEP}", num_envs=2), said)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("NaN", "environment 0 of engine 'native' sent obs=nan, which must be finite; correct"),
        ("infinite reward", "sent reward=inf, which must be finite"),
        ("flag of 2", "sent terminated=2, which must be 0 or 1"),
        ("both ends", "sent terminated=True and truncated=True, of which one must be False"),
        ("end without an end", "sent episode_end=True, which must be terminated or truncated"),
        ("begin", "sent is_first=True, which must be False here"),
    ],
)
def test_values_that_cannot_be_are_errors(make, wrong, said):
    check_step_fails(make(f"{wrong}@{FIRST_STEP}"), said)


def test_a_reset_that_begins_no_episode_is_an_error(make):
    with pytest.raises(EnvError, match="sent is_first=False, which must be True here"):
        make("no begin").reset()


@pytest.mark.parametrize("wrong", ["window of 0", "share of 7"])
def test_observations_outside_of_their_bounds_are_errors(monkeypatch, wrong):
    monkeypatch.setattr("sebulba_networks.options.find_engine", lambda name: lambda: Path(wrong))
    monkeypatch.setattr("sebulba_networks.pools.find_engine", lambda name: lambda: Path(wrong))
    pool = make_pool(CongestionControlOptions(engine="other"), [0])
    with pytest.raises(EnvError, match=r"sent obs=.*, which must be inside its bounds"):
        pool.reset()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("closed", "its process ended with SIGKILL, because it had closed its output and went on"),
        ("ends in an answer", "its process ended with exit code 7"),
        ("assertion", 'its process ended with exit code 7: NS_ASSERT failed.* msg="no x".*'),
    ],
)
def test_what_ends_at_one_place_twice_is_an_error(make, wrong, said):
    pool = make(f"{wrong}@{FIRST_STEP}")
    with pytest.warns(RuntimeWarning, match=f"{said}; a new one repeats the episode"):
        check_step_fails(pool, said)


def test_a_worker_that_closes_its_output_once_is_replaced(make, tmp_path):
    pool = make(f"once {tmp_path / 'it'}@{FIRST_STEP}")
    pool.reset()
    with pytest.warns(RuntimeWarning, match="a new one repeats the episode"):
        assert pool.step(NOTHING).obs[0, 3] == 10
    assert pool.step(NOTHING, with_info=True).info.shape == (1, 22)


def test_an_answer_that_nothing_asked_for_is_not_the_next_one(make):
    pool = make(f"twice@{FIRST_STEP}")
    pool.reset(), pool.step(NOTHING)
    time.sleep(0.2)
    with pytest.raises(EnvError, match="sent bytes that no request asked for; correct the engine"):
        pool.step(NOTHING)


def test_a_worker_that_does_not_read_is_an_error(monkeypatch):
    monkeypatch.setattr("sebulba_networks.process_pool.STEP_TIMEOUT_S", TIMEOUT_S)
    began = time.monotonic()
    with pytest.raises(EnvError, match="no answer within 1 s"):
        ask_once(Path("deaf"), (worker.SPEC, bytes(10**6)))
    assert time.monotonic() - began < SOON_S


@pytest.mark.slow
def test_workers_that_do_not_end_are_killed_together(make, monkeypatch):
    monkeypatch.setattr("sebulba_networks.process_pool.CLOSE_S", 3.0)
    pool = make(f"half header@{FIRST_STEP}", num_envs=8)
    pool.reset()
    pids = [env.worker.process.pid for env in pool._envs]
    pool._send([(worker.STEP, b"\0\0\0\0\0")] * 8)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 20 and not any(map(is_alive, pids))


ACTION = NOTHING.tobytes()


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ([(1, 0, False, [np.float32("nan").tobytes()])], "must be 1 finite float32; use another"),
        ([(1, 0, False, [b""])], "action b'', which must be 1 finite float32"),
        ([(1, 0, False, [0])], "action 0, which must be 1 finite float32"),
        ([(1, 0, False, b"abc")], "actions=b'abc', which must be a list"),
        ([(1, -1, False, [])], "has_ended=False, which must be a bool, and True before"),
        ([(1, 0, 1, [])], "has_ended=1, which must be a bool"),
        ([("a", 0, True, [])], "seed='a', which must be from"),
        ([(1, 2**63 - 1, True, [])], "episode=9223372036854775807, which must be from -1 to"),
        ([None], "environment 0 is None, and not seed, episode"),
        ([], "state of 0 environments, not 1"),
        (7, "is damaged: it is 7; use another"),
        (b"", "is damaged"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_and_changes_nothing(make, saved, said):
    pool = make("well")
    pool.reset(), pool.step(NOTHING)
    state = pool.state()
    with pytest.raises(EnvError, match=said):
        pool.put_back(pack(saved) if saved != b"" else state[:-2])
    assert pool.state() == state
    assert pool.step(NOTHING).obs[0, 3] == 10


def test_a_state_whose_actions_end_its_episode_is_refused(make):
    pool = make("well")
    pool.reset(), pool.step(NOTHING)
    state = pool.state()
    assert unpack(state) == [(0, 0, False, [ACTION])]
    other = make("end@6")
    other.put_back(state)  # create, seek and create, seek, reset, step
    with pytest.raises(EnvError, match="ended an episode that had gone on when it was saved; use"):
        other.put_back(state)


@needs_compiler
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

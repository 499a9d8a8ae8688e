"""Shares of the cores: who gets which, and that threads, and no others, run on theirs."""

from __future__ import annotations

import os
import threading

import pytest

import sebulba
from sebulba.errors import UsageError
from sebulba.inference.cores import run_on, shares_of_cores, threads_run_on
from sebulba.inference.places import make_cycle
from tests.support.loop_helpers import make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads to cores"
)


@pytest.mark.parametrize(
    ("cores", "num_inferencers", "num_threads", "shares"),
    [
        ({0, 1}, 2, 1, [{0}, {1}]),
        ({4, 5, 6, 7}, 2, 2, [{4, 5}, {6, 7}]),
        ({0, 1}, 4, 1, [{0}, {1}, {0}, {1}]),
        ({3}, 2, 1, [{3}, {3}]),
        ({0, 1}, 1, 1, [None]),  # it may use both
        ({0, 1, 2}, 2, 1, [None, None]),
        ({0, 1}, 3, 1, [None] * 3),
        ({0, 1, 2, 3}, 2, 3, [None, None]),  # more threads than cores
        ({0, 1}, 4, 2, [None] * 4),
        ({0, 1}, 2, None, [None, None]),
    ],
)
def test_cores_are_shared_out_equally_or_not_at_all(
    monkeypatch, cores, num_inferencers, num_threads, shares
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    assert shares_of_cores(num_inferencers, num_threads) == shares


def test_a_system_without_affinity_shares_nothing_out(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    assert shares_of_cores(2, 1) == [None, None]


def one_core() -> frozenset[int]:
    return frozenset({min(os.sched_getaffinity(0))})


def test_threads_that_start_inside_stay_on_the_cores_and_the_caller_does_not():
    before = os.sched_getaffinity(0)
    found: list[set[int]] = []
    go_on = threading.Event()

    def look() -> None:
        go_on.wait(300)
        found.append(os.sched_getaffinity(0))

    with threads_run_on(one_core()):
        thread = threading.Thread(target=look)
        thread.start()
    assert os.sched_getaffinity(0) == before
    go_on.set()
    thread.join()
    assert found == [one_core()]


def test_cores_that_are_not_there_leave_a_thread_where_it_is():
    before = os.sched_getaffinity(0)
    run_on(frozenset({100_000}))
    run_on(None)
    assert os.sched_getaffinity(0) == before


def cores_of_inferencers(env, **options):
    """Return, by Inferencer, the cores on which its cycles ran."""
    seen: dict[str, set[int]] = {}

    def make(env, programs, device, timer):
        cycle, _ = make_cycle("stepped", env, programs, device, timer)
        run = cycle.run

        def looking_run(*arguments):
            seen[threading.current_thread().name] = os.sched_getaffinity(0)
            return run(*arguments)

        cycle.run = looking_run
        return cycle

    agent = TinyAgent(sebulba.env_spec(env), TinyConfig())
    devices = {"inference_devices": [0], "update_devices": [0]}
    with sebulba.GymnasiumLoop(env, agent, 4, cycle=make, **devices, **options) as loop:
        loop.run(loop.new_state(0, 5), 8, 5)
    return [seen[name] for name in sorted(seen)]


def test_inferencers_run_on_shares_of_the_cores_and_the_update_where_it_did():
    before = os.sched_getaffinity(0)
    found = cores_of_inferencers("CartPole-v1")
    assert found == [set(share or before) for share in shares_of_cores(2, 1)]
    assert os.sched_getaffinity(0) == before


def native_threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) % 2 == 1, reason="two cannot share an odd number")
def test_threads_of_an_environment_run_on_the_cores_of_its_inferencer():
    make_tiny_loop("CartPole-v1")[0].close()  # JAX and envpool have their threads now
    before = native_threads()
    loop, _ = make_tiny_loop("CartPole-v1")
    with loop:
        found = [frozenset(os.sched_getaffinity(tid)) for tid in native_threads() - before]
    shares = shares_of_cores(2, 1)
    assert set(found) == set(shares) and found.count(shares[0]) == found.count(shares[1])


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("CartPole-v1", {"pin_inferencers": False}),
        ("CartPole-v1", {"num_inferencers_per_device": 0}),
        (CountingEnv, {}),  # whose threads are not known
    ],
)
def test_inferencers_run_where_they_like_if_told_so_and_where_nothing_is_gained(env, options):
    before = os.sched_getaffinity(0)
    assert all(cores == before for cores in cores_of_inferencers(env, **options))


def test_pinning_is_on_or_off():
    with pytest.raises(UsageError, match="pin_inferencers='yes' must be True or False"):
        make_tiny_loop(pin_inferencers="yes")

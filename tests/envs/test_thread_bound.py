"""Environments that work only in the thread that made them."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import threading

import jax
import numpy as np
import pytest

import sebulba
from sebulba.inference.env_thread import EnvThread
from sebulba.loops.evaluation import EvaluationPlayer
from sebulba.types import RunSpec
from tests.support.loop_helpers import make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

MADE: list[Bound] = []


class Bound(CountingEnv):
    """Holds what only the thread that made it can use, and notes where it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.local = threading.local()
        self.local.number = 0
        self.connection = sqlite3.connect(":memory:")
        self.is_in_main_thread = threading.current_thread() is threading.main_thread()
        new = asyncio.new_event_loop if self.is_in_main_thread else asyncio.get_event_loop
        self.events = new()
        self.fails_at = 0
        self.is_closed = False
        MADE.append(self)

    def use(self) -> None:
        assert threading.get_ident() == self.thread
        self.local.number += 1
        self.connection.execute("select 1")
        self.events.run_until_complete(asyncio.sleep(0))

    def reset(self, **options):
        self.use()
        return super().reset(**options)

    def step(self, action):
        self.use()
        if 0 < self.fails_at <= self.local.number:
            raise RuntimeError("fails")
        return super().step(action)

    def close(self) -> None:
        self.use()
        self.connection.close()
        if self.is_in_main_thread:
            self.events.close()
        self.is_closed = True


@pytest.fixture(autouse=True)
def forgotten():
    MADE.clear()
    yield
    assert all(env.is_closed for env in MADE)
    MADE.clear()


def threads_of_envs():
    return [t for t in threading.enumerate() if t.name.startswith(("idle-", "inferencer-"))]


@pytest.mark.parametrize("inferencers", [0, 1, 2])
def test_each_inferencer_makes_steps_and_closes_its_environments_in_one_thread(inferencers):
    before = len(threads_of_envs())
    loop, _ = make_tiny_loop(
        Bound, num_inferencers_per_device=inferencers, inference_devices=[0], schedule="lockstep"
    )
    of_loop = {env.thread for env in MADE if not env.is_closed}
    with loop:
        state = loop.new_state(0, 5)
        for _ in range(2):
            state = loop.run(state, 4 if inferencers else 3, 5).state
        assert len(of_loop) == max(1, inferencers)
        assert (threading.get_ident() in of_loop) == (inferencers == 0)
    for thread in threads_of_envs():
        thread.join(300)
    assert len(threads_of_envs()) == before


def test_environments_that_failed_are_closed_and_made_anew_in_that_thread():
    loop, _ = make_tiny_loop(
        Bound,
        num_envs=1,
        num_inferencers_per_device=1,
        inference_devices=[0],
        faults=sebulba.FaultOptions(on_env_failure="restart", max_env_restarts=1),
    )
    next(env for env in MADE if not env.is_closed).fails_at = 9
    with loop, pytest.warns(RuntimeWarning, match="gets replaced"):
        assert loop.run(loop.new_state(0, 5), 4, 5).counters.env_restarts == 1


@pytest.mark.parametrize("inline", [False, True])
def test_evaluations_make_play_and_close_their_environments_in_one_thread(inline):
    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
    networks = agent.new_state(jax.random.key(0), RunSpec(5, 2, 2, 1)).networks
    player = EvaluationPlayer(agent, Bound, num_episodes=3, num_envs=2, inline=inline)
    with player:
        assert player(networks, threading.Event()) is not None
    assert (MADE[-1].thread == threading.get_ident()) == inline
    player.close()  # again


class Signals(CountingEnv):
    """Has a handler of signals, which only a main thread may have."""

    def reset(self, **options):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return super().reset(**options)


class Asserts(CountingEnv):
    """Says in words of its own what it needs."""

    def step(self, action):
        raise AssertionError("Main Thread expected")


@pytest.mark.parametrize("env", [Signals, Asserts])
def test_what_needs_a_main_thread_is_told_which_option_has_one(env):
    loop, _ = make_tiny_loop(env, num_inferencers_per_device=1, inference_devices=[0])
    with loop, pytest.raises((ValueError, AssertionError), match=r"(?i)main thread") as raised:
        loop.run(loop.new_state(0, 5), 1, 5)
    assert any("use --env.vectorization async" in note for note in raised.value.__notes__)


class Alarmed(CountingEnv):
    """Has a handler of signals from the beginning, in a worker's main thread."""

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.slow
def test_with_worker_processes_it_has_one():
    factory = sebulba.make_env_factory(Alarmed, vectorization="async")
    spec = sebulba.env_spec(factory)
    loop, _ = make_tiny_loop(factory, num_inferencers_per_device=1, inference_devices=[0])
    with loop:
        result = loop.run(loop.new_state(0, 5), 2, 5)
    assert result.counters.cycles == 2 and spec.name


def test_a_thread_raises_what_a_call_raised_and_runs_nothing_once_it_ended():
    thread = EnvThread("x")
    assert thread.call(lambda x: x + 1, 1) == 2
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)
    assert thread.call(lambda: thread.call(threading.get_ident)) != threading.get_ident()
    thread.end()
    with pytest.raises(RuntimeError, match="'x' has ended"):
        thread.call(np.zeros, 1)

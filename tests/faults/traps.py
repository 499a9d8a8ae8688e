"""Faults that spring at a chosen moment, and the pieces of a run that they are built into."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

from sebulba.loops.supervisor import Supervisor
from tests.support.tiny import CountingEnv, TinyAgent

SHORT_LIMIT_S = 1.0
"""The supervisor's patience from the moment at which something begins to hang."""
LONG_LIMIT_S = 300.0
OUR_THREADS = ("inferencer-", "evaluator", "supervisor", "checkpoint-saver")


class Planted(Exception):
    """What a trap raises."""


class Trap:
    """Springs once, at its ``at``-th call; ``kind`` says what it does then."""

    def __init__(self, kind: str, at: int = 1) -> None:
        self.kind = kind
        self.at = at
        self.sprung = threading.Event()
        self.release = threading.Event()
        """Ends a hang."""
        self._calls = 0
        self._counting = threading.Lock()
        self.supervisors: list[Supervisor] = []

    def __call__(self) -> None:
        with self._counting:
            self._calls += 1
            if self._calls != self.at:
                return
        self.sprung.set()
        if self.kind == "raise":
            raise Planted("planted")
        if self.kind == "exit":
            raise SystemExit(0)
        if self.kind == "hang":
            for supervisor in self.supervisors:
                supervisor._limit_s = SHORT_LIMIT_S
            self.release.wait(300)
        if self.kind == "slow":
            time.sleep(0.3)


@pytest.fixture
def make_trap(monkeypatch):
    """Return a maker of traps; what hangs in one is released and joined at the end of the test."""
    traps: list[Trap] = []

    def enter(supervisor: Supervisor) -> Supervisor:
        for trap in traps:
            trap.supervisors.append(supervisor)
        return original(supervisor)

    def print_stacks(supervisor: Supervisor, *what: str) -> None:
        supervisor._limit_s = LONG_LIMIT_S  # found; what else takes its time is no hang
        original_print(supervisor, *what)

    original, original_print = Supervisor.__enter__, Supervisor._print_stacks
    monkeypatch.setattr(Supervisor, "__enter__", enter)
    monkeypatch.setattr(Supervisor, "_print_stacks", print_stacks)

    def make(kind: str, at: int = 1) -> Trap:
        traps.append(Trap(kind, at))
        return traps[-1]

    yield make
    for trap in traps:
        trap.release.set()
    deadline = time.monotonic() + 60
    while our_threads() and time.monotonic() < deadline:  # one may go on under another name, idle
        time.sleep(0.01)
    assert not our_threads(), "what hung ends when it can"


def our_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(OUR_THREADS)]


# Where traps are built in.


def env_with(reset: Any = None, step: Any = None, close: Any = None) -> type:
    class TrappedEnv(CountingEnv):
        def reset(self, **kwargs):
            if reset is not None:
                reset()
            return super().reset(**kwargs)

        def step(self, action):
            if step is not None:
                step()
            return super().step(action)

        def close(self):
            if close is not None:
                close()
            super().close()

    return TrappedEnv


def agent_with(
    step: Any = None, hand_off: Any = None, take: Any = None, loss: Any = None, count: Any = None
) -> type[TinyAgent]:
    """Return an agent class; ``step``, ``take`` and ``loss`` spring inside compiled programs."""

    class TrappedAgent(TinyAgent):
        def step(self, networks, step_state, env_step, *, explore=True):
            if step is not None and explore:
                jax.debug.callback(lambda _: step(), step_state["steps"][0])
            return super().step(networks, step_state, env_step, explore=explore)

        def shard_step_state(self, step_state, sharding):
            if hand_off is not None:
                hand_off()
            return super().shard_step_state(step_state, sharding)

        def update_experience(self, experience, initial, final, trajectory, networks):
            if take is not None:
                jax.debug.callback(lambda _: take(), trajectory.cycle)
            return super().update_experience(experience, initial, final, trajectory, networks)

        def loss(self, networks, opt, experience, key):
            if loss is not None:
                jax.debug.callback(lambda _: loss(), opt["updates"])
            return super().loss(networks, opt, experience, key)

        def num_off_policy_optims_per_cycle(self, cycle):
            if count is not None:
                count()
            return super().num_off_policy_optims_per_cycle(cycle)

    return TrappedAgent


class TrappedWriter:
    """A metric writer."""

    def __init__(self, trap: Trap) -> None:
        self._trap = trap
        self.records: list[Any] = []

    def write(self, metrics):
        self._trap()
        self.records.append(metrics)

    def close(self):
        pass


class NanEnv(CountingEnv):
    """Observes or pays what is not finite at its 23rd step."""

    wrong = "obs"
    value: float = np.nan

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self._steps == 23:
            obs, reward = (obs + self.value, reward) if self.wrong == "obs" else (obs, self.value)
        return obs, reward, *rest

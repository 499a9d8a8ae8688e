"""Whom the supervisor takes for hung, and whom it must not; by a clock of the test's own."""

from __future__ import annotations

import types
from typing import Any

import pytest

from sebulba.errors import EnvHangError, HangError
from sebulba.inference.env_thread import CallingThread
from sebulba.inference.inferencer import ENV_PHASES, INFERENCER_PHASES, WAITING_PHASES, Inferencer
from sebulba.loops import supervisor as supervisor_module
from sebulba.loops.session import LEARNER_PHASES
from sebulba.loops.supervisor import Supervisor
from sebulba.metrics.timer import PhaseTimer
from sebulba.options import FaultOptions, LoopOptions
from sebulba.transport.permits import WAKE_S

LIMIT_S = 300.0


class World:
    """A supervisor over one Inferencer, an evaluator and a learner, at a time that tests choose."""

    def __init__(self, monkeypatch: Any, all_in_nodes: bool = False) -> None:
        self.now = 1000.0
        clock = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("sebulba.metrics.timer.time", clock)
        monkeypatch.setattr(supervisor_module, "time", clock)
        self.told: list[HangError] = []
        self.evaluator_silent_s = 0.0
        self.learner = PhaseTimer(*LEARNER_PHASES)
        timer = PhaseTimer(*INFERENCER_PHASES)
        self.inferencer = Inferencer(0, *[None] * 4, timer, CallingThread())  # type: ignore[arg-type,list-item]
        queue = types.SimpleNamespace(fail=self.told.append)
        running = types.SimpleNamespace(
            fail=self.fail, silent=[], queue=queue, replacing_takes_long=all_in_nodes
        )
        evaluations = types.SimpleNamespace(
            silent_s=lambda: self.evaluator_silent_s, threads=[], end=self.end_evaluations
        )
        session = types.SimpleNamespace(
            options=LoopOptions(faults=FaultOptions(hang_timeout_s=LIMIT_S)),
            attached=types.SimpleNamespace(on_hang=self.told.append),
            timer=self.learner,
            inferencers=[self.inferencer],
        )
        self.supervisor = Supervisor(session, running, evaluations)  # type: ignore[arg-type]
        self.supervisor._looked_at = self.supervisor._awake_since = self.now

    def fail(self, inferencer: Inferencer, error: HangError) -> None:
        inferencer.fail(error)
        self.told.append(error)

    def end_evaluations(self) -> None:
        self.evaluator_silent_s = 0.0

    def wait(self, seconds: float) -> None:
        """Let time pass, while the supervisor looks as it should."""
        end = self.now + seconds
        while self.now < end:
            self.now += WAKE_S
            self.supervisor.look()

    def stand_still(self, seconds: float) -> None:
        """Let time pass while the whole process is stopped."""
        self.now += seconds
        self.supervisor.look()


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize("phase", INFERENCER_PHASES)
def test_an_inferencer_that_works_for_too_long_hangs_and_one_that_waits_does_not(
    world, phase, capsys
):
    with world.inferencer.timer.phase(phase):
        world.wait(LIMIT_S - 2)
        assert not world.told
        world.wait(4)
        world.wait(1000)
    if phase in WAITING_PHASES:
        assert not world.told
        return
    (error,) = world.told
    assert isinstance(error, EnvHangError) == (phase in ENV_PHASES)
    assert "thread 'inferencer-0' is silent" in str(error) and "cycle 0" in str(error)
    assert "MainThread" in capsys.readouterr().err, "all stacks are printed"


@pytest.mark.parametrize("phase", LEARNER_PHASES)
def test_an_update_loop_that_works_for_too_long_hangs_and_one_that_waits_does_not(world, phase):
    with world.learner.phase(phase):
        world.wait(LIMIT_S - 2)
        assert not world.told
        world.wait(1000)
    names = [str(error) for error in world.told]
    assert len(names) == (phase not in ("get", "checkpoint"))
    assert all(f"did not leave {phase!r}" in name for name in names)


def test_many_slow_updates_after_a_trajectory_are_no_hang_and_one_that_hangs_is(world):
    phase = world.learner.phase("update")
    with phase:
        for _ in range(9):
            world.wait(LIMIT_S - 2)
            phase.begin_again()
        assert not world.told
        world.wait(1000)
    assert len(world.told) == 1
    assert world.learner.seconds()["update"] >= 9 * (LIMIT_S - 2) + 1000


def test_a_restart_that_hangs_in_a_wait_for_a_trajectory_is_found(world):
    with world.learner.phase("get"):
        world.wait(1000)
        with world.learner.phase("restart"):
            world.wait(LIMIT_S + 2)
    assert len(world.told) == 1 and "'restart'" in str(world.told[0])


def test_a_restart_in_a_node_has_the_limits_of_its_requests(monkeypatch):
    world = World(monkeypatch, all_in_nodes=True)
    with world.learner.phase("restart"):
        world.wait(1000)
    assert not world.told


def test_many_short_phases_are_no_silence(world):
    for _ in range(20):
        with world.inferencer.timer.phase("env_step"):
            world.wait(LIMIT_S / 10)
    assert not world.told


def test_a_process_that_stood_still_gets_the_whole_limit_again(world):
    with world.inferencer.timer.phase("env_step"), world.learner.phase("update"):
        world.stand_still(100 * LIMIT_S)
        world.wait(LIMIT_S - 2)
        assert not world.told
        world.wait(4)
    assert len(world.told) == 2


def test_an_evaluator_that_gives_no_sign_of_life_hangs(world):
    world.wait(2 * LIMIT_S)
    world.evaluator_silent_s = LIMIT_S + 1
    world.wait(10)
    assert len(world.told) == 1 and "thread 'evaluator' is silent" in str(world.told[0])


def test_a_process_that_stood_still_amid_a_look_is_given_the_whole_limit_again(world, monkeypatch):
    timer = world.inferencer.timer
    world.wait(2 * LIMIT_S)
    with timer.phase("env_step"):
        present = timer.present

        def stands_still():
            world.now += 10 * LIMIT_S
            return present()

        with monkeypatch.context() as patch:
            patch.setattr(timer, "present", stands_still)
            world.supervisor.look()
        world.wait(LIMIT_S - 2)
        assert not world.told
        world.wait(4)
        assert len(world.told) == 1

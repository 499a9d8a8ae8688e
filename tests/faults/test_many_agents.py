"""Environments of many agents that fail: named by environment and agent, replaced, gone on from."""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import numpy as np
import pytest

import sebulba
from sebulba.errors import EnvError
from sebulba.inference.cycle import check_finite
from sebulba.runs.exit_codes import EXIT_ENV, exit_code_of
from sebulba.types import EnvStep
from tests.envs.test_echo import PETTINGZOO, RandomAgents
from tests.faults.test_restarts import Faults, kill_a_worker, make_loop
from tests.faults.traps import make_trap, our_threads
from tests.support import echo
from tests.support.loop_helpers import Recorder

__all__ = ["make_trap"]

STEPS = 5
pytestmark = pytest.mark.filterwarnings("ignore:.*gets replaced by a new one:RuntimeWarning")


def faulty_echo(faults: Faults) -> type:
    class FaultyEcho(echo.Echo):
        def step(self, actions: dict) -> Any:
            is_due = faults()
            obs, rewards, *ends = super().step(actions)
            if is_due and faults.kind == "NaN":
                rewards = {**rewards, "crew.0": np.nan}
            return (obs, rewards) if is_due and faults.kind == "tuple" else (obs, rewards, *ends)

    return FaultyEcho


def check_alignment(world: echo.World, recorder: Recorder) -> None:
    """Check every cell, and that what follows a gap begins new episodes."""
    for inferencer in range(2):
        before = None
        for trajectory in recorder.of(inferencer):
            assert echo.misplaced_cells(world, trajectory.env_step, trajectory.action) == 0
            first = jax.tree.map(lambda x: x[0], trajectory.env_step)
            if before is None or int(trajectory.cycle) != int(before.cycle) + 1:
                assert all(flags.all() for flags in first.is_first.values())
            else:
                last = jax.tree.map(lambda x: x[-1], before.env_step)
                assert all(map(np.array_equal, jax.tree.leaves(last), jax.tree.leaves(first)))
            before = trajectory


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("kind", ["raise", "NaN", "tuple", "hang"])
def test_not_one_agents_cell_is_out_of_place_after_restarts(kind, schedule, make_trap):
    at = [150] if kind == "hang" else [70, 200, 207]
    faults = Faults(kind, at, make_trap("hang") if kind == "hang" else None)
    recorder = Recorder()
    env = faulty_echo(faults)
    with make_loop(env, recorder, agent_class=RandomAgents, schedule=schedule) as loop:
        result = loop.run(loop.new_state(0, STEPS), 24, STEPS)
    assert result.counters.cycles == 24
    assert result.counters.env_restarts == result.counters.dropped_env_cycles == len(at)
    check_alignment(echo.TREE, recorder)
    assert len([t for t in our_threads() if t.is_alive()]) == (kind == "hang")


def test_a_reward_of_one_agent_that_is_nan_is_named_by_environment_and_agent():
    class Poor(echo.Echo):
        def step(self, actions: dict) -> Any:
            obs, rewards, *ends = super().step(actions)
            if self.s % 5 == 0 and self.t == 3:
                rewards["crew.1"] = np.nan
            return obs, rewards, *ends

    seeds = [11, 12, 15, 13]
    adapter = sebulba.make_env_factory(Poor)(4, seeds)
    output = adapter.reset()
    zeros = {n: np.zeros((4, len(g.slots)), np.int32) for n, g in adapter.spec.groups.items()}
    with pytest.raises(EnvError, match=r"reward of agent 'crew.1' must be a finite") as caught:
        for _ in range(3):
            zeros["guide"] = output.obs["guide"]["legal"].argmax(axis=-1).astype(np.int32)
            output = adapter.step(zeros)
    assert "raised by environment 2, step 3" in caught.value.__notes__
    assert exit_code_of(caught.value) == EXIT_ENV
    adapter.close()


def test_a_value_that_is_not_finite_in_a_program_is_named_by_environment_and_agent():
    """So it is for environments in JAX, which nobody looks at while they are stepped."""
    spec = sebulba.env_spec("tests.envs.test_jax_populations:Duel")
    reward = np.zeros((5, 3, 2), np.float32)
    step = EnvStep({"seat": np.zeros((5, 3, 2, 1))}, {}, {"seat": reward}, {}, {}, {})
    check_finite(step, spec)
    reward[2, 1, 1] = np.nan
    words = r"environment 1 at row 2 of the cycle, reward.seat\[1\] = nan of agent 'seat_1'"
    with pytest.raises(EnvError, match=words):
        check_finite(step, spec)


class HangsOnce(echo.Echo):
    """Hangs in its ninth step, where ``path`` does not exist yet."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.steps = path, 0

    def step(self, actions: dict) -> Any:
        self.steps += 1
        if self.steps == 9 and not os.path.exists(self.path):
            with open(self.path, "w"):
                time.sleep(60)
        return super().step(actions)


WORKERS = {
    "MultiAgentEnv": (echo.Echo, echo.TREE),
    "PettingZoo": ("tests.support.pettingzoo_echo:EchoAEC", echo.IN_TURN),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_process_of_many_agents_that_is_killed_is_replaced(kind):
    env, world = WORKERS[kind]
    if kind == "PettingZoo":
        pytest.importorskip("pettingzoo", reason=PETTINGZOO)

    class Killing(Recorder):
        def __call__(self, trajectory: Any, step_infos: Any) -> None:
            super().__call__(trajectory, step_infos)
            if len(self.trajectories) == 4:
                kill_a_worker(Inside(loop), 1)

    recorder = Killing()
    options = {"num_envs": 1, "make_options": {"vectorization": "async"}}
    with make_loop(env, recorder, agent_class=RandomAgents, **options) as loop:
        result = loop.run(loop.new_state(0, STEPS), 20, STEPS)
    assert result.counters.env_restarts == result.counters.dropped_env_cycles == 1
    check_alignment(world, recorder)


class Inside:
    """A loop whose adapters are those within the adapters of many agents."""

    def __init__(self, loop: Any) -> None:
        self._envs = [loop._envs[index]._env for index in range(2)]


@pytest.mark.slow
def test_a_worker_process_of_many_agents_that_hangs_is_replaced(tmp_path):
    recorder = Recorder()
    make = {"vectorization": "async", "step_timeout_s": 1.0, "path": str(tmp_path / "hung")}
    options = {"num_envs": 1, "make_options": make}
    with make_loop(HangsOnce, recorder, agent_class=RandomAgents, **options) as loop:
        result = loop.run(loop.new_state(0, STEPS), 12, STEPS)
    assert result.counters.env_restarts >= 1
    check_alignment(echo.TREE, recorder)

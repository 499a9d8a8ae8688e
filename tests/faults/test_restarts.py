"""Environments that fail and are replaced: nothing out of place, everything counted."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

import sebulba
from sebulba.errors import EnvError
from sebulba.runs.exit_codes import EXIT_ENV, exit_code_of
from sebulba.transport.trajectory_queue import TrajectoryQueue
from tests.faults.counts import rounds
from tests.faults.traps import Planted, Trap, agent_with, make_trap, our_threads
from tests.loops.test_alignment import RandomAgent
from tests.support import oracle
from tests.support.loop_helpers import Recorder
from tests.support.tiny import TinyConfig

__all__ = ["make_trap"]

NUM_ENVS, STEPS = 4, 5
pytestmark = [
    pytest.mark.timeout(rounds(1200, 3600)),
    pytest.mark.filterwarnings("ignore:.*gets replaced by a new one:RuntimeWarning"),
]


class Faults:
    """Springs each time at one of the given numbers of environment steps, over all Inferencers."""

    def __init__(self, kind: str, at: list[int], trap: Trap | None = None) -> None:
        self.kind = kind
        self.at = set(at)
        self.trap = trap
        self.num = 0
        self._counting = threading.Lock()

    def __call__(self) -> bool:
        with self._counting:
            self.num += 1
            is_due = self.num in self.at
        if is_due and self.kind == "raise":
            raise Planted("planted")
        if is_due and self.trap is not None:
            self.trap()
        return is_due


def faulty_oracle(faults: Faults, places: tuple[str, ...] = ("step",)) -> type:
    class FaultyOracle(oracle.OracleEnv):
        def reset(self, **kwargs):
            if "reset" in places:
                faults()
            return super().reset(**kwargs)

        def step(self, action):
            is_due = "step" in places and faults()
            obs, reward, *rest = super().step(action)
            if is_due and faults.kind == "NaN":
                obs = obs * np.nan
            return (obs, reward) if is_due and faults.kind == "tuple" else (obs, reward, *rest)

    return FaultyOracle


def make_loop(env: Any, recorder: Recorder, **options: Any) -> Any:
    agent_class = options.pop("agent_class", RandomAgent)
    factory = sebulba.make_env_factory(env, **options.pop("make_options", {}))
    agent = agent_class(sebulba.env_spec(factory), TinyConfig())
    options = {"num_envs": NUM_ENVS, "inference_devices": [0], "update_devices": [0]} | options
    return sebulba.GymnasiumLoop(
        factory,
        agent,
        observe_cycle=recorder,
        on_env_failure="restart",
        **options,
    )


def check_alignment(recorder: Recorder, num_inferencers: int = 2) -> int:
    """Check every cell; return the gaps that there are in ``cycle``."""
    gaps = 0
    seeds_of: dict[tuple[int, ...], int] = {}
    for inferencer in range(num_inferencers):
        before = None
        for trajectory in recorder.of(inferencer):
            wrong = oracle.misplaced_cells(trajectory.env_step, trajectory.action, mode="next_step")
            assert wrong == 0
            first = jax.tree.map(lambda x: x[0], trajectory.env_step)
            seeds = tuple(first.obs[:, :2].astype(int).ravel())
            if before is None or int(trajectory.cycle) != int(before.cycle) + 1:
                gaps += before is not None
                assert first.is_first.all(), "what follows a gap begins new episodes"
                assert seeds not in seeds_of, "with seeds that were never used before"
                seeds_of[seeds] = inferencer
            else:
                last = jax.tree.map(lambda x: x[-1], before.env_step)
                assert all(map(np.array_equal, jax.tree.leaves(last), jax.tree.leaves(first)))
            assert seeds_of[seeds] == inferencer
            before = trajectory
    each = [seed for seeds in seeds_of for seed in zip(seeds[::2], seeds[1::2], strict=True)]
    assert len(set(each)) == len(each), "no two environments ever share one"
    return gaps


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("kind", ["raise", "NaN", "tuple", "hang"])
def test_not_one_cell_is_out_of_place_after_restarts(kind, schedule, make_trap):
    at = [250] if kind == "hang" else [70, 200, 207]
    faults = Faults(kind, at, make_trap("hang") if kind == "hang" else None)
    recorder = Recorder()
    with make_loop(faulty_oracle(faults), recorder, schedule=schedule) as loop:
        result = loop.run(loop.new_state(0, STEPS), 24, STEPS)
        again = loop.run(result.state, 8, STEPS)
    assert result.counters.cycles == 24 and again.counters.cycles == 32
    assert result.counters.env_restarts == result.counters.dropped_env_cycles == len(at)
    assert again.counters.env_restarts == len(at)
    assert check_alignment(recorder) >= 1
    assert len([t for t in our_threads() if t.is_alive()]) == (kind == "hang")


def test_what_hung_and_comes_back_to_fail_fails_no_other(make_trap):
    """The thread that was left behind raises while the run goes on."""
    trap = make_trap("hang")
    faults = Faults("hang", [250], trap)
    came_back = threading.Event()

    class ComesBack(faulty_oracle(faults)):  # type: ignore[misc]
        def step(self, action):
            was_hung = trap.sprung.is_set()
            result = super().step(action)
            if trap.sprung.is_set() and not was_hung:
                came_back.set()
                raise Planted("too late")
            return result

    class ReleasingRecorder(Recorder):
        def __call__(self, trajectory, step_infos):
            super().__call__(trajectory, step_infos)
            if loop._session.counters.env_restarts and not came_back.is_set():
                trap.release.set()
                came_back.wait(300)
                time.sleep(0.1)

    recorder = ReleasingRecorder()
    with make_loop(ComesBack, recorder) as loop:
        result = loop.run(loop.new_state(0, STEPS), 24, STEPS)
    assert came_back.is_set() and result.counters.env_restarts == 1
    check_alignment(recorder)


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_budget_that_is_used_up_ends_the_run(schedule):
    faults = Faults("raise", list(range(60, 10_000, 40)))
    with make_loop(
        faulty_oracle(faults), Recorder(), schedule=schedule, max_env_restarts=3
    ) as loop:
        with pytest.raises(Planted) as caught:
            loop.run(loop.new_state(0, STEPS), 1000, STEPS)
        assert loop._session.counters.env_restarts == 3
    assert exit_code_of(caught.value) == EXIT_ENV
    notes = "\n".join(caught.value.__notes__)
    assert "3 environments were replaced before this one; max_env_restarts=3" in notes
    assert not our_threads()


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_reset_that_fails_is_replaced_and_costs_no_cycle(schedule):
    faults = Faults("raise", [3])
    recorder = Recorder()
    with make_loop(faulty_oracle(faults, ("reset",)), recorder, schedule=schedule) as loop:
        result = loop.run(loop.new_state(0, STEPS), 8, STEPS)
        assert sum(i.cycle for i in loop._session.inferencers) <= 8 + 2 + 2 * 2
    assert (result.counters.env_restarts, result.counters.dropped_env_cycles) == (1, 0)
    assert result.counters.dropped_cycles == 0
    check_alignment(recorder)


def test_new_environments_that_cannot_be_made_end_the_run_and_say_for_whom():
    faults = Faults("raise", [60])
    made = []

    class Once(faulty_oracle(faults)):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            made.append(self)
            if len(made) > 1 + 2 * NUM_ENVS:
                raise OSError("no licence left")

    with make_loop(Once, Recorder()) as loop, pytest.raises(OSError, match="licence") as caught:
        loop.run(loop.new_state(0, STEPS), 24, STEPS)
    notes = "\n".join(caught.value.__notes__)
    assert "new environments, because its own had failed: Planted: planted" in notes
    assert exit_code_of(caught.value) == EXIT_ENV and not our_threads()


def test_a_failure_that_is_not_the_environments_is_no_reason_for_new_ones(make_trap):
    trap = make_trap("raise", 5)

    class Trapped(RandomAgent, agent_with(hand_off=trap)):  # type: ignore[misc]
        pass

    with make_loop(oracle.OracleEnv, Recorder(), agent_class=Trapped) as loop:
        with pytest.raises(Planted):
            loop.run(loop.new_state(0, STEPS), 24, STEPS)
        assert loop._session.counters.env_restarts == 0


def test_inline_a_failure_is_always_raised():
    faults = Faults("raise", [60])
    env = faulty_oracle(faults)
    with (
        make_loop(env, Recorder(), num_inferencers_per_device=0) as loop,
        pytest.raises(Planted),
    ):
        loop.run(loop.new_state(0, STEPS), 24, STEPS)


def test_an_environment_that_fails_as_the_run_is_stopped_is_replaced_too():
    failed, stopped = threading.Event(), threading.Event()

    class FailsAtTheStop(oracle.OracleEnv):
        num = 0

        def step(self, action):
            type(self).num += 1
            if self.num == 40:
                stopped.wait(300)
                failed.set()
                raise Planted("at the stop")
            return super().step(action)

    class Stopping(Recorder):
        def __call__(self, trajectory, step_infos):
            super().__call__(trajectory, step_infos)
            if len(self.trajectories) == 1:
                loop.stop()
                stopped.set()
                failed.wait(300)

    recorder = Stopping()
    with make_loop(FailsAtTheStop, recorder, num_inferencers_per_device=1) as loop:
        result = loop.run(loop.new_state(0, STEPS), 100, STEPS)
        assert result.stopped and result.counters.env_restarts == 1
        assert loop.run(result.state, 4, STEPS).counters.cycles == 5, "with the new one"
    check_alignment(recorder, 1)


@pytest.mark.slow
def test_lockstep_keeps_its_rounds_whatever_fails(monkeypatch):
    """Faults at random steps and delays at every hand-off: one trajectory of each a round."""
    put = TrajectoryQueue.put
    for seed in range(rounds(5, 300)):
        rng = np.random.default_rng(seed)
        lock, slow = threading.Lock(), rng.uniform(0, 0.02, 1000)
        number = iter(range(10**6))

        def delayed(self, item, stop, lock=lock, slow=slow, number=number):
            with lock:
                delay = slow[next(number) % 1000]
            time.sleep(delay if item.inferencer else 0)
            return put(self, item, stop)

        with monkeypatch.context() as patch:
            patch.setattr(TrajectoryQueue, "put", delayed)
            faults = Faults("raise", list(rng.integers(1, 500, 6)))
            recorder = Recorder()
            with make_loop(
                faulty_oracle(faults, ("step", "reset")), recorder, schedule="lockstep"
            ) as loop:
                state, counts = loop.new_state(0, STEPS), [8, 2, 6]
                for num_cycles in counts:
                    result = loop.run(state, num_cycles, STEPS)
                    state = result.state
                    kept = [item.inferencer for item in loop._session.kept_round]
                    assert kept == [0, 1], "one of each, for the next run"
        check_alignment(recorder)
        check_rounds(recorder, result.counters)


def check_rounds(recorder: Recorder, counters: Any) -> None:
    """Check that rounds are whole, in order, and act with what was published in time."""
    assert [int(t.inferencer) for t in recorder.trajectories] == [0, 1] * 8
    for i, trajectory in enumerate(recorder.trajectories):
        version, expected = int(trajectory.policy_version), max(0, i // 2 - 1)
        # The first of a new Inferencer may find that the networks of its round are gone already.
        before = [t for t in recorder.trajectories[:i] if t.inferencer == trajectory.inferencer]
        is_new = not before or int(trajectory.cycle) != int(before[-1].cycle) + 1
        assert version == expected or (is_new and version == expected + 1)
    assert counters.cycles == 16 and counters.policy_version == 8


# Worker processes.


def kill_a_worker(loop: Any, inferencer: int) -> None:
    processes = loop._envs[inferencer]._vector_env.processes
    os.kill(processes[0].pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    rounds(["lockstep"], ["async", "lockstep"]),
)
def test_a_worker_process_that_is_killed_is_replaced(schedule):
    class Killing(Recorder):
        def __call__(self, trajectory, step_infos):
            super().__call__(trajectory, step_infos)
            if len(self.trajectories) == 4:
                kill_a_worker(loop, 1)

    recorder = Killing()
    with make_loop(
        oracle.OracleEnv,
        recorder,
        schedule=schedule,
        num_envs=1,
        make_options={"vectorization": "async"},
    ) as loop:
        result = loop.run(loop.new_state(0, STEPS), 20, STEPS)
    assert result.counters.env_restarts == result.counters.dropped_env_cycles == 1
    assert check_alignment(recorder) == 1


@pytest.mark.slow
def test_a_worker_process_that_is_killed_ends_a_run_that_does_not_replace_it():
    agent = RandomAgent(sebulba.env_spec(oracle.OracleEnv), TinyConfig())
    factory = sebulba.make_env_factory(oracle.OracleEnv, vectorization="async")
    with sebulba.GymnasiumLoop(
        factory,
        agent,
        1,
        num_inferencers_per_device=1,
        inference_devices=[0],
        update_devices=[0],
        observe_cycle=lambda t, _: kill_a_worker(loop, 0) if int(t.cycle) == 2 else None,
    ) as loop:
        with pytest.raises(EnvError, match=r"worker process .*exit code -9") as caught:
            loop.run(loop.new_state(0, STEPS), 1000, STEPS)
        assert set(loop.last_transition()) == {"obs", "action"}
    assert exit_code_of(caught.value) == EXIT_ENV and not our_threads()

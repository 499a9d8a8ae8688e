"""Loops that are started and stopped again and again, at random moments, with random delays."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sebulba
from sebulba.loops.evaluation_thread import Evaluator
from sebulba.options import ClusterOptions
from sebulba.transport.staging import Staging
from sebulba.transport.trajectory_queue import TrajectoryQueue
from tests.faults.counts import rounds
from tests.faults.traps import our_threads
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

STEPS, NUM_ENVS = 3, 2
LONGEST_DELAY_S = 0.01
DEADLINE_S = 300.0
"""Of one start and stop; in which anything may have to be compiled."""

pytestmark = pytest.mark.timeout(rounds(1200, 7200))


def vector(num_envs: int, seeds: list[int]) -> Any:
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv([CountingEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


WORLDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "sync": (CountingEnv, {}, {}),
    "vector": (vector, {}, {}),
    "inline": (CountingEnv, {}, {"num_inferencers_per_device": 0}),
    "four devices": (CountingEnv, {}, {"update_devices": [1, 2], "inference_devices": [0, 3]}),
    "evaluated": (CountingEnv, {}, {"evaluator": True}),
    "pool": ("CartPole-v1", {}, {"cycle": "stepped"}),
    "fused": ("CartPole-v1", {}, {"cycle": "fused"}),
    "workers": (CountingEnv, {"vectorization": "async"}, {}),
    "nodes": (
        CountingEnv,
        {},
        {"cluster": ClusterOptions(address="processes", inferencers_per_node=2)},
    ),
}
"""Environment, options of its factory, options of the loop."""
SHARE = {"workers": 0.05, "fused": 0.1, "pool": 0.15, "nodes": 1.0}
"""Of the cycles; others have 0.15 each. Worker processes take a second to start."""
LONGEST = {"nodes": (2, 40)}
"""Most runs of one loop, short and long; others have 2 and 5. Here a process takes seconds."""


CASES_LONG = [(world, schedule) for world in WORLDS for schedule in ("async", "lockstep")]
CASES_SHORT = [CASES_LONG[2 * i + i % 2] for i in range(len(WORLDS))]


class Delays:
    """Random waits before hand-offs: trajectories, networks, step states, metrics."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._drawing = threading.Lock()

    def __reduce__(self) -> tuple:
        return Delays, (0,)  # in another process

    def __call__(self) -> None:
        with self._drawing:
            delay = self._rng.choice([0.0, 0.0, 0.0, self._rng.uniform(0, LONGEST_DELAY_S)])
        if delay:
            time.sleep(delay)

    def put_before(self, patch: Any, cls: type, name: str) -> None:
        original = getattr(cls, name)

        @functools.wraps(original)
        def delayed(*args, **kwargs):
            self()
            return original(*args, **kwargs)

        patch.setattr(cls, name, delayed)


class DelayedWriter:
    def __init__(self, delays: Delays) -> None:
        self.write: Callable = lambda metrics: delays()

    def close(self) -> None:
        pass


def play(networks: Any, stop: threading.Event) -> dict[str, float] | None:
    return None if stop.wait(0.002) else {"eval_return_mean": 0.0}


class Held:
    """What the process holds that a loop could leave behind."""

    def __init__(self) -> None:
        gc.collect()
        deadline = time.monotonic() + 60
        while any(t.name.startswith("idle-") for t in threading.enumerate()):
            assert time.monotonic() < deadline, "a thread of environments has ended with its loop"
            time.sleep(0.01)
        self.threads = {t.name for t in our_threads()}
        self.files = sorted(_target(path) for path in Path("/proc/self/fd").iterdir())
        # Its own: other processes of the machine have shared memory, too.
        maps = Path("/proc/self/maps").read_text().splitlines()
        self.shared = {line.split()[-1] for line in maps if "/dev/shm/" in line}
        self.children = len(multiprocessing.active_children())


def _target(path: Path) -> str:
    try:
        target = os.readlink(path)
    except OSError:
        return ""  # of this very listing
    # Numbers of pipes and sockets say nothing.
    return target.partition(":")[0] if "[" in target else target


def start_and_stop(loop: Any, state: Any, rng: np.random.Generator) -> Any:
    """Run once, to a target that is near in a quarter of the cases, or until a stop."""
    is_near, is_early, delay_s = rng.integers(4) == 0, rng.integers(4) == 0, rng.uniform(0, 0.1)
    num_cycles = (4 if is_near else 10**6) * loop.num_inferencers
    if is_early:
        loop.stop()
    stopper = threading.Timer(delay_s, loop.stop)
    stopper.start()
    began = time.monotonic()
    result = loop.run(state, num_cycles, STEPS)
    assert time.monotonic() - began < DEADLINE_S
    stopper.join()  # one that comes too late is for the next run
    assert result.stopped or is_near
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("world", "schedule"), rounds(CASES_SHORT, CASES_LONG))
def test_loops_start_and_stop_without_a_deadlock_or_a_leak(world, schedule, monkeypatch):
    env, make_options, options = WORLDS[world]
    count = rounds(2 if world == "nodes" else 4, max(1, round(1000 * SHARE.get(world, 0.14) / 2)))
    seed = list(WORLDS).index(world) * 2 + (schedule == "lockstep")
    rng, delays = np.random.default_rng(seed), Delays(seed)
    delays.put_before(monkeypatch, TrajectoryQueue, "put")
    delays.put_before(monkeypatch, TrajectoryQueue, "get")
    delays.put_before(monkeypatch, Staging, "publish")
    delays.put_before(monkeypatch, Staging, "take")

    class Agent(TinyAgent):
        uses_final_obs = True

        def shard_step_state(self, step_state, sharding):
            delays()
            return super().shard_step_state(step_state, sharding)

    factory = sebulba.make_env_factory(env, **make_options)
    agent = Agent(sebulba.env_spec(factory), TinyConfig())
    options = {"inference_devices": [0], "update_devices": [0]} | options
    if options.pop("evaluator", False):
        options["evaluator"] = Evaluator(play, 10 * STEPS)

    def make_loop() -> Any:
        return sebulba.GymnasiumLoop(
            factory,
            agent,
            NUM_ENVS,
            schedule=schedule,
            metric_writer=DelayedWriter(delays),
            metrics_interval_s=0.0,
            queue_size=int(rng.integers(1, 4)),
            **options,
        )

    held, longest = None, 1 + rounds(*LONGEST.get(world, (2, 5)))
    num_runs = 0
    while num_runs < count:
        with make_loop() as loop:
            state = loop.new_state(num_runs, STEPS)
            for _ in range(min(count - num_runs, int(rng.integers(1, longest)))):
                result = start_and_stop(loop, state, rng)
                assert not our_threads()
                # Half of the time it goes on, else it begins anew.
                state = result.state if rng.integers(2) else state
                num_runs += 1
            del result, state
        del loop
        if held is None:
            held = Held()  # what compiling, envpool and forkserver keep for good is there now
    after = Held()
    assert after.threads == set()
    assert after.children == held.children, "no process is left"
    assert len(after.shared) <= len(held.shared), "no shared memory is left"
    assert len(after.files) <= len(held.files), set(after.files) - set(held.files)

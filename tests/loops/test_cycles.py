"""Stepped and fused cycles are the same cycle; nothing compiles after the start."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src import compilation_cache

import sebulba
from sebulba.inference import cycle as cycle_module
from sebulba.inference import fused_cycle, hangs, places, stepped_cycle
from sebulba.inference.cycle import CyclePrograms
from sebulba.inference.inferencer import INFERENCER_PHASES
from sebulba.inference.inferencer_pool import RunningInferencers
from sebulba.metrics.timer import PhaseTimer
from sebulba.types import RunSpec
from tests.support.loop_helpers import Recorder, make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

DEADLINE_S = 300.0

# Every Inferencer compiles a fused cycle of its own.
ONE = {"num_inferencers_per_device": 1}
EXACT = ("obs", "prev_action", "reward", "terminated", "truncated", "is_first")


def record(env, cycle, num_cycles, steps, **options):
    recorder = Recorder()
    loop, _ = make_tiny_loop(
        env, cycle=cycle, schedule="lockstep", observe_cycle=recorder, **options
    )
    with loop:
        result = loop.run(loop.new_state(5, steps), num_cycles, steps)
    return recorder, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "num_cycles", "steps", "options"),
    [
        ("CartPole-v1", 60, 31, {"num_envs": 3}),
        ("Pong-v5", 6, 9, {"num_envs": 3, **ONE}),
        ("CartPole-v1", 60, 31, {"num_envs": 1, **ONE}),
    ],
    ids=["CartPole", "Pong", "one CartPole"],
)
def test_stepped_and_fused_cycles_are_the_same(env, num_cycles, steps, options):
    factory = sebulba.make_env_factory(env)
    stepped, _ = record(factory, "stepped", num_cycles, steps, **options)
    fused, _ = record(factory, "fused", num_cycles, steps, **options)
    assert len(stepped.trajectories) == len(fused.trajectories) == num_cycles
    for one, other in zip(stepped.trajectories, fused.trajectories, strict=True):
        for name in EXACT:
            np.testing.assert_array_equal(
                getattr(one.env_step, name), getattr(other.env_step, name), err_msg=name
            )
        np.testing.assert_array_equal(one.action, other.action)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
            one.extras,
            other.extras,
        )
    for one, other in zip(stepped.step_infos, fused.step_infos, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)


class OnAccelerator(stepped_cycle.SteppedCycle):
    """A stepped cycle that takes its CPU device for an accelerator."""

    def __init__(self, env, programs, device, timer):
        super().__init__(env, programs, device, timer)
        self._accelerator = device

    def run(self, networks, step_state, stop):
        item, step_state = super().run(networks, step_state, stop)
        # The hand-off has nothing to upload.
        of_host = [
            x for x in jax.tree.leaves(item and item.trajectory) if isinstance(x, np.ndarray)
        ]
        assert not of_host
        return item, step_state


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "Pong-v5"])
def test_rows_that_stay_on_an_accelerator_are_those_of_the_host(env, monkeypatch):
    uploads, fetched = [], []
    on_host = stepped_cycle._on_host

    def upload(leaves, device):
        uploads.append(len(leaves))
        return jax.device_put(leaves, device)

    def fetch(action):
        fetched.append(action.shape)
        return on_host(action)

    monkeypatch.setattr(stepped_cycle, "_upload", upload)
    monkeypatch.setattr(stepped_cycle, "_on_host", fetch)
    here, _ = record(env, "stepped", 3, 5, **ONE)
    assert not uploads
    fetched.clear()
    there, _ = record(env, OnAccelerator, 3, 5, **ONE)
    assert len(uploads) == 1 + 4 * 5 and len(set(uploads)) == 1  # lockstep begins a fourth cycle
    assert len(fetched) == 4 * 5 and len(set(fetched)) == 1
    for one, other in zip(here.trajectories, there.trajectories, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    for one, other in zip(here.step_infos, there.step_infos, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def whole():
    """Fused cycles of one chunk."""
    return record("CartPole-v1", "fused", 8, 12, **ONE)[0]


@pytest.mark.slow
def test_chunks_do_not_change_a_fused_cycle(whole, monkeypatch):
    monkeypatch.setattr(fused_cycle, "FIRST_CHUNK_ENV_STEPS", 3 * 4)
    chunked, _ = record("CartPole-v1", "fused", 8, 12, **ONE)
    for one, other in zip(whole.trajectories, chunked.trajectories, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.env_step, other.env_step)


@pytest.fixture
def numbers_of_chunks(monkeypatch):
    """How many chunks a cycle has after each one; chunks adapt in lockstep, too."""
    numbers = []

    class Adapts(fused_cycle.FusedCycle):
        def __init__(self, *arguments, adapts):
            super().__init__(*arguments, adapts=True)

        def _choose_chunks(self, chunk_s):
            super()._choose_chunks(chunk_s)
            numbers.append(self._num_chunks)

    monkeypatch.setattr(places, "FusedCycle", Adapts)
    return numbers


@pytest.mark.slow
def test_a_slow_fused_cycle_is_split_once_and_stays_the_same(whole, monkeypatch, numbers_of_chunks):
    monkeypatch.setattr(fused_cycle, "CHUNK_S", 1e-9)
    split, _ = record("CartPole-v1", "fused", 8, 12, **ONE)
    assert set(numbers_of_chunks) == {12}
    for one, other in zip(whole.trajectories, split.trajectories, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.env_step, other.env_step)


@pytest.mark.slow
def test_short_chunks_of_a_fused_cycle_are_merged_once_and_it_stays_the_same(
    whole, monkeypatch, numbers_of_chunks
):
    monkeypatch.setattr(fused_cycle, "FIRST_CHUNK_ENV_STEPS", 3 * 4)
    monkeypatch.setattr(fused_cycle, "MERGE_AFTER_S", 0.0)
    monkeypatch.setattr(fused_cycle, "CHUNK_S", 1e9)
    merged, _ = record("CartPole-v1", "fused", 8, 12, **ONE)
    assert numbers_of_chunks[0] == 4 and set(numbers_of_chunks[1:]) == {1}
    for one, other in zip(whole.trajectories, merged.trajectories, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.env_step, other.env_step)


class Noted:
    """An array that notes when it is asked for and when it is read."""

    def __init__(self, array, events):
        self.array, self.events = array, events

    def copy_to_host_async(self):
        self.events.append("asked")
        self.array.copy_to_host_async()

    def __array__(self, dtype=None, copy=None):
        self.events.append("read")
        return np.asarray(self.array, dtype)

    def __bool__(self):
        return bool(self.__array__())


def test_the_host_asks_for_all_of_a_chunk_before_it_reads(monkeypatch):
    """So an accelerator is waited for once a chunk."""
    chunks = []
    program_of = fused_cycle.FusedCycle._program

    def noting(cycle, *arguments):
        def program(*given):
            events = []
            *rest, finished, chunk = compiled(*given)
            if finished is not None:
                finished = finished._replace(finite=Noted(finished.finite, events))
            chunks.append(events)
            return *rest, finished, jax.tree.map(lambda x: Noted(x, events), chunk)

        compiled = program_of(cycle, *arguments)
        cycle._device = SimpleNamespace(platform="gpu")
        return program

    monkeypatch.setattr(fused_cycle, "FIRST_CHUNK_ENV_STEPS", 3 * 4)
    monkeypatch.setattr(fused_cycle.FusedCycle, "_program", noting)
    record("CartPole-v1", "fused", 2, 12, **ONE)
    assert len(chunks) >= 8
    for events in chunks:
        count = events.count("asked")
        assert count >= 3 and events == ["asked"] * count + ["read"] * count


@pytest.mark.parametrize("env", ["CartPole-v1", "gymnax:CartPole-v1"])
def test_programs_that_no_other_process_finds_are_not_saved(env, monkeypatch):
    if env.startswith("gymnax"):
        pytest.importorskip("gymnax")
    saved = []
    monkeypatch.setattr(
        compilation_cache, "put_executable_and_time", lambda key, name, *_: saved.append(name)
    )
    monkeypatch.setattr(compilation_cache, "get_executable_and_time", lambda *_: (None, None))
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        record(env, "fused", 1, 12, **ONE)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
    assert any("run_chunk" in name for name in saved) == env.startswith("gymnax")


def test_auto_says_which_way_it_uses_and_why():
    loop, _ = make_tiny_loop("CartPole-v1", **ONE)
    with loop:
        loop.run(loop.new_state(0, 5), 2, 5)
        assert "fused cycles (the environment has an XLA handle" in loop.describe()
    loop, _ = make_tiny_loop()
    with loop:
        loop.run(loop.new_state(0, 5), 2, 5)
        assert "stepped cycles (" in loop.describe()


class CompileCounter:
    """Counts what XLA compiles, in any thread, once it is switched on."""

    def __init__(self):
        self.on = False
        self.names = []

    def __call__(self, event, duration_s, **more):
        if self.on and event == "/jax/core/compile/backend_compile_duration":
            self.names.append((event, more))


@pytest.fixture
def compiles():
    counter = CompileCounter()
    jax.config.update("jax_enable_compilation_cache", False)  # what it finds is not counted
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.clear_event_listeners()
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.slow
@pytest.mark.parametrize("cycle", ["stepped", "fused"])
@pytest.mark.parametrize("devices", [([0], [0]), ([0], [1, 2])])
def test_nothing_compiles_after_two_cycles_of_each_inferencer(compiles, cycle, devices):
    def observe(trajectory, step_infos):
        if int(trajectory.cycle) >= 3:
            compiles.on = True

    loop, _ = make_tiny_loop(
        "CartPole-v1",
        cycle=cycle,
        schedule="lockstep",
        observe_cycle=observe,
        inference_devices=devices[0],
        update_devices=devices[1],
        num_inferencers_per_device=2 if cycle == "stepped" else 1,
        metrics_interval_s=0.0,
    )
    with loop:
        result = loop.run(loop.new_state(0, 5), 40, 5)
        assert compiles.on
        programs = loop._session.inferencers[0].run_cycle._programs
        updater = loop._parts.updater
        # The update may have been compiled ahead, which is not counted here.
        update = updater._programs[True, 1]._jitted
        compiled_later = update._cache_size()
        assert compiled_later <= 1
        used = [updater._acting]
        if cycle == "stepped":
            used.append(programs.act)
        assert [program._cache_size() for program in used] == [1] * len(used)
        assert not compiles.names
        compiles.on = False  # what the end of a run and the begin of the next copy is their own
        loop.run(result.state, 10, 5)
        assert [program._cache_size() for program in used] == [1] * len(used)
        assert update._cache_size() == compiled_later


@pytest.mark.slow
@pytest.mark.parametrize("cycle", ["stepped", "fused"])
@pytest.mark.parametrize("devices", [([0], [0]), ([0], [1]), ([1], [1])])
def test_the_update_is_compiled_ahead_for_what_it_will_be_given(cycle, devices, monkeypatch):
    next_item = RunningInferencers.next_item

    def idle_first(running, wait_s):
        running._while_idle()
        return next_item(running, wait_s)

    monkeypatch.setattr(RunningInferencers, "next_item", idle_first)
    loop, _ = make_tiny_loop(
        "CartPole-v1", cycle=cycle, inference_devices=devices[0], update_devices=devices[1]
    )
    with loop:
        loop.run(loop.new_state(0, 5), 4, 5)
        assert loop._parts.updater._programs[True, 1]._jitted._cache_size() == 0


@pytest.fixture
def turn(monkeypatch):
    """Of one Inferencer of several on two cores."""
    monkeypatch.setattr(cycle_module, "num_cores", lambda: 2)
    agent, run = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig()), RunSpec(4, 1, 5, 1)
    state = agent.new_state(jax.random.key(0), run)
    programs = CyclePrograms(agent, state.networks, state.step[0], run)

    def turn(stop):
        return programs.turn_to_compile(stop, PhaseTimer(*INFERENCER_PHASES))

    yield turn
    assert programs._compiling.acquire(blocking=False), "it was not given back"


def test_one_program_compiles_at_a_time(turn, monkeypatch):
    monkeypatch.setattr(cycle_module, "LONGEST_WAIT_TO_COMPILE_S", 10 * DEADLINE_S)
    stop, began, others = threading.Event(), threading.Event(), []

    def other():
        began.set()
        with turn(stop):
            others.append(is_free)

    is_free = False
    thread = threading.Thread(target=other, daemon=True)
    with turn(stop):
        thread.start()
        assert began.wait(DEADLINE_S)
        thread.join(0.1)
        assert not others
        is_free = True
    thread.join(DEADLINE_S)
    assert others == [True]


@pytest.mark.parametrize("how", ["stopped", "too long"])
def test_a_turn_that_does_not_come_is_not_waited_for(turn, monkeypatch, how):
    stop = threading.Event()
    longest_s = 10 * DEADLINE_S if how == "stopped" else 0.1
    monkeypatch.setattr(cycle_module, "LONGEST_WAIT_TO_COMPILE_S", longest_s)

    def other():
        with turn(stop):
            pass

    with turn(stop):
        if how == "stopped":
            stop.set()
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_stop_waits_for_a_compile_and_does_not_call_it_a_hang(monkeypatch):
    loop, _ = make_tiny_loop("CartPole-v1", cycle="fused", **ONE)
    compile_chunk = fused_cycle.FusedCycle._compile_chunk

    def compile_slowly(cycle, *arguments):
        loop.stop()
        time.sleep(1.0)
        return compile_chunk(cycle, *arguments)

    monkeypatch.setattr(fused_cycle.FusedCycle, "_compile_chunk", compile_slowly)
    monkeypatch.setattr(hangs, "JOIN_S", 0.1)
    with loop:
        assert loop.run(loop.new_state(0, 5), 4, 5).stopped


def test_networks_are_taken_once_the_first_program_is_compiled(monkeypatch):
    """Others train while an Inferencer compiles: its first trajectory would be that much older."""
    versions: dict[int, list[int]] = {}
    compile_chunk = fused_cycle.FusedCycle._compile_chunk
    is_first, others_trained = threading.Lock(), threading.Event()

    def observe(trajectory, step_infos):
        versions.setdefault(int(trajectory.inferencer), []).append(int(trajectory.policy_version))
        if max(map(len, versions.values())) > 8:
            others_trained.set()
        if len(versions) == 2:
            loop.stop()

    def compile_late(cycle, *arguments):
        assert is_first.acquire(blocking=False) or others_trained.wait(DEADLINE_S)
        return compile_chunk(cycle, *arguments)

    monkeypatch.setattr(fused_cycle.FusedCycle, "_compile_chunk", compile_late)
    loop, _ = make_tiny_loop("CartPole-v1", cycle="fused", observe_cycle=observe)
    with loop:
        loop.run(loop.new_state(0, 5), 10**6, 5)
    assert len(versions) == 2 and min(versions.values(), key=len)[0] > 4


def test_a_stop_before_its_turn_to_compile_ends_a_fused_cycle(monkeypatch):
    loop, _ = make_tiny_loop("CartPole-v1", cycle="fused", **ONE)

    @contextlib.contextmanager
    def stop_while_waiting(programs, stop, timer):
        loop.stop()
        assert stop.wait(DEADLINE_S)
        yield

    monkeypatch.setattr(CyclePrograms, "turn_to_compile", stop_while_waiting)
    monkeypatch.setattr(fused_cycle.FusedCycle, "_compile_chunk", None)
    with loop:
        assert loop.run(loop.new_state(0, 5), 4, 5).counters.cycles == 0


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_the_update_is_traced_while_the_first_cycle_is_played(schedule):
    is_traced = threading.Event()

    class Agent(TinyAgent):
        def loss(self, networks, opt, experience, key):
            is_traced.set()
            return super().loss(networks, opt, experience, key)

    class Env(CountingEnv):
        def reset(self, **options):
            assert is_traced.wait(DEADLINE_S)
            return super().reset(**options)

    loop, _ = make_tiny_loop(Env, agent_class=Agent, schedule=schedule, **ONE)
    with loop:
        assert loop.run(loop.new_state(0, 5), 2, 5).counters.updates == 2


@pytest.mark.slow
def test_a_long_stepped_cycle_is_stacked_in_groups():
    stepped, _ = record("CartPole-v1", "stepped", 2, 150, **ONE)
    fused, _ = record("CartPole-v1", "fused", 2, 150, **ONE)
    for one, other in zip(stepped.trajectories, fused.trajectories, strict=True):
        assert one.action.shape[0] == 150
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
            one.extras,
            other.extras,
        )

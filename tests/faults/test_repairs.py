"""Faults that a review and a hostile trial found, each as the test that found it again."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
from typing import ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba import UsageError
from sebulba.agents.configs import DQNConfig, ReplayConfig, SACConfig, TorsoConfig
from sebulba.agents.dqn import DQN
from sebulba.agents.kernels.exploration import FallingEpsilon
from sebulba.agents.sac import SAC
from sebulba.errors import is_env_failure
from sebulba.inference.env_thread import CallingThread
from sebulba.inference.fused_cycle import FusedCycle
from sebulba.inference.hangs import silence_error
from sebulba.inference.inferencer import INFERENCER_PHASES, Inferencer
from sebulba.inference.loop_envs import LoopEnvs
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.key_streams import UPDATE_STREAM
from sebulba.support.trees import fold_in_count
from sebulba.transport.item import Item
from sebulba.types import RunSpec
from tests.support.loop_helpers import counting, make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

STEPS = 5
ONE_DEVICE = {"inference_devices": [0], "update_devices": [0]}


def bits(key: jax.Array) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()


# Keys.


@pytest.mark.parametrize("env_steps", [2**32 - 1, 2**32, 2**33 + 7, 2**70])
def test_a_run_of_any_length_can_be_resumed(env_steps, tmp_path):
    with sebulba.Checkpointer(tmp_path) as checkpointer:
        loop, _ = make_tiny_loop(checkpointer=checkpointer)
        with loop:
            loop.run(loop.new_state(0, STEPS), 2, STEPS)
        saved = checkpointer.load_newest()
    loop, _ = make_tiny_loop()
    with loop:
        state = loop.restore(saved._replace(env_steps=env_steps, experience_env_steps=env_steps))
        loop.run(state, 2, STEPS)


def test_counts_beyond_32_bits_make_keys_of_their_own():
    key = jax.random.key(0)
    assert bits(fold_in_count(key, 5)) == bits(jax.random.fold_in(key, 5))
    counts = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**64, 2**64 + 1]
    assert len({bits(fold_in_count(key, count)) for count in counts}) == len(counts)


def test_no_two_streams_of_a_run_share_a_key():
    seed, num_inferencers = 3, 4
    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
    seen: list[bytes] = []

    class Watched(TinyAgent):
        def new_networks(self, key):
            seen.append(bits(key))
            return super().new_networks(key)

        def new_experience(self, key, networks, run):
            seen.append(bits(key))
            return super().new_experience(key, networks, run)

        def new_step_state(self, key, run, inferencer):
            if not isinstance(key, jax.core.Tracer):  # of shapes
                seen.append(bits(key))
            return super().new_step_state(key, run, inferencer)

    watched = Watched(agent.spec, agent.config)
    watched.new_state(jax.random.key(seed), RunSpec(2, num_inferencers, STEPS, 1))
    factory = sebulba.make_env_factory(CountingEnv)
    envs = LoopEnvs(factory, agent.spec, seed, 2, [None])
    for generation in range(1, 6):
        fresh = envs.fresh_key(generation)
        seen.append(bits(fresh))
        seen += [bits(jax.random.fold_in(fresh, index)) for index in range(num_inferencers)]
    update_key = jax.random.fold_in(jax.random.key(seed), UPDATE_STREAM)
    for update, device in itertools.product(range(20), range(4)):
        seen.append(bits(jax.random.fold_in(jax.random.fold_in(update_key, update), device)))
    policy = sebulba.Policy(Watched(agent.spec, agent.config), None, seed=seed)
    for _ in range(3):
        policy.new_state(2)  # of evaluations beside training
    assert len(seen) == 2 + num_inferencers + 5 * (1 + num_inferencers) + 80 + 3
    assert len(set(seen)) == len(seen)


# The loop.


@pytest.mark.slow
def test_in_lockstep_chunks_do_not_depend_on_the_clock(monkeypatch):
    monkeypatch.setattr("sebulba.inference.fused_cycle.CHUNK_S", 1e-9)
    chunks = {}
    for schedule in ("async", "lockstep"):
        loop, _ = make_tiny_loop(
            "CartPole-v1", cycle="fused", schedule=schedule, num_inferencers_per_device=1
        )
        with loop:
            loop.run(loop.new_state(0, STEPS), 3, STEPS)
            (inferencer,) = loop._session.inferencers
            assert isinstance(inferencer.run_cycle, FusedCycle)
            chunks[schedule] = inferencer.run_cycle._num_chunks
    assert chunks == {"async": STEPS, "lockstep": 1}


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_the_update_loop_keeps_no_trajectory_that_it_has_consumed(schedule):
    held: list[int] = []
    of_others = [x for x in gc.get_objects() if isinstance(x, Item)]  # in tracebacks of tests

    class Looking(CountingEnv):
        def step(self, action):
            if self._steps == 4 * STEPS:  # what came before has been consumed
                for _ in range(300):  # the update may still be compiling
                    threading.Event().wait(0.1)
                    items = [x for x in gc.get_objects() if isinstance(x, Item)]
                    held.append(sum(all(x is not y for y in of_others) for x in items))
                    if not held[-1]:
                        break
            return super().step(action)

    loop, _ = make_tiny_loop(Looking, num_envs=1, num_inferencers_per_device=1, schedule=schedule)
    with loop:
        loop.run(loop.new_state(0, STEPS), 8, STEPS)
    assert held and held[-1] == 0


def test_run_within_observe_cycle_is_refused():
    def observe(trajectory, step_infos):
        loop.run(loop.new_state(0, STEPS), 2, STEPS)

    loop, _ = make_tiny_loop(observe_cycle=observe)
    with loop, pytest.raises(UsageError, match="this loop is running"):
        loop.run(loop.new_state(0, STEPS), 2, STEPS)


def test_run_in_a_second_thread_is_refused_and_the_first_goes_on():
    refused: list[BaseException] = []

    def second():
        try:
            loop.run(state, 2, STEPS)
        except UsageError as error:
            refused.append(error)

    def observe(trajectory, step_infos):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(300)

    loop, _ = make_tiny_loop(observe_cycle=observe)
    with loop:
        state = loop.new_state(0, STEPS)
        result = loop.run(state, 2, STEPS)
        assert result.counters.cycles == 2 and len(refused) == 2
        assert "this loop is running" in str(refused[0])


@pytest.mark.slow
def test_stop_iteration_of_an_environment_is_its_failure_and_can_be_mended():
    env = counting(fail_at=9, make_error=StopIteration)
    loop, _ = make_tiny_loop(env)
    with loop, pytest.raises(RuntimeError) as raised:
        loop.run(loop.new_state(0, STEPS), 20, STEPS)
    assert is_env_failure(raised.value)

    made = itertools.count()

    class FailsOnce(CountingEnv):
        def __init__(self):
            super().__init__(fail_at=9 if next(made) == 1 else None, make_error=StopIteration)

    loop, _ = make_tiny_loop(FailsOnce, num_envs=1, on_env_failure="restart")
    with loop, pytest.warns(RuntimeWarning, match="gets replaced"):
        result = loop.run(loop.new_state(0, STEPS), 20, STEPS)
    assert result.counters.env_restarts == 1


def test_a_slow_compile_is_not_blamed_on_the_environment():
    timer = PhaseTimer(*INFERENCER_PHASES)
    inferencer = Inferencer(0, *[None] * 4, timer, CallingThread())
    error = silence_error(inferencer, "compile", 301.0)
    assert "compiling" in str(error) and "environment" not in str(error)
    assert not is_env_failure(error)


def test_compiling_a_fused_cycle_is_a_phase_of_its_own(monkeypatch):
    phases = []
    compile_chunk = FusedCycle._compile_chunk

    def compiles(self, *args):
        phases.append(self._timer.present()[0])
        return compile_chunk(self, *args)

    monkeypatch.setattr(FusedCycle, "_compile_chunk", compiles)
    loop, _ = make_tiny_loop("CartPole-v1", cycle="fused", num_inferencers_per_device=1)
    with loop:
        loop.run(loop.new_state(0, STEPS), 2, STEPS)
    assert phases == ["compile"]


# Environments.


class SharedBuffer(gymnasium.Env):
    """Every environment writes its observation into the same array of the class."""

    observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(-1e6, 1e6, (2,))})
    action_space = gymnasium.spaces.Discrete(2)
    buffer = np.zeros(2, np.float32)
    made = itertools.count()

    def __init__(self):
        self.number = next(self.made)

    def observe(self):
        self.buffer[:] = self.number, self.t
        return {"x": self.buffer}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), 0.0, False, False, {}


def test_environments_that_share_a_buffer_keep_their_own_observations():
    adapter = sebulba.make_env_factory(SharedBuffer)(3, [0, 1, 2])
    first = adapter.reset().obs["x"]
    second = adapter.step(np.zeros(3, np.int32)).obs["x"]
    adapter.close()
    assert len(set(first[:, 0])) == 3 and (first[:, 0] == second[:, 0]).all()
    assert (second[:, 1] == 1).all()


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "gymnasium"},
        {"vectorization": "async"},
        {"num_threads": 2},
        {"step_timeout_s": 1.0},
    ],
)
def test_options_for_a_ready_factory_are_refused(options):
    factory = sebulba.make_env_factory(CountingEnv)
    assert sebulba.make_env_factory(factory) is factory
    with pytest.raises(UsageError, match=f"takes no options; got {next(iter(options))}"):
        sebulba.make_env_factory(factory, **options)


# The process.


def run_command(tmp_path, *words):
    return subprocess.run(
        [sys.executable, "-m", "sebulba", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{os.getcwd()}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_resume_of_a_run_without_checkpoints_is_refused_and_changes_nothing(tmp_path):
    options = ["--name", "run", "--total-env-steps", "2048"]
    assert run_command(tmp_path, "train", "cartpole", *options).returncode == 0
    folder = tmp_path / "runs/run"
    subprocess.run(["rm", "-r", folder / "checkpoints"], check=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    done = run_command(tmp_path, "resume", "runs/run")
    assert done.returncode == 2 and "has no checkpoint: the run is still going" in done.stderr
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before


def test_too_few_open_files_are_named_in_one_sentence(tmp_path):
    words = f"ulimit -n 32; exec {sys.executable} -m sebulba train cartpole"
    environ = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        ["bash", "-c", words],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "sebulba: error: this process may open 32 files, and a run needs 128; raise the limit "
        "(ulimit -n 4096) in the shell that starts this"
    ]


@pytest.mark.slow
def test_a_crash_in_native_code_prints_where_python_was(tmp_path):
    (tmp_path / "crashes.py").write_text(
        textwrap.dedent(
            """
            import ctypes
            from tests.support.tiny import CountingEnv
            class Crashes(CountingEnv):
                def step(self, action):
                    ctypes.string_at(0)
            """
        )
    )
    options = ["--env.id", "crashes:Crashes", "--num-envs", "4", "--name", "run"]
    done = run_command(tmp_path, "train", "cartpole", *options)
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr and 'crashes.py", line 6 in step' in done.stderr


# Exploration.


def small_dqn(env, **options):
    config = DQNConfig(
        initial_epsilon=1.0,
        final_epsilon=0.0,
        exploration_env_steps=400,
        torso=TorsoConfig(hidden_sizes=(8,)),
        replay=ReplayConfig(capacity=400, batch_size=4, **options),
    )
    return DQN(sebulba.env_spec(env), config)


def steps_of(loop):
    return [int(i.step_state.epsilon.steps) for i in loop._session.inferencers]


@pytest.mark.slow
def test_an_inferencer_that_is_replaced_explores_no_more_than_the_others():
    made = itertools.count()

    class FailsOnce(CountingEnv):
        def __init__(self):
            super().__init__(fail_at=60 if next(made) == 1 else None)

    # In lockstep, so that both have acted as often when it fails; at the end, one of them may have
    # played the round that the run no longer needs.
    options = {"on_env_failure": "restart", "schedule": "lockstep", **ONE_DEVICE}
    loop = sebulba.GymnasiumLoop(FailsOnce, small_dqn(CountingEnv), 1, **options)
    with loop, pytest.warns(RuntimeWarning, match="gets replaced"):
        result = loop.run(loop.new_state(0, STEPS), 40, STEPS)
        assert result.counters.env_restarts == 1
        learned_from = result.counters.env_steps // 2  # by each of the two
        for steps in steps_of(loop):
            assert steps in (learned_from, learned_from + STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("inferencers", "num_envs"), [(1, 4), (2, 4)])
def test_exploration_goes_on_where_step_states_are_split_or_begin_anew(
    inferencers, num_envs, tmp_path
):
    env, agent = CountingEnv, small_dqn(CountingEnv)
    with sebulba.Checkpointer(tmp_path) as checkpointer:
        with sebulba.GymnasiumLoop(
            env, agent, 2, schedule="lockstep", **ONE_DEVICE, checkpointer=checkpointer
        ) as loop:
            loop.run(loop.new_state(0, STEPS), 20, STEPS)  # 50 steps of each of 4 environments
        saved = checkpointer.load_newest()
    options = {"num_inferencers_per_device": inferencers, **ONE_DEVICE}
    with sebulba.GymnasiumLoop(env, agent, num_envs, **options) as loop:
        state = loop.restore(saved, drop_replay=True)
        expected = 200 // (inferencers * num_envs)
        assert [int(step.epsilon.steps) for step in state.step] == [expected] * inferencers


@pytest.mark.slow
def test_a_step_state_of_another_form_begins_anew_where_exploration_has_come(tmp_path):
    class Older(DQN):
        def new_epsilon(self, run, inferencer):
            return super().new_epsilon(run, inferencer)._replace(steps=jnp.float32(0))

    agent = small_dqn(CountingEnv)
    with sebulba.Checkpointer(tmp_path) as checkpointer:
        older = Older(agent.spec, agent.config)
        with sebulba.GymnasiumLoop(
            CountingEnv, older, 2, **ONE_DEVICE, checkpointer=checkpointer
        ) as loop:
            loop.run(loop.new_state(0, STEPS), 20, STEPS)
        saved = checkpointer.load_newest()
    with sebulba.GymnasiumLoop(CountingEnv, agent, 2, **ONE_DEVICE) as loop:
        state = loop.restore(saved)
        assert [int(step.epsilon.steps) for step in state.step] == [50, 50]
        assert "step state of Inferencers [0, 1]" in " ".join(loop.resume_notes)
        loop.run(state, 2, STEPS)


def test_epsilon_does_not_stand_still_over_very_many_steps():
    run = RunSpec(num_envs=1, num_inferencers=1, steps_per_cycle=1, num_update_devices=1)
    epsilon = FallingEpsilon.new(1.0, jnp.full(1, 0.05), 50_000_000, run)
    half = epsilon.advanced(25_000_000)
    assert int(half.advanced().steps) == 25_000_001
    np.testing.assert_allclose(half.value, 0.525, rtol=1e-6)
    np.testing.assert_allclose(half.advanced(25_000_000).value, 0.05, rtol=1e-6)
    assert int(half.advanced(10**12).advanced().steps) == 50_000_000


def test_random_steps_are_not_taken_again():
    spec = sebulba.env_spec("Pendulum-v1")
    agent = SAC(spec, SACConfig(random_env_steps=100))
    run = RunSpec(num_envs=5, num_inferencers=2, steps_per_cycle=1, num_update_devices=1)
    new = agent.new_step_state(jax.random.key(0), run, 0)
    assert int(new.random_steps) == 10
    assert int(agent.advance_step_state(new, 4).random_steps) == 6
    assert int(agent.advance_step_state(new, 10**10).random_steps) == 0


@pytest.mark.slow
def test_samples_per_insert_counts_from_where_the_replay_was_begun(tmp_path):
    records: list[dict] = []

    class Writer:
        def write(self, metrics):
            records.append(dict(metrics))

        def close(self):
            pass

    agent = small_dqn(CountingEnv, updates_per_cycle=3, warm_up_cycles=2)
    options = {"schedule": "lockstep", **ONE_DEVICE, "metrics_interval_s": 0.0}
    with sebulba.Checkpointer(tmp_path) as checkpointer:
        with sebulba.GymnasiumLoop(
            CountingEnv, agent, 2, checkpointer=checkpointer, **options
        ) as loop:
            loop.run(loop.new_state(0, STEPS), 20, STEPS)
        saved = checkpointer.load_newest()
    with sebulba.GymnasiumLoop(CountingEnv, agent, 4, metric_writer=Writer(), **options) as loop:
        loop.run(loop.restore(saved, drop_replay=True), 8, STEPS)
    # The 8th trajectory's updates are the 19th to the 21st since the replay was begun, the 7th's
    # the 16th to the 18th; 4 rows each, of 8 and 7 trajectories of 20 rows.
    expected = (np.mean([19, 20, 21]) * 4 / 160 + np.mean([16, 17, 18]) * 4 / 140) / 2
    assert records[-1]["samples_per_insert"] == pytest.approx(expected)


# Windows.


class InAWindow(CountingEnv):
    """Would abort the process if two threads drew, or another than the main one."""

    metadata = {"render_modes": ["human"]}  # noqa: RUF012
    render_mode = "human"
    drawers: ClassVar[set] = set()

    def step(self, action):
        self.drawers.add((threading.current_thread(), self))
        return super().step(action)


@pytest.mark.parametrize(
    ("num_envs", "options"),
    [(2, {}), (1, {}), (2, {"num_inferencers_per_device": 0}), (1, {"inference_devices": [0, 1]})],
    ids=["several", "in_a_thread", "several_inline", "two_devices"],
)
def test_environments_that_draw_elsewhere_than_in_the_main_thread_are_refused(num_envs, options):
    with pytest.raises(
        UsageError, match=r"num_envs=1 and num_inferencers_per_device=0.*load_policy"
    ):
        make_tiny_loop(InAWindow, num_envs, **{"update_devices": [0], **options})


def test_a_single_environment_draws_in_the_main_thread():
    options = {**ONE_DEVICE, "num_inferencers_per_device": 0}
    loop, _ = make_tiny_loop(InAWindow, 1, **options)
    with loop:
        loop.run(loop.new_state(0, STEPS), 2, STEPS)
    assert [thread for thread, _ in InAWindow.drawers] == [threading.main_thread()]

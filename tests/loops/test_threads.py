"""The thread rules: what fails surfaces, what stops ends, nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import gymnasium
import jax
import numpy as np
import pytest

import sebulba
from sebulba.errors import NotFiniteError, UsageError
from sebulba.loops.interrupt import KeptInterrupt
from tests.support.loop_helpers import counting, inferencer_threads, leaves_equal, make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

pytestmark = pytest.mark.timeout(1200)


class Planted(Exception):
    """Raised by the tests' own faults; knows when it was made."""

    def __init__(self, *args):
        super().__init__(*args)
        self.raised_at = time.monotonic()


class FailingReset(CountingEnv):
    def reset(self, **kwargs):
        raise Planted("in reset")


class FailsInStep(TinyAgent):
    def step(self, networks, step_state, env_step, *, explore=True):
        output, step_state = super().step(networks, step_state, env_step, explore=explore)

        def fail(steps):
            if steps > 40:
                raise Planted("in Agent.step")
            return steps

        jax.debug.callback(fail, step_state["steps"][0])
        return output, step_state


class FailsInHandOff(TinyAgent):
    def shard_step_state(self, step_state, sharding):
        raise Planted("in the hand-off")


class FailsInLoss(TinyAgent):
    def loss(self, networks, opt, experience, key):
        raise Planted("in the loss")


class FailsInUpdateCount(TinyAgent):
    def num_off_policy_optims_per_cycle(self, cycle):
        if cycle > 3:
            raise Planted("in the update loop")
        return 1


def failing_observer(trajectory, step_infos):
    raise Planted("in observe_cycle")


FAULTS = {
    "env step": (dict(env=counting(fail_at=30, make_error=Planted)), "step"),
    "env reset": (dict(env=FailingReset), "reset"),
    "hand-off": (dict(agent_class=FailsInHandOff), "shard_step_state"),
    "loss": (dict(agent_class=FailsInLoss), "loss"),
    "update loop": (dict(agent_class=FailsInUpdateCount), "num_off_policy_optims_per_cycle"),
    "observe_cycle": (dict(observe_cycle=failing_observer), "failing_observer"),
}
IN_THREADS = ("env step", "env reset", "hand-off")
PROMISED_S = 1.0


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_surfaces_with_its_own_traceback_and_leaves_no_thread(fault, schedule):
    options, planted_in = FAULTS[fault]
    loop, _ = make_tiny_loop(schedule=schedule, **options)
    with loop, pytest.raises(Planted) as caught:
        loop.run(loop.new_state(0, 5), 10_000, 5)
    assert not inferencer_threads()
    assert time.monotonic() - caught.value.raised_at < 10 * PROMISED_S
    assert planted_in in [entry.name for entry in caught.traceback]
    notes = getattr(caught.value, "__notes__", [])
    assert any("inferencer-" in note for note in notes) == (fault in IN_THREADS)


def test_a_fault_inside_a_compiled_step_surfaces():
    loop, _ = make_tiny_loop(agent_class=FailsInStep)
    with loop, pytest.raises(Exception, match=r"in Agent\.step"):
        loop.run(loop.new_state(0, 5), 10_000, 5)
    assert not inferencer_threads()


class FailsInUpdateOnce(TinyAgent):
    fails = True

    def optimize(self, networks, opt, grads):
        def fail(updates):
            if self.fails and updates >= 5:
                raise Planted("in the update program")

        jax.debug.callback(fail, opt["updates"])
        return super().optimize(networks, opt, grads)


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_fault_inside_a_compiled_update_surfaces_and_the_loop_can_run_again(schedule):
    loop, agent = make_tiny_loop(agent_class=FailsInUpdateOnce, schedule=schedule)
    with loop:
        state = loop.new_state(0, 5)
        with pytest.raises(Exception, match="in the update program"):
            loop.run(state, 10_000, 5)
        assert not inferencer_threads()
        agent.fails = False
        assert loop.run(state, 20, 5).counters.updates == 20


def test_a_fault_in_the_cycle_in_flight_at_a_stop_is_not_lost():
    failed = threading.Event()

    class FailsAtTheStop(CountingEnv):
        def step(self, action):
            if self._steps == 5 * 3:  # of the fourth cycle
                failed.set()
                raise Planted("at the stop")
            return super().step(action)

    def observe(trajectory, infos):
        if int(trajectory.cycle) == 2:
            failed.wait(300)
            loop.stop()

    loop, _ = make_tiny_loop(
        env=FailsAtTheStop, num_envs=1, num_inferencers_per_device=1, observe_cycle=observe
    )
    with loop, pytest.raises(Planted, match="at the stop"):
        loop.run(loop.new_state(0, 5), 100, 5)
    assert not inferencer_threads()


@pytest.mark.parametrize("per_device", [0, 1, 3])
def test_no_cycle_begins_that_nobody_asked_for(per_device):
    loop, _ = make_tiny_loop(num_inferencers_per_device=per_device)
    with loop:
        result = loop.run(loop.new_state(0, 5), 7, 5)
        assert result.counters.dropped_stop_cycles == 0
        assert sum(inferencer.cycle for inferencer in loop._session.inferencers) == 7
        assert loop.run(result.state, 4, 5).counters.cycles == 11
        assert sum(inferencer.cycle for inferencer in loop._session.inferencers) == 11


def test_a_loop_that_failed_can_run_again():
    fail = [True]

    def observe(trajectory, step_infos):
        if fail[0]:
            raise Planted("once")

    loop, _ = make_tiny_loop(observe_cycle=observe)
    with loop:
        state = loop.new_state(0, 5)
        with pytest.raises(Planted):
            loop.run(state, 4, 5)
        fail[0] = False
        assert loop.run(state, 4, 5).counters.cycles == 4


def test_a_failing_metric_writer_only_warns():
    class Failing:
        def write(self, metrics):
            raise Planted("disk full")

        def close(self):
            pass

    loop, _ = make_tiny_loop(metric_writer=Failing())
    with loop, pytest.warns(RuntimeWarning, match="disk full"):
        result = loop.run(loop.new_state(0, 5), 6, 5)
    assert result.counters.cycles == 6


def test_a_loss_that_is_not_finite_ends_the_run():
    class NanLoss(TinyAgent):
        def loss(self, *args):
            loss, aux = super().loss(*args)
            return loss * np.nan, aux

    loop, _ = make_tiny_loop(agent_class=NanLoss)
    with loop, pytest.raises(NotFiniteError, match="loss = nan"):
        loop.run(loop.new_state(0, 5), 6, 5)


class NanObservation(CountingEnv):
    def _obs(self):
        obs = super()._obs()
        return obs * np.nan if self._steps == 13 else obs


@pytest.mark.parametrize("cycle_length", [1, 30])
def test_a_nan_observation_is_named_by_environment_and_value(cycle_length):
    loop, _ = make_tiny_loop(env=NanObservation)
    with loop, pytest.raises(sebulba.EnvError, match=r"(?s)environment \d.*nan"):
        loop.run(loop.new_state(0, cycle_length), 1000, cycle_length)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("per_device", [0, 1, 2])
def test_stop_from_another_thread_ends_the_run_cleanly(schedule, per_device):
    started = threading.Event()
    loop, _ = make_tiny_loop(
        schedule=schedule,
        num_inferencers_per_device=per_device,
        observe_cycle=lambda *_: started.set(),
    )

    def stop():
        started.wait(300)
        loop.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with loop:
        result = loop.run(loop.new_state(0, 5), 10**9, 5)
    stopper.join()
    assert result.stopped
    assert 0 < result.counters.cycles < 10**9
    assert not inferencer_threads()


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_stop_that_comes_before_the_run_is_not_lost(schedule):
    loop, _ = make_tiny_loop(schedule=schedule)
    with loop:
        loop.stop()
        result = loop.run(loop.new_state(0, 5), 10**9, 5)
        assert result.stopped
        assert not loop.run(result.state, 4, 5).stopped, "it ends one run"


def test_a_full_queue_does_not_keep_inferencers_from_ending():
    def observe(trajectory, infos):
        time.sleep(0.02)
        if int(trajectory.cycle) == 5:
            loop.stop()

    loop, _ = make_tiny_loop(queue_size=1, observe_cycle=observe)
    with loop:
        result = loop.run(loop.new_state(0, 5), 1000, 5)
    assert not inferencer_threads()
    assert result.counters.dropped_stop_cycles > 0, "what a stop loses is counted"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_an_environment_that_hangs_is_named(monkeypatch, schedule):
    release = threading.Event()
    loops = []

    class Hanging(CountingEnv):
        def step(self, action):
            if self._steps > 20:
                loops[0].stop()
                release.wait(300)
            return super().step(action)

    monkeypatch.setattr("sebulba.inference.hangs.JOIN_S", 1.0)
    loop, _ = make_tiny_loop(env=Hanging, num_inferencers_per_device=1, schedule=schedule)
    loops.append(loop)
    with pytest.raises(sebulba.HangError, match=r"(?s)inferencer-0.*release\.wait"):
        loop.run(loop.new_state(0, 5), 10**9, 5)
    with pytest.raises(UsageError, match="still hangs"):
        loop.run(loop.new_state(0, 5), 4, 5)
    release.set()
    deadline = time.monotonic() + 60
    while inferencer_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not inferencer_threads(), "it was told to stop, and ends when it can"
    loop.close()


@pytest.mark.slow
def test_a_slow_round_at_the_end_is_no_hang(monkeypatch):
    is_slow = threading.Event()

    class Slow(CountingEnv):
        def step(self, action):
            time.sleep(0.3 if is_slow.is_set() else 0.0)
            return super().step(action)

    monkeypatch.setattr("sebulba.inference.hangs.SAVE_FIRST_S", 0.1)
    monkeypatch.setattr("sebulba.inference.hangs.JOIN_S", 0.3)
    loop, _ = make_tiny_loop(env=Slow, num_envs=1, schedule="lockstep")
    with loop:
        compiled = loop.run(loop.new_state(0, 10), 2, 10)
        is_slow.set()
        result = loop.run(compiled.state, 2, 10)  # the round in flight takes three seconds
    assert result.counters.cycles == 4 and not result.stopped


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("per_device", [0, 2])
def test_a_second_run_goes_on_where_the_first_ended(schedule, per_device):
    rows = []

    def observe(trajectory, step_infos):
        rows.append((int(trajectory.inferencer), jax.device_get(trajectory.env_step)))

    loop, _ = make_tiny_loop(
        schedule=schedule, num_inferencers_per_device=per_device, observe_cycle=observe
    )
    with loop:
        first = loop.run(loop.new_state(0, 5), 4, 5)
        second = loop.run(first.state, 4, 5)
    assert second.counters.cycles == 8
    assert second.counters.env_steps == 8 * 5 * 4
    assert second.counters.updates == 8
    for inferencer in {i for i, _ in rows}:
        times = np.concatenate([step.obs[:-1, :, 1] for i, step in rows if i == inferencer])
        firsts = np.concatenate([step.is_first[:-1] for i, step in rows if i == inferencer])
        if schedule == "lockstep" or per_device == 0:
            # Nothing was lost between the runs: every row continues the one before it.
            assert np.all((times[1:] == times[:-1] + 1) | firsts[1:])
        assert np.all((times == 0) == firsts), "observations belong to their flags"


def test_a_state_of_its_own_begins_anew():
    loop, _ = make_tiny_loop()
    with loop:
        state = loop.new_state(0, 5)
        loop.run(state, 4, 5)
        again = loop.run(state, 4, 5)
    assert again.counters.cycles == 4


def test_run_leaves_the_callers_state_valid():
    loop, _ = make_tiny_loop()
    with loop:
        state = loop.new_state(0, 5)
        before = jax.device_get(state.networks)
        result = loop.run(state, 4, 5)
        final = jax.device_get(result.state.networks)
        loop.run(result.state, 4, 5)
        assert leaves_equal(before, state.networks)
        assert leaves_equal(final, result.state.networks)
        jax.block_until_ready((state.step, result.state))


def test_close_may_come_twice_and_run_after_it_is_refused():
    loop, _ = make_tiny_loop()
    state = loop.new_state(0, 5)
    loop.close()
    loop.close()
    with pytest.raises(UsageError, match="closed"):
        loop.run(state, 4, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_envs=0), "num_envs=0 must be at least 1"),
        (dict(num_envs=2.0), "num_envs=2.0 must be an int"),
        (dict(num_envs=10, update_devices=[0, 1, 2, 3]), "use 8 or 12"),
        (dict(schedule="sync"), "'async', 'lockstep'"),
        (dict(cycle="quick"), "'auto', 'stepped', 'fused'"),
        (dict(queue_size=0), "queue_size=0"),
        (dict(max_policy_lag=-1), "max_policy_lag"),
        (dict(max_policy_lag=0, schedule="lockstep"), "use 1 or None"),
        (dict(cycle="fused"), "fused"),
        (dict(seed=2**31), "seed"),
        (dict(seed=1.5), "seed"),
    ],
)
def test_bad_arguments_are_named_with_the_remedy(options, message):
    with pytest.raises(UsageError, match=message):
        loop, _ = make_tiny_loop(**options)
        with loop:
            loop.run(loop.new_state(0, 5), 4, 5)


def test_bad_run_arguments_are_named_with_the_remedy():
    loop, _ = make_tiny_loop(schedule="lockstep")
    other, _ = make_tiny_loop(num_inferencers_per_device=1)
    with loop, other:
        state = loop.new_state(0, 5)
        with pytest.raises(UsageError, match=r"num_cycles=5 must be divisible by the 2.*use 6"):
            loop.run(state, 5, 5)
        with pytest.raises(UsageError, match="steps_per_cycle=0"):
            loop.run(state, 4, 0)
        with pytest.raises(UsageError, match=r"shape .*steps_per_cycle"):
            loop.run(state, 4, 7)
        with pytest.raises(UsageError, match="2 step states, 1 Inferencers"):
            other.run(state, 4, 5)


def test_an_agent_of_other_spaces_is_refused():
    class Other(CountingEnv):
        action_space = gymnasium.spaces.Discrete(5)

    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
    with pytest.raises(UsageError, match=r"action_space=Discrete\(5"):
        sebulba.GymnasiumLoop(Other, agent, 4, update_devices=[0])


def ctrl_c_where_exceptions_are_lost():
    """Send this process a SIGINT whose KeyboardInterrupt Python prints and forgets."""

    class Dying:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    Dying()


@pytest.fixture
def own_ctrl_c():
    """Give Ctrl-C Python's own handler in this test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_ctrl_c")
@pytest.mark.parametrize("num_inferencers", [0, 1])
def test_ctrl_c_stops_a_run_with_all_saved_and_is_raised_then(
    monkeypatch, tmp_path, num_inferencers
):
    cycles, lost = [], []

    def observe(trajectory, step_infos):
        cycles.append(trajectory)
        if len(cycles) == 3:
            ctrl_c_where_exceptions_are_lost()

    monkeypatch.setattr(sys, "unraisablehook", lambda about: lost.append(about.exc_type))
    checkpointer = sebulba.Checkpointer(tmp_path, every_s=600)
    loop, _ = make_tiny_loop(
        observe_cycle=observe, num_inferencers_per_device=num_inferencers, checkpointer=checkpointer
    )
    with checkpointer, loop:
        with pytest.raises(KeyboardInterrupt):
            loop.train(total_env_steps=10**9, steps_per_cycle=5)
        assert not lost, "Python would print it there, and go on"
        assert len(cycles) < 20
        assert checkpointer.load_newest().env_steps == loop.counters.env_steps > 0
        assert inferencer_threads() == []
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        wanted = loop.counters.env_steps + 100
        ended = loop.train(total_env_steps=wanted, steps_per_cycle=5)  # the stop was for one run
        assert not ended.stopped and ended.counters.env_steps >= wanted


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_ctrl_c_ends_a_run_inside_another_and_both():
    stopped = []
    outer, inner = (KeptInterrupt(functools.partial(stopped.append, of)) for of in "oi")
    with pytest.raises(KeyboardInterrupt), outer:
        lost = contextlib.suppress(KeyboardInterrupt)
        with contextlib.suppress(KeyboardInterrupt), inner, lost:
            signal.raise_signal(signal.SIGINT)
        assert inner.came and signal.getsignal(signal.SIGINT) == outer._handle
    assert stopped == ["i", "o"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_handler_that_was_left_behind_is_replaced():
    left = KeptInterrupt(lambda: None)
    left.__enter__()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # keeps __exit__ from coming so far
    with KeptInterrupt(lambda: None) as kept:
        assert signal.getsignal(signal.SIGINT) == kept._handle
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_ctrl_c_handler_of_the_user_is_left_alone():
    heard = []
    signal.signal(signal.SIGINT, lambda which, frame: heard.append(which))
    loop, _ = make_tiny_loop(
        observe_cycle=lambda *cycle: None if heard else signal.raise_signal(signal.SIGINT)
    )
    with loop:
        assert not loop.run(loop.new_state(0, 5), 6, 5).stopped
    assert heard == [signal.SIGINT]


@pytest.mark.slow
def test_ctrl_c_ends_the_process_with_every_thread_joined():
    program = textwrap.dedent(
        """
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may ignore it
        from tests.support.loop_helpers import inferencer_threads, make_tiny_loop
        def observe(trajectory, step_infos):
            print("running", flush=True)
        loop, _ = make_tiny_loop(observe_cycle=observe)
        try:
            loop.run(loop.new_state(0, 5), 10**9, 5)
        except KeyboardInterrupt:
            print("threads left:", len(inferencer_threads()), flush=True)
            sys.exit(130)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    with process:
        try:
            for line in process.stdout:
                if line.startswith("running"):
                    break
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert "threads left: 0" in output
    assert process.returncode == 130

"""Every kind of fault at every place of a run: what comes out, what ends, what is kept.

``README.md`` beside this file says which test covers which kind.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.checkpoints.store import CheckpointStore
from sebulba.errors import CheckpointError, EnvError, EnvHangError, HangError, NotFiniteError
from sebulba.inference.stepped_cycle import SteppedCycle
from sebulba.loops.evaluation_thread import Evaluator
from sebulba.runs.exit_codes import (
    EXIT_CHECKPOINT,
    EXIT_ENV,
    EXIT_HANG,
    EXIT_NOT_FINITE,
    EXIT_OTHER,
    exit_code_of,
)
from sebulba.transport.staging import Staging
from sebulba.transport.trajectory_queue import TrajectoryQueue
from tests.faults.counts import rounds
from tests.faults.traps import (
    NanEnv,
    Planted,
    Trap,
    TrappedWriter,
    agent_with,
    env_with,
    make_trap,
    our_threads,
)
from tests.support.loop_helpers import leaves_equal, make_tiny_loop
from tests.support.tiny import TinyAgent

__all__ = ["make_trap"]

STEPS, CYCLES = 5, 24
MODES: dict[str, dict[str, Any]] = {
    "async": {"schedule": "async"},
    "lockstep": {"schedule": "lockstep"},
    "inline": {"schedule": "async", "num_inferencers_per_device": 0},
}
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:sebulba"),
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),
]


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a fault must come to."""

    error: type[BaseException]
    code: int
    who: str | None = None
    """Of the thread that the notes or the message name."""
    is_saved: bool = True
    says: str = ""


IN_THREAD = {"async": r"thread 'inferencer-\d'", "lockstep": r"thread 'inferencer-\d'"}
IN_THREAD["inline"] = r"the calling thread \(Inferencer \d\)"

PLACES: dict[str, Callable[[Trap, Any], dict[str, Any]]] = {
    "env reset": lambda trap, patch: {"env": env_with(reset=trap)},
    "env step": lambda trap, patch: {"env": env_with(step=trap)},
    "Agent.step": lambda trap, patch: {"agent_class": agent_with(step=trap)},
    "hand-off": lambda trap, patch: {"agent_class": agent_with(hand_off=trap)},
    "queue": lambda trap, patch: before(patch, TrajectoryQueue, "put", trap),
    "update_experience": lambda trap, patch: {"agent_class": agent_with(take=trap)},
    "loss": lambda trap, patch: {"agent_class": agent_with(loss=trap)},
    "updates due": lambda trap, patch: {"agent_class": agent_with(count=trap)},
    "observe_cycle": lambda trap, patch: {"observe_cycle": lambda *_: trap()},
    "publish": lambda trap, patch: before(patch, Staging, "publish", trap),
    "metric writer": lambda trap, patch: {"metric_writer": TrappedWriter(trap)},
    "evaluator": lambda trap, patch: {"evaluator": Evaluator(player(trap), 40)},
}
AT = {
    "hand-off": 12,
    "env step": 170,
    "env reset": 19,
    "Agent.step": 12,
    "metric writer": 2,
    "evaluator": 2,
}
"""Which call springs the trap; in the midst of the run. 5 elsewhere."""


def before(patch: Any, cls: type, name: str, trap: Trap) -> dict[str, Any]:
    original = getattr(cls, name)

    def trapped(self, *args, **kwargs):
        trap()
        return original(self, *args, **kwargs)

    patch.setattr(cls, name, trapped)
    return {}


def player(trap: Trap) -> Any:
    def play(networks, stop):
        stop.is_set()
        trap()
        return {"eval_return_mean": 0.0}

    return play


def raised(place: str, mode: str) -> Ending:
    """Return what comes of an exception of the user's at ``place``."""
    if place in ("env reset", "env step"):
        return Ending(Planted, EXIT_ENV, IN_THREAD[mode])
    if place in ("Agent.step", "update_experience", "loss"):
        # Inside a program: JAX raises it as its own, and what the program had taken over is gone.
        who = IN_THREAD[mode] if place == "Agent.step" else None
        return Ending(Exception, EXIT_OTHER, who, is_saved=who is not None, says="planted")
    if place in ("hand-off", "queue") and not (place == "queue" and mode == "inline"):
        return Ending(Planted, EXIT_OTHER, IN_THREAD[mode])
    if place == "evaluator":
        who = None if mode == "inline" else "thread 'evaluator'"
        return Ending(Planted, EXIT_OTHER, who, says="in the evaluation of the networks of")
    return Ending(Planted, EXIT_OTHER)


def text(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def run_into(options: dict[str, Any], mode: str, folder: Any, **more: Any) -> tuple[Any, Any]:
    """Run a loop with a checkpointer; return what it raised or returned, and the loop."""
    options = MODES[mode] | {"metrics_interval_s": 0.0} | options | more
    with Checkpointer(folder, every_s=1e9) as checkpointer:
        loop, _ = make_tiny_loop(checkpointer=checkpointer, **options)
        with loop:
            try:
                return loop.run(loop.new_state(0, STEPS), CYCLES, STEPS), loop
            except BaseException as error:
                return error, loop


def check(outcome: Any, ending: Ending, folder: Any, *, hung: int = 0) -> None:
    assert isinstance(outcome, ending.error), repr(outcome)
    assert exit_code_of(outcome) == ending.code
    if ending.who is not None:
        assert re.search(ending.who, text(outcome)), text(outcome)
        assert "evaluator" in ending.who or re.search(r"cycle \d", text(outcome))
    assert re.search(ending.says, text(outcome))
    if ending.error is Planted:
        frames = []
        trace = outcome.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        assert "__call__" in frames, "it has the traceback of where it was raised"
    assert len([t for t in our_threads() if t.is_alive()]) == hung
    with Checkpointer(folder) as checkpointer:
        saved = checkpointer.load_newest()
    assert (saved is not None) == ending.is_saved
    if saved is not None:
        assert 0 <= saved.env_steps <= CYCLES * STEPS * 4
        assert all(np.isfinite(x).all() for x in saved.snapshot.arrays.values() if x.dtype == "f4")


# Raised.


RAISES_LONG = [
    (place, mode)
    for place in PLACES
    for mode in MODES
    if place != "metric writer" and (place, mode) != ("queue", "inline")
]
RAISES_SHORT = [case for i, case in enumerate(RAISES_LONG) if i % 2 == 0]
"""Each place in one or two modes."""


@pytest.mark.parametrize(("place", "mode"), rounds(RAISES_SHORT, RAISES_LONG))
def test_what_is_raised_comes_out_and_what_was_learned_is_saved(
    place, mode, make_trap, monkeypatch, tmp_path
):
    trap = make_trap("raise", AT.get(place, 5))
    outcome, _ = run_into(PLACES[place](trap, monkeypatch), mode, tmp_path)
    assert trap.sprung.is_set()
    check(outcome, raised(place, mode), tmp_path)


EXITS_LONG = [
    (place, mode) for place in ("env reset", "env step", "hand-off", "evaluator") for mode in MODES
]


@pytest.mark.parametrize(("place", "mode"), rounds(EXITS_LONG[1::2], EXITS_LONG))
def test_sys_exit_where_a_run_does_not_expect_it_is_an_error(
    place, mode, make_trap, monkeypatch, tmp_path
):
    trap = make_trap("exit", AT.get(place, 5))
    outcome, _ = run_into(PLACES[place](trap, monkeypatch), mode, tmp_path)
    if place == "evaluator":
        if mode == "inline":
            assert isinstance(outcome, SystemExit), "the caller's own thread may exit"
            return
        ending = Ending(EnvError, EXIT_ENV, "thread 'evaluator'", says=r"sys\.exit\(0\)")
    elif place == "hand-off":
        ending = Ending(RuntimeError, EXIT_OTHER, IN_THREAD[mode], says=r"agent called sys\.exit")
    else:
        ending = Ending(EnvError, EXIT_ENV, IN_THREAD[mode], says=r"environment called sys\.exit")
    check(outcome, ending, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["raise", "slow"])
def test_a_metric_writer_never_ends_a_run(kind, mode, make_trap, monkeypatch, tmp_path):
    trap = make_trap(kind, 2)
    options = PLACES["metric writer"](trap, monkeypatch)
    outcome, _ = run_into(options, mode, tmp_path)
    assert trap.sprung.is_set() and outcome.counters.cycles == CYCLES
    assert len(options["metric_writer"].records) > 1


# Silent.


HANGS_SHORT = [
    *(("env step", "async"), ("Agent.step", "lockstep"), ("hand-off", "async")),
    *(("evaluator", "lockstep"), ("loss", "async"), ("metric writer", "lockstep")),
]
HANGS_LONG = [
    (place, mode)
    for place in PLACES
    for mode in ("async", "lockstep")
    if place not in ("queue", "updates due")
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "mode"), rounds(HANGS_SHORT, HANGS_LONG))
def test_what_hangs_is_named_and_ends_the_run(
    place, mode, make_trap, monkeypatch, tmp_path, capsys
):
    trap = make_trap("hang", AT.get(place, 5))
    told = []

    def on_hang(error):
        told.append(error)
        trap.release.set()

    outcome, loop = run_into(PLACES[place](trap, monkeypatch), mode, tmp_path, on_hang=on_hang)
    printed = capsys.readouterr().err
    assert "All threads:" in printed and "MainThread" in printed and "release.wait" in printed
    if place in ("update_experience", "loss", "observe_cycle", "publish", "metric writer"):
        # The calling thread itself: nothing can be raised there, so that somebody else is told.
        assert [exit_code_of(error) for error in told] == [EXIT_HANG]
        assert "update loop is silent" in str(told[0])
        assert outcome.counters.cycles == CYCLES, "it came back, and the run with it"
        return
    assert not told
    kind = EnvHangError if place.startswith("env") else HangError
    who = "thread 'evaluator'" if place == "evaluator" else r"thread 'inferencer-\d'"
    check(outcome, Ending(kind, EXIT_HANG, who, says="is silent"), tmp_path, hung=1)
    with pytest.raises(sebulba.UsageError, match=r"closed|hangs"):
        loop.run(loop.new_state(0, STEPS), CYCLES, STEPS)
    if place == "env step":
        assert set(loop.last_transition()) == {"obs", "action"}


@pytest.mark.slow
def test_environments_that_a_thread_hangs_in_are_closed_by_that_thread(make_trap, tmp_path):
    trap = make_trap("hang", 100)
    closed: list[str] = []

    def close():
        if trap.sprung.is_set():
            closed.append(threading.current_thread().name)

    env = env_with(step=trap, close=close)
    outcome, _ = run_into({"env": env}, "async", tmp_path, num_envs=2)
    assert isinstance(outcome, EnvHangError)
    hung = re.search(r"inferencer-\d", str(outcome)).group()  # type: ignore[union-attr]
    (other,) = {"inferencer-0", "inferencer-1"} - {hung}
    assert closed == [other] * 2, "each by its own"
    trap.release.set()
    for thread in our_threads():
        thread.join(300)
    assert closed[2:] == [hung] * 2


@pytest.mark.parametrize("mode", MODES)
def test_slow_is_not_hung(mode, make_trap, tmp_path):
    step, observe, play = (make_trap("slow", at) for at in (100, 3, 2))
    outcome, _ = run_into(
        {
            "env": env_with(step=step),
            "observe_cycle": lambda *_: observe(),
            "evaluator": Evaluator(player(play), 40),
        },
        mode,
        tmp_path,
        hang_timeout_s=60.0,
    )
    assert outcome.counters.cycles == CYCLES
    assert all(trap.sprung.is_set() for trap in (step, observe, play))


@pytest.mark.parametrize("place", ["env step", "observe_cycle"])
def test_a_debugger_may_keep_an_inline_run_anywhere(
    place, make_trap, monkeypatch, tmp_path, capsys
):
    trap = make_trap("slow", AT.get(place, 5))
    told: list[HangError] = []
    options = PLACES[place](trap, monkeypatch)
    outcome, _ = run_into(options, "inline", tmp_path, hang_timeout_s=0.01, on_hang=told.append)
    assert outcome.counters.cycles == CYCLES
    assert not told and "silent" not in capsys.readouterr().err


# Not finite.


class NanWorld(NanEnv):
    wrong = "reward"


class InfiniteWorld(NanEnv):
    value = -np.inf


class NanLoss(TinyAgent):
    def loss(self, *args):
        loss, aux = super().loss(*args)
        return jnp.where(args[1]["updates"] > 6, jnp.nan, loss), aux


class NanGradient(TinyAgent):
    """The loss stays as it is; the gradient of a square root at 0 is infinite, times 0 NaN."""

    def loss(self, networks, opt, *args):
        loss, aux = super().loss(networks, opt, *args)
        is_bad = (opt["updates"] > 6).astype(jnp.float32)
        return loss + jnp.sqrt(networks["w"].sum() * (1 - is_bad) * 0 + (1 - is_bad)) * 0, aux


class WildAction(TinyAgent):
    def step(self, networks, step_state, env_step, *, explore=True):
        output, step_state = super().step(networks, step_state, env_step, explore=explore)
        is_bad = (step_state["steps"] > 30)[0]
        return output._replace(action=jnp.where(is_bad, 7, output.action)), step_state


NOT_FINITE = {
    "NaN observation": ({"env": NanEnv}, EnvError, EXIT_ENV, "obs.* nan"),
    "infinite observation": ({"env": InfiniteWorld}, EnvError, EXIT_ENV, "obs.* -inf"),
    "NaN reward": ({"env": NanWorld}, EnvError, EXIT_ENV, "reward.* nan"),
    "NaN loss": ({"agent_class": NanLoss}, NotFiniteError, EXIT_NOT_FINITE, "loss = nan"),
    "NaN gradient": ({"agent_class": NanGradient}, NotFiniteError, EXIT_NOT_FINITE, "finite"),
    "invalid action": ({"agent_class": WildAction}, EnvError, EXIT_ENV, "action 7 .*outside"),
}


NOT_FINITE_LONG = [(fault, mode) for fault in NOT_FINITE for mode in MODES]


@pytest.mark.parametrize(
    ("fault", "mode"),
    rounds(NOT_FINITE_LONG[::2], NOT_FINITE_LONG),
)
def test_what_is_not_finite_is_named_and_never_saved(fault, mode, tmp_path):
    options, error, code, says = NOT_FINITE[fault]
    outcome, loop = run_into(options, mode, tmp_path)
    is_learner = error is NotFiniteError
    who = None if is_learner else IN_THREAD[mode]
    check(outcome, Ending(error, code, who, not is_learner, says), tmp_path)
    assert bool(loop.last_transition()) != is_learner


def test_networks_that_are_not_finite_are_not_saved_on_the_way_either(tmp_path):
    """Saved before the window of metrics that would have told."""
    with Checkpointer(tmp_path, every_updates=1) as checkpointer:
        loop, _ = make_tiny_loop(
            agent_class=NanLoss, checkpointer=checkpointer, metrics_interval_s=1e9
        )
        with loop, pytest.raises(NotFiniteError):
            loop.run(loop.new_state(0, STEPS), CYCLES, STEPS)
        saved = checkpointer.load_newest()
    assert saved is None or np.isfinite(saved.snapshot.arrays["networks/w"]).all()


# What saves.


@pytest.mark.parametrize("kind", [OSError(28, "No space left on device"), SystemExit(0)])
@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_fails_costs_checkpoints_and_at_the_end_the_exit_code(
    kind, mode, monkeypatch, tmp_path
):
    def save(self, *args, **kwargs):
        raise kind

    monkeypatch.setattr(CheckpointStore, "save", save)
    with Checkpointer(tmp_path, every_updates=1) as checkpointer:
        loop, _ = make_tiny_loop(checkpointer=checkpointer, **MODES[mode])
        with loop, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(CheckpointError) as failed:
                loop.run(loop.new_state(0, STEPS), CYCLES, STEPS)
    assert exit_code_of(failed.value) == EXIT_CHECKPOINT
    assert "resume from the previous checkpoint" in str(failed.value)
    assert loop._session.counters.cycles == CYCLES, "the run itself came to its end"
    assert any("the run continues without it" in str(w.message) for w in caught)


def test_a_disk_that_hangs_does_not_hold_training_up(make_trap, monkeypatch, tmp_path):
    trap = make_trap("hang")
    before(monkeypatch, CheckpointStore, "save", trap)
    monkeypatch.setattr("sebulba.checkpoints.checkpointer.FINAL_SAVE_S", 0.5)
    with Checkpointer(tmp_path, every_updates=3) as checkpointer:
        loop, _ = make_tiny_loop(checkpointer=checkpointer)
        with loop, pytest.raises(CheckpointError):
            loop.run(loop.new_state(0, STEPS), CYCLES, STEPS)
        assert loop._session.counters.cycles == CYCLES
        trap.release.set()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_a_stop_saves_what_was_learned_before_it_waits_for_a_slow_environment(
    mode, monkeypatch, tmp_path
):
    monkeypatch.setattr("sebulba.inference.hangs.SAVE_FIRST_S", 0.1)
    amid, release, steps = threading.Event(), threading.Event(), itertools.count()

    def step():
        if next(steps) == 170:
            amid.set()
            release.wait(300)

    saved_early = []

    def stop_amid():
        assert amid.wait(300)
        loop.stop()
        store = CheckpointStore(tmp_path)
        deadline = time.monotonic() + 300
        while not store.numbers() and time.monotonic() < deadline:
            time.sleep(0.01)
        saved_early.append(store.load_newest())
        release.set()

    said: list[str] = []
    with Checkpointer(tmp_path, every_s=1e9, say=said.append) as checkpointer:
        loop, _ = make_tiny_loop(env_with(step=step), checkpointer=checkpointer, **MODES[mode])
        stopper = threading.Thread(target=stop_amid)
        stopper.start()
        with loop:
            result = loop.run(loop.new_state(0, STEPS), CYCLES, STEPS)
        stopper.join(300)
        at_the_end = checkpointer.load_newest()
    assert result.stopped and at_the_end is not None
    (early,) = saved_early
    assert 0 < early[0] <= at_the_end.env_steps == result.counters.env_steps
    assert [i["has_step_state"] for i in early[1].record["inferencers"]] == [False, False]
    assert [i["has_step_state"] for i in at_the_end.snapshot.record["inferencers"]] == [True, True]
    assert len(said) == 1 and "what was learned is saved" in said[0]


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_fails_as_it_is_saved_at_the_end_costs_its_episodes_only(
    mode, monkeypatch, tmp_path
):
    def position(self):
        raise EnvError("its worker process is gone")

    with Checkpointer(tmp_path, every_s=1e9) as checkpointer:
        loop, _ = make_tiny_loop(checkpointer=checkpointer, **MODES[mode])
        with loop:
            monkeypatch.setattr(SteppedCycle, "position", position)
            with pytest.warns(RuntimeWarning, match="failed while it was saved.*process is gone"):
                result = loop.run(loop.new_state(0, STEPS), CYCLES, STEPS)
        saved = checkpointer.load_newest()
        assert saved is not None and saved.env_steps == result.counters.env_steps
        loop, _ = make_tiny_loop(checkpointer=checkpointer, **MODES[mode])
        with loop:
            loop.restore(saved)
            assert "its worker process is gone" in " ".join(loop.resume_notes)


# And then.


GOES_ON_LONG = [(p, mode) for p in ("env step", "hand-off", "observe_cycle") for mode in MODES]


@pytest.mark.parametrize(("place", "mode"), rounds(GOES_ON_LONG[::4], GOES_ON_LONG))
def test_a_run_that_failed_goes_on_from_what_it_saved(
    place, mode, make_trap, monkeypatch, tmp_path
):
    trap = make_trap("raise", AT.get(place, 5))
    outcome, _ = run_into(PLACES[place](trap, monkeypatch), mode, tmp_path)
    assert isinstance(outcome, Planted)
    with Checkpointer(tmp_path) as checkpointer:
        loop, _ = make_tiny_loop(checkpointer=checkpointer, **MODES[mode])
        with loop:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None
            state = loop.restore(checkpoint)
            done = loop._session.counters.cycles
            assert done > 0 and checkpoint.env_steps == done * STEPS * 4
            assert leaves_equal(state.networks, saved_networks(checkpoint))
            result = loop.run(state, 4, STEPS)
    assert result.counters.cycles == done + 4


def test_a_run_does_not_begin_in_the_folder_of_another(tmp_path):
    run_into({}, "async", tmp_path)
    outcome, _ = run_into({}, "async", tmp_path)
    assert isinstance(outcome, sebulba.UsageError)
    assert re.search(
        r"has checkpoints of another run, up to 480 env steps.*new folder", str(outcome)
    )
    with (
        Checkpointer(tmp_path) as checkpointer,
        make_tiny_loop(checkpointer=checkpointer)[0] as loop,
    ):
        assert checkpointer.load_newest() is not None
        with pytest.raises(sebulba.UsageError, match=r"loop\.restore"):
            loop.run(loop.new_state(0, STEPS), CYCLES, STEPS)


def saved_networks(checkpoint: Any) -> dict[str, np.ndarray]:
    return {name: checkpoint.snapshot.arrays[f"networks/{name}"] for name in ("b", "w")}

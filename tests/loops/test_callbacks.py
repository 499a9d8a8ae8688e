"""Callbacks: at times, at a new best, and early ends, from Python and from the command line."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import sebulba
from sebulba.agents.configs import SimplePolicyGradientConfig, TorsoConfig
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.commands import cli
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.errors import UsageError
from sebulba.loops import callbacks


class FourSteps(gymnasium.Env):
    """An episode has four steps, each with a reward of 1."""

    observation_space = Box(0, 4, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 4, False, {}


EVALUATIONS = [10, 30, 20, 30, 31, 31, 31, 31]
TRAINING = [(5, 99), (9, 20), (9, 100), (7, 100), (11, 100)]


def training(values):
    return [
        {"env_steps": 100 * i, "seconds": i, "episode_return_mean": x, "episodes_averaged": n}
        for i, (x, n) in enumerate(values)
    ]


def evaluations(values):
    """Records, every other one of which has an evaluation."""
    records = []
    for i, value in enumerate(values):
        records += [{"env_steps": 100 * i}, {"env_steps": 100 * i, "eval_return_mean": value}]
    return records


def test_something_is_done_every_so_many_updates():
    seen = []
    callback = callbacks.every_updates(10, seen.append)
    for updates in (9, 10, 19, 35, 36, 40):
        callback({"updates": updates})
    assert [record["updates"] for record in seen] == [10, 35, 40]
    with pytest.raises(UsageError, match="number=0"):
        callbacks.every_updates(0, seen.append)


def test_something_is_done_every_so_many_env_steps():
    records = [{"env_steps": n} for n in (0, 99, 100, 150, 199, 450, 499, 500)]
    seen = []
    callback = callbacks.every_env_steps(100, seen.append)
    for record in records:
        callback(record)
    assert [record["env_steps"] for record in seen] == [100, 450, 500]


def test_something_is_done_at_a_new_best():
    seen = []
    callback = callbacks.on_new_best(lambda record: seen.append(record["eval_return_mean"]))
    for record in evaluations(EVALUATIONS):
        callback(record)
    assert seen == [10, 30, 31]
    seen.clear()
    callback = callbacks.on_new_best(
        lambda record: seen.append(record["episode_return_mean"]), of="training"
    )
    for record in training(TRAINING):
        callback(record)
    assert seen == [9, 11]


def first_reason(callback, records):
    reasons = [callback(record) for record in records]
    (index,) = [i for i, reason in enumerate(reasons) if reason is not None][:1]
    return index, reasons[index]


def test_early_ends_say_why():
    at = callbacks.stop_at_return(30, "evaluation")
    assert first_reason(at, evaluations(EVALUATIONS)) == (
        3,
        "the return of evaluation is 30, and 30 was the goal",
    )
    index, reason = first_reason(callbacks.stop_at_return(9), training(TRAINING))
    assert index == 2 and reason.startswith("the return of training is 9")
    without = callbacks.stop_without_improvement(3)
    assert first_reason(without, evaluations(EVALUATIONS)) == (
        2 * 7 + 1,
        "3 evaluations in a row were not above 31",
    )
    assert first_reason(callbacks.stop_after(2.5), training(TRAINING)) == (3, "2.5 s are over")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: callbacks.every_env_steps(0, print), "number=0 must be"),
        (lambda: callbacks.stop_at_return(float("nan")), "goal=nan must be"),
        (lambda: callbacks.stop_at_return(1, "validation"), "of='validation' must be 'training'"),
        (lambda: callbacks.stop_without_improvement(0), "evaluations=0 must be"),
        (lambda: callbacks.stop_after(-1), "seconds=-1 must be"),
    ],
)
def test_wrong_arguments_are_told(make, said):
    with pytest.raises(UsageError, match=said):
        make()


@pytest.fixture(scope="module")
def agent():
    config = SimplePolicyGradientConfig(torso=TorsoConfig(hidden_sizes=(4,)))
    return SimplePolicyGradient(sebulba.env_spec(FourSteps), config)


def run(agent, *given, num_cycles=6, **options):
    devices = {"inference_devices": [0], "update_devices": [0], "num_inferencers_per_device": 1}
    options = {**devices, "schedule": "lockstep", "metrics_interval_s": 0, **options}
    with sebulba.GymnasiumLoop(FourSteps, agent, 2, callbacks=given, **options) as loop:
        state = loop.new_state(0, steps_per_cycle=4)
        result = loop.run(state, num_cycles=num_cycles, steps_per_cycle=4)
        more = loop.run(result.state, num_cycles=1, steps_per_cycle=4) if result.stopped else None
    return result, more


def test_a_loop_ends_early_and_can_go_on(agent):
    written, seen = [], []

    class Writer:
        def write(self, record):
            written.append(record["env_steps"])

        def close(self):
            pass

    def callback(record):
        assert written[-1] == record["env_steps"]
        seen.append(record["env_steps"])
        return "enough" if record["env_steps"] == 24 else None

    result, more = run(agent, callback, lambda record: None, metric_writer=Writer())
    assert result.stopped and result.stop_reason == "enough"
    assert result.counters.env_steps < 48 and 24 in seen
    assert more.stop_reason is None and not more.stopped
    assert more.counters.env_steps == result.counters.env_steps + 8


@pytest.mark.slow
def test_what_a_callback_raises_ends_the_run_and_wrong_returns_are_told(agent):
    def raises(record):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(agent, raises)
    with pytest.raises(UsageError, match="a callback returned True; it must return None, or"):
        run(agent, lambda record: True)


class AtOnce:
    """A callback of a user."""

    def __call__(self, record):
        return "that will do" if record["env_steps"] >= 16 else None


NOT_CALLABLE = 3


@pytest.mark.slow
def test_the_command_line_ends_early_saves_and_goes_on(tmp_path, capsys):
    folder = tmp_path / "run"
    words = [
        "train",
        "cartpole",
        "--env.id",
        "tests.loops.test_callbacks:FourSteps",
        "--num-envs",
        "2",
    ]
    words += ["--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"]
    words += ["--num-inferencers-per-device", "1", "--metrics-interval-s", "0"]
    words += ["--steps-per-cycle", "4", "--schedule", "lockstep", "--total-env-steps", "80"]
    own = ["--callbacks", "tests.loops.test_callbacks:AtOnce"]
    assert cli.main([*words, *own, "--run-dir", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "ended early: that will do\ndone: " in said and "sebulba resume" in said
    assert "Ended early: that will do" in (folder / "ended.txt").read_text()
    assert json.loads((folder / "config.json").read_text())["callbacks"] == own[1:]
    assert (folder / "policy").exists()
    assert cli.main(["resume", str(folder), "--callbacks"]) == 0
    assert "80 env steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--callbacks", "nothing"], "callbacks='nothing' must be 'module:attribute'"),
        (["--callbacks", "tests.loops.test_callbacks:Missing"], "Missing"),
        (
            ["--callbacks", "tests.loops.test_callbacks:NOT_CALLABLE"],
            "must be a function of a record",
        ),
        (["--stop-at-return", "nan"], "stop_at_return=nan must be"),
    ],
)
def test_wrong_words_are_told(words, said, capsys, tmp_path):
    argv = ["train", "cartpole", *words, "--run-dir", str(tmp_path / "run")]
    assert cli.main(argv) == cli.EXIT_USAGE
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_file_of_a_stranger_names_no_callback():
    config = ExperimentConfig(
        env=EnvConfig("CartPole-v1"),
        agent=SimplePolicyGradientConfig(),
        callbacks=("tests.loops.test_callbacks:AtOnce",),
        total_env_steps=100,
    )
    assert "the callback tests.loops.test_callbacks:AtOnce" in config.named_code()

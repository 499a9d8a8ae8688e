"""Observations far from 0: the run subtracts an offset in float64 and keeps it."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba.commands import cli
from sebulba.configs.experiment import EnvConfig
from sebulba.envs import make_env_factory
from sebulba.envs.wrappers import SubtractOffset, find_offsets, load_wrapper
from sebulba.errors import UsageError
from tests.support.own import MyWrapper

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float64)
LARGEST = float(np.finfo(np.float64).max)


class Clock(gymnasium.Env):
    """Pays the action that says whether ten of its twenty seconds are over."""

    action_space = spaces.Discrete(2)
    observation_space: gymnasium.Space = spaces.Box(0.0, np.inf, (1,), np.float64)
    begins = 1.7e9

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        reward = float(action == (self.t >= 10))
        self.t += 1
        return self.observe(), reward, False, self.t == 20, {}

    def observe(self):
        return np.array([self.begins + self.t])


class Shows(Clock):
    """Observes what it is told."""

    def __init__(self, shown, space=BOX):
        self.observation_space, self.shown = space, shown

    def observe(self):
        return self.shown


PARTS = spaces.Dict(a=BOX, b=spaces.Box(-1, 1, (2,), np.float32), c=spaces.Discrete(3))
OF_PARTS = {"a": np.array([3.0, -2e6]), "b": np.zeros(2, np.float32), "c": 1}


@pytest.mark.parametrize(
    ("env", "offsets"),
    [
        (Clock(), {0: 1.7e9}),
        (Shows(np.array([5.0, 1e6])), {1: 1e6}),
        (Shows(OF_PARTS, PARTS), {"a": {1: -2e6}}),
        (MyWrapper(Clock()), {0: 1.7e9}),
    ],
)
def test_the_first_observation_tells_the_offsets(env, offsets):
    wrapper = find_offsets(env, 0)
    assert wrapper == f"sebulba.envs.wrappers:SubtractOffset(offsets={offsets})"
    again = load_wrapper(wrapper)(env)
    assert find_offsets(again, 0) is None


@pytest.mark.parametrize(
    "env",
    [
        Shows(np.array([5.0, 9e3])),
        Shows(np.array([LARGEST, -np.inf])),
        Shows(np.array([1e6, 1e6], np.float32), spaces.Box(0, 1e7, (2,), np.float32)),
        Shows(np.full(300, 1e6), spaces.Box(0, 1e7, (300,), np.float64)),
        Shows("no numbers"),
        Shows(1, spaces.Discrete(3)),
    ],
)
def test_there_may_be_none(env):
    assert find_offsets(env, 0) is None


def test_what_is_observed_is_a_difference_taken_in_64_bits():
    env = SubtractOffset(Shows(OF_PARTS, PARTS), {"a": {1: -2e6}})
    env.env.shown = {**OF_PARTS, "a": np.array([3.0, -2e6 + 2**-20])}
    obs, _ = env.reset()
    assert obs["a"].tolist() == [3.0, 2**-20] and obs["b"].dtype == np.float32 and obs["c"] == 1
    bounded = SubtractOffset(Clock(), {0: 1.7e9})
    assert bounded.observation_space == spaces.Box(-1.7e9, np.inf, (1,), np.float64)


@pytest.mark.parametrize("offsets", [{1: 1e6}, {0: "much"}, {"a": {0: 1e6}}, 3])
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(UsageError, match=r"offsets=.* do not fit the observation Box"):
        SubtractOffset(Clock(), offsets)
    with pytest.raises(UsageError, match=r"offsets=.* do not fit the observation Dict"):
        SubtractOffset(Shows(OF_PARTS, PARTS), {"c": {0: 1e6}})


def test_what_is_no_observation_is_refused_as_without_the_wrapper():
    wrappers = [lambda env: SubtractOffset(env, {0: 1e6})]
    for shown in (np.zeros(3), "text"):
        env = make_env_factory(lambda s=shown: Shows(s), wrappers=wrappers)(1, [0])
        with pytest.raises(sebulba.EnvError, match="obs of reset must be an array of shape"):
            env.reset()
        env.close()


def test_the_wrapper_of_a_run_names_no_code_of_a_stranger():
    wrapper = find_offsets(Clock(), 0)
    assert EnvConfig("CartPole-v1", wrappers=(wrapper,)).named_code() == []
    assert EnvConfig("CartPole-v1", wrappers=("x:SubtractOffset",)).named_code()


RESUMES: dict = {}
"""Further options of ``trained``."""


def trained(name, env_steps, normalizes):
    return sebulba.train(
        "cartpole-ppo",
        env=Clock,
        agent={"normalize_observations": normalizes},
        total_env_steps=env_steps,
        anneal_learning_rate=False,
        run_dir=name,
        **RESUMES,
    )


@pytest.mark.slow
def test_a_clock_of_64_bits_is_learned_with_an_offset_and_not_without(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="policies see float32.*--agent.normalize-observations"):
        result = trained("without", 40_000, False)
    assert result.metrics["episode_return_mean"] < 13  # ten are had by always acting alike
    result = trained("with", 40_000, True)
    assert result.metrics["episode_return_mean"] > 19
    said = capsys.readouterr().out.partition("the run subtracts them first: ")[2]
    assert "sebulba.envs.wrappers:SubtractOffset(offsets={0: 1700000000.0})" in said
    config = json.loads((result.folder / "config.json").read_text())
    monkeypatch.setattr(Clock, "begins", 1.7e9 + 3)  # later, the clock shows another time
    assert cli.main(["eval", str(result.folder), "--episodes", "5"]) == 0
    assert "mean return 17.00" in capsys.readouterr().out  # three seconds early
    sebulba.resume(result.folder, total_env_steps=41_000)
    again = json.loads((result.folder / "config.json").read_text())
    assert again["env"] == config["env"]
    # The command that began it, with --resume, as a job does that is queued again.
    monkeypatch.setattr("tests.envs.test_offsets.RESUMES", {"resume": True})
    result = trained("with", 42_000, True)
    assert result.counters.env_steps >= 42_000
    again = json.loads((result.folder / "config.json").read_text())
    assert again["env"] == config["env"]

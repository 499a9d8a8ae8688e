"""Evaluation: the episodes it counts, their true returns, and the interval around the mean."""

from __future__ import annotations

import io
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from scipy import stats

from sebulba.commands.playing import EpisodeProgress
from sebulba.envs import env_spec
from sebulba.errors import UsageError
from sebulba.loops.evaluation import Evaluation, EvaluationPlayer, evaluate
from sebulba.policies.policy import Policy
from sebulba.types import RunSpec
from tests.support.tiny import TinyAgent, TinyConfig


class Unequal(gymnasium.Env):
    """Episodes of 2 or 11 steps, by the seed; each step is worth 1."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.length = 2 if seed % 2 else 11
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t >= self.length, False, {}


def policy_for(env) -> Policy:
    agent = TinyAgent(env_spec(env), TinyConfig())
    weights = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
    return Policy(agent, weights, RunSpec(5, 2, 7, 1))


def test_short_episodes_are_not_favoured():
    evaluation = evaluate(policy_for(Unequal), Unequal, num_episodes=12, num_envs=6, seed=4)
    returns = evaluation.returns.tolist()
    assert len(returns) == 12
    # Two episodes from each environment, although short ones have ended five times by then.
    pairs = [returns[i : i + 2] for i in range(0, 12, 2)]
    assert all(a == b for a, b in pairs)
    assert {2.0, 11.0} == set(returns)
    np.testing.assert_array_equal(evaluation.lengths, evaluation.returns)


class SomeNeverEnd(Unequal):
    """Episodes of 2 steps, or without an end, by the seed."""

    def step(self, action):
        obs, reward, ended, truncated, info = super().step(action)
        return obs, reward, ended and self.length == 2, truncated, info


def test_an_episode_that_does_not_end_is_cut_and_said_to_be():
    seen = []
    evaluation = evaluate(
        policy_for(SomeNeverEnd),
        SomeNeverEnd,
        num_episodes=12,
        num_envs=6,
        seed=4,
        max_episode_steps=50,
        progress=lambda done, longest: seen.append((done, longest)),
    )
    endless = evaluation.num_cut
    assert 0 < endless < 6, "environments of both kinds"
    assert evaluation.num_not_played == endless, "the second episode of each"
    assert sorted(evaluation.returns) == [2.0] * 2 * (6 - endless) + [50.0] * endless
    assert sorted(evaluation.lengths) == sorted(evaluation.returns)
    assert f"{endless} of the {12 - endless} episodes had not ended after 50" in str(evaluation)
    assert f"{endless} that would have come after them were not played" in str(evaluation)
    assert evaluation.metrics()["eval_cut_episodes"] == endless
    assert evaluation.record()["cut_episodes"] == endless
    older = evaluation.mean_return, evaluation.mean_length
    assert older == (evaluation.episode_return_mean, evaluation.episode_length_mean)
    assert seen[0] == (0, 1) and seen[-2][1] == 49 and seen[-1][0] == 12 - endless


def test_an_evaluation_beside_training_ends_although_no_episode_does():
    class NeverEnds(SomeNeverEnd):
        def reset(self, *, seed=None, options=None):
            out = super().reset(seed=seed, options=options)
            self.length = 11
            return out

    policy = policy_for(NeverEnds)
    with EvaluationPlayer(
        policy.agent, NeverEnds, num_episodes=4, num_envs=2, max_episode_steps=20
    ) as player:
        for _ in range(2):
            metrics = player(policy.acting_networks, threading.Event())
            assert metrics["eval_return_mean"] == 20.0
            assert (metrics["eval_episodes"], metrics["eval_cut_episodes"]) == (2, 2)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_whoever_waits_for_an_evaluation_sees_how_far_it_is(is_terminal, monkeypatch):
    stream, now = io.StringIO(), [0.0]
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with EpisodeProgress(100, stream) as progress:
        for now[0] in (0.1, 61.0, 61.1, 75.0):
            progress(12, int(100 * now[0]))
    lines = [line.strip() for line in stream.getvalue().replace("\r", "\n").splitlines()]
    assert [line for line in lines if line] == [
        "12 of 100 episodes done, the longest that runs has 6,100 steps, 1:01",
        "12 of 100 episodes done, the longest that runs has 7,500 steps, 1:15",
    ]
    stream.close()
    now[0] = 200.0
    progress(13, 1)  # to nobody


@pytest.mark.parametrize(("num_episodes", "num_envs"), [(1, 16), (7, 3), (5, 5)])
def test_plays_exactly_as_many_episodes_as_asked(num_episodes, num_envs):
    evaluation = evaluate(
        policy_for(Unequal), Unequal, num_episodes=num_episodes, num_envs=num_envs
    )
    assert len(evaluation.returns) == num_episodes


def test_interval_is_student_t():
    returns = np.array([1.0, 2.0, 4.0, 8.0])
    evaluation = Evaluation(returns, np.array([3, 3, 3, 5]))
    low, high = stats.t.interval(0.95, 3, loc=returns.mean(), scale=stats.sem(returns))
    assert evaluation.episode_return_mean == 3.75 and evaluation.episode_length_mean == 3.5
    assert evaluation.interval == pytest.approx((high - low) / 2)
    assert "mean return 3.75 ± 4.93" in str(evaluation)


def test_one_episode_has_no_interval():
    evaluation = Evaluation(np.array([3.0]), np.array([4]))
    assert evaluation.interval is None and "±" not in str(evaluation)
    assert evaluation.record()["interval_95"] is None


def test_refuses_another_environment_and_no_episodes():
    policy = policy_for(Unequal)
    with pytest.raises(UsageError, match="not the policy's"):
        evaluate(policy, "CartPole-v1", num_episodes=1)
    for bad in ({"num_episodes": 0}, {"num_envs": 0}, {"max_episode_steps": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            evaluate(policy, Unequal, **bad)


def test_clipped_rewards_and_lost_lives_are_not_what_is_counted():
    from sebulba.types import EnvOutput

    class Lives:
        spec = env_spec(Unequal)
        num_envs = 1

        def __init__(self) -> None:
            self.t = 0

        def reset(self) -> EnvOutput:
            return self._output(False, False)

        def step(self, action) -> EnvOutput:
            self.t += 1
            return self._output(self.t % 3 == 0, self.t % 9 == 0)

        def _output(self, life_lost: bool, end: bool) -> EnvOutput:
            def row(x, dtype):
                return np.array([x], dtype)

            return EnvOutput(
                np.zeros((1, 2), np.float32),
                row(0.5, np.float32),
                row(life_lost, bool),
                row(False, bool),
                row(life_lost or self.t == 0, bool),
                row(2.0, np.float32),
                row(end, bool),
            )

        def close(self) -> None:
            pass

    class Factory:
        def __call__(self, num_envs, seeds):
            return Lives()

    evaluation = evaluate(policy_for(Unequal), Factory(), num_episodes=2, num_envs=1)
    assert evaluation.returns.tolist() == [18.0, 18.0]
    assert evaluation.lengths.tolist() == [9, 9]

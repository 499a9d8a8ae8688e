"""The study of bsuite: its environments as Gymnasium's, what is recorded, and the scores."""

from __future__ import annotations

import json
import os
import types

import gymnasium
import numpy as np
import pytest

from benchmarks.studies import bsuite_env, bsuite_scores
from benchmarks.studies.bsuite_env import ORDERS, BsuiteEnv, FromDmEnv
from sebulba.errors import UsageError


class _Countdown:
    """Two steps of an episode, in the manner of dm_env, with a last discount."""

    def __init__(self, discount: float) -> None:
        self.discount, self.left = discount, 0

    def observation_spec(self):
        return types.SimpleNamespace(shape=(1, 2), minimum=0, maximum=2)

    def action_spec(self):
        return types.SimpleNamespace(num_values=3)

    def reset(self):
        self.left = 2
        return self._now(None)

    def step(self, action):
        self.left -= 1
        return self._now(float(action))

    def _now(self, reward):
        discount = self.discount if self.left == 0 else 1.0
        return types.SimpleNamespace(
            observation=np.full((1, 2), self.left, np.int64),
            reward=reward,
            discount=None if reward is None else discount,
            last=lambda: self.left == 0,
        )


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_an_end_with_a_discount_is_a_truncation(discount):
    env = FromDmEnv(_Countdown(discount))
    assert env.action_space == gymnasium.spaces.Discrete(3)
    obs, _ = env.reset(seed=0)
    for left in (1, 0):
        assert env.observation_space.contains(obs)
        obs, reward, terminated, truncated, _ = env.step(np.int32(2))
        assert obs.dtype == np.float32 and (obs == left).all() and reward == 2.0
        assert terminated == (left == 0 and discount == 0)
        assert truncated == (left == 0 and discount == 1)


def test_the_last_recorded_episode_is_read(tmp_path):
    assert bsuite_scores.episodes_in(tmp_path, "catch/3") == 0
    file = tmp_path / "bsuite_id_-_catch-3.csv"
    file.write_text("steps,episode,total_return\n9,1,1.0\n90,10,3.0\n")
    assert bsuite_scores.episodes_in(tmp_path, "catch/3") == 10


def test_scores_are_tables_and_a_picture(tmp_path):
    found = {
        "a": {"scores": {"catch": 0.5}, "tags": {"basic": 0.5}, "ids": 2, "finished": 1},
        "b": {"scores": {"catch": 1.0, "bandit": 0.0}, "tags": {"basic": 0.5, "memory": 1.0}}
        | {"ids": 3, "finished": 3},
    }
    page = bsuite_scores.page(found)
    for line in ("| bandit |  | 0 |", "| memory |  | 1 |", "| finished ids | 1 of 2 | 3 of 3 |"):
        assert line in page
    bsuite_scores.draw(str(tmp_path / "x.png"), {name: of["tags"] for name, of in found.items()})
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_ids_are_chosen_and_an_agent_has_a_folder_of_its_own(tmp_path):
    pytest.importorskip("bsuite", reason="the package bsuite is not installed")
    assert len(bsuite_scores.chosen(["all"])) == 468 and len(bsuite_scores.chosen(["first"])) == 23
    assert bsuite_scores.chosen(["catch/1", "catch"])[:3] == ["catch/1", "catch/0", "catch/2"]
    with pytest.raises(UsageError, match="--ids cach/0"):
        bsuite_scores.chosen(["cach/0"])
    assert bsuite_scores.train(["ppo"], [], tmp_path, None) == 0
    with pytest.raises(UsageError, match="has results of ppo; use another"):
        bsuite_scores.train(["dqn"], [], tmp_path, None)
    with pytest.raises(UsageError, match="--num-envs is the same for all agents"):
        bsuite_scores.train(["ppo", "--num-envs", "4"], [], tmp_path, None)


@pytest.mark.slow
def test_one_environment_is_recorded_up_to_its_last_episode_and_scored(tmp_path, monkeypatch):
    pytest.importorskip("bsuite", reason="the package bsuite is not installed")
    folder = tmp_path / "random"
    orders = {"folder": str(folder), "seconds": 60, "parent": os.getppid()}
    monkeypatch.setattr(BsuiteEnv, "recorded", None)
    _play(BsuiteEnv("bandit/0"), 5)
    assert BsuiteEnv.recorded is None  # nobody has ordered a record
    monkeypatch.setenv(ORDERS, json.dumps(orders))
    probe, env = BsuiteEnv("bandit/0"), BsuiteEnv("bandit/0")
    probe.reset()
    _play(env, 9_999)
    assert bsuite_env.is_over({"seconds": 1}) is None
    assert bsuite_env.is_over({"seconds": 60}) == "60 s are over"
    _play(env, 2_001)
    assert bsuite_env.is_over({"seconds": 1}) == "the 10000 episodes of bandit/0 are over"
    _play(probe, 100)
    assert bsuite_scores.episodes_in(folder, "bandit/0") == 10_000
    assert [file.name for file in folder.iterdir()] == ["bsuite_id_-_bandit-0.csv"]
    found = bsuite_scores.score(folder)
    assert abs(found["scores"]["bandit"]) < 0.05  # as bsuite defines it, random play has 0
    assert (found["ids"], found["finished"], [*found["tags"]]) == (1, 1, ["basic"])


def _play(env, episodes):
    rng = np.random.default_rng(0)
    for _ in range(episodes):
        env.reset()
        is_over = False
        while not is_over:
            _, _, terminated, truncated, _ = env.step(rng.integers(env.action_space.n))
            is_over = terminated or truncated

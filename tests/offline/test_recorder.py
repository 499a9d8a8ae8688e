"""What is recorded is what environments did, whichever way they begin episodes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sebulba_offline.dataset import Dataset, load
from sebulba_offline.recorder import Recorder, record

import sebulba
from sebulba.errors import UsageError
from tests.support.loop_helpers import make_tiny_loop
from tests.support.tiny import TinyAgent

NUMBER = itertools.count()


class Diary(gymnasium.Env):
    """An observation says which environment, episode and step it is, and the last action.

    Episode e has 3 + e % 4 steps; every second one is cut short.
    """

    observation_space = Box(-1, 1000, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2, dtype=np.int32)

    def __init__(self) -> None:
        self._number, self._episode, self._step = next(NUMBER) % 1000, -1, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        return self._seen(-1), {}

    def _seen(self, action: int) -> np.ndarray:
        return np.array([self._number, self._episode, self._step, action], np.float32)

    def step(self, action: Any) -> Any:
        self._step += 1
        ends = self._step == 3 + self._episode % 4
        is_cut = self._episode % 2 == 1
        obs = self._seen(int(action))
        return obs, self._step + 0.5 * int(action), ends and not is_cut, ends and is_cut, {}


def same_step(num_envs: int, seeds: list[int]) -> SyncVectorEnv:
    return SyncVectorEnv([Diary] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def check(dataset: Dataset, *, ends_cut: bool = False) -> int:
    """Check every row of every episode; return how many are whole."""
    rows, told = dataset.rows, dataset.episodes()
    whole = 0
    seen = set()
    for first, length in zip(told.first, told.lengths, strict=True):
        at = slice(first, first + length + 1)
        obs, action, reward = rows.obs[at], rows.action[at], rows.reward[at]
        number, episode = obs[0, :2]
        assert (number, episode) not in seen
        seen.add((number, episode))
        np.testing.assert_array_equal(obs[:, 0], number)
        np.testing.assert_array_equal(obs[:, 1], episode)
        np.testing.assert_array_equal(obs[:, 2], np.arange(length + 1))
        np.testing.assert_array_equal(obs[1:, 3], action[:-1])
        np.testing.assert_array_equal(reward[1:], obs[1:, 2] + 0.5 * action[:-1])
        assert reward[0] == 0 and action[-1] == 0
        if length == 3 + episode % 4:
            whole += 1
            assert rows.terminated[at][-1] == (episode % 2 == 0)
        else:
            assert ends_cut and rows.truncated[at][-1]
    return whole


@pytest.mark.parametrize("env", [Diary, same_step], ids=["next step", "same step"])
def test_a_training_is_recorded_row_by_row(tmp_path: Path, env: Any) -> None:
    recorder = Recorder(tmp_path, sebulba.env_spec(env))
    agent = type("Seeing", (TinyAgent,), {"uses_final_obs": True})
    options = {
        "agent_class": agent,
        "num_inferencers_per_device": 2,
        "schedule": "lockstep",
        "observe_cycle": recorder,
    }
    loop, _ = make_tiny_loop(env, num_envs=3, **options)
    with loop, recorder:
        loop.train(total_env_steps=2 * 3 * 7 * 10, steps_per_cycle=7)
    assert check(load(tmp_path), ends_cut=True) > 60


def test_a_policy_is_recorded_in_whole_episodes(tmp_path: Path) -> None:
    loop, agent = make_tiny_loop(Diary)
    with loop:
        networks = loop.train(total_env_steps=64, steps_per_cycle=4).acting_networks
    policy = sebulba.Policy(agent, networks, explore=True)
    assert record(policy, Diary, tmp_path, num_episodes=11, num_envs=4, random=0.5) == 11
    dataset = load(tmp_path)
    assert check(dataset) == 11
    episodes = dataset.rows.obs[dataset.rows.is_first][:, 1]
    assert sorted(episodes) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    acts = ~(dataset.rows.terminated | dataset.rows.truncated)
    assert set(dataset.rows.action[acts]) == {0, 1}


def test_long_episodes_are_cut(tmp_path: Path) -> None:
    loop, agent = make_tiny_loop(Diary)
    loop.close()
    policy = sebulba.Policy(agent, agent.new_networks(__import__("jax").random.key(0)))
    record(policy, Diary, tmp_path, num_episodes=4, num_envs=4, max_episode_steps=2)
    told = load(tmp_path).episodes()
    assert told.lengths.tolist() == [2, 2, 2, 2] and not told.terminated.any()


def test_an_environment_of_many_agents_is_refused(tmp_path: Path) -> None:
    spec = sebulba.types.MultiAgentSpec({})
    with pytest.raises(UsageError, match="many agents cannot be recorded"):
        Recorder(tmp_path, spec)  # type: ignore[arg-type]

"""What is recorded is what environments did, whichever way they begin episodes."""

from __future__ import annotations

import collections
import errno
import functools
import itertools
import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sebulba_offline import recorder as recorder_module
from sebulba_offline.dataset import Dataset, DatasetWriter, load
from sebulba_offline.recorder import EvaluationRecorder, Recorder, record

import sebulba
from sebulba.commands.cli import main
from sebulba.errors import CheckpointError, UsageError
from tests.support.loop_helpers import make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent

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
    returns: list[float] = []

    def observe(trajectory: Any, infos: Any) -> None:
        recorder(trajectory, infos)
        returns.extend(infos.episode_returns)

    options = {
        "agent_class": agent,
        "num_inferencers_per_device": 2,
        "schedule": "lockstep",
        "observe_cycle": observe,
    }
    loop, _ = make_tiny_loop(env, num_envs=3, **options)
    with loop, recorder:
        loop.train(total_env_steps=2 * 3 * 7 * 10, steps_per_cycle=7)
    dataset = load(tmp_path)
    assert check(dataset, ends_cut=True) == len(returns) > 60
    told = dataset.episodes()
    whole = told.lengths == 3 + dataset.rows.obs[told.first, 1] % 4
    assert sorted(told.returns[whole]) == sorted(returns)


def test_an_evaluation_records_the_episodes_that_it_counts(tmp_path: Path) -> None:
    loop, agent = make_tiny_loop(Diary)
    with loop:
        networks = loop.train(total_env_steps=64, steps_per_cycle=4).acting_networks
    policy = sebulba.Policy(agent, networks, explore=True)
    for env in (Diary, same_step):
        folder = tmp_path / env.__name__
        with EvaluationRecorder(folder, sebulba.env_spec(env), 11, 4) as recorder:
            told = sebulba.evaluate(policy, env, num_episodes=11, num_envs=4, observe=recorder)
        dataset = load(folder)
        assert len(dataset.episodes().first) == 11
        assert sorted(dataset.episodes().lengths) == sorted(told.lengths)
        if env is Diary:
            assert check(dataset) == 11
            assert sorted(dataset.episodes().returns) == sorted(told.returns)


def recorded_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Return a recorder of a training that never closed it, as if it had been killed."""
    monkeypatch.setattr(recorder_module, "FLUSH_S", 0.0)
    recorder = Recorder(folder, sebulba.env_spec(Diary), append=True)
    loop, _ = make_tiny_loop(Diary, num_inferencers_per_device=1, observe_cycle=recorder)
    with loop:
        loop.train(total_env_steps=4 * 7 * 10, steps_per_cycle=7)
    return recorder


def test_a_run_that_is_killed_leaves_a_data_set_and_another_adds_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_without_end(tmp_path, monkeypatch)
    before = load(tmp_path)
    assert check(before) == len(before.episodes().first) > 20
    recorded_without_end(tmp_path, monkeypatch).close()
    after = load(tmp_path)
    assert check(after, ends_cut=True) > 2 * 20
    num_rows = before.rows.num_rows
    np.testing.assert_array_equal(after.rows.obs[:num_rows], before.rows.obs)
    with pytest.raises(UsageError, match="holds a data set already"):
        Recorder(tmp_path, sebulba.env_spec(Diary))
    with pytest.raises(UsageError, match="another observation_space"):
        Recorder(tmp_path, sebulba.env_spec("CartPole-v1"), append=True)


def test_a_full_disk_is_told_in_words_and_what_was_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorded_without_end(tmp_path, monkeypatch)
    before = load(tmp_path).rows.num_rows

    def full(self: Any, episodes: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DatasetWriter, "_write", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*check that the disk"):
        recorder.close()
    recorder.close()
    assert load(tmp_path).rows.num_rows == before


def test_endless_episodes_need_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MOST_BYTES", 2000)
    endless = functools.partial(CountingEnv, length=10**9)
    most = 0
    with Recorder(tmp_path, sebulba.env_spec(endless)) as recorder:

        def observe(trajectory: Any, infos: Any) -> None:
            nonlocal most
            recorder(trajectory, infos)
            most = max(most, sum(one.num_bytes for one in recorder._streams.values()))

        loop, _ = make_tiny_loop(endless, num_inferencers_per_device=1, observe_cycle=observe)
        with loop:
            loop.train(total_env_steps=4 * 8 * 20, steps_per_cycle=8)
    assert 0 < most <= 2000
    told = load(tmp_path).episodes()
    assert len(told.first) == 4 and not told.terminated.any()


def words(folder: Path, *more: str) -> list[str]:
    given = ["--run-dir", str(folder / "run"), "--record-dataset", str(folder / "data")]
    given += ["--num-envs", "8", "--num-inferencers-per-device", "2", "--platform", "cpu"]
    given += ["--inference-devices", "0", "--update-devices", "0"]
    return [*given, "--writers", "--eval-every-env-steps", "0", *more]


@pytest.mark.slow
def test_the_command_line_records_a_training_and_a_resumed_one_adds_to_it(
    tmp_path: Path, capsys: Any
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    steps = ["--total-env-steps", "2048", "--no-anneal-learning-rate"]
    command = ["train", "cartpole", *words(tmp_path, *steps)]
    assert main(command) == 0
    first = load(data)
    told = first.episodes()
    assert first.record["env"] == "CartPole-v1"
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    returns = [value for line in lines for value in line["returns"]]
    assert len(returns) > 20
    assert not collections.Counter(returns) - collections.Counter(told.returns.tolist())
    limits, rounding = np.array([2.4, np.deg2rad(12)]), 1e-6
    ends = first.rows.obs[first.rows.terminated]
    assert (np.abs(ends[:, [0, 2]]) > limits - rounding).any(axis=1).all()
    acts = ~(first.rows.terminated | first.rows.truncated)
    assert not (np.abs(first.rows.obs[acts][:, [0, 2]]) > limits + rounding).any()

    more = ["--record-dataset", str(data), "--total-env-steps", "4096"]
    assert main(["resume", str(run), *more]) == 0
    assert len(load(data).episodes().first) > len(told.first)
    capsys.readouterr()
    assert main([*command, "--run-dir", str(tmp_path / "other")]) == 2
    assert "holds a data set already" in capsys.readouterr().err

    assert main(["eval", str(run), "--episodes", "5", "--record-dataset", f"{data}2"]) == 0
    printed = capsys.readouterr().out
    played = load(f"{data}2").episodes()
    assert len(played.first) == 5 and f"{played.returns.mean():.2f}" in printed


@pytest.mark.slow
def test_continuous_episodes_end_in_their_last_observation(tmp_path: Path) -> None:
    command = ["train", "impala", "--env.id", "Pendulum-v1", *words(tmp_path)]
    assert main([*command, "--total-env-steps", "8192", "--steps-per-cycle", "32"]) == 0
    dataset = load(tmp_path / "data")
    told, rows = dataset.episodes(), dataset.rows
    whole = told.lengths == 200
    assert whole.sum() >= 16 and not told.terminated.any()
    angle = np.arctan2(rows.obs[:, 1], rows.obs[:, 0])
    moved = np.mod(np.diff(angle) - 0.05 * rows.obs[1:, 2] + np.pi, 2 * np.pi) - np.pi
    is_step = ~rows.is_first[1:] & (np.abs(rows.obs[1:, 2]) < 7.9)  # it clips speeds at 8
    np.testing.assert_allclose(moved[is_step], 0, atol=1e-4)


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

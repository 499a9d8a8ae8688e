"""Data sets of Minari: one that Minari itself wrote is read, and ours is read by Minari."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from sebulba_offline.cloning import BC
from sebulba_offline.configs import BCConfig
from sebulba_offline.dataset import load

import sebulba
from sebulba.commands.cli import main
from tests.support import recorded

pytestmark = pytest.mark.filterwarnings(
    "ignore:Implicitly cleaning up:ResourceWarning", "ignore::UserWarning:minari"
)
minari = pytest.importorskip("minari", reason="needs sebulba-offline[minari]")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def game() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=30)


def test_what_minari_recorded_is_read_and_trains(tmp_path: Path, capsys: Any) -> None:
    env = minari.DataCollector(game())
    env.action_space.seed(0)
    for seed in range(12):
        env.reset(seed=seed)
        over = False
        while not over:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            over = terminated or truncated
    source = env.create_dataset("toy/random-v0")
    env._tmp_dir.cleanup()  # close() would leave that to the garbage collector, which warns
    assert main(["dataset", "minari", "toy/random-v0", str(tmp_path / "data")]) == 0
    dataset = load(tmp_path / "data")
    told = dataset.episodes()
    assert dataset.record["env"] == "CartPole-v1" and len(told.lengths) == 12
    for episode, first, length in zip(
        source.iterate_episodes(), told.first, told.lengths, strict=True
    ):
        rows = dataset.rows.part(first, first + length + 1)
        np.testing.assert_array_equal(rows.obs, episode.observations)
        np.testing.assert_array_equal(rows.action[:-1], episode.actions)
        np.testing.assert_array_equal(rows.reward[1:], episode.rewards)
        np.testing.assert_array_equal(rows.terminated[1:], episode.terminations)
        assert rows.truncated[-1] == (not episode.terminations[-1])
    agent = BC(sebulba.env_spec(game), BCConfig(dataset=str(tmp_path / "data")))
    sizes = {"num_inferencers_per_device": 1, "inference_devices": [0], "update_devices": [0]}
    with sebulba.GymnasiumLoop(game, agent, 4, **sizes) as loop:
        assert loop.train(total_env_steps=640, steps_per_cycle=16).counters.updates > 0


def test_what_is_written_is_read_by_minari_and_again(tmp_path: Path) -> None:
    folder = recorded.aim(tmp_path / "ours", 7)
    assert main(["dataset", "minari", "toy/aim-v0", str(folder), "--write"]) == 0
    assert minari.load_dataset("toy/aim-v0").total_steps == 35
    assert main(["dataset", "minari", "toy/aim-v0", str(tmp_path / "again")]) == 0
    ours, again = load(folder), load(tmp_path / "again")
    for one, other in zip(ours.rows, again.rows, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_unknown_data_set_is_refused_in_words(tmp_path: Path, capsys: Any) -> None:
    assert main(["dataset", "minari", "toy/nothing-v0", str(tmp_path / "data")]) == 2
    assert "toy/nothing-v0" in capsys.readouterr().err

"""Policies that come with the package: small, unsigned, our own code, as good as they say."""

from __future__ import annotations

import json
import math
import shutil

import pytest

import sebulba
from benchmarks.studies.make_pretrained import COMMANDS, environment
from sebulba.commands import cli
from sebulba.errors import UsageError
from sebulba.policies import pretrained
from sebulba.runs.folder import RunFolder
from sebulba.runs.read_config import read_config

EPISODES = 12
MOST_BYTES = 100_000
"""Of a policy with its card and configuration."""


@pytest.fixture
def stranger(monkeypatch, tmp_path):
    """Let the key of this user be one that has signed nothing."""
    monkeypatch.setenv("SEBULBA_KEY_FILE", str(tmp_path / "key"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_policy_returns_what_its_card_says(name, stranger):
    said = pretrained.about(name)
    policy = sebulba.load_policy(f"pretrained:{name}")
    evaluation = sebulba.evaluate(
        policy, environment(f"pretrained:{name}"), num_episodes=EPISODES, num_envs=EPISODES, seed=7
    )
    spread = 4 * said.episode_return_std / math.sqrt(EPISODES) + 0.02 * abs(
        said.episode_return_mean
    )
    assert abs(evaluation.episode_return_mean - said.episode_return_mean) < spread
    card = (pretrained.FOLDER / name / "policy/README.md").read_text()
    assert f"{said.episode_return_mean:.2f} ± {said.episode_return_std:.2f}" in card
    assert f"| {' '.join(said.command)} |".replace("_", "\\_") in card


def test_each_is_there_small_and_unsigned():
    assert pretrained.names() == sorted(COMMANDS)
    for name, command in COMMANDS.items():
        folder = pretrained.FOLDER / name
        assert sum(path.stat().st_size for path in folder.rglob("*")) < MOST_BYTES
        for file in (folder / "config.json", folder / "policy/config.json"):
            record = json.loads(file.read_text())
            assert record["signature"] is None and "sha256" in record
        assert pretrained.about(name).command == ("sebulba", *command)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_configuration_that_trained_it_is_one_to_train_with(name, stranger):
    _, config = read_config([f"pretrained:{name}", "--seed", "5"], "sebulba train")
    assert (config.seed, config.env.id) == (5, pretrained.about(name).env_id)
    assert not config.named_code()


@pytest.mark.parametrize("name", ["", "cartpol", "../trained/cartpole", "/etc"])
def test_a_name_that_is_unknown_is_refused(name):
    for load in (sebulba.load_policy, sebulba.load_env):
        with pytest.raises(UsageError, match=r"pretrained:.* is unknown; use .*acrobot"):
            load(f"pretrained:{name}")


def test_what_is_written_of_one_does_not_go_into_the_package():
    assert str(pretrained.beside("pretrained:cartpole", "video.mp4")) == "cartpole-video.mp4"
    assert str(pretrained.beside("runs/a", "video.mp4")) == "runs/a/video.mp4"


def test_they_are_listed(capsys, tmp_path):
    assert cli.main(["policies", "--json", str(tmp_path / "policies.json")]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS) and "LunarLander-v3" in shown
    (first, *_) = json.loads((tmp_path / "policies.json").read_text())["policies"]
    assert first["name"] == "acrobot" and first["episode_return_mean"] < -60


def test_one_is_played_from_the_command_line(capsys, stranger):
    words = ["eval", "pretrained:cartpole", "--episodes", "2", "--num-envs", "2"]
    assert cli.main(words) == 0
    assert "mean return 500.00" in capsys.readouterr().out


def test_one_that_names_the_code_of_others_is_refused(monkeypatch, tmp_path, stranger):
    shutil.copytree(pretrained.FOLDER / "cartpole", tmp_path / "cartpole")
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
    file = RunFolder(tmp_path / "cartpole").policy / "config.json"
    record = json.loads(file.read_text())
    record.pop("sha256")
    record["agent"] = "os:system"
    file.write_text(json.dumps(record))
    with pytest.raises(UsageError, match="not signed"):
        sebulba.load_policy("pretrained:cartpole")

"""A trained policy elsewhere: evaluated with other options, and the beginning of another run."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from sebulba.checkpoints.store import CheckpointStore
from sebulba.commands import cli
from sebulba.runs.configurations import config_first
from sebulba.runs.read_config import parse

SMALL = [
    *("--num-envs", "4", "--steps-per-cycle", "5", "--num-inferencers-per-device", "1"),
    *("--agent.torso.hidden-sizes", "8", "--agent.normalize-observations", "--compile-cache"),
    *(
        "off",
        "--no-anneal-learning-rate",
        "--inference-devices",
        "0",
        "--update-devices",
        "0",
        "--writers",
    ),
]


class Paid(gymnasium.Env):
    """Pays ``wage`` in each of 5 steps, whatever is done, and observes noise."""

    def __init__(self, wage: float = 1.0, size: int = 3):
        self.observation_space = spaces.Box(-1, 1, (size,))
        self.action_space = spaces.Discrete(2)
        self.wage = wage

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def seen(self):
        shape = self.observation_space.shape
        return self.np_random.uniform(-1, 1, shape).astype(np.float32)

    def step(self, action):
        self.t += 1
        return self.seen(), self.wage, False, self.t == 5, {}


def train(folder: Path, *words: str) -> int:
    env = ["--env.id", "tests.runs.test_from_run:Paid"]
    return cli.main(["train", *words, *env, *SMALL, "--run-dir", str(folder)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    assert train(folder, "cartpole", "--total-env-steps", "400") == 0
    return folder


def saved(folder: Path) -> dict[str, np.ndarray]:
    _, snapshot = CheckpointStore(folder / "checkpoints").load_newest()
    return snapshot.arrays


def test_a_policy_is_evaluated_with_other_options_of_its_environment(run, capsys):
    words = ["eval", str(run), "--episodes", "4", "--num-envs", "2"]
    for options, mean in (
        ([], 5.0),
        (["--env.options", "wage", "3"], 15.0),
        (["--env.options.wage=0.5"], 2.5),
    ):
        assert cli.main([*words, *options]) == 0
        assert f"mean return {mean:.2f}" in capsys.readouterr().out
    assert cli.main([*words, "--env.options.wages", "3"]) == cli.EXIT_USAGE
    assert "wages" in capsys.readouterr().err
    assert cli.main([*words, "--env.options", "wage", "3", "size"]) == cli.EXIT_USAGE
    assert "wage 3 size: the last name needs a value" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_run_begins_with_the_networks_and_statistics_of_another(run, tmp_path, capsys):
    folder = tmp_path / "second"
    words = ["cartpole", "--from", str(run), "--env.options.wage", "2", "--seed", "5"]
    assert train(folder, *words, "--learning-rate", "1e-20", "--total-env-steps", "40") == 0
    assert f"the networks of {run} at 400 env steps" in capsys.readouterr().out
    first, second = saved(run), saved(folder)
    names = [name for name in first if name.startswith("networks/")]
    assert names and all(np.allclose(first[name], second[name], atol=1e-7) for name in names)
    number = "lasting/observations/0/num_samples"
    assert second[number] > first[number] > 300
    assert cli.main(["resume", str(folder), "--total-env-steps", "80"]) == 0
    assert "the networks of" not in capsys.readouterr().out


def test_other_spaces_and_folders_without_a_run_are_refused(run, tmp_path, capsys):
    folder = tmp_path / "second"
    words = ["cartpole", "--total-env-steps", "40", "--from"]
    assert train(folder, *words, str(run), "--env.options.size", "4") == cli.EXIT_USAGE
    assert "the checkpoint does not fit this run" in capsys.readouterr().err
    assert train(folder, *words, str(tmp_path / "none")) == cli.EXIT_USAGE
    assert "has no checkpoint" in capsys.readouterr().err
    assert not folder.exists()


def test_the_configuration_may_be_that_of_the_other_run():
    assert config_first(["--from", "runs/a", "--seed", "1"]) == [
        *("runs/a", "--from", "runs/a", "--seed", "1")
    ]
    assert parse("cartpole", ["--from", "runs/a"]).from_run == "runs/a"

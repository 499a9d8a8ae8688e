"""A run whose learning rate fell to 0 goes on beyond its end, and its learning curve with it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from sebulba.agents.configs import ImpalaConfig, OptimizerConfig
from sebulba.commands import cli
from sebulba.configs.presets import PRESETS
from sebulba.envs import env_spec
from sebulba.metrics.episode_sample import episodes_of
from sebulba.metrics.plots import read_records
from sebulba.runs.build import build_agent, note_of_unbounded_actions, warn_of_rate_0
from sebulba.types import EnvSpec

TRAIN = [
    *("train", "cartpole", "--env.id", "tests.runs.test_cli:Guess", "--schedule", "lockstep"),
    *("--num-envs", "4", "--steps-per-cycle", "5", "--num-inferencers-per-device", "1"),
    *("--agent.torso.hidden-sizes", "8", "--metrics-interval-s", "0", "--learning-rate", "0.01"),
    *("--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"),
]
EXTENDED = ["--extension-learning-rate", "0.02"]


def arrays(run: Path) -> dict[str, np.ndarray]:
    (file,) = (run / "policy").glob("*.npz")
    with np.load(file) as archive:
        return {name: archive[name] for name in archive.files}


def are_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return (folder, output of the command) of a run of 200 steps whose rate fell to 0."""
    run = tmp_path_factory.mktemp("runs") / "fell"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda *words, **options: said.append(" ".join(words)))
        assert cli.main([*TRAIN, "--total-env-steps", "200", "--run-dir", str(run)]) == cli.EXIT_OK
    return run, "\n".join(said)


@pytest.mark.slow
def test_before_it_begins_a_run_says_that_its_learning_rate_falls(finished):
    assert "the learning rate falls to 0 over 200 env steps" in finished[1]
    assert "--no-anneal-learning-rate keeps it" in finished[1]


def test_at_its_end_a_run_says_of_how_many_episodes_its_mean_is(finished):
    run, said = finished
    last = read_records(run / "metrics.jsonl")[-1]
    assert last["episodes"] == last["episodes_averaged"] == 32
    assert "done: mean return " in said and " (of 32 episodes), 200 env steps" in said


def test_a_finished_run_says_how_it_goes_on(finished, capsys):
    run, _ = finished
    assert cli.main(["resume", str(run)]) == cli.EXIT_OK
    assert "--total-env-steps N --extension-learning-rate X trains on" in capsys.readouterr().out
    assert cli.main(["resume", str(run), "--total-env-steps", "300"]) == cli.EXIT_USAGE
    assert "--extension-learning-rate X goes on from there" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_extended_learns_on_and_may_be_resumed_again(finished, tmp_path):
    at_once, in_parts = tmp_path / "at-once", tmp_path / "in-parts"
    for copy in (at_once, in_parts):
        shutil.copytree(finished[0], copy)
    assert cli.main(["resume", str(at_once), "--total-env-steps", "400", *EXTENDED]) == 0
    # Twice as a scheduler would, with the words of its beginning.
    words = [*TRAIN, "--run-dir", str(in_parts), "--resume", *EXTENDED]
    assert cli.main([*words, "--total-env-steps", "300"]) == 0
    assert not are_equal(arrays(in_parts), arrays(finished[0])), "it learned on"
    assert cli.main([*words, "--total-env-steps", "400"]) == 0
    assert are_equal(arrays(in_parts), arrays(at_once))
    config = json.loads((in_parts / "config.json").read_text())
    assert (config["anneal_env_steps"], config["total_env_steps"]) == (200, 400)
    assert cli.main(["resume", str(in_parts), "--total-env-steps", "500"]) == 0

    episodes = episodes_of(read_records(at_once / "episodes.jsonl"))
    assert episodes is not None
    last = read_records(at_once / "metrics.jsonl")[-1]
    assert episodes.indices.tolist() == list(range(last["episodes"])), "none twice, none missing"
    assert episodes.env_steps[-1] <= last["env_steps"] == 400


def test_the_configuration_of_a_run_before_extensions_is_read(finished):
    from sebulba.runs.folder import RunFolder

    folder = RunFolder(finished[0])
    record = json.loads(folder.config.read_text())
    _, config = folder.read_config()
    for name in ("anneal_env_steps", "extension_learning_rate", "eval_max_episode_steps"):
        del record[name]
    del record["agent"]["optimizer"]["share_after_schedule"]
    old = folder.path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(record))
    assert dataclasses.asdict(RunFolder(old).read_config()[1]) == dataclasses.asdict(config)


@pytest.mark.parametrize(("num_updates", "warns"), [(9, True), (10, False)])
def test_a_schedule_by_hand_that_ends_before_the_run_is_told(num_updates, warns):
    optimizer = OptimizerConfig(schedule="linear", schedule_updates=num_updates)
    config = dataclasses.replace(
        PRESETS["cartpole"].make(),
        agent=ImpalaConfig(optimizer=optimizer),
        anneal_learning_rate=False,
        num_envs=4,
        steps_per_cycle=5,
        total_env_steps=200,
    )
    agent = build_agent(config, env_spec("CartPole-v1"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_of_rate_0(config, agent)
    assert [("than the 10 updates" in str(each.message)) for each in told] == [True] * warns


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (gymnasium.spaces.Box(-1, 1, (3,)), None),
        (gymnasium.spaces.Discrete(3), None),
        (gymnasium.spaces.Box(0, np.inf, (2,)), "all components of the action lack a bound"),
        (gymnasium.spaces.Box(np.float32([0, 0]), np.float32([1, 1e30])), r"components \[1\] of"),
    ],
    ids=str,
)
def test_components_of_the_action_without_bounds_are_said(space, said):
    note = note_of_unbounded_actions(EnvSpec(gymnasium.spaces.Box(-1, 1, (3,)), space))
    assert (note is None) == (said is None)
    assert said is None or re.search(said, note)

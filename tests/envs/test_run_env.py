"""``sebulba.load_env``: the environment of a run in a loop of the user's own."""

from __future__ import annotations

import dataclasses
import json
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import sebulba
from sebulba.commands import cli
from sebulba.configs.experiment import EnvConfig
from sebulba.configs.presets import PRESETS
from sebulba.envs import make_env_factory
from sebulba.envs.single_env import SingleEnv
from sebulba.errors import ActionError, UsageError
from sebulba.runs import environment as run_env
from sebulba.runs.folder import RunFolder
from sebulba.video import screens
from tests.video.test_video import SMALL, Recorder


def folder_of(tmp_path, **env) -> str:
    """Return the folder of a run in an environment, as far as ``load_env`` needs it."""
    config = dataclasses.replace(PRESETS["ppo"].make(), env=EnvConfig(**env))
    RunFolder(tmp_path).write_config(config, "ppo", ["train"])
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        {"id": "CartPole-v1"},
        {"id": "CartPole-v1", "backend": "gymnasium", "vectorization": "async"},
        {"id": "Pendulum-v1"},
        {"id": "FrozenLake-v1"},
        {"id": "tests.support.own:MyEnv", "wrappers": ("tests.support.own:MyWrapper(factor=3)",)},
        {"id": "tests.video.test_video:Drawn"},
        {"id": "sebulba/CongestionControl-v0"},
    ],
    ids=lambda env: "-".join(map(str, env.values())),
)
def test_it_is_an_environment_as_gymnasium_wants_it(env, tmp_path):
    made = sebulba.load_env(folder_of(tmp_path, **env))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of spaces that are not symmetric or not limited
        check_env(made, skip_render_check=True)
    made.close()
    made.close()


def test_it_is_what_gymnasium_makes(tmp_path):
    made = sebulba.load_env(folder_of(tmp_path, id="CartPole-v1", backend="gymnasium"))
    theirs = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(0)
    for seed in (3, None, None, 5):
        obs, _ = made.reset(seed=seed)
        expected, _ = theirs.reset(seed=seed)
        assert (obs == expected).all()
        is_over = False
        while not is_over:
            action = int(rng.integers(2))
            obs, reward, terminated, truncated, info = made.step(action)
            expected, *others, _ = theirs.step(action)
            assert (obs == expected).all() and [reward, terminated, truncated] == others
            assert info == {}
            is_over = terminated or truncated


def test_a_limit_truncates_and_the_last_observation_is_of_that_episode(tmp_path):
    for backend in ("gymnasium", "envpool"):
        folder = folder_of(tmp_path, id="Pendulum-v1", backend=backend, max_episode_steps=5)
        made = sebulba.load_env(folder)
        first, _ = made.reset(seed=0)
        ends = [made.step(np.float32([2])) for _ in range(5)]
        assert [one[3] for one in ends] == [False] * 4 + [True] and not ends[-1][2]
        assert np.abs(ends[-1][0] - ends[-2][0]).max() < 2, "it goes on from the step before"
        with pytest.raises(UsageError, match="call reset"):
            made.step(np.float32([2]))
        assert (made.reset(seed=0)[0] == first).all()


class SameStep:
    """A vector environment that shows the next episode's begin in the row of the end."""

    def __new__(cls, num_envs: int, seeds: list[int]):
        return SyncVectorEnv(
            [lambda: gymnasium.make("CartPole-v1")] * num_envs,
            autoreset_mode=AutoresetMode.SAME_STEP,
        )


def test_where_the_next_episode_begins_in_the_row_of_the_end(tmp_path):
    made = SingleEnv(make_env_factory(SameStep))
    made.reset(seed=1)
    terminated = False
    while not terminated:
        obs, _, terminated, _, _ = made.step(1)
    assert abs(obs[2]) > 0.2, "the pole has fallen"


def test_what_is_wrong_is_refused(tmp_path):
    folder = folder_of(tmp_path, id="CartPole-v1")
    made = sebulba.load_env(folder)
    with pytest.raises(UsageError, match="call reset"):
        made.step(0)
    with pytest.raises(UsageError, match=r"options=.* leave them out"):
        made.reset(options={"low": 0})
    with pytest.raises(UsageError, match="seed=-1 must be from 0"):
        made.reset(seed=-1)
    made.reset()
    with pytest.raises(ActionError):
        made.step(2)
    made.close()
    with pytest.raises(UsageError, match="is closed"):
        made.step(0)
    made.reset(seed=0)
    assert made.step(0)[1] == 1
    with pytest.raises(UsageError, match="render_mode='ansi' must be"):
        sebulba.load_env(folder, render_mode="ansi")
    with pytest.raises(UsageError, match=r"config\.json"):
        sebulba.load_env(tmp_path / "nowhere")


def test_of_many_agents_is_none(tmp_path):
    with pytest.raises(UsageError, match="many agents"):
        sebulba.load_env(folder_of(tmp_path, id="tests.support.populations:Pairs"))


def test_a_strangers_environment_is_not_imported(tmp_path):
    folder = folder_of(tmp_path, id="tests.support.own:MyEnv")
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, "run_id": "another"}))
    with pytest.raises(UsageError, match="trust=True"):
        sebulba.load_env(folder)
    assert sebulba.load_env(folder, trust=True).reset()


# Pictures.


def test_pictures(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, id="tests.video.test_video:Drawn")
    silent = sebulba.load_env(folder)
    silent.reset()
    assert silent.render() is None
    drawn = sebulba.load_env(folder, render_mode="rgb_array")
    drawn.reset()
    assert drawn.render().shape == (8, 12, 3)
    recorder = Recorder(3)
    monkeypatch.setattr(screens, "open_screen", lambda where: recorder)
    shown = sebulba.load_env(folder, render_mode="human")
    shown.reset()
    for _ in range(4):
        shown.step(0)
    assert len(recorder.captions) == 3, "the window was closed at its third picture"
    shown.close()


def test_what_cannot_draw_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be rendered"):
        sebulba.load_env(
            folder_of(tmp_path, id="sebulba/CongestionControl-v0"), render_mode="rgb_array"
        )
    with pytest.raises(UsageError, match="cannot draw itself"):
        SingleEnv(make_env_factory("gymnax:CartPole-v1"), render_mode="rgb_array")


@pytest.mark.slow
def test_the_policy_of_a_run_plays_in_it(tmp_path):
    words = ["train", "impala", "--env.id", "tests.video.test_video:Drawn", *SMALL]
    assert cli.main([*words, "--total-env-steps", "80", "--run-dir", str(tmp_path / "run")]) == 0
    policy, env = sebulba.load_policy(tmp_path / "run"), sebulba.load_env(tmp_path / "run")
    assert env.observation_space == policy.spec.observation_space
    assert env.action_space == policy.spec.action_space
    (obs, _), state, length, is_over = env.reset(seed=0), None, 0, False
    while not is_over:
        action, state = policy(obs, state)
        obs, _, terminated, truncated, _ = env.step(action)
        is_over, length = terminated or truncated, length + 1
    assert length == 4


def test_its_name_is_that_of_the_package():
    assert sebulba.load_env is run_env.load_env


def test_the_folder_of_a_policy_has_no_environment(tmp_path):
    (tmp_path / "config.json").write_text('{"format": 1, "agent": "a:B", "agent_config": {}}')
    with pytest.raises(
        UsageError, match=r"is the folder of a policy, .*name the folder of its run"
    ):
        sebulba.load_env(str(tmp_path))

"""Any Gymnasium environment behind a network: delays, losses, and what an agent sees of them."""

from __future__ import annotations

import json
import pickle
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from sebulba_networks.benchmarks import delay as delay_figures
from sebulba_networks.networked import ENVIRONMENTS, Networked

from sebulba.commands import cli
from sebulba.envs import env_spec, make_env_factory
from sebulba.errors import UsageError


class Count(gymnasium.Env):
    """Observes the number of its step, and rewards the action that it was given."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float32)
    action_space = spaces.Box(-9, 1000, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def seen(self):
        return np.full(1, self.t, np.float32)

    def step(self, action):
        self.t += 1
        return self.seen(), float(action[0]), False, self.t == 200, {}


def played(env, actions, seed=0) -> tuple[list, list, list]:
    """Return observations, rewards and infos; the actions are 1, 2, ..."""
    obs, info = env.reset(seed=seed)
    seen, rewards, infos = [obs], [], [info["network"]]
    for number in range(1, actions + 1):
        obs, reward, _, _, info = env.step(np.full(1, number, np.float32))
        seen.append(obs), rewards.append(reward), infos.append(info["network"])
    return seen, rewards, infos


def test_a_network_without_delay_changes_nothing():
    env = Networked(Count())
    assert env.observation_space == Count.observation_space
    seen, rewards, infos = played(env, 5)
    assert [x[0] for x in seen] == [0, 1, 2, 3, 4, 5] and rewards == [1, 2, 3, 4, 5]
    assert infos[-1] == {"age": 0, "sent": 10, "lost": 0}


def test_observations_and_actions_are_late_by_their_delays():
    seen, rewards, infos = played(Networked(Count(), delay=2, action_delay=3), 7)
    assert [x[0] for x in seen] == [0, 0, 0, 1, 2, 3, 4, 5]
    assert rewards == [0, 0, 0, 1, 2, 3, 4]
    assert [info["age"] for info in infos] == [0, 1, 2, 2, 2, 2, 2, 2]


def test_the_agent_may_see_its_own_actions_ages_and_earlier_observations():
    env = Networked(Count(), delay=2, action_delay=1, own_actions=True, observations=2, ages=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the wrapper, and of advice
        check_env(env, skip_render_check=True)
    seen, _, _ = played(env, 4)
    assert [x["actions"].tolist() for x in seen[:3]] == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
    assert seen[4]["actions"].tolist() == [2, 3, 4]
    assert [x[0] for x in seen[4]["observation"]] == [1, 2]
    assert seen[4]["age"].tolist() == [3, 2] and seen[0]["age"].tolist() == [0, 0]
    cart = Networked(gymnasium.make("CartPole-v1"), own_actions=2)
    cart.reset(seed=0)
    assert cart.step(1)[0]["actions"].tolist() == [0, 0, 0, 1]
    assert cart.step(0)[0]["actions"].tolist() == [0, 1, 1, 0]


def test_lost_messages_are_counted_and_the_last_ones_stay_in_force():
    env = Networked(Count(), loss=0.3)
    seen, rewards, infos = played(env, 199)
    numbers = [int(x[0]) for x in seen]
    assert numbers == sorted(numbers) and rewards == sorted(rewards)
    kept = len(set(numbers)) - 1 + len(set(rewards) - {0})
    assert kept == infos[-1]["sent"] - infos[-1]["lost"] and infos[-1]["sent"] == 398
    assert 80 < infos[-1]["lost"] < 160
    assert [info["age"] for info in infos] == [t - number for t, number in enumerate(numbers)]
    assert played(env, 199, seed=0)[2] == infos != played(env, 199, seed=1)[2]


def test_of_messages_that_overtake_each_other_the_newest_counts():
    seen, _, infos = played(Networked(Count(), delay=(0, 6)), 199)
    numbers = [int(x[0]) for x in seen]
    assert numbers == sorted(numbers) and infos[-1]["lost"] == 0
    ages = [info["age"] for info in infos]
    assert set(ages) >= {0, 1, 2, 3} and max(ages) <= 6


def test_a_copy_goes_on_alike():
    env = Networked(Count(), delay=(1, 4), loss=0.2, own_actions=3)
    played(env, 20)
    copy = pickle.loads(pickle.dumps(env))
    for _ in range(20):
        (one, *_), (other, *_) = env.step(np.ones(1)), copy.step(np.ones(1))
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": -1}, "delay=-1 must be a number of steps from 0"),
        ({"action_delay": (3, 1)}, r"action_delay=\(3, 1\) must be .* least and the largest"),
        ({"delay": 1.5}, "delay=1.5 must be"),
        ({"loss": 1}, "loss=1 must be a probability below 1"),
        ({"own_actions": -1}, "own_actions=-1 must be a whole number from 0"),
        ({"observations": 0}, "observations=0 must be a whole number from 1"),
        ({"ages": 1}, "ages=1 must be True or False"),
    ],
    ids=str,
)
def test_wrong_options_are_told(options, said):
    with pytest.raises(UsageError, match=said):
        Networked(Count(), **options)


def test_every_id_of_gymnasium_is_one_behind_a_network():
    assert "CartPole-v1" in ENVIRONMENTS and "os:system" not in ENVIRONMENTS
    make = ENVIRONMENTS["CartPole-v1"]
    assert make(delay=3, max_episode_steps=7).spec.max_episode_steps == 7
    with pytest.raises(UsageError, match=r"networked:CartPole-v1.*sizes"):
        make(sizes=3)
    spec = env_spec("networked:CartPole-v1", delay=3, own_actions=True)
    assert spec.observation_space["actions"].shape == (6,)
    with pytest.raises(UsageError, match="the nearest are networked:CartPole-v1"):
        make_env_factory("networked:CartPoles-v1")
    with pytest.raises(UsageError, match=r"'networked:minigrid:X'.*--env.id MODULE:ID --env.wrap"):
        make_env_factory("networked:minigrid:X")


def test_it_is_trained_and_evaluated_with_another_delay(tmp_path, capsys):
    folder = str(tmp_path / "run")
    words = ["train", "cartpole-ppo", "--env.id", "networked:CartPole-v1", "--run-dir", folder]
    words += ["--env.options", "delay", "(1, 3)", "own_actions", "4", "--total-env-steps", "64"]
    words += ["--num-envs", "2", "--steps-per-cycle", "16", "--agent.torso.hidden-sizes", "8"]
    words += ["--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"]
    assert cli.main(words) == 0
    assert cli.main(["eval", folder, "--episodes", "2", "--env.options.delay", "8"]) == 0
    assert "mean return" in capsys.readouterr().out


def test_the_figures_keep_each_training_and_repeat_none(monkeypatch, tmp_path):
    trainings = []

    def measured(env, sees, delay, loss, seed, env_steps):
        trainings.append((sees, delay, loss, seed))
        return 500.0 - 40 * delay

    monkeypatch.setattr(delay_figures, "measured", measured)
    kept, drawn = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--delays", "0", "3", "--losses", "0.2", "--json", str(kept), "--png", str(drawn)]
    for seeds in ("1", "2"):
        assert delay_figures.main(["--seeds", seeds, *words]) == 0
    assert len(trainings) == len(set(trainings)) == 2 * 3 * len(delay_figures.OPTIONS)
    assert len(json.loads(kept.read_text())["runs"]) == len(trainings)
    assert drawn.stat().st_size > 1000

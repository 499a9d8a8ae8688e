"""CartPole in the event loop of the network engine."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from sebulba_networks import CART_POLE
from sebulba_networks.benchmarks import cart_pole

import sebulba
from sebulba.envs import make_env_factory
from sebulba.errors import ActionError, UsageError
from tests.support.needs import needs_compiler

pytestmark = needs_compiler


def make(num_envs=5, **options):
    return make_env_factory(CART_POLE, **options)(num_envs, list(range(num_envs)))


def test_it_has_gymnasiums_spaces_and_physics():
    theirs = gymnasium.make("CartPole-v1").unwrapped
    adapter, rng = make(1), np.random.default_rng(0)
    assert adapter.spec.action_space.n == theirs.action_space.n
    np.testing.assert_allclose(
        adapter.spec.observation_space.high, theirs.observation_space.high, rtol=1e-6
    )
    output = adapter.reset()
    for _ in range(300):
        if output.is_first[0]:
            theirs.reset()
            theirs.state = output.obs[0].astype(float)
            assert np.abs(output.obs).max() <= 0.05 and output.reward[0] == 0
        action = rng.integers(2, size=1).astype(np.int32)
        output = adapter.step(action)
        if not output.is_first[0]:
            obs, reward, terminated, _, _ = theirs.step(int(action[0]))
            np.testing.assert_allclose(output.obs[0], obs, atol=1e-5)
            assert output.reward[0] == reward == 1
            assert output.terminated[0] == terminated == output.episode_end[0]


def test_episodes_are_cut_drawn_anew_and_put_back():
    adapter, back = make(max_episode_steps=4), make(max_episode_steps=4)
    first = adapter.reset().obs
    actions = np.arange(25, dtype=np.int32).reshape(5, 5) % 2
    outputs = [adapter.step(action) for action in actions]
    assert [output.truncated.all() for output in outputs] == [False, False, False, True, False]
    assert outputs[4].is_first.all() and not np.array_equal(outputs[4].obs, first)
    back.put_back(adapter.state())
    for action in actions:
        expected, output = adapter.step(action), back.step(action)
        assert all(np.array_equal(a, b) for a, b in zip(expected, output, strict=True))


def test_wrong_actions_and_options_are_told():
    adapter = make(2)
    adapter.reset()
    with pytest.raises(ActionError, match="action"):
        adapter.step(np.array([0, 2], np.int32))
    with pytest.raises(UsageError, match="max_episode_steps=0 must be a whole number"):
        make(max_episode_steps=0)
    with pytest.raises(UsageError, match="has no option 'rtt_ms'"):
        make(rtt_ms=3)
    assert sebulba.env_spec(CART_POLE).name == CART_POLE


def test_the_experiment_keeps_each_training_and_repeats_none(monkeypatch, tmp_path):
    trainings = []

    def trained(env, num_envs, seed):
        trainings.append((env, num_envs, seed))
        figures = dict.fromkeys(("env_steps", "seconds", "cpu_s", "peak_mb"), num_envs + seed)
        return {"env": env, "num_envs": num_envs, "seed": seed, "is_reached": seed == 0, **figures}

    monkeypatch.setattr(cart_pole, "trained", trained)
    kept, drawn = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--sizes", "2", "64", "--json", str(kept), "--png", str(drawn)]
    for seeds in ("1", "2"):
        assert cart_pole.main(["--seeds", seeds, *words]) == 0
    assert len(trainings) == len(set(trainings)) == 8
    assert len(json.loads(kept.read_text())["runs"]) == 8 and drawn.stat().st_size > 1000
    with pytest.raises(UsageError, match=r"sizes=3 must divide 64; use 16"):
        cart_pole.main(["--sizes", "3", "--json", str(kept)])

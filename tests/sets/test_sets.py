"""Sets of environments: which are drawn, how often, and what is told of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare
from sebulba_sets.environments import ENVIRONMENTS

import sebulba
from sebulba import UsageError
from sebulba.configs.experiment import EnvConfig
from sebulba.envs.policy_view import as_played
from tests.support.loop_helpers import make_tiny_loop
from tests.support.set_members import noted

HERE = "tests.support.set_members"


class Set:
    """The options of a set whose members write into one log."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"

    def env(self, name: str, kind: str = "Member", **options: Any) -> Any:
        return f"{HERE}:{kind}", {"name": name, "log": str(self.log), **options}

    def envs(self, names: Iterable[str], **options: Any) -> dict[str, Any]:
        return {name: self.env(name, **options) for name in names}


@pytest.fixture
def of(tmp_path: Path) -> Set:
    return Set(tmp_path)


def made(kind: str, options: dict[str, Any], num_envs: int = 8, seed: int = 0) -> Any:
    """Return a vector, as a factory of the id ``sets:KIND`` makes it."""
    parts = ENVIRONMENTS[kind].parts(options, None, 60.0)
    return parts.make(num_envs, list(range(seed, seed + num_envs)))


def play(adapter: Any, num_steps: int, action: int = 0) -> list[Any]:
    outputs = []
    for _ in range(num_steps):
        outputs.append(adapter.step(np.full(adapter.num_envs, action, np.int32)))
    return outputs


def test_the_spec_is_that_of_the_members(of: Set) -> None:
    for kind in ("Member", "Parts"):
        env = of.env("a", kind)
        options = {"envs": {"a": env}, "test": of.envs("z", kind=kind)}
        own = ENVIRONMENTS["split"].parts(options, None, 60.0).make_spec()
        expected = sebulba.env_spec(env[0], **env[1])
        assert (own.observation_space, own.action_space) == (
            expected.observation_space,
            expected.action_space,
        )
        adapter = made("split", options)
        assert adapter.spec == own
        first = adapter.reset()
        assert "sets_env" not in first.obs
        adapter.close()


def test_draws_follow_the_prior(of: Set) -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    adapter = made("prior", {"envs": of.envs("abc"), "weights": weights}, num_envs=32)
    adapter.reset()
    play(adapter, 120)  # every second row is a reset
    adapter.close()
    counts = Counter(noted(of.log, "reset"))
    total = sum(counts.values())
    assert total == 32 * 61
    expected = [total * weight for weight in weights.values()]
    assert chisquare([counts[n] for n in "abc"], expected).pvalue > 0.01
    assert chisquare([counts[n] for n in "abc"], [total / 3] * 3).pvalue < 1e-6


def test_a_prior_is_over_draws_and_means_are_over_episodes(of: Set) -> None:
    envs = {"short": of.env("short", pays=1.0), "long": of.env("long", pays=5.0, length=100)}
    options = {"envs": envs, "weights": {"short": 0.5, "long": 0.5}}
    adapter = made("prior", options, num_envs=16)
    adapter.reset()
    play(adapter, 1500)
    np.testing.assert_array_equal(adapter.results.means(), [1.0, 5.0])
    drawn = Counter(noted(of.log, "reset"))
    assert chisquare([drawn["short"], drawn["long"]]).pvalue > 0.01
    ended = dict(zip(("short", "long"), adapter.results.episodes, strict=True))
    unfinished = drawn["long"] - ended["long"]
    assert 0 <= unfinished <= 16 and drawn["short"] - ended["short"] <= 16
    assert adapter.metrics_of([adapter, adapter]) == {
        **{"return/short": 1.0, "return/long": 5.0},
        **{f"episodes/{name}": 2 * count for name, count in ended.items()},
        **{"weight/short": 0.5, "weight/long": 0.5},
    }
    adapter.close()


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_neither_makes_nor_resets_what_is_for_tests(of: Set, processes: bool) -> None:
    options = {"envs": of.envs("ab"), "test": of.envs("yz"), "processes": processes}
    for generation in range(2):
        adapter = made("split", options, num_envs=4, seed=100 * generation)
        adapter.reset()
        play(adapter, 40)
        state = adapter.state()
        assert isinstance(state, bytes)
        adapter.put_back(state)
        play(adapter, 10)
        adapter.close()
    assert set(noted(of.log, "made")) == set(noted(of.log, "reset")) == {"a", "b"}
    of.log.unlink()
    adapter = as_played(made("split", options, num_envs=4))
    adapter.reset()
    play(adapter, 40)
    adapter.close()
    assert set(noted(of.log, "reset")) == {"y", "z"}


def test_a_curriculum_opens_what_is_next_and_nothing_before(of: Set) -> None:
    envs = of.envs(["easy", "middle", "hard"], by_action=True)
    after = {"middle": "easy", "hard": ["easy", "middle"]}
    adapter = made("curriculum", {"envs": envs, "after": after, "gate": 0.8}, num_envs=4)
    adapter.reset()
    play(adapter, 60, action=0)
    assert set(noted(of.log, "reset")) == {"easy"}, "from the first draw on"
    np.testing.assert_array_equal(adapter.weights, [1, 0, 0])
    play(adapter, 200, action=1)
    np.testing.assert_allclose(adapter.weights, [1 / 3] * 3)
    order = [*dict.fromkeys(noted(of.log, "reset"))]
    assert order == ["easy", "middle", "hard"]
    play(adapter, 400, action=0)
    np.testing.assert_allclose(adapter.weights, [1 / 3] * 3), "what is open stays open"
    adapter.close()


def test_adversarial_weights_go_to_the_greatest_regret(of: Set) -> None:
    pays = {"a": 0.9, "b": 0.2, "c": 0.5}
    envs = {name: of.env(name, pays=pay) for name, pay in pays.items()}
    adapter = made("adversarial", {"envs": envs, "best": 1.0, "step_size": 0.02}, num_envs=8)
    adapter.reset()
    play(adapter, 200)
    a, b, c = adapter.weights
    assert b > 0.9 and b > c >= a == pytest.approx(0.1 / 3, rel=0.1)
    adapter.close()
    # With other returns to be had, the regret of another is the greatest.
    best = {"a": 3.0, "b": 0.3, "c": 0.6}
    adapter = made("adversarial", {"envs": envs, "best": best, "step_size": 0.02}, num_envs=8)
    adapter.reset()
    play(adapter, 200)
    assert adapter.weights.argmax() == 0
    adapter.close()


def test_a_saved_set_goes_on_exactly(of: Set) -> None:
    envs = {"easy": of.env("easy", length=3), "hard": of.env("hard", length=5)}
    options = {"envs": envs, "after": {"hard": "easy"}, "gate": 0.5}
    first = made("curriculum", options, num_envs=4)
    first.reset()
    play(first, 60)
    state = first.state()
    second = made("curriculum", options, num_envs=4)
    second.put_back(state)
    own, other = play(first, 80), play(second, 80)
    for a, b in zip(own, other, strict=True):
        np.testing.assert_array_equal(a.obs, b.obs)
        np.testing.assert_array_equal(a.episode_end, b.episode_end)
    assert first.weights.tolist() == second.weights.tolist() == [0.5, 0.5]
    assert str(first.results.state()) == str(second.results.state())
    first.close()
    second.close()


def test_metrics_reach_the_records_of_a_run(of: Set) -> None:
    parts = ENVIRONMENTS["split"].parts({"envs": of.envs("ab"), "test": of.envs("z")}, None, 60.0)
    loop, _ = make_tiny_loop(parts.make)
    with loop:
        metrics = loop.train(total_env_steps=512, steps_per_cycle=8).metrics
    assert metrics["return/a"] == metrics["return/b"] == 1.0
    assert metrics["weight/a"] == metrics["weight/b"] == 0.5
    assert metrics["episodes/a"] + metrics["episodes/b"] >= metrics["episodes"] > 100
    assert "return/z" not in metrics


ONE = {"a": ("x", {})}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("split", {}, "needs the option 'envs'; use a list of ids"),
    ("split", {"envs": ["CartPole-v1"]}, "needs the option 'test'; use test"),
    ("split", {"envs": ["CartPole-v1"], "test": ["CartPole-v1"]}, "is in envs and in test"),
    ("split", {"envs": [], "test": ["CartPole-v1"]}, r"envs={} is empty; use"),
    ("split", {"envs": 3, "test": ["CartPole-v1"]}, "envs=3 must be a list of ids"),
    ("split", {"envs": ["Pong-v5"], "test": ["CartPole-v1"]}, "comes as vectors only"),
    ("split", {"envs": ["CartPole-v1"], "test": ["Acrobot-v1"]}, ""),
    ("prior", {"envs": ["CartPole-v1"], "weights": {"Cart": 1.0}}, "not in the set"),
    ("prior", {"envs": ["CartPole-v1"], "weights": {"CartPole-v1": 0.4}}, "of sum 1, not 0.4"),
    ("prior", {"envs": ["CartPole-v1"], "weights": {"CartPole-v1": -1}}, "of 0 or more, not -1"),
    ("prior", {"envs": ["CartPole-v1"], "weights": {}}, "lacks 'CartPole-v1'"),
    ("prior", {"envs": ["CartPole-v1"], "weights": {"CartPole-v1": "1"}}, "a finite number"),
    ("prior", {"envs": ["CartPole-v1"], "wieghts": {}}, "has no option 'wieghts'.*weights"),
    ("curriculum", {"envs": ["CartPole-v1"], "after": {"x": "y"}, "gate": 1}, "not in the set"),
    ("curriculum", {"envs": ["CartPole-v1"], "after": {"CartPole-v1": "CartPole-v1"}, "gate": 1},
     "wait for itself; let one of"),
    ("curriculum", {"envs": ["CartPole-v1"], "after": 7, "gate": 1}, "must be a dict"),
    ("adversarial", {"envs": ["CartPole-v1"], "step_size": 0}, "step_size=0.0 must be above 0"),
    ("adversarial", {"envs": ["CartPole-v1"], "best": {}}, "lacks 'CartPole-v1'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "words"), BAD, ids=[f"{k}-{w}" for k, _, w in BAD])
def test_wrong_options_are_refused_in_words(kind: str, options: dict, words: str) -> None:
    if not words:  # another space shows where it is drawn
        adapter = as_played(made(kind, options, num_envs=1))
        with pytest.raises(UsageError, match=r"'Acrobot-v1' is not .* pad them"):
            adapter.reset()
        return
    with pytest.raises(UsageError, match=words):
        ENVIRONMENTS[kind].parts(options, None, 60.0)


def test_members_of_other_spaces_are_refused(of: Set) -> None:
    envs = {"a": of.env("a"), "b": of.env("b", "Wider")}
    adapter = made("prior", {"envs": envs, "weights": {"a": 0.0, "b": 1.0}})
    with pytest.raises(UsageError, match=r"of 'b' is not .* of 'a'; environments of a set"):
        adapter.reset()
    adapter.close()


@pytest.mark.slow
def test_a_run_by_the_id_evaluates_the_test_split_and_resumes(of: Set, tmp_path: Path) -> None:
    options = {"envs": of.envs("ab", pays=1.0), "test": of.envs("yz", pays=7.0)}
    env = EnvConfig("sets:split", options={k: repr(v) for k, v in options.items()})
    run = tmp_path / "run"
    given = dict(
        env=env,
        num_envs=8,
        total_env_steps=4096,
        eval_every_env_steps=2048,
        anneal_learning_rate=False,
    )
    result = sebulba.train("ppo", run_dir=str(run), eval_episodes=8, eval_num_envs=4, **given)
    assert result.metrics["return/a"] == result.metrics["return/b"] == 1.0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["eval_return_mean"] for r in records if "eval_return_mean" in r][-1] == 7.0
    before = result.metrics["episodes/a"]
    again = sebulba.resume(run, total_env_steps=8192, trust=True)
    assert again.metrics["episodes/a"] > before
    # Inferencers are a round ahead of what was learned from.
    assert again.metrics["episodes/a"] + again.metrics["episodes/b"] >= again.metrics["episodes"]

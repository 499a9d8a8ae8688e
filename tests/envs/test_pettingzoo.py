"""PettingZoo, AEC and Parallel: ids, trees, masks, ends, copies, training, evaluation, resuming."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba import ActionError, EnvError, UsageError
from sebulba.commands import cli
from sebulba.envs import env_source
from sebulba.envs.multi import pettingzoo_env
from sebulba.tools.check.env_players import RandomActions, fingerprint

pytest.importorskip("pettingzoo", reason="the package pettingzoo is not installed")

from pettingzoo import ParallelEnv

from tests.support import pettingzoo_echo

HAS_PYGAME = importlib.util.find_spec("pygame") is not None
TICTACTOE = "pettingzoo:classic/tictactoe_v3"
needs_pygame = pytest.mark.skipif(not HAS_PYGAME, reason="the package pygame is not installed")
ECHOES = ("EchoParallel", "EchoAEC", "MaskInInfo")


def echo(name: str) -> str:
    return f"tests.support.pettingzoo_echo:{name}"


def outputs(adapter: Any, steps: int, seed: int = 0) -> Iterator[Any]:
    """Yield what ``steps`` random steps return."""
    choose = RandomActions(adapter.spec, adapter.num_envs, seed)
    output = adapter.reset()
    for _ in range(steps):
        output = adapter.step(choose(output))
        yield output


def play(adapter: Any, steps: int, seed: int = 0) -> list:
    """Return the fingerprints of ``steps`` random steps."""
    return [fingerprint(output) for output in outputs(adapter, steps, seed)]


@pytest.mark.parametrize("name", ECHOES)
def test_agents_with_equal_spaces_are_a_group_and_masks_are_legal_actions(name):
    spec = sebulba.env_spec(echo(name))
    assert {n: g.slots for n, g in spec.groups.items()} == {
        "scout": ("scout_0", "scout_1"),
        "anchor": ("anchor",),
    }
    scout, anchor = spec.groups["scout"].spec, spec.groups["anchor"].spec
    assert scout.legal_actions == "action_mask" and anchor.legal_actions is None
    assert scout.observation_space["action_mask"] == spaces.MultiBinary(4)
    assert sebulba.env_spec(getattr(pettingzoo_echo, name)()).groups == {
        **{n: g for n, g in sebulba.env_spec(getattr(pettingzoo_echo, name)).groups.items()}
    }


@pytest.mark.parametrize("name", ECHOES)
def test_an_action_that_its_mask_forbids_is_refused(name):
    adapter = sebulba.make_env_factory(echo(name))(4, [1, 2, 3, 4])
    output, choose = adapter.reset(), RandomActions(adapter.spec, 4, 0)
    for _ in range(10):
        action = choose(output)
        acting, mask = output.acting["scout"], output.obs["scout"]["action_mask"]
        if acting.any():
            wrong = {**action, "scout": mask.argmin(axis=-1).astype(np.int32)}
            with pytest.raises(ActionError, match=r"of agent .scout_\d. of environment \d is not"):
                adapter.step(wrong)
        output = adapter.step(action)
    adapter.close()


@pytest.mark.parametrize("name", ECHOES)
def test_a_state_goes_on_exactly_in_another_adapter(name):
    factory = sebulba.make_env_factory(echo(name))
    one, other = factory(3, [5, 6, 7]), factory(3, [8, 9, 10])
    *_, last = outputs(one, 23)
    state = one.state()
    assert isinstance(state, bytes), state
    other.put_back(state)
    choose = RandomActions(one.spec, 3, 1)
    for _ in range(40):
        chosen = choose(last)
        last, again = one.step(chosen), other.step(chosen)
        assert fingerprint(last) == fingerprint(again)
    one.close(), other.close()


class Forgetful(pettingzoo_echo.EchoParallel):
    """What it observes depends on more than the seed of the episode."""

    made = 0

    def observe(self, agent: str) -> Any:
        seen = super().observe(agent)
        type(self).made += 1
        return seen if isinstance(seen, dict) else seen + np.float32(self.made % 7)


def test_an_environment_whose_seed_does_not_decide_all_is_not_put_back():
    adapter = sebulba.make_env_factory(Forgetful)(1, [3])
    play(adapter, 5)
    state = adapter.state()
    assert isinstance(state, str) and "let the seed of reset decide all chance" in state
    adapter.close()


@pytest.mark.slow
def test_workers_play_the_same():
    factories = [
        sebulba.make_env_factory(echo("EchoAEC"), vectorization=kind) for kind in ("sync", "async")
    ]
    adapters = [factory(2, [1, 2]) for factory in factories]
    assert play(adapters[0], 30) == play(adapters[1], 30)
    for adapter in adapters:
        adapter.close()


# What environments say wrong.


class Wrong(pettingzoo_echo.EchoParallel):
    def __init__(self, wrong: Any) -> None:
        self.wrong = wrong

    def step(self, actions: dict) -> Any:
        return self.wrong(*super().step(actions))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda *r: r[:4], "must return a tuple of 5 (observations, rewards"),
        (lambda o, r, *x: (o, {**r, "anchor": np.nan}, *x), "agent 'anchor' must be a finite"),
        (lambda o, r, *x: (o, {**r, "x": 1.0}, *x), "rewards name 'x'"),
        (lambda o, *x: ({**o, "anchor": np.zeros(3)}, *x), "'anchor' must be an array of shape"),
        (lambda o, r, a, *x: (o, r, {"anchor": 1}, *x), "terminated of agent 'anchor' must be"),
    ],
)
def test_what_a_parallel_environment_returns_wrong_is_refused_by_name(wrong, words):
    adapter = sebulba.make_env_factory(lambda: Wrong(wrong))(2, [1, 2])
    with pytest.raises(EnvError) as raised:
        play(adapter, 3)
    assert words in str(raised.value)
    assert "raised by environment 0, step 1" in raised.value.__notes__
    adapter.close()


class WrongReset(pettingzoo_echo.EchoParallel):
    def reset(self, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed, options)[0]


class Nobody(pettingzoo_echo.EchoParallel):
    possible_agents = ()


class Spaced(pettingzoo_echo.EchoParallel):
    def observation_space(self, agent: str) -> Any:
        return spaces.Text(3)


def test_what_cannot_be_adapted_is_refused_by_name():
    with pytest.raises(UsageError, match="has no possible_agents"):
        sebulba.env_spec(Nobody)
    with pytest.raises(UsageError, match=r"node .scout_0.: .*Text"):
        sebulba.env_spec(Spaced)
    adapter = sebulba.make_env_factory(WrongReset)(1, [0])
    with pytest.raises(EnvError, match=r"must return a tuple of 2 \(observations, infos\)"):
        adapter.reset()
    adapter.close()
    one = pettingzoo_echo.EchoParallel()
    with pytest.raises(UsageError, match="the same environment twice"):
        sebulba.make_env_factory(lambda: one)(2, [0, 1])


# Ids.


def test_ids_are_those_of_the_installed_families():
    known = pettingzoo_env.pettingzoo_ids()
    assert {"classic/tictactoe_v3", "classic/connect_four_v3", "butterfly/pistonball_v6"} <= known
    for env, words in {
        "pettingzoo:classic/tictacto_v3": "the nearest are classic/tictactoe_v3",
        "pettingzoo:chess": "is not an id of pettingzoo",
    }.items():
        with pytest.raises(UsageError, match=words):
            sebulba.make_env_factory(env)
    for options, words in (
        ({"backend": "envpool"}, "backend='envpool' does not go with"),
        ({"num_threads": 2}, "num_threads=2 is an option of envpool"),
    ):
        with pytest.raises(UsageError, match=words):
            sebulba.make_env_factory(TICTACTOE, **options)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(pettingzoo_env, "FAMILIES", {**pettingzoo_env.FAMILIES, "mpe": "nompe"})
    with pytest.raises(UsageError, match="needs the package nompe, which is not installed"):
        sebulba.make_env_factory("pettingzoo:mpe/simple_spread_v3")
    monkeypatch.setitem(sys.modules, "pygame", None)  # as if it were not there
    for name in [one for one in sys.modules if one.startswith("pettingzoo.classic.tictactoe")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"needs the package pygame.*pip install pygame"):
        sebulba.env_spec(TICTACTOE)


def test_without_pettingzoo_the_extra_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        pettingzoo_env.importlib.util, "find_spec", lambda n: None if n == "pettingzoo" else find(n)
    )
    with pytest.raises(UsageError, match=r"pip install 'sebulba\[pettingzoo\]'"):
        sebulba.make_env_factory(TICTACTOE)


@needs_pygame
def test_an_id_is_played_and_its_source_is_told():
    source = env_source(TICTACTOE)
    assert source.backend == "pettingzoo" and "pettingzoo" in source.versions
    adapter = sebulba.make_env_factory(TICTACTOE)(4, [1, 2, 3, 4])
    assert adapter.spec.groups["player"].slots == ("player_1", "player_2")
    assert play(adapter, 40) == play(sebulba.make_env_factory(TICTACTOE)(4, [1, 2, 3, 4]), 40)
    adapter.close()
    with pytest.raises(UsageError, match=r"cannot be made: TypeError.*'size'"):
        sebulba.env_spec(TICTACTOE, size=4)


class Steady(ParallelEnv):
    """Two agents who act in every step."""

    metadata = {"name": "steady"}  # noqa: RUF012
    possible_agents = ("a_0", "a_1")
    all_act = True

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 10, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Box(-1, 1, (2,), np.float32)

    def seen(self) -> dict:
        return {agent: np.array([self.t], np.float32) for agent in self.possible_agents}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return self.seen(), {}

    def step(self, actions: dict) -> Any:
        assert all(action.shape == (2,) for action in actions.values())
        self.t += 1
        cut = dict.fromkeys(self.agents, self.t == 5)
        self.agents = [] if self.t == 5 else self.agents
        none = dict.fromkeys(cut, False)
        return self.seen(), dict.fromkeys(cut, 1.0), none, cut, {}


def test_all_act_saves_the_bookkeeping():
    adapter = sebulba.make_env_factory(Steady)(2, [0, 1])
    assert not adapter.spec.groups["a"].waits
    output, choose = adapter.reset(), RandomActions(adapter.spec, 2, 0)
    ends = []
    for _ in range(12):
        output = adapter.step(choose(output))
        ends.append(bool(output.truncated["a"].all()))
        assert output.acting == ()
    assert [i for i, end in enumerate(ends) if end] == [4, 10]
    adapter.close()


class Screen(Steady):
    """Both are shown the same picture, in two copies."""

    same_observation = True

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 255, (20, 16, 1), np.uint8)

    def seen(self) -> dict:
        return {a: np.full((20, 16, 1), self.t, np.uint8) for a in self.possible_agents}


class TwoScreens(Screen):
    def seen(self) -> dict:
        shown = super().seen()
        shown["a_1"] = shown["a_1"] + (self.t == 3)
        return shown


class OneIsBlind(Screen):
    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 255, (20, 16 - (agent == "a_1"), 1), np.uint8)


class Masks(pettingzoo_echo.EchoParallel):
    same_observation = True

    def observation_space(self, agent: str) -> Any:
        return pettingzoo_echo.MASKED


def test_what_all_are_shown_is_there_once_and_each_knows_its_number():
    adapter = sebulba.make_env_factory(Screen)(2, [0, 1])
    assert adapter.spec.groups["a"].slots == ("a_0", "a_1")
    output, choose = adapter.reset(), RandomActions(adapter.spec, 2, 0)
    for t in range(1, 6):
        output = adapter.step(choose(output))
        assert output.obs["common"].shape == (2, 20, 16, 1)
        np.testing.assert_array_equal(output.obs["common"][:, 0, 0, 0], t)
        np.testing.assert_array_equal(output.obs["a"]["observation"], [[0, 1], [0, 1]])
    again = sebulba.make_env_factory(Screen)(2, [0, 1])
    again.put_back(adapter.state())
    outputs = [one.step(choose(output)) for one in (adapter, again)]
    np.testing.assert_array_equal(*(one.obs["common"] for one in outputs))
    for one in (adapter, again):
        one.close()


def test_what_all_are_shown_must_be_the_same():
    adapter = sebulba.make_env_factory(TwoScreens)(1, [0])
    with pytest.raises(EnvError, match="agents 'a_0' and 'a_1' observe different things"):
        play(adapter, 4)
    adapter.close()
    with pytest.raises(UsageError, match=r"agent 'a_0' observes Box.* and 'a_1' Box"):
        sebulba.env_spec(OneIsBlind)
    with pytest.raises(UsageError, match="agents have their own action_mask"):
        sebulba.env_spec(Masks)


# The command line.

ONE_DEVICE = ("--inference-devices", "0", "--update-devices", "0")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_is_trained_resumed_and_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    env = TICTACTOE if HAS_PYGAME else echo("EchoAEC")
    words = ["cartpole", "--env.id", env, "--agent.torso.hidden-sizes", "8", "--num-envs", "4"]
    words += ["--num-inferencers-per-device", "1", "--steps-per-cycle", "8"]
    words += ["--no-anneal-learning-rate", "--run-dir", "run", *ONE_DEVICE]
    words += ["--eval-every-env-steps", "32", "--eval-episodes", "2"]
    assert cli.main(["train", *words, "--total-env-steps", "64"]) == 0
    assert cli.main(["resume", "run", "--total-env-steps", "128"]) == 0
    printed = capsys.readouterr().out
    assert "new episodes" not in printed
    assert cli.main(["eval", "run", "--episodes", "2"]) == 0
    assert cli.main(["eval", "run", "--best", "--episodes", "2"]) == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    best = max(record.get("eval_return_mean", -math.inf) for record in records)
    kept = json.loads(Path("run/best_policy/evaluation.json").read_text())
    assert kept["episode_return_mean"] == best
    for folder in ("policy", "best_policy"):
        members = {path.name for path in Path("run", folder).iterdir() if path.is_dir()}
        assert members == ({"player"} if env == TICTACTOE else {"scout", "anchor"})


# Who is there, and what is legal, as environments of others say it.


class Steps(ParallelEnv):
    """Three agents; who ends in the second step, and who stays in ``agents`` then, are given."""

    metadata = {"name": "steps"}  # noqa: RUF012
    possible_agents = ("a", "b", "c")

    def __init__(self, ended: Any = "", stay: Any = "abc", masks: str = "") -> None:
        self.ended, self.stay, self.masks = ended, stay, masks

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 100, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def told(self, when: str) -> tuple[dict, dict]:
        info = {"action_mask": np.int8([0, 1, 0])} if when in self.masks else {}
        names = self.possible_agents
        return {name: np.float32([self.t]) for name in names}, dict.fromkeys(names, info)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return self.told("reset")

    def step(self, actions: dict) -> Any:
        self.t += 1
        flags = {name: self.t == 2 and name in self.ended for name in self.possible_agents}
        if self.t == 2:
            self.agents = list(self.stay)
        seen, infos = self.told("step")
        return seen, dict.fromkeys(flags, 1.0), flags, dict.fromkeys(flags, False), infos


def begun(*given: str) -> Any:
    env = pettingzoo_env.PettingZooEnv(lambda: Steps(*given))
    env.reset(seed=0)
    env.step(dict.fromkeys("abc", 0))
    return env


def test_an_agent_that_ends_and_stays_in_agents_is_taken_as_gone_and_named():
    env = begun("a", "abc")
    with pytest.warns(UserWarning, match="'a' ended and stays in agents"):
        seen, _, terminated, _ = env.step(dict.fromkeys("abc", 0))
    assert seen.keys() == {"a", "b", "c"} and terminated["a"], "with its last observation"
    for _ in range(3):
        assert env.step(dict.fromkeys("bc", 0))[0].keys() == {"b", "c"}
    assert env.reset(seed=1).keys() == {"a", "b", "c"}


def test_agents_that_leave_without_a_flag_are_named():
    with pytest.raises(EnvError, match="agents is empty, and 'b', 'c' neither terminated"):
        begun("a", "").step(dict.fromkeys("abc", 0))


def test_masks_in_the_infos_of_reset_are_heeded_without_an_attribute():
    spec = sebulba.env_spec(lambda: Steps("", "abc", "reset step"))
    (group,) = spec.groups.values()
    assert group.spec.legal_actions == "action_mask"
    seen = pettingzoo_env.PettingZooEnv(lambda: Steps("", "abc", "reset step")).reset(seed=0)
    assert seen["a"]["action_mask"].tolist() == [0, 1, 0]


def test_masks_that_only_steps_have_are_not_passed_over():
    with pytest.raises(EnvError, match=r"agent '.' has an action_mask in step.*infos of reset"):
        begun("", "abc", "step")


@pytest.mark.parametrize(
    ("agents", "names"),
    [
        ((0, 1, 2), ["agent_0", "agent_1", "agent_2"]),
        (("red team", "b.1", "b/1"), ["red_team", "b_1", "b_1_"]),
        ((("r", 1), ("r", 2), "c"), ["r_1", "r_2", "c"]),
    ],
)
def test_agents_whose_names_a_tree_cannot_have_are_given_others(agents, names):
    class Named(Steps):
        possible_agents = agents

        def step(self, actions: dict) -> Any:
            assert {*actions} == {*agents}
            return super().step(actions)

    env = pettingzoo_env.PettingZooEnv(lambda: Named((), agents))
    assert [*env.tree.members] == names
    assert [*env.reset(seed=0)] == names
    seen, rewards, terminated, _ = env.step(dict.fromkeys(names, 0))
    assert [*seen] == [*rewards] == [*terminated] == names

    assert env.step(dict.fromkeys(names, 1))[1] == dict.fromkeys(names, 1.0)

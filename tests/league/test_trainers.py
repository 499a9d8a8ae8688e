"""Trainers that nest: best responses, populations, curricula; and ``--trainer``."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sebulba_league import (
    PSRO,
    Curriculum,
    League,
    LeagueConfig,
    LeaguePopulationConfig,
    Population,
    PopulationConfig,
    Rollout,
    SelfPlay,
)
from sebulba_league.matchmakers import MATCHMAKERS, Standings, matchmaker_of
from sebulba_league.population import PopulationAgent

import sebulba
from sebulba import UsageError
from sebulba.agents.configs import (
    DQNConfig,
    ImpalaConfig,
    MultiAgentConfig,
    PPOConfig,
    ReplayConfig,
    make_agent,
)
from sebulba.agents.ppo import PPO as PPOAgent
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.configs.presets import PRESETS
from sebulba.runs.read_config import parse
from tests.league.games import CYCLE, PPO, Turns
from tests.support.loop_helpers import leaves_equal
from tests.support.plugin_files import install_project

ROOT = Path(__file__).parents[2]
ALONE: Any = CYCLE | {"schedule": "lockstep"}
SMALL: dict[str, Any] = {"history": 6, "opponents": 3, "mirrors": 1, "snapshot_every": 512}
LEAGUES = ROOT / "packages/sebulba-league/pyproject.toml"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Have the package's own metadata come first on Python's path."""
    install_project(tmp_path / "site", LEAGUES.read_text())
    monkeypatch.syspath_prepend(tmp_path / "site")


class Bandit(gymnasium.Env):
    """Episodes of one step, which pays for action 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action), True, False, {}


class Long(Bandit):
    """The same, which pays less."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward / 2, *rest


def rollout_of(env: Any, agent: Any = PPO, num_envs: int = 16, **options: Any) -> Rollout:
    options = ALONE | {"steps_per_cycle": 8, "rounds": 4} | options
    return Rollout(env, agent, num_envs=num_envs, **options)


# Best responses.


def known(rates: list[float], payoff: Any = None) -> Standings:
    """Return the standings of snapshots that the learner beats so often."""
    results = 1e6 * np.stack([np.array(rates), 0 * np.array(rates), 1 - np.array(rates)], axis=-1)
    table = np.full((len(rates), len(rates)), 0.5) if payoff is None else payoff
    return Standings(np.arange(len(rates)), results[:, None].repeat(2, 1), table)


def test_best_responses_meet_the_equilibrium_and_sometimes_others():
    payoff = np.array([[0.5, 0.0, 0.2], [1.0, 0.5, 0.9], [0.8, 0.1, 0.5]])
    chances = MATCHMAKERS["psro"](known([0.5, 0.5, 0.5], payoff))
    np.testing.assert_allclose(chances, [0.1 / 3, 0.9 + 0.1 / 3, 0.1 / 3], atol=1e-6)


def test_a_curriculum_opens_a_snapshot_when_all_older_are_beaten():
    opened = MATCHMAKERS["curriculum"]
    np.testing.assert_allclose(opened(known([0.9, 0.6, 0.9])), [0.5, 0.5, 0])
    np.testing.assert_allclose(opened(known([0.9, 0.8, 0.9])), [1 / 3] * 3)
    np.testing.assert_allclose(opened(known([0.9, 0.6, 0.9])._replace(gate=0.95)), [1, 0, 0])


def halves(standings: Standings) -> np.ndarray:
    return np.full(len(standings.generation), 0.5)


def second(standings: Standings) -> np.ndarray:
    return (standings.generation == 1).astype(float)


def test_a_matchmaker_of_ones_own_is_asked_and_has_to_return_chances():
    here = "tests.league.test_trainers"
    assert matchmaker_of(f"{here}:second")(known([0.1, 0.2])).tolist() == [0, 1]
    with pytest.raises(UsageError, match=r"halves' returned \[0.5, 0.5, 0.5\]; .* the sum 1"):
        matchmaker_of(f"{here}:halves")(known([0.1, 0.2, 0.3]))
    assert "matchmaker" in LeagueConfig({"*": PPO}, matchmaker=f"{here}:second").named_code()[-1]


@pytest.mark.parametrize("name", sorted(MATCHMAKERS))
def test_an_empty_history_is_said_in_words(name):
    with pytest.raises(UsageError, match="the history is empty"):
        MATCHMAKERS[name](known([0.5, 0.5])._replace(generation=np.array([-1, -1])))


@pytest.mark.slow
def test_best_responses_begin_anew_after_each_snapshot_and_play_no_mirrors():
    trainer = PSRO(SelfPlay(rollout_of(Turns, num_envs=16), **SMALL), restart=1.0)
    with trainer:
        trainer.train()
        state = trainer.rollout.result().state
        agent: Any = trainer.rollout.loop.agent
        assert (agent.lanes.opponents, agent.lanes.mirrors) == (4, 0)
        assert agent.config.matchmaker == "psro"
        history = jax.device_get(state.experience.history)
        assert state.experience.generation[:2].tolist() == [0, 1]
        # The snapshot is of networks that had learned; those of now have not.
        assert int(state.experience.made) == 2 and not np.any(state.experience.results)
        now = jax.device_get(agent.acting_networks(state.networks, state.experience))
        assert not leaves_equal(jax.tree.map(lambda x: x[1], history), now)
        assert not any(np.any(x) for x in jax.tree.leaves(state.opt))


def test_a_league_adds_anchors_to_those_of_its_self_play():
    inner = SelfPlay(rollout_of(Turns), **SMALL, anchors={"any": "legal-random"})
    config: Any = League(inner, "main").rollout.config
    assert config.anchors == {"any": "legal-random"}
    config = League(inner, "main", {"own": "m:own"}).rollout.config
    assert list(config.anchors) == ["any", "own"]


# Populations.


WITH_ENTROPY = dataclasses.replace(PPO, entropy_coefficient=0.1)


def population_of(env: Any = Bandit, agent: Any = WITH_ENTROPY, **fields: Any) -> PopulationAgent:
    given: dict[str, Any] = {"vary": ("learning_rate", "entropy_coefficient"), "size": 4}
    agent = make_agent(sebulba.env_spec(env), PopulationConfig({"member": agent}, **given | fields))
    assert isinstance(agent, PopulationAgent)
    return agent


@pytest.mark.slow
def test_members_learn_as_agents_with_their_hyper_parameters_do(monkeypatch):
    """The same networks and rows, with numbers that are arrays and with numbers of a config."""
    seen = []

    def check(self, networks, opt, experience, key):
        """Compare the losses and the optimizer steps of all members with those of agents alone."""
        result = whole(self, networks, opt, experience, key)
        for m in range(self._size):
            own = {name: float(values[m]) for name, values in first.items()}
            alone = PPOAgent(self.spec, dataclasses.replace(WITH_ENTROPY, **own))
            alone = alone.for_run(self._run)
            mine = networks[m], opt.members[m], experience.members[m], jax.random.key(3)
            theirs, grads = jax.value_and_grad(alone.loss, has_aux=True)(*mine)
            ours, own_grads = jax.value_and_grad(self._with(opt.varied, m).loss, has_aux=True)(
                *mine
            )
            stepped = self._with(opt.varied, m).optimize(networks[m], opt.members[m], grads)
            expected = alone.optimize(networks[m], opt.members[m], grads)
            pairs = (theirs[0], ours[0]), (grads, own_grads), (stepped[0], expected[0])
            for pair in pairs:
                jax.debug.callback(lambda *x: seen.append(x), *map(jax.tree.leaves, pair))
        return result

    agent = population_of()
    first = jax.device_get(agent._first_values())
    whole = PopulationAgent.loss
    monkeypatch.setattr(PopulationAgent, "loss", check)
    with sebulba.GymnasiumLoop(Bandit, agent, 16, **ALONE, seed=1) as loop:
        loop.run(loop.new_state(0, 8), 1, 8)
    jax.effects_barrier()
    assert len(seen) == 4 * 3 * 2  # two minibatches
    for ours, theirs in seen:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), ours, theirs
        )
    assert len(set(first["learning_rate"].tolist())) == 4
    assert max(first["learning_rate"]) == pytest.approx(3 * PPO.learning_rate, rel=1e-5)


@pytest.mark.slow
def test_the_worst_take_over_from_the_best_and_the_best_is_the_policy():
    agent = population_of(replaced=0.25)
    with sebulba.GymnasiumLoop(Bandit, agent, 16, **ALONE, seed=1) as loop:
        state = loop.run(loop.new_state(0, 8), 1, 8).state
        returns = np.array([3.0, 1.0, 9.0, 5.0], np.float32)
        experience = state.experience._replace(returns=returns, episodes=np.full(4, 10, np.float32))
        state = state._replace(experience=experience)
        before = jax.device_get(state)
        after = jax.device_get(agent._exploited(state, np.random.default_rng(0)))
        best = agent.acting_networks(after.networks, after.experience)
    networks, kept = after.networks, before.networks
    assert leaves_equal(networks[1], kept[2]) and leaves_equal(
        after.opt.members[1], after.opt.members[2]
    )
    assert all(leaves_equal(networks[m], kept[m]) for m in (0, 2, 3))
    assert leaves_equal(best.networks, kept[2]) and not leaves_equal(kept[2], kept[1])
    for name, values in after.experience.varied.items():
        old = before.experience.varied[name]
        np.testing.assert_array_equal(values, after.opt.varied[name])
        np.testing.assert_array_equal(values[[0, 2, 3]], old[[0, 2, 3]])
        assert float(values[1] / old[2]) in (pytest.approx(1.2), pytest.approx(1 / 1.2))
    assert after.experience.returns.tolist() == [3, 9, 9, 5]


def test_a_population_with_the_networks_of_another_one_has_one_set_of_hyper_parameters():
    """``--from`` keeps the experience's numbers, and the optimizer state has new ones."""
    agent = population_of(size=2)
    with sebulba.GymnasiumLoop(Bandit, agent, 16, **ALONE, seed=1) as loop:
        state = loop.new_state(0, 8)
        first = jax.device_get(state.opt.varied)
        other = {name: 0.5 * values for name, values in state.experience.varied.items()}
        known = {"returns": np.float32([0, 9]), "episodes": np.full(2, 9, np.float32)}
        experience = state.experience._replace(varied=other, **known)
        state = state._replace(experience=experience)
        exploited = jax.device_get(agent._exploited(state, np.random.default_rng(0)))
        state = loop.run(state, 2, 8).state
    assert leaves_equal(jax.device_get(state.experience.varied), first)
    for name, values in exploited.experience.varied.items():
        assert values[1] == first[name][1]
        assert float(values[0] / values[1]) in (pytest.approx(1.2), pytest.approx(1 / 1.2))


def test_a_member_without_an_episode_is_neither_best_nor_replaced():
    agent = population_of()
    experience = jax.eval_shape(
        lambda key: agent.new_state(key, sebulba.RunSpec(16, 1, 8, 1)).experience, jax.random.key(0)
    )
    experience = experience._replace(
        returns=jnp.array([-5.0, 0, 0, -9]), episodes=jnp.array([1.0, 0, 0, 1])
    )
    assert agent._fitness(experience).tolist() == [-5, -np.inf, -np.inf, -9]


class Leaves(sebulba.MultiAgentEnv):
    """Agent a leaves after a step with 1, agent b after two steps with 2."""

    tree = sebulba.Population(
        {
            name: sebulba.AgentNode(
                sebulba.Obs(gymnasium.spaces.Discrete(2)), sebulba.Act(gymnasium.spaces.Discrete(2))
            )
            for name in ("a", "b")
        },
        symmetric=True,
    )

    def reset(self, *, seed: int | None = None) -> Any:
        self.t = 0
        return {"a": 0, "b": 0}

    def step(self, actions: dict) -> Any:
        self.t += 1
        if self.t == 1:
            return {"b": 1}, {"a": 1.0, "b": 1.0}, {"a": True}, {}
        return {}, {"b": 1.0}, {"b": True}, {}


@pytest.mark.slow
def test_an_episode_that_an_agent_leaves_early_counts():
    agent = population_of(Leaves, size=2)
    with sebulba.GymnasiumLoop(Leaves, agent, 8, **ALONE, seed=1) as loop:
        experience = loop.run(loop.new_state(0, 8), 1, 8).state.experience
    # Eight rows of four environments: a reset and two steps, twice, and a reset and a step.
    assert experience.episodes.tolist() == [8, 8]
    np.testing.assert_allclose(experience.returns / experience.episodes, 1.5)


def test_a_hyper_parameter_stays_where_its_rule_allows_it():
    agent = population_of(vary=("discount",), agent=dataclasses.replace(PPO, discount=0.9))
    values = np.asarray(agent._first_values()["discount"])
    np.testing.assert_allclose(sorted(values), [0.3, 0.9 * 3 ** (-1 / 3), 0.9, 0.9], rtol=1e-5)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_populations_count_the_returns_of_each_member_and_resume_to_the_bit(devices, tmp_path):
    def loop_of(**options: Any) -> sebulba.GymnasiumLoop:
        agent = population_of(exploit_every=16 * 8 * 2, size=2)
        options |= ALONE | {"update_devices": range(devices), "seed": 1}
        return sebulba.GymnasiumLoop(Bandit, agent, 16, **options)

    with loop_of() as loop:
        whole = loop.run(loop.new_state(0, 8), 4, 8)
    experience = whole.state.experience
    # Every second row is a reset; after 256 and 512 env steps member 1 took over, or was taken.
    assert float(experience.episodes.max()) == pytest.approx(100 * (1 - 0.99**128), rel=0.2)
    assert {"fitness/0", "fitness/1", "best_member", "learning_rate/1"} <= whole.metrics.keys()
    with Checkpointer(tmp_path) as checkpointer:
        with loop_of(checkpointer=checkpointer) as loop:
            loop.run(loop.new_state(0, 8), 3, 8)
        with loop_of(checkpointer=checkpointer) as loop:
            again = loop.run(loop.restore(checkpointer.load_newest()), 1, 8)
    for name in ("networks", "opt", "experience"):
        ours, theirs = (jax.device_get(getattr(x.state, name)) for x in (whole, again))
        assert leaves_equal(ours, theirs), name


@pytest.mark.slow
def test_a_population_finds_the_learning_rate_that_learns():
    """Three of four learning rates are too small to learn in these steps."""
    agent = dataclasses.replace(PPO, learning_rate=1e-4)
    fields = {"size": 4, "spread": 100.0, "vary": ("learning_rate",), "exploit_every": 16 * 8 * 8}
    with Population(rollout_of(Bandit, agent, rounds=64), **fields) as trainer:
        done = trainer.train()
        assert trainer.evaluate(50).episode_return_mean == 1.0
    rates = [done.metrics[f"learning_rate/{m}"] for m in range(4)]
    assert sum(rate > 1e-3 for rate in rates) >= 3, rates


@pytest.mark.slow
def test_a_population_of_dqn_has_a_replay_each(tmp_path):
    replay = ReplayConfig(capacity=256, warm_up_env_steps=64, batch_size=8)
    dqn = DQNConfig(torso=PPO.torso, replay=replay)
    with Population(rollout_of(Bandit, dqn), size=2) as trainer:
        done = trainer.train()
        assert done.metrics["updates"] > 0
        trainer.save(tmp_path)
    assert type(sebulba.load_policy(tmp_path).agent).__name__ == "DQN"


@pytest.mark.slow
def test_a_population_of_leagues_is_compared_by_its_anchors(tmp_path):
    inner = League(
        SelfPlay(rollout_of(Turns, num_envs=32), **SMALL | {"opponents": 2}),
        "pfsp",
        {"any": "legal-random"},
    )
    with Population(inner, size=2, exploit_every=256) as trainer:
        done = trainer.train()
        assert 0 < done.metrics["fitness/0"] < 1
        trainer.save(tmp_path / "p")
        made = [int(one.made) for one in trainer.rollout.result().state.experience.members]
    assert made == [3, 3]
    assert sebulba.load_policy(tmp_path / "p").acting_networks.keys() == {"seat"}


def test_networks_that_were_taken_over_have_the_results_of_the_best_against_anchors_alone():
    fields = SMALL | {"opponents": 2, "anchors": {"any": "legal-random"}}
    config = LeaguePopulationConfig({"*": PPO}, size=2, **fields)
    agent: Any = make_agent(sebulba.env_spec(Turns), config)
    run = sebulba.RunSpec(32, 1, 8, 1)
    state = agent.new_state(jax.random.key(0), run)
    members = [
        one._replace(results=one.results.at[..., column].set(9.0), fresh=one.fresh + 1)
        for one, column in zip(state.experience.members, (2, 0), strict=True)
    ]
    state = state._replace(experience=state.experience._replace(members=tuple(members)))
    after = agent._exploited(state, np.random.default_rng(0)).experience
    lost, won = after.members
    assert not np.any(lost.results[:6]) and not np.any(lost.fresh)
    np.testing.assert_array_equal(lost.results[6:], won.results[6:])
    assert np.all(won.results[..., 0] == 9) and np.all(won.fresh == 1)


# Curricula.


def test_a_curriculum_over_environments_opens_them_in_order():
    envs = {"first": Bandit, "second": Long}
    with Curriculum(rollout_of(envs), after={"second": "first"}, gate=0.9) as trainer:
        done = trainer.train()
    assert done.metrics["episodes/first"] > 0 and done.metrics["weight/first"] == 1.0
    assert "weight/second" not in done.metrics


def test_a_curriculum_over_opponents_is_a_matchmaker():
    trainer = Curriculum(SelfPlay(rollout_of(Turns), **SMALL), gate=0.6)
    config: Any = trainer.rollout.config
    assert (config.matchmaker, config.gate) == ("curriculum", 0.6)


TWO = {"first": Bandit, "second": Long}
TWO_RATES = MultiAgentConfig({"a": PPO, "b": dataclasses.replace(PPO, learning_rate=0.1)})
WRONG = [
    (lambda: PSRO(rollout_of(Turns)), r"PSRO needs a history; put a SelfPlay between: PSRO\("),
    (lambda: Curriculum(rollout_of(Bandit), gate=1), "Curriculum needs a history"),
    (lambda: SelfPlay(Population(rollout_of(Turns))), "population cannot be inside self-play"),
    (lambda: Population(Population(rollout_of(Bandit))), "cannot have populations"),
    (lambda: Population(rollout_of(Bandit), size=1), "agent.size=1 must be"),
    (lambda: Population(rollout_of(Bandit), members=3), "members is not an option"),
    (lambda: Population(rollout_of(Bandit), vary=("speed",)), r"vary='speed' must be .* no such"),
    (lambda: Population(rollout_of(Bandit), vary=("value_clip",)), r"vary='value_clip' .* has 0.0"),
    (
        lambda: Population(rollout_of(Bandit), vary=("initial_std",)),
        r"vary='initial_std' cannot differ between members; use some of (?!.*initial_std)",
    ),
    (
        lambda: Population(rollout_of(Bandit, ImpalaConfig()), vary=("max_rho",)),
        "vary='max_rho' cannot differ",
    ),
    (
        lambda: Population(rollout_of(Bandit, DQNConfig()), vary=("final_epsilon",)),
        "cannot differ between members; use some of learning_rate",
    ),
    (
        lambda: Population(rollout_of(Leaves, TWO_RATES), vary=("learning_rate",)),
        r"vary='learning_rate' must be the same .* have \{'a': 0.001, 'b': 0.1\}; give them one",
    ),
    (lambda: Population(rollout_of(Turns)).rollout.loop, "zero-sum game say nothing"),
    (lambda: Population(SelfPlay(rollout_of(Turns))).rollout.loop, r"agent.anchors=.* all members"),
    (lambda: Population(rollout_of(Bandit, num_envs=6)).train(), "divisible by 4: 4 members x 1"),
    (lambda: rollout_of(TWO).loop, "2 environments have no structure; put a Curriculum"),
    (
        lambda: Curriculum(rollout_of(Bandit), gate=1, after={"hard": "easy"}),
        r"after=.* and there is one; give several",
    ),
    (
        lambda: Curriculum(rollout_of(TWO), gate=1, after={"third": "first"}).rollout.loop,
        "after names 'third', which is not in the set",
    ),
    (
        lambda: (
            Curriculum(
                rollout_of(TWO), gate=1, after={"first": "second", "second": "first"}
            ).rollout.loop
        ),
        "lets 'first' wait for itself",
    ),
]


def test_a_population_leaves_values_that_differ_between_agents_alone():
    config: Any = Population(rollout_of(Leaves, TWO_RATES)).rollout.config
    assert (config.vary, config.agents["b"].learning_rate) == ((), 0.1)


@pytest.mark.parametrize(("make", "words"), WRONG, ids=lambda x: x[:20] if x is str else None)
def test_trainers_that_do_not_fit_are_refused_in_words(make, words):
    with pytest.raises(UsageError, match=words):
        make()


# The command line.


@pytest.mark.parametrize(
    "anchors", [{}, {"a": "legal-random"}, dict.fromkeys("ab", "legal-random")]
)
def test_anchors_take_lanes_of_snapshots(anchors):
    league = LeagueConfig({"player": PPOConfig()}, anchors=anchors)
    assert league.num_opponents + league.mirrors + len(anchors) == 8
    assert dataclasses.replace(league, opponents=3).num_opponents == 3


def test_a_trainer_of_the_command_is_that_of_the_preset(installed):
    words = ["--trainer", "league", "--league.history", "7", "--seed", "3"]
    words += ["--league.opponents", "1", "--league.mirrors", "7"]
    config = parse("tic-tac-toe", words)
    preset = PRESETS["tic-tac-toe-league"].make()
    assert isinstance(config.agent, LeagueConfig) and config.agent.history == 7
    assert dataclasses.replace(config, seed=0).agent == dataclasses.replace(preset.agent, history=7)
    assert parse("cartpole", ["--trainer", "rollout"]) == parse("cartpole", [])
    psro: Any = parse("kuhn", ["--trainer=psro"]).agent
    assert (psro.matchmaker, psro.num_opponents, psro.mirrors) == ("psro", 8, 0)
    uniform: Any = parse("kuhn", ["--trainer", "self-play"]).agent
    assert uniform.matchmaker == "uniform"
    ladder: Any = parse("kuhn", ["--trainer", "curriculum", "self-play"]).agent
    assert ladder.matchmaker == "curriculum"
    words = ["--trainer", "population", "league", "--league.anchors", "any", "legal-random"]
    leagues: Any = parse("kuhn", words).agent
    assert isinstance(leagues, LeaguePopulationConfig)
    assert (leagues.size, leagues.anchors) == (4, {"any": "legal-random"})


def test_a_trainer_of_environments_is_a_set(installed):
    options = ["envs", "{'a': 'm:A', 'b': 'm:B'}", "after", "{'b': 'a'}", "gate", "0.8"]
    config = parse("ppo", ["--trainer", "curriculum", "--env.options", *options])
    assert config.env.id == "sets:curriculum" and config.env.options["gate"] == 0.8
    members: Any = parse("cartpole", ["--trainer", "population", "--population.size", "8"]).agent
    assert (members.size, members.vary) == (8, ("learning_rate", "entropy_coefficient"))


def test_trainers_that_are_unknown_or_not_named_are_refused(installed):
    for words, said in (
        (["--trainer", "leage"], "trainer='leage' is unknown; the nearest are league"),
        (["--trainer", "x"], "trainer='x' is unknown; use rollout, curriculum, league"),
        (["--trainer"], "--trainer needs a name"),
    ):
        with pytest.raises(UsageError, match=said):
            parse("kuhn", words)


class Unnamed(PPOAgent):
    """An agent whose hyper-parameters name another one."""


@dataclasses.dataclass(frozen=True)
class NamedConfig(PPOConfig):
    agent_class: ClassVar[str] = "tests.league.test_trainers:Named"


class Named(PPOAgent):
    """An agent that its hyper-parameters name."""

    def __init__(self, spec: Any, config: NamedConfig) -> None:
        super().__init__(spec, config)


def test_an_agent_of_ones_own_is_inside_a_trainer_if_its_hyper_parameters_name_it(installed):
    here = "tests.league.test_trainers"
    config = parse("cartpole", ["--agent", f"{here}:Named", "--trainer", "population"])
    spec = sebulba.env_spec("CartPole-v1")
    assert config.agent_class is None
    assert isinstance(make_agent(spec, config.agent).player, Named)
    envs = ["--env.options", "envs", "{'a': 'm:A'}"]
    words = ["--agent", f"{here}:Unnamed", "--trainer"]
    assert parse("ppo", [*words, "curriculum", *envs]).agent_class == f"{here}:Unnamed"
    with pytest.raises(UsageError, match="Unnamed' cannot be inside the trainer 'population'"):
        parse("cartpole", [*words, "population"])


@pytest.mark.slow
def test_a_population_by_the_command_is_a_run_like_others(installed, tmp_path):
    run: dict[str, Any] = {"trainer": "population", "run_dir": str(tmp_path / "r")}
    run |= {"total_env_steps": 20_000, "eval_every_env_steps": 10_000, "eval_episodes": 5}
    result = sebulba.train("cartpole", anneal_learning_rate=False, **run)
    assert result is not None and "fitness/3" in result.metrics
    policy = sebulba.load_policy(tmp_path / "r")
    assert type(policy.agent).__name__ == type(PRESETS["cartpole"].make().agent).__name__[:-6]
    again = sebulba.resume(tmp_path / "r", total_env_steps=40_000)
    assert again is not None and again.counters.env_steps >= 40_000


# Killed.


KILLED = """
import sys, time
import jax, numpy as np
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba_league import League, Rollout, SelfPlay
from tests.league.games import CYCLE, PPO, Turns

folder, target = sys.argv[1], int(sys.argv[2])
with Checkpointer(folder, every_s=0.2) as checkpointer:
    options = CYCLE | {"schedule": "lockstep", "checkpointer": checkpointer}
    rollout = Rollout(Turns, PPO, num_envs=16, steps_per_cycle=8, rounds=1, **options)
    fields = {"history": 6, "opponents": 3, "mirrors": 1}
    fields |= {"snapshot_every": 256, "rematch_every": 128}
    with League(SelfPlay(rollout, **fields), "pfsp") as trainer:
        while trainer.env_steps < target:
            print(trainer.train().env_steps, flush=True)
            time.sleep(0.02)
        state = rollout.result().state
        np.savez(sys.argv[3], *map(np.asarray, jax.tree.leaves((state.networks, state.experience))))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_league_that_is_killed_ends_as_one_that_is_not(tmp_path):
    """Two kills at different moments; all arrays of networks and league are the same bits."""

    def start(folder: str, name: str) -> subprocess.Popen[str]:
        words = [
            sys.executable,
            "-c",
            KILLED,
            str(tmp_path / folder),
            "1920",
            str(tmp_path / name),
        ]
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    with start("whole", "whole.npz") as whole:
        whole.communicate(timeout=500)
    assert whole.returncode == 0
    reached = 0
    for lines in (5, 4):
        with start("killed", "killed.npz") as child:
            assert child.stdout is not None
            printed = [int(child.stdout.readline()) for _ in range(lines)]
            os.kill(child.pid, signal.SIGKILL)
        assert printed[0] > reached * 0.3  # it went on, and did not begin anew
        reached = printed[-1]
    with start("killed", "killed.npz") as last:
        printed = [int(line) for line in last.communicate(timeout=500)[0].split()]
    assert last.returncode == 0 and printed[0] > 128
    with np.load(tmp_path / "whole.npz") as ours, np.load(tmp_path / "killed.npz") as theirs:
        assert ours.files == theirs.files
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours.files)

"""Many agents in the loop: rows by group, members, turns, and what the environment may say."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from benchmarks.studies.lockstep_hashes import CASES, train_and_hash
from sebulba import Act, ActionError, AgentNode, EnvError, Obs, Population, UsageError
from sebulba.agents.configs import (
    DQNConfig,
    MultiAgentConfig,
    OptimizerConfig,
    PPOConfig,
    R2D2Config,
    ReplayConfig,
    SACConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.configs.multi_agent import assigned
from sebulba.agents.kernels.exploration import epsilon_greedy
from sebulba.agents.kernels.legal_actions import legal_mask, only_legal
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.envs.tree import compile_tree
from sebulba.inference.episodes import SlotStatistics
from sebulba.loops.evaluation import EvaluationPlayer
from sebulba.metrics.counters import of_groups
from sebulba.metrics.window import RecentEpisodes, teams_of
from sebulba.types import COMMON, EnvSpec, RunSpec, empty_env_step
from tests.support.agent_suite import AGENTS
from tests.support.alone import alone, alone_class
from tests.support.loop_helpers import Recorder
from tests.support.populations import Turns, Visitors

SMALL = TorsoConfig(hidden_sizes=(16,))
PPO_SMALL = PPOConfig(torso=SMALL, epochs=1, minibatches=1)


# A group of one is a single agent, bit for bit. ALL_LONE_CASES=1 runs every agent both ways, for
# half an hour. It needs XLA_FLAGS=--xla_backend_optimization_level=3, as users compile: where XLA
# optimises little, means of normalised observations differ in their last bits.

LONE_CASES = [("ppo", "fused", 1), ("impala-lstm", "stepped", 4), ("dqn", "fused", 4)]
if os.environ.get("ALL_LONE_CASES"):
    LONE_CASES = [
        (case, cycle, devices)
        for case, cycle, devices in itertools.product(CASES, ("stepped", "fused"), (1, 4))
        if cycle == "stepped" or isinstance(CASES[case][0], str)  # one of one's own is not fused
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "cycle", "devices"), LONE_CASES)
def test_a_group_of_one_is_a_single_agent_bit_for_bit(case, cycle, devices):
    env, agent_class, config = CASES[case]
    of_run: Any = {"config": config, "cycle": cycle, "devices": devices}
    single = train_and_hash(env, agent_class, **of_run)
    assert train_and_hash(alone(env), alone_class(agent_class), **of_run) == single


STACK = Obs(spaces.Box(0, 255, (4, 20, 20), np.uint8), frame_stack=4)


@pytest.mark.parametrize(("waits", "kept"), [(False, (20, 20)), (True, (4, 20, 20))])
def test_a_replay_of_slots_keeps_frames_once(waits, kept):
    tree = Population({name: AgentNode(STACK, Act(spaces.Discrete(2))) for name in ("a_0", "a_1")})
    agent = make_agent(compile_tree(tree, waits=waits), DQNConfig(replay=ReplayConfig(800, 16)))
    run = RunSpec(num_envs=3, num_inferencers=2, steps_per_cycle=5, num_update_devices=1)
    state = jax.eval_shape(lambda key: agent.new_state(key, run), jax.random.key(0))
    frames = {x.shape[3:] for x in jax.tree.leaves(state.experience) if x.shape[-2:] == (20, 20)}
    assert frames == {kept}


# Who plays whom.


GROUPS = {"red": ("red_0", "red_1"), "blue": ("blue",)}


@pytest.mark.parametrize(
    ("names", "members"),
    [
        (["*"], {"red": (0, 1), "blue": (0,)}),
        (["*/*"], {"red/red_0": (0,), "red/red_1": (1,), "blue/blue": (0,)}),
        (["red/*", "*"], {"red/red_0": (0,), "red/red_1": (1,), "blue": (0,)}),
        (["red/red_1", "red", "blue"], {"red/red_1": (1,), "red": (0,), "blue": (0,)}),
    ],
)
def test_names_say_who_plays_whom(names, members):
    found = assigned(GROUPS, dict.fromkeys(names, PPO_SMALL))
    assert {name: slots for name, (_, slots, _) in found.items()} == members


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["red"], "has none for blue/blue"),
        (["green", "*"], "has 'green', which is not a group or slot"),
        (["red/blue", "*"], "has 'red/blue', which is not a group or slot"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, words):
    with pytest.raises(UsageError, match=words):
        assigned(GROUPS, dict.fromkeys(names, PPO_SMALL))


@pytest.mark.parametrize(
    ("agents", "words"),
    [
        ({}, "must be a dict of configurations by group"),
        (PPO_SMALL, "must be a dict of configurations by group"),
        ({3: PPO_SMALL}, "has the name 3"),
        ({"": PPO_SMALL}, "has the name ''"),
        ({"a/b/c": PPO_SMALL}, "has the name 'a/b/c'"),
        (
            {"a-b": PPO_SMALL, "a_b": PPO_SMALL},
            "'a-b' and 'a_b' are the same name on the command line",
        ),
        ({"*": PPOConfig}, None),
        ({"*": 3}, "must be the hyper-parameters of a single agent"),
        (
            {"*": MultiAgentConfig({"*": PPO_SMALL})},
            "must be the hyper-parameters of a single agent",
        ),
    ],
)
def test_a_configuration_of_members_is_checked(agents, words):
    if words is None:
        return
    with pytest.raises(UsageError, match=words):
        MultiAgentConfig(agents)


def test_many_agents_need_an_environment_of_many():
    with pytest.raises(UsageError, match=r"this one has a single agent.*leave out --trainer"):
        MultiAgent(sebulba.env_spec("CartPole-v1"), MultiAgentConfig({"*": PPO_SMALL}))


def test_a_member_that_cannot_wait_is_refused():
    with pytest.raises(UsageError, match="R2D2 with an LSTM, whose sequences span trajectories"):
        make_agent(sebulba.env_spec(Turns), R2D2Config(lstm_size=8))


# What members see.


def test_rows_of_slots_are_side_by_side_and_common_parts_are_repeated():
    agent = make_agent(sebulba.env_spec(Visitors), PPO_SMALL)
    row = empty_env_step(agent.population, 2)
    row.obs["visitors"]["said"][:] = [[0, 1, 2], [3, 0, 1]]
    row.obs[COMMON][:] = [[0.25], [0.75]]
    seen = agent._view(agent.members["visitors"], row, 0).obs
    assert set(seen) == {"said", COMMON}  # "secret" is eval_only
    np.testing.assert_array_equal(seen["said"], [0, 1, 2, 3, 0, 1])
    np.testing.assert_array_equal(seen[COMMON][:, 0], [0.25] * 3 + [0.75] * 3)


@pytest.mark.slow
def test_what_is_eval_only_changes_no_action():
    agent = make_agent(sebulba.env_spec(Visitors), PPO_SMALL)
    assert "secret" not in agent.members["visitors"].agent.spec.observation_space.spaces
    run = RunSpec(2, 1, 4, 1)
    state = agent.new_state(jax.random.key(0), run)
    row = jax.tree.map(jnp.asarray, empty_env_step(agent.population, 2))
    other = jax.tree.map(lambda x: x, row)
    other.obs["visitors"]["secret"] = row.obs["visitors"]["secret"] + 2
    jaxpr = jax.make_jaxpr(agent.step)
    assert str(jaxpr(state.networks, state.step[0], row)) == str(
        jaxpr(state.networks, state.step[0], other)
    )
    one, two = (agent.step(state.networks, state.step[0], x)[0].action for x in (row, other))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_slot_of_its_own_gets_its_own_actions():
    spec = sebulba.env_spec("LevelBasedForaging-v0")
    one = make_agent(spec, MultiAgentConfig({"agent/*": PPO_SMALL}))
    assert list(one.members) == ["agent/agent_0", "agent/agent_1"]
    actions = {
        "agent/agent_0": jnp.array([[0], [1]]),
        "agent/agent_1": jnp.array([[2], [3]]),
    }
    np.testing.assert_array_equal(one._by_group(actions)["agent"], [[0, 2], [1, 3]])


# Legal actions.


LEGAL = EnvSpec(
    spaces.Dict({"x": spaces.Discrete(2), "ok": spaces.MultiBinary(3)}),
    spaces.Discrete(3),
    legal_actions="ok",
)


def test_actions_that_are_not_legal_have_probability_zero():
    obs = {"ok": jnp.array([[1, 0, 1], [0, 0, 0]])}
    logits = only_legal(LEGAL, obs, jnp.zeros((2, 3)))
    np.testing.assert_allclose(jax.nn.softmax(logits), [[0.5, 0, 0.5], [1 / 3] * 3], rtol=1e-6)


def test_each_entry_of_a_multi_discrete_has_its_own_mask():
    two = dataclasses.replace(LEGAL, action_space=spaces.MultiDiscrete([2, 3]))
    mask = legal_mask(two, {"ok": jnp.array([[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]])})
    np.testing.assert_array_equal(mask, [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_random_actions_are_legal():
    legal = jnp.tile(jnp.array([[True, False, True]]), (200, 1))
    zeros, ones = jnp.zeros(200, jnp.int32), jnp.ones(200)
    drawn = epsilon_greedy(jax.random.key(0), zeros, 3, ones, legal)
    assert set(np.unique(drawn)) == {0, 2}


# In the loop.


def run_loop(env: Any, config: Any, *, cycles: int = 6, steps: int = 8, **options: Any) -> Any:
    recorder = Recorder()
    agent = make_agent(sebulba.env_spec(env), config)
    options = {"inference_devices": [0], "update_devices": [0], "seed": 1} | options
    with sebulba.GymnasiumLoop(env, agent, 4, observe_cycle=recorder, **options) as loop:
        result = loop.run(loop.new_state(0, steps), cycles, steps)
    return agent, result, recorder


@pytest.mark.slow
def test_visitors_come_and_go_beside_a_guide_with_other_spaces():
    _, result, recorder = run_loop(Visitors, PPO_SMALL)
    row = recorder.trajectories[0].env_step
    assert row.obs["visitors"]["said"].shape == (9, 4, 3)
    assert row.obs[COMMON].shape == (9, 4, 1)
    assert row.acting["visitors"].any() and not row.acting["visitors"].all()
    assert {"episode_return_mean/guide", "episode_return_mean/visitors/2"} <= set(result.metrics)
    assert {"guide/policy_loss", "visitors/policy_loss"} <= set(result.metrics)


@pytest.mark.slow
def test_members_are_a_slot_each_and_learn_on_four_devices():
    config = MultiAgentConfig({"*/*": PPO_SMALL})
    agent, result, _ = run_loop(Turns, config, update_devices=range(4), cycles=4)
    assert list(agent.members) == ["seat/seat_0", "seat/seat_1"]
    assert result.counters.updates == 4
    assert set(result.acting_networks) == set(agent.members)


@pytest.mark.slow
def test_rewards_of_turns_add_up():
    _, result, recorder = run_loop(Turns, DQNConfig(torso=SMALL, replay=ReplayConfig(2000, 16)))
    for infos in recorder.step_infos:
        total = infos.unclipped_reward["seat"].sum()
        assert total == 0
        np.testing.assert_array_equal(infos.slot_returns["seat"].sum(axis=1), 0.0)
        np.testing.assert_array_equal(infos.slot_lengths["seat"], 3)
    assert result.metrics["uncredited_reward"] > 0


@pytest.mark.slow
def test_stepped_and_fused_cycles_of_envpool_agree():
    runs = [
        run_loop("LevelBasedForaging-v0", PPO_SMALL, cycle=cycle, schedule="lockstep")
        for cycle in ("stepped", "fused")
    ]
    (_, _, one), (_, _, two) = runs
    for left, right in zip(one.trajectories, two.trajectories, strict=True):
        jax.tree.map(np.testing.assert_array_equal, left.env_step, right.env_step)
        assert left.env_step.obs[COMMON]["step_count"].shape == (9, 4)
        assert left.env_step.obs["agent"]["agents_view"].shape == (9, 4, 2, 12)


@pytest.mark.slow
def test_a_policy_is_saved_member_by_member_and_plays(tmp_path):
    agent, result, _ = run_loop(Visitors, PPO_SMALL, cycles=2)
    sebulba.save_policy(tmp_path, agent, result.acting_networks, RunSpec(4, 2, 8, 1))
    one = sebulba.load_policy(tmp_path / "guide")
    assert one.spec.observation_space.spaces.keys() == {"observation", COMMON}
    every = sebulba.load_policy(tmp_path)
    evaluation = sebulba.evaluate(every, Visitors, num_episodes=3, num_envs=2)
    assert len(evaluation.returns) == 3 and (evaluation.lengths == 10).all()
    jax.tree.map(np.testing.assert_array_equal, every.acting_networks, result.acting_networks)


@pytest.mark.slow
def test_an_edited_list_of_members_is_refused(tmp_path):
    agent, result, _ = run_loop(Turns, PPO_SMALL, cycles=2)
    sebulba.save_policy(tmp_path, agent, result.acting_networks)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"seat"', '"../seat"', 1))
    with pytest.raises(UsageError, match="was changed"):
        sebulba.load_policy(tmp_path)


# Statistics.


def test_slots_have_returns_and_lengths_of_their_own():
    statistics = SlotStatistics({"a": 2}, 1)
    reward = np.array([[[1, 10]], [[2, 20]], [[0, 0]], [[4, 40]]], np.float32)
    end = np.array([[False], [True], [False], [True]])
    inserted = np.array([[False], [False], [True], [False]])
    acting = np.array([[[1, 0]], [[1, 1]], [[1, 1]], [[1, 0]]], np.bool_)
    infos = statistics.add({"a": reward}, end, inserted, inserted & False, {"a": acting})
    np.testing.assert_array_equal(infos.slot_returns["a"], [[3, 30], [4, np.nan]])
    np.testing.assert_array_equal(infos.slot_lengths["a"], [[2, 1], [1, 0]])
    np.testing.assert_array_equal(infos.episode_returns, [16.5, 22])
    np.testing.assert_array_equal(infos.episode_lengths, [2, 1])


def episodes_of_a_step(*, ends: bool) -> RecentEpisodes:
    infos = SlotStatistics({"a": 2}, 1).add(
        {"a": np.ones((1, 1, 2), np.float32)},
        *(np.array([[flag]]) for flag in (ends, False, False)),
        {"a": np.array([[[True, False]]])},
    )
    episodes = RecentEpisodes()
    episodes.add(infos)
    return episodes


def test_a_group_is_in_the_metrics_before_its_first_episode():
    assert episodes_of_a_step(ends=False).means()["episode_return_mean/a"] is None


def test_returns_of_slots_that_never_acted_are_saved_again_and_again():
    episodes = episodes_of_a_step(ends=True)
    state = episodes.state()
    assert state[2] == {"a": [[1.0, None]]}
    again = RecentEpisodes.restored(state)
    assert again.state() == state and again.means() == episodes.means()


# What an environment may say.


class Broken(Turns):
    """Takes turns, but says something wrong at its third step."""

    def __init__(self, wrong: Any = None) -> None:
        super().__init__()
        self.wrong = wrong

    def step(self, actions: dict) -> Any:
        said = super().step(actions)
        return self.wrong(*said) if self.t == 3 else said


SEEN = {"number": 1, "legal": np.ones(3, np.int8)}
WRONG: dict[str, tuple[Any, str]] = {
    "five values": (lambda o, r, a, b: (o, r, a, b, {}), "must return a tuple of 4"),
    "nothing": (lambda o, r, a, b: None, "must return a tuple of 4"),
    "a list of observations": (lambda o, r, a, b: ([o], r, a, b), "observations by agent"),
    "an unknown agent": (lambda o, r, a, b: ({"seat_9": SEEN}, r, a, b), "name 'seat_9'"),
    "common that is not": (lambda o, r, a, b: ({**o, "common": 1}, r, a, b), "name 'common'"),
    "no part": (lambda o, r, a, b: ({"seat_1": {"number": 1}}, r, a, b), "the part 'legal'"),
    "no dict": (lambda o, r, a, b: ({"seat_1": 3}, r, a, b), "must have the part"),
    "too large": (
        lambda o, r, a, b: ({"seat_1": {**SEEN, "number": 7}}, r, a, b),
        "observation of agent 'seat_1' ['number'] must be inside Discrete(3",
    ),
    "another shape": (
        lambda o, r, a, b: ({"seat_1": {**SEEN, "legal": np.ones(4, np.int8)}}, r, a, b),
        "['legal'] must be an array of shape (3,)",
    ),
    "a reward of NaN": (
        lambda o, r, a, b: (o, {"seat_0": float("nan")}, a, b),
        "reward of agent 'seat_0' must be a finite number as float32; got nan",
    ),
    "a reward of text": (lambda o, r, a, b: (o, {"seat_0": "1 €"}, a, b), "must be a finite"),
    "one reward": (lambda o, r, a, b: (o, 1.0, a, b), "rewards must be a dict by agent"),
    "a reward for nobody": (lambda o, r, a, b: (o, {"x": 1.0}, a, b), "rewards name 'x'"),
    "a number for an end": (lambda o, r, a, b: (o, r, 1, b), "terminated must be a bool"),
    "a text for an end": (
        lambda o, r, a, b: (o, r, {"seat_0": "no"}, b),
        "terminated of agent 'seat_0' must be a bool",
    ),
    "the end of nobody": (lambda o, r, a, b: (o, r, a, {"y": True}), "truncated name 'y'"),
    "cut short unseen": (
        lambda o, r, a, b: ({"seat_1": SEEN}, r, False, {"seat_0": True}),
        "agent 'seat_0' was truncated without its last observation",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_an_environment_says_wrong_is_refused_by_the_name_of_the_agent(kind):
    wrong, words = WRONG[kind]
    adapter = sebulba.make_env_factory(lambda: Broken(wrong))(2, [0, 1])
    try:
        output = adapter.reset()
        with pytest.raises(EnvError) as raised:
            for _ in range(3):
                output = adapter.step({"seat": output.obs["seat"]["number"]})
        assert words in str(raised.value)
        assert "raised by environment 0, step 3" in raised.value.__notes__
    finally:
        adapter.close()


def test_an_action_that_is_not_legal_is_refused():
    adapter = sebulba.make_env_factory(Turns)(2, [0, 1])
    output = adapter.reset()
    action = (output.obs["seat"]["number"] + 1) % 3
    action[:, 1] = 0
    with pytest.raises(ActionError, match="of agent 'seat_0' of environment 0 is not legal"):
        adapter.step({"seat": action})
    adapter.close()


class Lone(Turns):
    tree = AgentNode(Obs(spaces.Discrete(2)), Act(spaces.Discrete(2)))


class Treeless(Turns):
    tree = None  # type: ignore[assignment]


class Early(Turns):
    all_act = True


class Nobody(Turns):
    def observe(self) -> dict:
        return {}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Lone, "is one AgentNode, a single agent"),
        (Treeless, "Treeless has no attribute tree"),
    ],
)
def test_an_environment_without_a_population_is_refused(env, words):
    with pytest.raises(UsageError, match=words):
        sebulba.env_spec(env)


@pytest.mark.parametrize(
    ("env", "words"),
    [(Early, "all_act=True, but seat_1 does not act"), (Nobody, "reset returned no agent")],
)
def test_an_environment_that_begins_wrongly_is_refused(env, words):
    adapter = sebulba.make_env_factory(env)(1, [0])
    with pytest.raises(EnvError, match=words):
        adapter.reset()
    adapter.close()


@pytest.mark.slow
def test_continuous_agents_have_members_too():
    node = AgentNode(Obs(spaces.Box(-1, 1, (2,))), Act({"x": spaces.Box(-1, 1, (1,))}))
    spec = sebulba.envs.tree.compile_tree(Population({"a_0": node, "a_1": node}))
    agent = make_agent(spec, SACConfig(torso=SMALL, optimizer=OptimizerConfig()))
    state = agent.new_state(jax.random.key(0), RunSpec(3, 1, 4, 1))
    output, _ = agent.step(
        state.networks["a"] and agent.acting_networks(state.networks, state.experience),
        state.step[0],
        empty_env_step(spec, 3),
    )
    assert output.action["a"].shape == (3, 2, 1)


@pytest.mark.parametrize("name", ["sac-discrete", "dqn-noisy"])
def test_agents_of_discrete_actions_with_a_replay_have_members_too(name):
    node = AgentNode(Obs(spaces.Box(-1, 1, (2,))), Act(spaces.Discrete(3)))
    spec = sebulba.envs.tree.compile_tree(Population({"a_0": node, "a_1": node}))
    agent = make_agent(spec, AGENTS[name].config)

    def acted(key):
        state = agent.new_state(key, RunSpec(4, 1, 5, 1))
        acting = agent.acting_networks(state.networks, state.experience)
        return agent.step(acting, state.step[0], empty_env_step(spec, 4))[0].action

    assert jax.eval_shape(acted, jax.random.key(0))["a"].shape == (4, 2)


def test_an_option_for_one_agent_is_refused():
    with pytest.raises(UsageError, match="channels_first=True is for one agent"):
        sebulba.env_spec(Turns, channels_first=True)


# What is reported.


def test_groups_and_teams_have_returns_in_training_and_evaluation():
    spec = sebulba.env_spec(Visitors)
    team = teams_of(spec)
    assert team[""] == [("guide", 0), *(("visitors", i) for i in range(3))]
    assert team["visitors"] == [("visitors", i) for i in range(3)]
    assert teams_of(sebulba.env_spec(Turns)) == {}  # the sum of a zero-sum game is 0
    infos = SlotStatistics({"guide": 1, "visitors": 3}, 1).add(
        {"guide": np.full((1, 1, 1), 5.0), "visitors": np.array([[[1.0, 2.0, 9.0]]])},
        *(np.array([[flag]]) for flag in (True, False, False)),
        {"visitors": np.array([[[True, True, False]]])},
    )
    episodes = RecentEpisodes(team)
    assert "team_return_mean" not in episodes.means()
    episodes.add(infos)
    means = episodes.means()
    assert means["team_return_mean"] == 8.0  # who never acted has no part in it
    assert means["team_return_mean/visitors"] == 3.0
    assert of_groups(means) == {"guide": 5.0, "visitors": 1.5}
    assert of_groups({"episode_return_mean/player": 1.0}) == {}
    seats = {"episode_return_mean/player/0": 1.0, "episode_return_mean/player/1": -1.0}
    assert of_groups({"episode_return_mean/player": 0.0, **seats}) == {
        "player/0": 1.0,
        "player/1": -1.0,
    }
    assert of_groups({"team_return_mean": 0.0, **seats}) == {}  # the mean says as much
    assert RecentEpisodes.restored(episodes.state(), team).means() == means


@pytest.mark.slow
def test_an_evaluation_has_the_returns_of_groups():
    agent = make_agent(sebulba.env_spec(Visitors), PPO_SMALL)
    state = agent.new_state(jax.random.key(0), RunSpec(2, 1, 4, 1))
    policy = sebulba.Policy(agent, agent.acting_networks(state.networks, state.experience))
    played = sebulba.evaluate(policy, Visitors, num_episodes=3, num_envs=2)
    guide, visitors = played.group_returns["guide"], played.group_returns["visitors"]
    assert guide.shape == (3,) and guide.max() > 0
    np.testing.assert_allclose(guide, 3 * visitors)  # it is paid for each who did
    np.testing.assert_allclose(played.returns, (guide + 3 * visitors) / 4)
    assert played.metrics()["eval_return_mean/guide"] == guide.mean()
    assert played.record()["episode_return_mean/visitors"] == visitors.mean()
    slots = {name: returns.mean() for name, returns in played.slot_returns.items()}
    assert next(iter(slots)) == "guide/guide" and len(slots) == 4
    lines = str(played).splitlines()
    assert lines[-1].split() == ["visitors", f"{visitors.mean():.2f}"]
    assert [line.split() for line in lines[2:6]] == [[n, f"{r:.2f}"] for n, r in slots.items()]
    assert played.metrics()["eval_return_mean/visitors/2"] == list(slots.values())[3]
    assert "won" not in str(played) and not played.outcomes()


@pytest.mark.slow
def test_an_evaluation_of_a_zero_sum_game_counts_wins_draws_and_losses_of_each_seat(tmp_path):
    agent = make_agent(sebulba.env_spec("KuhnPoker-v1"), PPO_SMALL)
    state = agent.new_state(jax.random.key(0), RunSpec(2, 1, 4, 1))
    sebulba.save_policy(tmp_path, agent, agent.acting_networks(state.networks, state.experience))
    policy = sebulba.load_policy(tmp_path)
    played = sebulba.evaluate(policy, "KuhnPoker-v1", num_episodes=20, num_envs=4)
    first, second = played.outcomes().values()
    assert sum(first.values()) == 20 and first["won"] == second["lost"] > 0
    row = next(line for line in str(played).splitlines() if line.startswith("player/player_1"))
    assert [int(number) for number in row.split()[2:]] == list(second.values())
    assert played.record()["outcomes/player/player_0"] == first
    newest = []
    options = dict(num_episodes=4, num_envs=2, on_best=newest.append)
    with EvaluationPlayer(agent, "KuhnPoker-v1", **options) as player:
        networks = agent.acting_networks(state.networks, state.experience)
        player.best = 1.0  # which rounding could make of a mean that is always 0
        player(networks, threading.Event())
    assert newest == [networks], "its mean says nothing, so the newest is kept"

"""Members that learn at their own pace, do not learn, do not act, and what a replay shares."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba import Act, AgentNode, Obs, Population, UsageError
from sebulba.agents.configs import (
    DQNConfig,
    ImpalaConfig,
    MultiAgentConfig,
    PPOConfig,
    RandomNetworkDistillationConfig,
    ReplayConfig,
    TargetConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.configs.frozen import FrozenConfig
from sebulba.agents.multi.update_rates import MARKS, Schedule, means_when_due, schedule_of
from sebulba.agents.ppo import PPO as PPOAgent
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.inference.cycle import CyclePrograms
from sebulba.runs.build import build_agent
from sebulba.types import COMMON, RunSpec
from tests.support.loop_helpers import Recorder, leaves_equal
from tests.support.populations import Pairs, Turns, Visitors


class Strange(PPOAgent):
    """An agent of somebody else."""


SMALL = TorsoConfig(hidden_sizes=(16,))
PPO = PPOConfig(torso=SMALL, epochs=2, minibatches=2, learning_rate=1e-2)
DQN = DQNConfig(
    torso=SMALL,
    learning_rate=1e-2,
    discount=0.5,
    exploration_env_steps=2000,
    replay=ReplayConfig(4000, 32, warm_up_cycles=2, cycles_per_update=2),
    target=TargetConfig(period=20),
)
RND = RandomNetworkDistillationConfig(torso=SMALL, features=8)
ALONE = {"num_inferencers_per_device": 1, "inference_devices": [0], "update_devices": [0]}


def loop_of(env: Any, config: Any, recorder: Any = None, **options: Any) -> Any:
    options = ALONE | {"schedule": "lockstep", "seed": 1} | options
    agent = make_agent(sebulba.env_spec(env), config)
    return sebulba.GymnasiumLoop(env, agent, 4, observe_cycle=recorder, **options)


def run(env: Any, config: Any, cycles: int = 4, steps: int = 10, **options: Any) -> Any:
    recorder = Recorder()
    with loop_of(env, config, recorder, **options) as loop:
        result = loop.run(loop.new_state(0, steps), cycles, steps)
        return jax.device_get(result), recorder, loop


# At their own pace.


TWO = MultiAgentConfig({"red": PPO, "blue": DQN})


@pytest.mark.slow
def test_a_member_that_is_not_due_stays_as_it_is():
    with loop_of(Pairs, TWO) as loop:
        new = loop.new_state(0, 10)
        states = [jax.device_get(new)]
        for _ in range(4):
            states.append(jax.device_get(new := loop.run(new, 1, 10).state))
    parts = {
        name: [(s.networks[name], s.opt.of_each[name]) for s in states] for name in ("red", "blue")
    }
    same = {
        name: [leaves_equal(*two) for two in itertools.pairwise(own)] for name, own in parts.items()
    }
    # DQN has one update after trajectories 2, 4, ..., which is the first of the four of PPO.
    assert same == {"red": [False] * 4, "blue": [True, False, True, False]}
    assert [int(s.opt.updates["blue"]) for s in states] == [0, 0, 1, 1, 2]
    assert [int(s.opt.updates["red"]) for s in states] == [0, 4, 8, 12, 16]
    assert int(states[-1].opt.of_each["blue"].updates) == 2
    assert all(not np.any(mark) for mark in jax.tree.leaves(states[-1].networks[MARKS]))


@pytest.mark.slow
def test_a_member_learns_as_it_does_beside_one_of_its_own_pace():
    """Where all agree there is no condition in the program; the keys of updates are the same."""
    fast = dataclasses.replace(DQN, replay=ReplayConfig(4000, 32, updates_per_cycle=1))
    slow = dataclasses.replace(PPO, epochs=1, minibatches=1)
    gather = dataclasses.replace(DQN, replay=ReplayConfig(4000, 32, warm_up_cycles=3))
    even, _, _ = run(Pairs, MultiAgentConfig({"red": slow, "blue": fast}))
    uneven, _, _ = run(Pairs, MultiAgentConfig({"red": slow, "blue": gather}))
    assert uneven.counters == even.counters
    for one, other in zip(
        *(jax.tree.leaves(r.state.networks["red"]) for r in (even, uneven)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert uneven.state.opt.updates == {"red": 4, "blue": 2}


@pytest.mark.slow
def test_metrics_are_means_over_the_updates_that_a_member_had():
    result, _, _ = run(Pairs, TWO)
    metrics = result.metrics
    assert metrics["red/due"] == 1.0 and 0 < metrics["blue/due"] <= 1 / 4  # of some trajectories
    assert 0 <= metrics["blue/updates"] <= 1
    assert 0 < metrics["red/entropy"] < np.log(3) + 1e-3
    assert metrics["blue/samples_per_insert"] > 0
    assert means_when_due({"a/x": 1.0, "a/b/x": 3.0, "loss": 4.0}, {"a": 0.5, "a/b": 0.0}) == {
        "a/x": 2.0,
        "loss": 4.0,
    }


@pytest.mark.slow
def test_members_of_unequal_pace_go_on_exactly_where_they_were(tmp_path):
    never, _, _ = run(Pairs, TWO, cycles=6)
    with sebulba.Checkpointer(tmp_path) as saver, loop_of(Pairs, TWO, checkpointer=saver) as loop:
        loop.run(loop.new_state(0, 10), 3, 10)
    with sebulba.Checkpointer(tmp_path) as saver, loop_of(Pairs, TWO) as loop:
        resumed = jax.device_get(loop.run(loop.restore(saver.load_newest()), 3, 10))
    assert resumed.counters == never.counters
    for part in ("networks", "opt"):
        assert leaves_equal(getattr(resumed.state, part), getattr(never.state, part))


@pytest.mark.slow
def test_dqn_learns_beside_ppo():
    fast = dataclasses.replace(DQN, replay=ReplayConfig(4000, 32, updates_per_cycle=3))
    # Nothing ever terminates, so values grow to 100 and would fill a torso that they share.
    apart = dataclasses.replace(PPO, separate_value_torso=True)
    result, _, loop = run(Pairs, MultiAgentConfig({"red": apart, "blue": fast}), 250, 20)
    policy = sebulba.Policy(loop.agent, result.acting_networks)
    assert sebulba.evaluate(policy, Pairs, num_episodes=5, num_envs=5).episode_return_mean > 9.5


def test_the_learning_rate_of_each_member_falls_over_its_own_updates():
    """PPO has 2 epochs of 2 minibatches a trajectory, DQN an update after every other from 2 on."""
    config = ExperimentConfig(
        env=EnvConfig("tests.support.populations:Pairs"),
        agent=MultiAgentConfig({"red": PPO, "blue": DQN}),
        total_env_steps=100 * 4 * 5,
        num_envs=4,
        steps_per_cycle=5,
        anneal_learning_rate=True,
    )
    agent = build_agent(config, sebulba.env_spec(Pairs))
    found = {name: member.agent.config.optimizer for name, member in agent.members.items()}
    assert {one.schedule for one in found.values()} == {"linear"}
    assert {name: one.schedule_updates for name, one in found.items()} == {"red": 400, "blue": 50}
    constant = dataclasses.replace(config, anneal_learning_rate=False)
    (one,) = {
        member.agent.config.optimizer.schedule
        for member in build_agent(constant, sebulba.env_spec(Pairs)).members.values()
    }
    assert one == "constant"


@pytest.mark.parametrize(
    ("counts", "schedule"),
    [([3, 3, 3, 3], Schedule(1, 1, 3, 3)), ([0, 0, 2, 0, 0, 2], Schedule(3, 3, 2, 2))],
)
def test_a_schedule_is_found_from_the_first_trajectories(counts, schedule):
    found = schedule_of("x", lambda cycle: counts[(cycle - 1) % len(counts)])
    assert found == schedule
    assert [found.due(c) for c in range(1, len(counts) + 1)] == counts
    assert [int(found.due(jnp.int32(c))) for c in range(1, len(counts) + 1)] == counts


def test_a_schedule_that_changes_is_refused(monkeypatch):
    agent = make_agent(sebulba.env_spec(Pairs), TWO)
    monkeypatch.setattr(
        agent.members["red"].agent, "num_off_policy_optims_per_cycle", lambda cycle: cycle
    )
    assert [agent.num_off_policy_optims_per_cycle(cycle) for cycle in (1, 2)] == [1, 2]
    with pytest.raises(UsageError, match=r"after trajectory 3 .*'red': 3, 'blue': 0.* than"):
        agent.num_off_policy_optims_per_cycle(3)
    with pytest.raises(UsageError, match="member 'x' has no update after 1,000,000"):
        schedule_of("x", lambda cycle: 0)


# Frozen.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the policies of ``red`` and ``blue``."""
    folder = tmp_path_factory.mktemp("policy")
    config = dataclasses.replace(PPO, normalize_observations=True)
    result, _, loop = run(Pairs, config)
    sebulba.save_policy(folder, loop.agent, result.acting_networks, RunSpec(4, 1, 10, 1))
    return folder


@pytest.mark.slow
def test_a_frozen_policy_acts_as_it_does_alone_and_does_not_change(trained, tmp_path):
    config = MultiAgentConfig({"*": PPO}, frozen={"blue": str(trained / "blue")})
    result, recorder, loop = run(Pairs, config)
    policy = sebulba.load_policy(trained / "blue")
    assert leaves_equal(result.acting_networks["blue"], policy.acting_networks)
    assert result.state.networks["blue"] == () and set(result.state.opt) == {"red", "blue"}
    assert not any(name.startswith("blue/") for name in result.metrics if "return" not in name)
    step = recorder.trajectories[-1].env_step
    for t in range(10):
        obs = {COMMON: step.obs[COMMON][t], "observation": step.obs["blue"]["observation"][t, :, 0]}
        expected, _ = policy(obs)
        np.testing.assert_array_equal(recorder.trajectories[-1].action["blue"][t, :, 0], expected)
    sebulba.save_policy(tmp_path, loop.agent, result.acting_networks)
    again = sebulba.load_policy(tmp_path)
    assert leaves_equal(again.acting_networks, result.acting_networks)
    assert type(sebulba.load_policy(tmp_path / "blue").agent) is type(policy.agent)


@pytest.mark.slow
def test_a_policy_that_explores_is_frozen_with_its_chance(trained):
    policy = sebulba.load_policy(trained / "blue", explore=True)
    _, sampled, _ = run(Pairs, MultiAgentConfig({"*": PPO}, frozen={"blue": policy}))
    _, greedy, _ = run(Pairs, MultiAgentConfig({"*": PPO}, frozen={"blue": trained / "blue"}))
    one, other = (r.trajectories[0].action["blue"] for r in (sampled, greedy))
    assert not np.array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("env", [Turns, Visitors, Pairs])
def test_a_function_plays_a_seat(env):
    def repeats(obs: Any, key: Any) -> Any:
        return obs["number" if env is Turns else "said" if env is Visitors else "observation"]

    seat = {Turns: "seat/seat_1", Visitors: "visitors", Pairs: "red/red_1"}[env]
    config = MultiAgentConfig({"*": PPO}, frozen={seat: repeats})
    _, recorder, _ = run(env, config, steps=12, update_devices=range(2))
    group, _, slot = seat.partition("/")
    column = 1 if slot else 0
    returns = np.concatenate([i.slot_returns[group][:, column] for i in recorder.step_infos])
    if env is Pairs:
        assert (returns == 10).all() and len(returns)
    assert np.isfinite(returns).any()


@pytest.mark.slow
def test_a_function_is_not_saved_and_its_companions_are(tmp_path):
    config = MultiAgentConfig({"*": PPO}, frozen={"blue": lambda obs, key: obs["observation"]})
    result, _, loop = run(Pairs, config, cycles=1)
    sebulba.save_policy(tmp_path, loop.agent, result.acting_networks)
    assert sebulba.load_policy(tmp_path / "red").spec.action_space.n == 3
    with pytest.raises(UsageError, match=r"lacks members that are functions \(\['blue'\]\)"):
        sebulba.load_policy(tmp_path)


@pytest.mark.slow
def test_a_frozen_policy_is_in_the_checkpoint(trained, tmp_path):
    copy = tmp_path / "copy"
    sebulba.save_policy(copy, *_parts(sebulba.load_policy(trained / "blue")))
    config = MultiAgentConfig({"*": PPO}, frozen={"blue": str(copy)})
    with (
        sebulba.Checkpointer(tmp_path / "c") as saver,
        loop_of(Pairs, config, checkpointer=saver) as loop,
    ):
        before = jax.device_get(loop.run(loop.new_state(0, 10), 2, 10))
    other = sebulba.load_policy(trained / "blue")
    other.acting_networks = jax.tree.map(np.zeros_like, other.acting_networks)
    sebulba.save_policy(copy, *_parts(other))
    with sebulba.Checkpointer(tmp_path / "c") as saver, loop_of(Pairs, config) as loop:
        state = loop.restore(saver.load_newest())
        assert leaves_equal(loop.agent.acting_networks(*state[:3:2]), before.acting_networks)


def _parts(policy: sebulba.Policy) -> tuple:
    return policy.agent, policy.acting_networks, policy.run


@pytest.mark.slow
def test_a_policy_for_other_spaces_is_refused_with_both(trained):
    spec = sebulba.env_spec(Pairs)
    with pytest.raises(UsageError) as raised:
        make_agent(spec, MultiAgentConfig({"*": PPO}, frozen={"blue": str(trained / "red")}))
    words = str(raised.value)
    assert words.startswith("frozen member 'blue': the policy was trained for another agent")
    assert "Discrete(3" in words and "Discrete(4" in words and "observes" in words
    with pytest.raises(UsageError, match=r"'blue': the policy is of the members red, blue"):
        make_agent(spec, MultiAgentConfig({"*": PPO}, frozen={"blue": str(trained)}))


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (3, "must be the folder of a policy"),
        (PPO, "must be the folder of a policy"),
        (gymnasium.Env, "must be the folder of a policy"),
        ("nowhere", "cannot be read"),
        (lambda obs: obs, "raises TypeError"),
        (lambda obs, key: jnp.zeros((2, 5)), "must return actions of Discrete"),
        (lambda obs, key: None, "returns None for 2 observations"),
    ],
)
def test_what_cannot_be_frozen_is_refused(strategy, words):
    with pytest.raises(UsageError, match=words):
        make_agent(sebulba.env_spec(Pairs), MultiAgentConfig({"*": PPO}, frozen={"blue": strategy}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"frozen": {"*": "x"}}, r"'\*' is in agents and in frozen"),
        ({"frozen": ["x"]}, "frozen=.* must be a dict by member"),
        ({"frozen": {"a/b/c": "x"}}, "has the name 'a/b/c'"),
        ({"auxiliary": RND}, "auxiliary=.* must be a dict by member"),
        ({"auxiliary": {"a/b": RND}}, "auxiliary has the name 'a/b'"),
        ({"auxiliary": {"x": PPO}}, "must be the hyper-parameters of an auxiliary"),
    ],
)
def test_a_configuration_of_others_is_checked(changes, words):
    with pytest.raises(UsageError, match=words):
        MultiAgentConfig({"*": PPO}, **changes)


def test_names_and_learners_are_checked():
    spec = sebulba.env_spec(Pairs)
    repeats = lambda obs, key: obs["observation"]  # noqa: E731
    agent = make_agent(spec, MultiAgentConfig({"*": PPO}, frozen={"red": repeats, "blue": repeats}))
    with pytest.raises(UsageError, match="nothing can learn"):
        agent.check_run(RunSpec(4, 1, 10, 1))
    with pytest.raises(UsageError, match="auxiliary 'red' has the name of a member"):
        make_agent(spec, MultiAgentConfig({"*": PPO}, auxiliary={"red": RND}))


def test_a_strangers_policy_is_frozen_only_if_trusted(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("SEBULBA_KEY_FILE", str(tmp_path / "key"))  # another user's
    policy = sebulba.load_policy(trained / "blue")
    sebulba.save_policy(
        tmp_path / "p", Strange(policy.spec, policy.agent.config), *_parts(policy)[1:]
    )
    monkeypatch.setenv("SEBULBA_KEY_FILE", str(tmp_path / "mine"))
    spec = sebulba.env_spec(Pairs)
    with pytest.raises(UsageError, match=r"frozen member 'blue': .*would be imported.*trust=True"):
        make_agent(spec, MultiAgentConfig({"*": PPO}, frozen={"blue": str(tmp_path / "p")}))
    trusted = sebulba.load_policy(tmp_path / "p", trust=True)
    assert make_agent(spec, MultiAgentConfig({"*": PPO}, frozen={"blue": trusted}))
    file = tmp_path / "p" / "config.json"
    file.write_text(file.read_text().replace('"epochs": 2', '"epochs": 3'))
    with pytest.raises(UsageError, match="was changed"):
        make_agent(spec, MultiAgentConfig({"*": PPO}, frozen={"blue": str(tmp_path / "p")}))


def test_no_file_of_a_policy_can_name_a_frozen_one(trained, tmp_path):
    with pytest.raises(UsageError, match="must be the folder of a policy"):
        FrozenConfig(str(trained))
    record = json.loads((trained / "blue" / "config.json").read_text())
    record = {name: x for name, x in record.items() if name not in ("sha256", "signature")}
    record["agent"] = FrozenConfig.agent_class
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match="names the class 'sebulba"):
        sebulba.load_policy(tmp_path)


# Auxiliary.


class Corridor(sebulba.MultiAgentEnv):
    """Somebody goes left or right from the middle of nine places, and is never paid."""

    all_act = True
    tree = Population({"walker": AgentNode(Obs(spaces.Discrete(9)), Act(spaces.Discrete(2)))})

    def reset(self, *, seed: int | None = None) -> Any:
        self.t, self.x = 0, 4
        return {"walker": self.x}

    def step(self, actions: dict) -> Any:
        self.t += 1
        self.x = int(np.clip(self.x + 2 * int(actions["walker"]) - 1, 0, 8))
        return {"walker": self.x}, {"walker": 0.0}, False, self.t == 10


@pytest.mark.slow
@pytest.mark.parametrize(("env", "devices"), [(Pairs, 4), (Turns, 1), (Visitors, 2)])
def test_random_network_distillation_learns_beside_the_members(env, devices):
    config = MultiAgentConfig({"*": PPO}, auxiliary={"novelty": RND})
    result, _, loop = run(env, config, update_devices=range(devices), steps=12)
    assert set(result.acting_networks) == set(loop.agent.members)
    assert result.state.opt.updates["novelty"] == 4
    assert 0 < result.metrics[f"novelty/error/{next(iter(loop.agent.groups))}"] < 10
    assert not np.isnan(result.metrics["novelty/updates"])


@pytest.mark.slow
def test_bonuses_are_added_to_valid_transitions_only():
    config = ImpalaConfig(torso=SMALL)
    config = MultiAgentConfig({"*": config}, auxiliary={"novelty": RND})
    result, recorder, _ = run(Corridor, config, cycles=2, steps=20)
    kept = result.state.experience["walker"].trajectory.env_step
    step = recorder.trajectories[-1].env_step
    bonus = kept.reward - step.reward["walker"][..., 0]
    valid = ~step.is_first["walker"][..., 0]
    assert (bonus[valid] > 0).all() and (bonus[~valid] == 0).all() and not valid.all()


@pytest.mark.slow
def test_an_auxiliary_keeps_its_statistics_at_other_sizes():
    config = MultiAgentConfig({"*": PPO}, auxiliary={"novelty": RND})
    result, _, loop = run(Corridor, config)
    new = loop.agent.new_state(jax.random.key(3), RunSpec(8, 1, 10, 1)).experience
    kept = loop.agent.refit_experience(new, result.state.experience)
    own, before = (x.of_each["novelty"]["walker"] for x in (kept, result.state.experience))
    assert own.acting.shape == (11, 8) and leaves_equal(own[2:], before[2:])
    assert kept.cycle == 4


# What a replay shares.


@pytest.mark.slow
def test_common_observations_are_in_a_replay_once_and_come_out_for_every_slot():
    config = dataclasses.replace(DQN, replay=ReplayConfig(800, 32), normalize_observations=True)
    result, recorder, loop = run(Pairs, MultiAgentConfig({"*": config}), cycles=8)
    red = loop.agent.members["red"].agent
    replay = result.state.experience["red"]
    shared, own = replay.rows.obs[COMMON], replay.rows.obs["observation"]
    assert own.shape == (1, 100, 8) and shared.shape == (1, 100, 4, 16)
    assert shared.nbytes == 100 * 4 * 16 * 4  # for 8 slots it would be twice that
    index = tuple(jnp.array(x) for x in np.nonzero(np.asarray(replay.rows.reward)[:, :80] >= 0))
    obs = red.replay.obs_at(replay, index)
    assert obs[COMMON].shape == (640, 16)
    rows = [t.env_step.obs for t in recorder.trajectories]
    number = np.concatenate([x["red"]["observation"][:-1] for x in rows]).reshape(640)
    common = np.concatenate([x[COMMON][:-1] for x in rows]).repeat(2, axis=1).reshape(640, 16)
    np.testing.assert_array_equal(obs["observation"], number)
    np.testing.assert_array_equal(obs[COMMON], common)
    shared = loop.agent.lasting_experience(result.state.experience)["red"][0]  # of all slots
    np.testing.assert_allclose(shared.mean, common.mean(axis=0), rtol=1e-3, atol=1e-3)


SCREEN = 4096


class Watchers(Pairs):
    """The agents of ``Pairs`` before a screen of 4096 pixels."""

    tree = Population(Pairs.tree.members, common=Obs(spaces.Box(0, 255, (SCREEN,), np.uint8)))

    def observe(self) -> dict:
        return {**super().observe(), COMMON: np.full(SCREEN, self.t, np.uint8)}


@pytest.mark.slow
@pytest.mark.parametrize("update_device", [0, 1])
def test_a_screen_that_all_watch_is_uploaded_and_handed_over_once(monkeypatch, update_device):
    uploaded = []

    def act(self: Any, networks: Any, step_state: Any, leaves: Any) -> Any:
        output = act_once(self, networks, step_state, leaves)
        uploaded.append(sum(leaf.size for leaf in leaves if leaf.dtype == np.uint8))
        return output

    act_once = CyclePrograms.act_once
    monkeypatch.setattr(CyclePrograms, "act_once", act)
    steps, envs = 3, 4
    _, recorder, _ = run(Watchers, PPO, 1, steps, update_devices=[update_device])
    handed_over = [
        leaf.nbytes
        for trajectory in recorder.trajectories
        for leaf in jax.tree.leaves(trajectory.env_step.obs)
        if leaf.dtype == np.uint8
    ]
    # Three agents watch it, so copies would be three times as much. A program is traced once.
    assert set(uploaded) == {envs * SCREEN}
    assert set(handed_over) == {(steps + 1) * envs * SCREEN}


def test_slots_that_wait_have_rows_of_their_own_times():
    config = MultiAgentConfig({"guide": PPO, "visitors": DQN})
    agent = make_agent(sebulba.env_spec(Visitors), config)
    assert agent.members["visitors"].agent.replay.slots == 1

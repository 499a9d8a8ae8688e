"""What off-policy agents share: ratio of updates, target networks, exploration."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.bases.off_policy import check_warm_up, moved_target
from sebulba.agents.configs import (
    DQNConfig,
    PPOConfig,
    ReplayConfig,
    TargetConfig,
    TorsoConfig,
)
from sebulba.agents.dqn import DQN
from sebulba.agents.kernels.exploration import (
    FallingEpsilon,
    HeldActions,
    epsilon_greedy,
    exploration_ladder,
    held_epsilon_greedy,
)
from sebulba.agents.ppo import PPO
from sebulba.errors import UsageError
from sebulba.types import EnvSpec, RunSpec
from tests.support.agent_driver import SPEC, Driver, spaces


def test_updates_follow_warm_up_in_a_fixed_ratio() -> None:
    several = ReplayConfig(updates_per_cycle=3, warm_up_cycles=4)
    few = ReplayConfig(cycles_per_update=3, warm_up_cycles=2)
    both = ReplayConfig(updates_per_cycle=2, cycles_per_update=3).schedule()
    assert [both.due(cycle) for cycle in range(1, 8)] == [2, 0, 0, 2, 0, 0, 2]
    several_due, few_due = several.schedule().due, few.schedule().due
    assert [several_due(cycle) for cycle in range(1, 8)] == [0, 0, 0, 3, 3, 3, 3]
    assert [few_due(cycle) for cycle in range(1, 10)] == [0, 1, 0, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (ReplayConfig, {"capacity": 0}, "replay.capacity=0"),
        (ReplayConfig, {"batch_size": 2.5}, "replay.batch_size=2.5"),
        (ReplayConfig, {"updates_per_cycle": 0}, "replay.updates_per_cycle=0"),
        (ReplayConfig, {"warm_up_cycles": 0}, "replay.warm_up_cycles=0"),
        (ReplayConfig, {"updates_per_env_step": 0.0}, "updates_per_env_step=0.0 .*; use 1"),
        (ReplayConfig, {"warm_up_env_steps": -1}, "replay.warm_up_env_steps=-1"),
        (ReplayConfig, {"priority_exponent": 1.5}, "from 0 to 1"),
        (ReplayConfig, {"importance_exponent": -1}, "from 0 to 1"),
        (TargetConfig, {"period": 0}, "target.period=0"),
        (TargetConfig, {"rate": 0.0}, "never move the target"),
        (TargetConfig, {"rate": 2.0}, "from 0 to 1"),
    ],
)
def test_refuses_what_is_out_of_range(config: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**wrong)


@pytest.mark.parametrize(("rows", "num_inferencers", "least"), [(5, 3, 1), (6, 3, 4), (11, 2, 5)])
def test_warm_up_must_fill_what_is_drawn_from(rows: int, num_inferencers: int, least: int) -> None:
    run = RunSpec(
        num_envs=2, num_inferencers=num_inferencers, steps_per_cycle=5, num_update_devices=1
    )
    check_warm_up(least, rows, run)
    if least > 1:
        with pytest.raises(UsageError, match=f"use {least} or more"):
            check_warm_up(least - 1, rows, run)


def test_target_copies_after_its_period_and_else_stays() -> None:
    target, networks = {"w": jnp.zeros(2)}, {"w": jnp.full(2, 8.0)}
    moved = [moved_target(target, networks, jnp.int32(n), 3, 1.0)["w"][0] for n in (1, 2, 3, 4, 6)]
    assert moved == [0, 0, 8, 0, 8]


def test_target_goes_a_share_of_the_way() -> None:
    target, networks = {"w": jnp.full(2, 4.0)}, {"w": jnp.full(2, 8.0)}
    np.testing.assert_allclose(moved_target(target, networks, jnp.int32(1), 1, 0.25)["w"], 5.0)


def test_ladder_goes_over_the_environments_of_all_inferencers() -> None:
    run = RunSpec(num_envs=3, num_inferencers=2, steps_per_cycle=4, num_update_devices=1)
    ladder = np.concatenate([exploration_ladder(run, j, base=0.4, exponent=7.0) for j in range(2)])
    np.testing.assert_allclose(ladder, [0.4 ** (1 + 7 * i / 5) for i in range(6)], rtol=1e-5)


def test_a_single_environment_explores_at_the_base() -> None:
    run = RunSpec(num_envs=1, num_inferencers=1, steps_per_cycle=4, num_update_devices=1)
    np.testing.assert_allclose(exploration_ladder(run, 0, base=0.4, exponent=7.0), [0.4])


def test_epsilon_falls_over_the_steps_of_all_inferencers() -> None:
    run = RunSpec(num_envs=5, num_inferencers=2, steps_per_cycle=4, num_update_devices=1)
    epsilon = FallingEpsilon.new(1.0, jnp.full(5, 0.2), 40, run)
    values = []
    for _ in range(6):
        values.append(float(epsilon.value[0]))
        epsilon = epsilon.advanced()
    np.testing.assert_allclose(values, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2], rtol=1e-5)
    np.testing.assert_allclose(FallingEpsilon.new(1.0, jnp.full(5, 0.2), 0, run).value, 0.2)


def test_random_actions_have_the_probability_of_each_environment() -> None:
    epsilon = jnp.repeat(jnp.array([0.0, 0.3, 1.0]), 4000)
    greedy = jnp.full(epsilon.shape, 2, jnp.int32)
    index = np.asarray(epsilon_greedy(jax.random.key(0), greedy, 4, epsilon)).reshape(3, -1)
    shares = np.stack([(index == action).mean(axis=1) for action in range(4)], axis=1)
    expected = [[0, 0, 1, 0], [0.075, 0.075, 0.775, 0.075], [0.25] * 4]
    np.testing.assert_allclose(shares, expected, atol=0.03)


def test_random_actions_last_as_long_as_they_should() -> None:
    rows, steps, most = 4000, 12, 4
    greedy, epsilon = jnp.full(rows, 9, jnp.int32), jnp.full(rows, 0.1)
    held, taken = HeldActions.new(rows), []
    step = jax.jit(held_epsilon_greedy, static_argnums=(2, 5))
    for key in jax.random.split(jax.random.key(1), steps):
        action, held = step(key, greedy, 4, epsilon, held, most, jnp.zeros(rows, bool))
        taken.append(np.asarray(action))
    is_random = np.stack(taken) < 9
    np.testing.assert_allclose(is_random[0].mean(), 0.1, atol=0.02)
    # Of those that began in the first step: n steps with a share of 1 / n**2, and one action each.
    began = np.stack(taken)[:, is_random[0]]
    same = np.cumprod(began == began[0], axis=0).astype(bool)
    shares = np.arange(1, most + 1) ** -2.0 / np.sum(np.arange(1, most + 1) ** -2.0)
    at_least = shares[::-1].cumsum()[::-1]
    # A second action may begin as the first ends, and be the same.
    np.testing.assert_allclose(same[:most].mean(axis=1), at_least, atol=0.07)
    assert np.bincount(began[0], minlength=4).min() > 0


def test_a_random_action_ends_with_its_episode_or_where_it_is_illegal() -> None:
    held = HeldActions(jnp.array([1, 1, 1, 1], jnp.int32), jnp.array([5, 5, 5, 0], jnp.int32))
    greedy, is_first = jnp.full(4, 2, jnp.int32), jnp.array([False, True, False, False])
    legal = jnp.ones((4, 3), bool).at[2, 1].set(False)
    key = jax.random.key(0)
    action, after = held_epsilon_greedy(key, greedy, 3, jnp.zeros(4), held, 9, is_first, legal)
    assert action.tolist() == [1, 2, 2, 2]
    assert after.left.tolist() == [4, 0, 0, 0]
    action, _ = held_epsilon_greedy(key, greedy, 3, jnp.ones(4), held, 9, is_first, legal)
    assert int(action[2]) != 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_updates_in_one_program_are_those_of_a_program_each(name: str) -> None:
    torso = TorsoConfig(hidden_sizes=(7,))
    replay = ReplayConfig(
        capacity=400, batch_size=8, updates_per_cycle=3, warm_up_cycles=2, prioritized=True
    )
    agent: Any = DQN(SPEC, DQNConfig(replay=replay, torso=torso))
    if name == "ppo":
        agent = PPO(SPEC, PPOConfig(epochs=3, minibatches=1, torso=torso))
    assert agent.updates_in_one_program
    results = []
    for one_program in (True, False):
        agent.updates_in_one_program = one_program
        driver = Driver(agent, devices=2, num_inferencers=1)
        metrics = [driver.cycle() for _ in range(4)]
        assert ((False, 1) not in driver.updater._programs) == one_program
        assert driver.updates == (9 if name == "dqn" else 12)
        results.append((driver.state, metrics))
    for one, three in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, three, rtol=1e-4, atol=1e-6)


def test_updates_of_convolutions_are_a_program_each() -> None:
    """In a loop XLA's convolutions are 20 times slower on a CPU."""
    images = EnvSpec(spaces.Box(0, 255, (36, 36, 1), np.uint8), SPEC.action_space)
    assert not DQN(images, DQNConfig()).updates_in_one_program
    assert not PPO(images, PPOConfig()).updates_in_one_program

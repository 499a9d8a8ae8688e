"""The replay ratio: updates an env step, whatever the numbers of environments and hosts are."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import DQNConfig, MultiAgentConfig, PPOConfig, ReplayConfig, TorsoConfig
from sebulba.agents.configs.agent_config import make_agent
from sebulba.configs.presets import NEUTRAL
from sebulba.errors import UsageError
from sebulba.runs.build import build_agent
from sebulba.types import RunSpec
from tests.support.agent_driver import BOX_SPEC, SPEC
from tests.support.populations import Turns

ALONE: Any = {"num_inferencers_per_device": 1, "inference_devices": [0], "update_devices": [0]}


def updates_after(agent: Any, run: RunSpec, env_steps: int) -> int:
    agent = agent.for_run(run)
    cycles, rest = divmod(env_steps, run.num_hosts * run.num_envs * run.steps_per_cycle)
    assert not rest
    return sum(map(agent.num_off_policy_optims_per_cycle, range(1, cycles + 1)))


@pytest.mark.parametrize(
    ("name", "env_steps"), [("dqn", 10_240), ("sac", 10_240), ("r2d2", 40_960)]
)
def test_all_numbers_of_environments_make_as_many_updates(name: str, env_steps: int) -> None:
    config = NEUTRAL[name].make()
    agent = build_agent(config, BOX_SPEC if name == "sac" else SPEC)
    replay = config.agent.replay  # type: ignore[attr-defined]
    expected = (env_steps - replay.warm_up_env_steps) * replay.updates_per_env_step
    for num_envs, inferencers, hosts in itertools.product((1, 8, 64), (1, 2), (1, 2)):
        run = RunSpec(num_envs, inferencers, config.steps_per_cycle, 1, hosts)
        agent.check_run(run)
        assert updates_after(agent, run, env_steps) == expected


@pytest.mark.parametrize("num_envs", [1, 8, 64])
@pytest.mark.parametrize("inferencers", [1, 2])
def test_exploration_follows_env_steps(num_envs: int, inferencers: int) -> None:
    run = RunSpec(num_envs, inferencers, 8, 1)
    steps, key = 5120 // (num_envs * inferencers), jax.random.key(0)  # of each environment
    dqn: Any = build_agent(NEUTRAL["dqn"].make(), SPEC)
    state = dqn.advance_step_state(dqn.new_step_state(key, run, 0), steps)
    # Linear from 1 to final_epsilon; the length is rounded up to steps of all environments.
    share = 5120 / dqn.config.exploration_env_steps
    expected = 1 - (1 - dqn.config.final_epsilon) * share
    np.testing.assert_allclose(state.epsilon.value, expected, atol=0.01)
    sac: Any = build_agent(NEUTRAL["sac"].make(), BOX_SPEC)
    assert sac.config.random_env_steps == 5000
    state = sac.new_step_state(key, run, 0)
    assert 0 <= state.random_steps * num_envs * inferencers - 5000 < num_envs * inferencers
    assert sac.advance_step_state(state, steps).random_steps == 0


@pytest.mark.parametrize("ratio", [1.0, 0.25, 1 / 3, 0.3, 1.5, 1 / 640, 20.0])
@pytest.mark.parametrize("trajectory", [1, 7, 64, 600])
@pytest.mark.parametrize("start", [0, 100, 960])
def test_updates_follow_env_steps(ratio: float, trajectory: int, start: int) -> None:
    replay = ReplayConfig(updates_per_env_step=ratio, warm_up_env_steps=start)
    schedule = replay.schedule(trajectory)
    total = 0
    for cycle in range(1, 3000):
        total += schedule.due(cycle)
        exact = max(0.0, ratio * (cycle * trajectory - start))
        assert exact * 0.999 - schedule.updates - 1e-6 <= total <= exact * 1.001 + 1e-6
    assert total > 0


def test_what_was_counted_by_trajectories_still_is() -> None:
    neutral: Any = NEUTRAL["dqn"].make().agent
    by_cycle = dataclasses.replace(neutral.replay, updates_per_cycle=3, warm_up_cycles=2)
    assert [by_cycle.schedule(64).due(n) for n in range(1, 5)] == [0, 3, 3, 3]
    rarely = dataclasses.replace(neutral.replay, cycles_per_update=2)
    assert [n for n in range(1, 22) if rarely.schedule(64).due(n)] == [17, 19, 21]
    later = dataclasses.replace(neutral.replay, warm_up_cycles=20)
    assert [later.schedule(64).due(n) for n in (19, 20, 21)] == [0, 64, 64]
    assert [ReplayConfig(updates_per_cycle=2).schedule().due(n) for n in (1, 2)] == [2, 2]


def test_sizes_have_to_be_known() -> None:
    agent = make_agent(SPEC, NEUTRAL["dqn"].make().agent)
    with pytest.raises(UsageError, match=r"use agent\.for_run\(run\)"):
        agent.num_off_policy_optims_per_cycle(1)


@pytest.mark.slow
def test_a_loop_counts_env_steps() -> None:
    torso = TorsoConfig(hidden_sizes=(8,))
    replay = ReplayConfig(2000, 8, updates_per_env_step=0.5, warm_up_env_steps=96)
    config = DQNConfig(torso=torso, replay=replay)
    made = []
    for num_envs in (1, 8, 64):
        agent = make_agent(sebulba.env_spec("CartPole-v1"), config)
        with sebulba.GymnasiumLoop(
            "CartPole-v1", agent, num_envs, schedule="lockstep", **ALONE
        ) as loop:
            result = loop.run(loop.new_state(0, 4), 512 // (4 * num_envs), 4)
            made.append((result.counters.env_steps, result.counters.updates))
    assert made == [(512, (512 - 96) // 2)] * 3


def test_members_have_the_ratio_of_their_environment() -> None:
    replay = ReplayConfig(2000, 8, updates_per_env_step=0.5, warm_up_env_steps=64)
    torso = TorsoConfig(hidden_sizes=(8,))
    members = {"*": DQNConfig(torso=torso, replay=replay)}
    agent: Any = make_agent(sebulba.env_spec(Turns), MultiAgentConfig(members))
    for num_envs in (1, 8):
        assert updates_after(agent, RunSpec(num_envs, 1, 8, 1), 640) == 288


def test_learners_with_a_ratio_play_beside_others() -> None:
    replay = ReplayConfig(2000, 8, updates_per_env_step=0.5, warm_up_env_steps=40)
    torso = TorsoConfig(hidden_sizes=(8,))
    first = DQNConfig(torso=torso, replay=replay)
    members = {"seat/seat_0": first, "*/*": PPOConfig(torso=torso)}
    agent: Any = make_agent(sebulba.env_spec(Turns), MultiAgentConfig(members))
    run = RunSpec(8, 1, 8, 1)
    agent = agent.for_run(run)
    # One due after 1 to 40 env steps is made up for after the first trajectory of 64.
    assert {n: agent.num_off_policy_optims_per_cycle(n) for n in (1, 2)} == {1: 40, 2: 40}
    dqn = agent._schedules["seat/seat_0"]
    assert [dqn.due(n) for n in (1, 2, 3)] == [12, 32, 32]


@pytest.mark.slow
def test_loops_of_two_sizes_share_learners_with_a_ratio(tmp_path: Path) -> None:
    replay = ReplayConfig(2000, 8, updates_per_env_step=0.25, warm_up_env_steps=16)
    torso = TorsoConfig(hidden_sizes=(8,))
    first = DQNConfig(torso=torso, replay=replay)
    members = {"seat/seat_0": first, "*/*": PPOConfig(torso=torso, epochs=1)}
    agent: Any = make_agent(sebulba.env_spec(Turns), MultiAgentConfig(members))
    with contextlib.ExitStack() as stack:
        options: Any = {"schedule": "lockstep", **ALONE}
        loops = [
            stack.enter_context(sebulba.GymnasiumLoop(Turns, agent, num_envs, **options))
            for num_envs in (4, 8)
        ]
        states = [loop.new_state(0, 8) for loop in loops]
        results = [loop.run(state, 2, 8) for loop, state in zip(loops, states, strict=True)]
    # PPO has 4 updates a trajectory; a quarter of 64 env steps, less those of warm-up, is more.
    assert [result.counters.updates for result in results] == [4 + 8, 12 + 16]
    sebulba.save_policy(tmp_path, agent, results[0].acting_networks)
    sebulba.load_policy(tmp_path, trust=True)

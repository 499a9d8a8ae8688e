"""Environments made of a program for ns-3."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.env_checker import check_env

import sebulba
from sebulba.commands import cli
from sebulba.errors import ActionError, EnvError, UsageError
from tests.networks.test_ns3 import needs_ns3

PROGRAM = Path(__file__).parents[1] / "support/ns3_scenario.cc"
EXAMPLE = Path(__file__).parents[2] / "packages/sebulba-ns3/examples/paced_sender.cc"
pytestmark = needs_ns3


def walk(env, actions, seed=None) -> list:
    rows = [env.reset(seed=seed)] if seed is not None else []
    rows += [env.step(action) for action in actions]
    return [tuple(x.tolist() if isinstance(x, np.ndarray) else x for x in row) for row in rows]


def test_a_program_is_an_environment(make):
    env = make(start=2)
    assert env.observation_space == Box(np.float32([-100, 0]), np.float32([100, 1]))
    assert env.action_space == Discrete(3)
    (obs, info), *rows = walk(env, [2, 1, 0, 2, 2, 2], seed=0)
    assert obs[0] == 2 and 0 <= obs[1] <= 1 and info == {"ms": 1}
    assert [row[0][0] for row in rows] == [3, 3, 2, 3, 4, 5]
    assert [row[1] for row in rows] == pytest.approx([-0.1] * 5 + [1])
    assert [row[2] for row in rows] == [False] * 5 + [True] and not any(row[3] for row in rows)
    assert [row[4]["ms"] for row in rows] == [3, 5, 7, 9, 11, 13]
    check_env(env, skip_render_check=True)


def test_a_seed_decides_ns_3s_random_streams(make):
    env, other = make(), make()
    first = walk(env, [1] * 3, seed=1)
    assert walk(env, [1] * 3, seed=1) == first == walk(other, [1] * 3, seed=1)
    assert walk(env, [1] * 3, seed=2) != first
    second = [tuple(x[0].tolist()) for x in (env.reset(), other.reset())]
    assert second[0] != second[1]  # the second episodes of seeds 2 and 1
    with pytest.raises(ActionError, match=r"action=3 is not in Discrete\(3\)"):
        env.step(3)


def test_an_episode_can_be_cut(make):
    env = make(max_episode_steps=2)
    for _ in range(2):
        (_, _), *rows = walk(env, [1, 1], seed=0)
        assert [row[2:4] for row in rows] == [(False, False), (False, True)]


def test_a_killed_process_and_a_saved_state_go_on(make):
    env, other = make(), make()
    expected = walk(env, [2, 1, 2, 0, 2], seed=3)
    before = walk(other, [2, 1], seed=3)
    state = other.get_state()
    os.kill(other._pool._envs[0].worker.process.pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="SIGKILL; a new one repeats the episode"):
        assert before + walk(other, [2, 0, 2]) == expected
    other.set_state(state)
    assert before + walk(other, [2, 0, 2]) == expected


def test_a_fault_of_ns_3_is_tried_again(make, tmp_path):
    file = tmp_path / "once"
    file.touch()
    env = make(fault="fatal once", file=str(file), start=2)
    env.reset(seed=0)
    with pytest.warns(RuntimeWarning, match=r"SIGABRT.*a new one repeats the episode"):
        assert env.step(2)[0][0] == 3
    env = make(fault="fatal", start=2)
    env.reset(seed=0)
    with (
        pytest.warns(RuntimeWarning, match="a new one repeats"),
        pytest.raises(EnvError, match=r"its process ended with SIGABRT.*a road block"),
    ):
        env.step(2)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("silence", "nothing happens any more, .* call decide_in"),
        ("observe", r"observe\(\) returned 1 numbers, not 2"),
        ("hang", r"gave no answer within 0\.5 s"),
    ],
)
def test_faults_of_a_program_are_told(make, fault, said):
    env = make(fault=fault, start=2, step_timeout_s=0.5 if fault == "hang" else 60.0)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=said):
        env.step(2)


def test_wrong_options_are_told(make, tmp_path):
    for options, said in (
        ({"fault": "begin"}, r"ns3_scenario\.cc: the network engine: no network today"),
        ({"spaces": 0}, r"spaces\(\): no observation"),
        ({"strat": 3}, "no parameter strat; it has fault, file, spaces, start"),
        ({"start": "x"}, "start=x is no number"),
        ({"start": 'x"'}, "without quotes"),
        ({"start": [1]}, "must be a number, or text"),
        ({"max_episode_steps": 0}, "max_episode_steps=0 must be a whole number of at least 1"),
    ):
        with pytest.raises(UsageError, match=said):
            make(**options)
    with pytest.raises(UsageError, match=r"is no file; give a program such as packages/"):
        make(source=tmp_path / "none.cc")
    wrong = tmp_path / "wrong.cc"
    wrong.write_text('#include "sebulba_scenario.h"\nint x = nothing;\n')
    with pytest.raises(UsageError, match=r"could not compile .*wrong\.cc.*(\n.*)*nothing"):
        make(source=wrong)


JAMMED = EXAMPLE.with_name("interference.cc")


def test_a_jammer_is_avoided_at_best_in_all_100_slots(make):
    env = make(JAMMED, max_episode_steps=100)
    obs, _ = env.reset(seed=0)
    assert obs.tolist() == [1, 0, 0, 0]
    rewards = []
    for slot in range(1, 101):
        obs, reward, terminated, truncated, _ = env.step((np.argmax(obs) + 2) % 4)
        rewards.append(reward)
        assert np.argmax(obs) == slot % 4 and obs.sum() == 1
    assert sum(rewards) == 100 and truncated and not terminated
    obs, _ = env.reset(seed=1)
    steps = [env.step((np.argmax(obs) + 1 + i) % 4) for i in range(3)]
    assert [step[1:3] for step in steps] == [(-1, False), (-1, False), (-1, True)]


@pytest.mark.slow
def test_the_jammers_pattern_is_learned_to_its_optimum(tmp_path):
    folder, options = str(tmp_path / "run"), {"source": str(JAMMED)}
    env = {"id": "ns3:program", "max_episode_steps": 100, "options": options}
    sebulba.train(
        "ppo",
        env=env,
        num_envs=8,
        num_inferencers_per_device=1,
        total_env_steps=30_000,
        run_dir=folder,
        writers=(),
    )
    played = sebulba.make_env_factory("ns3:program", **options, max_episode_steps=100)
    policy = sebulba.load_policy(folder)
    found = sebulba.evaluate(policy, played, num_episodes=4, num_envs=4)
    assert found.episode_return_mean == 100


def test_it_is_trained_resumed_and_evaluated(tmp_path, capsys):
    folder = str(tmp_path / "run")
    words = ["train", "ppo", "--env.id", "sebulba_ns3:Ns3Scenario", "--run-dir", folder]
    words += ["--env.options.source", str(EXAMPLE), "--env.options.link-mbps", "5"]
    words += ["--env.max-episode-steps", "4", "--num-envs", "2", "--steps-per-cycle", "4"]
    words += ["--agent.torso.hidden-sizes", "8", "--agent.minibatches", "1"]
    words += ["--num-inferencers-per-device", "1", "--no-anneal-learning-rate"]
    words += ["--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"]
    assert cli.main([*words, "--total-env-steps", "32"]) == 0
    assert cli.main(["resume", folder, "--total-env-steps", "64"]) == 0
    assert "resumed at 32 env steps" in capsys.readouterr().out
    assert cli.main(["eval", folder, "--episodes", "2", "--num-envs", "2"]) == 0
    assert "return" in capsys.readouterr().out

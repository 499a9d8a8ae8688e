"""Networks in other trainers: environments of Gymnasium and PettingZoo, by their own checks."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
from sebulba_networks import SHARED_BOTTLENECK

from sebulba.envs import make_env_factory
from sebulba.errors import ActionError, UsageError
from tests.support.needs import needs_compiler

MADE = """
import warnings
{first}
import gymnasium
from gymnasium.utils.env_checker import check_env
env = gymnasium.make({env_id!r}, rtt_ms=16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    check_env(env.unwrapped, skip_render_check=True)
env.reset(seed=0)
print(env.spec.id, [str(one.message) for one in caught if "symmetric" not in str(one.message)])
"""


@needs_compiler
@pytest.mark.parametrize(
    ("first", "env_id"),
    [
        ("import sebulba_networks", "sebulba/CongestionControl-v0"),
        ("", "sebulba_networks:sebulba/CongestionControl-v0"),
    ],
    ids=["imported", "by-module"],
)
def test_gymnasium_makes_congestion_control_in_a_process_without_sebulbas_trainer(first, env_id):
    code = MADE.format(first=first, env_id=env_id)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "sebulba/CongestionControl-v0 []\n", done.stderr


pettingzoo = pytest.importorskip("pettingzoo", reason="the package pettingzoo is not installed")

from sebulba_networks.pettingzoo_env import SharedBottleneckEnv, parallel_env  # noqa: E402

NETWORK = {"bandwidth_mbps": 8, "rtt_ms": 16, "buffer_packets": 40, "num_agents": 3}


@needs_compiler
def test_pettingzoo_finds_nothing_wrong_with_the_shared_bottleneck():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of its own games
        from pettingzoo.test import parallel_api_test, parallel_seed_test
    short = {**NETWORK, "join_s": (0, 1), "max_episode_steps": 20}
    parallel_api_test(parallel_env(**short), num_cycles=200)
    parallel_seed_test(lambda: parallel_env(**short), num_cycles=100)


@needs_compiler
def test_it_plays_what_the_trainer_plays():
    ours = make_env_factory(SHARED_BOTTLENECK, **NETWORK, max_episode_steps=20)(1, [7])
    env = SharedBottleneckEnv(**NETWORK, max_episode_steps=20)
    rng = np.random.default_rng(0)
    output, (obs, infos) = ours.reset(), env.reset(seed=7)
    num_waits = num_steps = 0
    while env.agents:
        acting = output.acting["flow"][0]
        for index, agent in enumerate(env.possible_agents):
            if agent in env.agents:
                assert infos[agent]["acting"] == acting[index]
                assert obs[agent] in env.observation_space(agent)
                num_waits += not acting[index]
            if acting[index]:
                assert (obs[agent] == output.obs["flow"][0, index]).all()
                assert infos[agent]["network"]["bandwidth_bps"] == 8e6
        action = rng.uniform(-2, 2, (1, 3, 1)).astype(np.float32)
        output = ours.step({"flow": action})
        before = env.agents
        obs, rewards, ended, cut, infos = env.step(
            dict(zip(env.possible_agents, action[0], strict=True))
        )
        assert rewards.keys() == ended.keys() == cut.keys() == obs.keys() == {*before}
        for agent in before:
            index = env.possible_agents.index(agent)
            assert rewards[agent] == output.reward["flow"][0, index]
            assert ended[agent] == output.terminated["flow"][0, index]
        num_steps += 1
    assert output.episode_end[0] and num_waits > 10 and num_steps > 20
    env.close()
    ours.close()


@needs_compiler
def test_an_agent_that_waits_needs_no_action_and_has_none():
    options = {**NETWORK, "num_agents": 2, "join_s": 1000, "max_episode_steps": 5}

    def played(idle: dict) -> list[float]:
        env = SharedBottleneckEnv(**options)
        _, infos = env.reset(seed=3)
        assert [infos[agent]["acting"] for agent in env.agents] == [True, False]
        rewards = []
        while "flow_0" in env.agents:
            _, reward, ended, cut, _ = env.step({"flow_0": np.zeros(1, np.float32), **idle})
            rewards.append(reward["flow_0"])
        assert env.agents == ["flow_1"] and not ended["flow_0"] and cut["flow_0"]
        assert len(rewards) == 5
        env.close()
        return rewards

    assert played({}) == played({"flow_1": np.full(1, 2, np.float32)})


@needs_compiler
@pytest.mark.parametrize("actions", [{}, {"flow_0": [2.5]}, {"flow_0": [np.nan]}])
def test_an_agent_that_acts_needs_an_action_of_its_space(actions):
    env = SharedBottleneckEnv(**NETWORK)
    env.reset(seed=0)
    with pytest.raises(ActionError, match="of flow_0 must be one number from -2 to 2"):
        env.step(actions)
    env.close()


def test_wrong_options_are_told():
    with pytest.raises(UsageError, match="num_agent"):
        SharedBottleneckEnv(num_agent=2)
    with pytest.raises(UsageError, match="render_mode='human' is none of this environment"):
        SharedBottleneckEnv(render_mode="human")

"""Models that travel over the network: which version each row acts with, and what that costs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import SimplePolicyGradientConfig, TorsoConfig
from sebulba.agents.configs.multi_agent import MultiAgentConfig
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.checkpoints.store import CheckpointStore
from sebulba.support.trees import host_copy
from tests.networks.test_ns3 import needs_ns3
from tests.networks.test_ns3_network import EXAMPLE as CART
from tests.networks.test_ns3_network import PROGRAM
from tests.support.loop_helpers import leaves_equal, run_in_lockstep

pytestmark = needs_ns3
OPTIONS = {"source": str(PROGRAM), "case": "models", "end_s": 1}


@pytest.fixture
def env():
    made = sebulba.make_env_factory("ns3:program", **OPTIONS)(2, [1, 2])
    yield made
    made.close()


def test_a_model_arrives_after_its_bytes_have(env):
    # 125,000 bytes take more than 100 ms over 10 Mbit/s; the server looks every 100 ms.
    env.publish(1, 125_000)
    env.reset()
    seen = []
    for step in range(30):
        if step in (3, 5):
            env.publish({3: 2, 5: 3}[step], 125_000)
        env.step(np.zeros(2, np.int32))
        seen.append(env.versions[:, 0].tolist())
    assert all(one == other for one, other in seen) and seen[0] == [1, 1]
    first = [[one for one, _ in seen].index(version) for version in (2, 3)]
    assert 8 <= first[0] <= 12 and first[1] - first[0] in (5, 6, 10, 11)
    env.publish(4, 1000)
    while not env.step(np.zeros(2, np.int32)).episode_end.any():
        pass
    env.step(np.zeros(2, np.int32))
    assert env.versions.tolist() == [[4], [4]]  # an episode begins with the newest


def test_an_agent_without_a_model_acts_with_the_newest():
    env = sebulba.make_env_factory("ns3:program", **OPTIONS, agents=2, with_model=1)(1, [1])
    env.publish(1, 125_000)
    (group,) = env.reset().obs
    seen = []
    for _ in range(40):
        env.step({group: np.zeros((1, 2), np.int32)})
        env.publish(2, 125_000)
        seen.append(env.versions.tolist())
    env.close()
    assert all(one == [[1, 2]] for one in seen[:6]) and seen[-1] == [[2, 2]]


def trained(folder, *num_cycles, resume=False, kill=None, agents=1, num_envs=2):
    """Train REINFORCE in lockstep; return state, last metrics and notes of the resumption.

    ``kill`` is the environment whose worker process is killed after each run of cycles.
    """
    adapters = []
    make = sebulba.make_env_factory("ns3:program", **OPTIONS, agents=agents)

    def factory(num_envs, seeds):
        adapters.append(make(num_envs, seeds))
        return adapters[-1]

    config = SimplePolicyGradientConfig(torso=TorsoConfig(hidden_sizes=(16,)))
    spec = sebulba.env_spec(make)
    one = SimplePolicyGradient(spec, config) if agents == 1 else None

    def after_each():
        if kill is not None:
            os.kill(adapters[-1]._pool._envs[kill].worker.process.pid, signal.SIGKILL)

    agent = one or MultiAgent(spec, MultiAgentConfig({"*": config}))
    how = {"num_envs": num_envs, "resume": resume, "after_each": after_each}
    state, result, notes = run_in_lockstep(folder, factory, agent, *num_cycles, **how)
    return state, result.metrics, notes


@pytest.mark.parametrize("agents", [1, 2])
def test_lockstep_is_bit_identical_and_resumes_with_models_on_their_way(tmp_path, agents):
    never, metrics, _ = trained(tmp_path / "never", 5, 5, agents=agents)
    # In lockstep the lag is 1, and models take time to arrive besides.
    assert metrics["policy_lag_mean"] > 1 and metrics["model_lag_mean"] > 0
    assert metrics["models_clipped"] == 0
    again, _, _ = trained(tmp_path / "again", 5, 5, agents=agents)
    assert leaves_equal(again, never)
    first = min(f for f in (tmp_path / "never").iterdir() if f.name.isdecimal())
    shutil.copytree(first, tmp_path / "cut" / first.name)
    resumed, _, notes = trained(tmp_path / "cut", 5, resume=True, agents=agents)
    assert not notes and leaves_equal(resumed, never)


def test_a_second_run_with_a_new_state_acts_with_its_own_networks():
    from sebulba_ns3.models import NUM_KEPT

    make = sebulba.make_env_factory("ns3:program", **OPTIONS)
    agent = SimplePolicyGradient(sebulba.env_spec(make), SimplePolicyGradientConfig())
    places = {"inference_devices": [0], "update_devices": [0], "num_inferencers_per_device": 1}
    with sebulba.GymnasiumLoop(make, agent, num_envs=1, schedule="lockstep", **places) as loop:
        loop.run(loop.new_state(0, steps_per_cycle=4), num_cycles=3, steps_per_cycle=4)
        state = loop.new_state(1, steps_per_cycle=4)
        given = jax.tree.leaves(host_copy(agent.staged(state.networks, state.experience)))
        loop.run(state, num_cycles=1, steps_per_cycle=4)
        (inferencer,) = loop._session.inferencers
        cycle = inferencer.run_cycle
    assert cycle._versions.tolist() == [1] * NUM_KEPT
    for kept, one in zip(cycle._ring, given, strict=True):
        np.testing.assert_array_equal(kept, np.stack([one] * NUM_KEPT))


def test_a_policy_that_was_trained_with_models_is_played(tmp_path):
    spec = sebulba.env_spec("ns3:program", **OPTIONS)
    agent = SimplePolicyGradient(spec, SimplePolicyGradientConfig())
    factory = sebulba.make_env_factory("ns3:program", **OPTIONS)
    adapter = factory(1, [0])
    played = adapter.as_played()
    assert not hasattr(played, "make_cycle") and agent.spec == played.spec
    played.reset()
    assert played.step(np.zeros(1, np.int32)).reward.shape == (1,)
    played.close()


def test_any_of_16_workers_is_killed_and_training_goes_on(tmp_path):
    never, *_ = trained(tmp_path / "never", 3, 3, 3, num_envs=16)
    for index in (0, 15):
        with pytest.warns(RuntimeWarning, match="SIGKILL; a new one repeats the episode"):
            killed, *_ = trained(tmp_path / str(index), 3, 3, 3, num_envs=16, kill=index)
        assert leaves_equal(killed, never)


WORDS = [
    *("train", "ppo", "--env.id", "ns3:program", "--env.options.source", str(CART)),
    *("--num-envs", "16", "--steps-per-cycle", "8", "--agent.torso.hidden-sizes", "8"),
    *("--agent.minibatches", "1", "--num-inferencers-per-device", "1", "--schedule", "lockstep"),
    *("--no-anneal-learning-rate", "--inference-devices", "0", "--update-devices", "0"),
    *("--compile-cache", "off", "--total-env-steps", "8192", "--resume"),
    *("--checkpoint.every-s", "0.5"),
]


@pytest.mark.slow
def test_a_killed_trainer_is_resumed_exactly_and_its_workers_end(tmp_path):
    def run(folder: Path) -> subprocess.Popen:
        words = [sys.executable, "-m", "sebulba", *WORDS, "--run-dir", str(folder)]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def children(pid: int) -> list[int]:
        found = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(one) for file in found for one in file.read_text().split()]

    never, killed = tmp_path / "never", tmp_path / "killed"
    with run(never) as one:
        assert one.wait(300) == 0, one.stderr.read()
    with run(killed) as one:
        while not CheckpointStore(killed / "checkpoints").numbers():
            assert one.poll() is None, one.stderr.read()
            time.sleep(0.05)
        workers = children(one.pid)
        assert len(workers) >= 16
        os.kill(one.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    at = CheckpointStore(killed / "checkpoints").numbers()[-1]
    assert 0 < at < 8192
    with run(killed) as one:
        assert one.wait(300) == 0, one.stderr.read()
    ends = [CheckpointStore(path / "checkpoints").load(8192) for path in (never, killed)]
    assert ends[0].record["counters"] == ends[1].record["counters"]
    assert ends[0].arrays.keys() == ends[1].arrays.keys()
    for name, values in ends[0].arrays.items():
        np.testing.assert_array_equal(values, ends[1].arrays[name], err_msg=name)

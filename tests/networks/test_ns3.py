"""The engine on ns-3: equal to the native one, worker processes, and what a user is told."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from sebulba_networks import CONGESTION_CONTROL, engines
from sebulba_networks.options import CongestionControlOptions
from sebulba_networks.pools import make_pool
from sebulba_networks.process_pool import ProcessPool

import sebulba
from benchmarks.studies import ns3_parity
from sebulba.agents.configs import SimplePolicyGradientConfig, TorsoConfig
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.envs import make_env_factory
from sebulba.errors import EnvError, UsageError

MISSING = [name for name in ("ns3", "sebulba_ns3") if importlib.util.find_spec(name) is None]
needs_ns3 = pytest.mark.skipif(
    bool(MISSING) or shutil.which("g++") is None,
    reason=f"{', '.join(MISSING) or 'g++'} is not installed; see packages/sebulba-ns3/README.md",
)


def small() -> CongestionControlOptions:
    return dataclasses.replace(ns3_parity.SMALL.options, engine="ns3", max_episode_steps=5)


@pytest.fixture
def pool():
    made = make_pool(small(), [3, 4])
    yield made
    made.close()


def played(pool, num_steps=8, seed=0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    rows = [pool.step(rng.uniform(-1, 1, 2).astype(np.float32)) for _ in range(num_steps)]
    return [x.tobytes() for one in rows for x in (one.obs, one.reward, one.truncated, one.is_first)]


@needs_ns3
def test_native_is_ns3_packet_for_packet():
    found = ns3_parity.compare(ns3_parity.SMALL)
    assert found.is_equal and found.events == 0 and found.drops > 5


@needs_ns3
def test_a_killed_worker_is_replaced_and_repeats_its_episode(pool):
    other = make_pool(small(), [3, 4])
    pool.reset(), other.reset()
    # In mid-episode, at its end, at the next one's begin; NS_FATAL ends a process by SIGABRT.
    for seed, how in enumerate((signal.SIGKILL, signal.SIGABRT, signal.SIGKILL)):
        assert played(pool, 3, seed) == played(other, 3, seed)
        os.kill(pool._envs[1].worker.process.pid, how)
        with pytest.warns(RuntimeWarning, match=f"environment 1 .* {how.name}; a new one repeats"):
            assert played(pool, 1, seed) == played(other, 1, seed)
    other.close()


@needs_ns3
def test_what_was_put_back_goes_on_from_every_place(pool):
    pool.reset()
    back = make_pool(small(), [7, 8])
    for steps in (0, 3, 2, 1):
        played(pool, steps, steps)
        state = pool.state()
        expected = played(pool)
        back.put_back(state)
        assert played(back) == expected
    with pytest.raises(EnvError, match="of 2 environments, not 1"):
        make_pool(small(), [0]).put_back(state)
    back.close()
    with pytest.raises(EnvError, match="closed"):
        back.reset()


NAME = f"sebulba_networks:{CONGESTION_CONTROL}"
TCP_NETWORK = {"bandwidth_mbps": 20, "rtt_ms": 16, "buffer_packets": 40, "slow_start_packets": 20}
OPTIONS = {"bandwidth_mbps": 8, "rtt_ms": 10, "max_episode_steps": 7}


@needs_ns3
def test_gymnasium_makes_it():
    env = gymnasium.make(NAME, engine="ns3", **OPTIONS)
    first = env.reset(seed=1)[0]
    assert env.step(np.zeros(1, np.float32))[4]["goodput_mbps"] > 1
    assert np.array_equal(env.reset(seed=1)[0], first)
    env.close()


@needs_ns3
@pytest.mark.slow
def test_a_training_goes_on_when_a_worker_is_killed(monkeypatch):
    number, step = itertools.count(), ProcessPool.step

    def step_after_death(self, *arguments, **options):
        if next(number) == 9:
            os.kill(self._envs[0].worker.process.pid, signal.SIGKILL)
        return step(self, *arguments, **options)

    monkeypatch.setattr(ProcessPool, "step", step_after_death)
    factory = make_env_factory(CONGESTION_CONTROL, **OPTIONS, engine="ns3")
    config = SimplePolicyGradientConfig(torso=TorsoConfig(hidden_sizes=(8,)))
    agent = SimplePolicyGradient(sebulba.env_spec(factory), config)
    devices = {"inference_devices": [0], "update_devices": [0], "num_inferencers_per_device": 1}
    with sebulba.GymnasiumLoop(factory, agent, num_envs=2, **devices) as loop:
        state = loop.new_state(0, steps_per_cycle=8)
        with pytest.warns(RuntimeWarning, match="a new one repeats the episode"):
            result = loop.run(state, num_cycles=3, steps_per_cycle=8)
    assert result.counters.env_steps == 48 and result.counters.env_restarts == 0


@needs_ns3
def test_tcp_fills_the_link_at_its_product_of_bandwidth_and_delay():
    env = gymnasium.make(NAME, engine="ns3", transport="tcp", **TCP_NETWORK)
    infos, gone = [env.reset(seed=1)[1]], []
    for _ in range(12):
        wanted = np.log2(30 / infos[-1]["cwnd"])  # 20 Mbit/s and 17 ms are 28.5 packets
        *_, truncated, info = env.step(np.clip(np.float32([wanted]), -2, 2))
        infos.append(info), gone.append(truncated)
    last = infos[-1]
    assert last["goodput_mbps"] > 0.97 * 20 * 1448 / 1490  # TCP's headers are of 20 bytes
    assert last["loss"] == 0 and last["cwnd"] == 30 and not any(gone)
    env.reset(seed=1)
    assert [env.step(np.ones(1, np.float32))[4]["cwnd"] for _ in range(2)] == [40, 80]
    env.close()


@needs_ns3
def test_a_step_of_tcp_that_is_too_much_work_is_cut_short():
    network = {"bandwidth_mbps": 128, "rtt_ms": 64, "buffer_packets": 800}
    env = gymnasium.make(NAME, engine="ns3", transport="tcp", **network)
    assert env.reset(seed=1)[1]["is_cut"]  # after the burst of losses that ends its slow start
    _, _, terminated, truncated, info = env.step(np.zeros(1, np.float32))
    assert truncated and not terminated and info["is_cut"]
    env.close()


@needs_ns3
@pytest.mark.parametrize("control", ["aimd", "cubic", "bbr"])
def test_tcp_has_its_own_controls(control):
    network = {**TCP_NETWORK, "control": control, "random_loss": 0.001}
    env = gymnasium.make(NAME, engine="ns3", transport="tcp", num_aimd=1, **network)
    runs = []
    for _ in range(2):
        env.reset(seed=3)
        runs.append([env.step(np.zeros(1, np.float32))[4] for _ in range(30)])
    assert runs[0] == runs[1]
    assert len({info["cwnd"] for info in runs[0]}) > 5
    assert 2 < np.mean([info["goodput_mbps"] for info in runs[0]]) < 19.5
    env.close()


def test_transports_are_checked(monkeypatch):
    with pytest.raises(UsageError, match=r"transport='tcp' is not in the native engine; use eng"):
        CongestionControlOptions(transport="tcp")
    monkeypatch.setattr("sebulba_networks.options.find_engine", lambda name: None)
    with pytest.raises(UsageError, match=r"trace=True follows the packets of our own transport"):
        CongestionControlOptions(engine="ns3", transport="tcp", trace=True)


@needs_ns3
def test_a_process_has_one_simulator():
    script = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); lib.net_create.restype = "
        "ctypes.c_void_p; lib.net_error.restype = ctypes.c_char_p; seeds = (ctypes.c_int64 * 2)(); "
        "made = [lib.net_create(sys.argv[2].encode(), n, seeds, 1) for n in (2, 1, 1)]; "
        "print([bool(x) for x in made], lib.net_error().decode())"
    )
    command = [sys.executable, "-c", script, str(engines.find_engine("ns3")()), small().as_json()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    assert said.startswith("[False, True, False] a process holds one simulator of ns-3")


def test_what_is_missing_is_told(monkeypatch):
    with pytest.raises(UsageError, match="engine='other' is not installed; there is native"):
        CongestionControlOptions(engine="other")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **group: ())
    with pytest.raises(UsageError, match=r"engine='ns3' is not installed; `pip install"):
        CongestionControlOptions(engine="ns3")


@needs_ns3
def test_a_missing_wheel_and_compiler_are_told(monkeypatch):
    import sebulba_ns3

    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"g\+\+ is not found; install it"):
        make_pool(small(), [0])
    monkeypatch.setattr(sebulba_ns3, "NS3_VERSION", "3.45")
    with pytest.raises(UsageError, match=r"needs ns3 3\.45, not 3.44.post0"):
        sebulba_ns3.library()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs ns-3.*`pip install --no-deps ns3==3.44.post0`"):
        sebulba_ns3.library()

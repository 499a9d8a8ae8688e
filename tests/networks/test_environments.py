"""Networks as environments: physics, seeds, states, options, and the compiled engine."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from sebulba_networks import CONGESTION_CONTROL, build
from sebulba_networks.gymnasium_env import CongestionControlEnv
from sebulba_networks.native import ACK_BYTES, INFO, PACKET_BYTES, PAYLOAD_BYTES, NativePool
from sebulba_networks.options import CongestionControlOptions

import sebulba
from sebulba.agents.configs import SimplePolicyGradientConfig, TorsoConfig
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.configs.presets import PRESETS
from sebulba.envs import env_source, env_spec, make_env_factory
from sebulba.errors import ActionError, EnvError, UsageError
from tests.support.loop_helpers import leaves_equal, run_in_lockstep
from tests.support.needs import needs_compiler

pytestmark = needs_compiler

MODULE_ID = f"sebulba_networks:{CONGESTION_CONTROL}"
SMALL = {"bandwidth_mbps": (2, 8), "rtt_ms": (4, 20), "buffer_packets": (5, 60)}
LINK = {"bandwidth_mbps": 96, "rtt_ms": 40, "buffer_packets": 300}
"""A network in the middle of the training ranges."""


def bits_ns(size: int, mbps: float) -> float:
    return size * 8e3 / mbps


def held(window: float, num_steps: int = 30, **options) -> list[dict[str, float]]:
    """Return the info of steps in which the window is as near ``window`` as it can be set."""
    pool = NativePool(CongestionControlOptions(**LINK | options), [5])
    info = dict(zip(INFO, pool.reset(with_info=True).info[0], strict=True))
    infos = []
    for _ in range(num_steps):
        exponent = np.clip(np.log2(window / info["window"]), -2, 2)
        rows = pool.step(np.array([exponent], np.float32), with_info=True)
        info = dict(zip(INFO, rows.info[0], strict=True))
        infos.append(info)
    return infos


def base_rtt_ns(mbps=96, rtt_ms=40) -> float:
    return rtt_ms * 1e6 + bits_ns(PACKET_BYTES, mbps) + bits_ns(ACK_BYTES, mbps)


BDP = base_rtt_ns() / bits_ns(PACKET_BYTES, 96)


def test_a_window_of_the_bandwidth_delay_product_fills_the_link_without_loss():
    infos = held(math.ceil(BDP) + 0.5)[-20:]
    capacity = 96e6 * PAYLOAD_BYTES / PACKET_BYTES
    assert min(info["throughput_bps"] for info in infos) >= 0.97 * capacity
    assert sum(info["lost"] for info in infos) == 0


def test_what_a_window_has_beyond_that_waits_in_the_buffer():
    for info in held(BDP + 150)[-10:]:
        waiting_ns = info["mean_rtt_ns"] - info["base_rtt_ns"]
        assert abs(waiting_ns / bits_ns(PACKET_BYTES, 96) - 150) <= 1
        assert info["lost"] == 0 and abs(info["queue_length"] - 150) <= 1


def test_a_small_window_sees_the_round_trip_time_of_the_path():
    info = held(4)[-1]
    assert abs(info["mean_rtt_ns"] - base_rtt_ns()) < 1000
    assert info["srtt_ns"] == info["least_srtt_ns"] == info["least_rtt_ns"] == info["base_rtt_ns"]
    assert info["interval_ns"] == 2 * info["least_rtt_ns"]


def test_an_action_multiplies_the_window_by_its_power_of_two():
    pool, rng = NativePool(CongestionControlOptions(**SMALL), [1]), np.random.default_rng(0)
    window = pool.reset().obs[0, 3].astype(float)
    for _ in range(50):
        action = rng.uniform(-1, 1, 1).astype(np.float32)
        window = min(10_000.0, max(1.0, window * math.exp2(float(action[0]))))
        rows = pool.step(action, with_info=True)
        assert rows.info[0][INFO.index("window")] == window
    pool.close()


def test_a_greedy_competitor_shares_the_link_and_shows_its_sawtooth():
    alone, shared = held(BDP)[-1], held(BDP, 150, num_aimd=1, competitor_start_s=0)
    assert shared[-1]["throughput_bps"] < 0.8 * alone["throughput_bps"]
    waiting = [info["queue_length"] for info in shared[50:]]
    assert max(waiting) > 280 and min(waiting[50:]) < 170


def played(adapter, num_steps=40, *, seed=0) -> str:
    """Return a hash of everything that random actions show."""
    rng, digest = np.random.default_rng(seed), hashlib.sha256()
    for _ in range(num_steps):
        action = rng.uniform(-2, 2, (adapter.num_envs, 1)).astype(np.float32)
        for leaf in adapter.step(action):
            digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def make(num_envs=3, *, seeds=None, **options):
    options = {"max_episode_steps": 9, "random_loss": 0.01, **SMALL, **options}
    return make_env_factory(CONGESTION_CONTROL, **options)(num_envs, seeds or list(range(num_envs)))


def hash_of_new(_=None) -> str:
    adapter = make()
    adapter.reset()
    return played(adapter)


@pytest.mark.slow
def test_one_seed_plays_one_game_in_any_process_and_after_an_abandoned_episode():
    expected = hash_of_new()
    assert hash_of_new() == expected
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(hash_of_new, [None]) == [expected]
    env = gymnasium.make(MODULE_ID, **SMALL)
    games = []
    for _ in range(2):
        obs, _ = env.reset(seed=7)
        steps = [env.step(np.array([0.3], np.float32))[:2] for _ in range(5)]
        games.append((obs.tobytes(), [(o.tobytes(), r) for o, r in steps]))
    assert games[0] == games[1]
    assert env.reset()[0].tobytes() != games[0][0]  # the next episode draws anew
    env.close()


def test_threads_change_nothing():
    hashes = set()
    for threads in (1, 2, 5):
        adapter = make(40, num_threads=threads)
        adapter.reset()
        hashes.add(played(adapter))
        adapter.close()
    assert len(hashes) == 1


def test_what_was_put_back_goes_on_from_every_place():
    adapter, back = make(num_cubic=1, cross_traffic_mbps=0.5), None
    adapter.reset()
    for steps in (0, 3, 5, 1, 1, 4):  # in mid-episode, at its end, at the next one's begin
        played(adapter, steps, seed=steps)
        state = adapter.state()
        expected = played(adapter)
        back = make(seeds=[7, 8, 9], num_cubic=1, cross_traffic_mbps=0.5)
        back.put_back(state)
        assert played(back) == expected
        adapter.put_back(state)  # in place, too
    before_any = make()
    back = make(seeds=[7, 8, 9])
    back.put_back(before_any.state())
    assert back.reset().obs.tobytes() == before_any.reset().obs.tobytes()


def test_rows_that_begin_an_episode_ignore_the_action():
    adapter = make(2)
    adapter.reset()
    outputs = [adapter.step(np.zeros((2, 1), np.float32)) for _ in range(20)]
    assert [output.is_first[0] for output in outputs] == [t % 10 == 9 for t in range(20)]
    assert [output.truncated[0] for output in outputs] == [t % 10 == 8 for t in range(20)]
    assert outputs[9].reward[0] == 0
    assert not np.shares_memory(outputs[0].obs, outputs[1].obs)


@pytest.mark.parametrize("what", ["another_number", "another_network", "damaged", "short"])
def test_a_state_that_does_not_fit_is_refused(what):
    adapter = make()
    adapter.reset()
    state = adapter.state()
    if what == "another_number":
        other = make(2)
    else:
        other = make(buffer_packets=7) if what == "another_network" else make()
    if what == "damaged":
        state = state[:-9] + b"x" + state[-8:]
    if what == "short":
        with pytest.raises(EnvError, match="the network engine: the state is too short"):
            other._pool.put_back(b"1234")
        return
    with pytest.raises(EnvError, match="state"):
        other.put_back(state)


def test_wrong_actions_and_closed_networks_are_refused():
    adapter = make()
    adapter.reset()
    for wrong in (
        np.full((3, 1), 2.1),
        np.full((3, 1), np.nan),
        np.zeros(3),
        np.zeros((3, 1), int),
    ):
        with pytest.raises(ActionError, match="action"):
            adapter.step(wrong.astype(np.float32) if wrong.dtype == float else wrong)
    adapter.close()
    adapter.close()
    with pytest.raises(EnvError, match="closed"):
        adapter.reset()


def test_memory_does_not_grow():
    adapter = make(4)
    for _ in range(50):
        adapter.reset()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000):
        adapter.reset()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5000  # KiB


def test_gymnasium_finds_nothing_wrong():
    env = gymnasium.make(MODULE_ID, **SMALL, max_episode_steps=None)
    with warnings.catch_warnings():
        # It recommends actions from -1 to 1, where the paper's go from -2 to 2.
        warnings.filterwarnings("ignore", ".*symmetric and normalized space")
        check_env(env.unwrapped, skip_render_check=True)
    _, info = env.reset(seed=1)
    keys = {"goodput_mbps", "srtt_ms", "queueing_delay_ms", "loss", "cwnd", "is_cut"} | {"network"}
    assert info.keys() == keys and 2 <= info["network"]["bandwidth_bps"] / 1e6 <= 8
    state = env.unwrapped.get_state()
    expected = env.step(np.zeros(1, np.float32))
    for wrong in ([2.1], [np.nan], [0, 0]):
        with pytest.raises(ActionError, match="must be one number from -2 to 2"):
            env.unwrapped.step(wrong)
    env.unwrapped.set_state(state)
    assert np.array_equal(env.step(np.zeros(1, np.float32))[0], expected[0])
    env.close()


def test_the_features_that_mean_the_same_everywhere():
    spec = env_spec(CONGESTION_CONTROL, features="relative")
    assert spec.observation_space.shape == (6,)
    adapter = make(features="relative")
    output = adapter.reset()
    assert all(row in spec.observation_space for row in output.obs)
    assert env_source(CONGESTION_CONTROL).backend is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bandwidth_mbps": 0}, "one or two numbers from 0.1 to 10000; the default is '64-128'"),
        ({"bandwidth_mbps": "fast"}, "a number, a pair of numbers or text such as"),
        ({"bandwidth_mbps": "64-"}, "a number, a pair"),
        ({"bandwidth_mbps": "-64"}, "a number, a pair"),
        ({"bandwidth_mbps": (128, 64)}, "smaller end first; swap"),
        ({"bandwidth_mbps": (1, 2, 3)}, "a pair"),
        ({"bandwidth_mbps": True}, "a pair"),
        ({"bandwidth_mbps": None}, "a pair"),
        ({"bandwidth_mbps": math.nan}, "a pair"),
        ({"bandwidth_mbps": math.inf}, "a pair"),
        ({"bandwidth_mbps": 10**400}, "a pair"),
        ({"bandwidth_mbps": [1, "x"]}, "a pair"),
        ({"bandwidth_mbps": {}}, "a pair"),
        ({"rtt_ms": -1}, "from 0.1 to 5000"),
        ({"rtt_ms": 0}, "from 0.1 to 5000"),
        ({"rtt_ms": 1e9}, "from 0.1 to 5000"),
        ({"buffer_packets": 0}, "whole numbers from 1"),
        ({"buffer_packets": 1.5}, "whole numbers"),
        ({"buffer_packets": (1, 2.5)}, "whole numbers"),
        ({"buffer_packets": 1e12}, "whole numbers from 1 to 1e.06"),
        ({"random_loss": 0.6}, "from 0 to 0.5"),
        ({"random_loss": -0.1}, "from 0 to 0.5"),
        ({"random_loss": "1e-3-1"}, "from 0 to 0.5"),
        ({"cross_traffic_mbps": 1e-6}, "must be 0, or from 0.001 on"),
        ({"cross_traffic_mbps": -1}, "from 0 to 10000"),
        ({"cross_traffic_on_ms": 0}, "from 0.001"),
        ({"cross_traffic_off_ms": -1}, "from 0 to"),
        ({"cross_traffic_off_ms": "long"}, "a number; use"),
        ({"competitor_start_s": -1}, "from 0 to 1000"),
        ({"num_aimd": -1}, "from 0 to 64"),
        ({"num_aimd": 1.0}, "a whole number"),
        ({"num_aimd": 65}, "from 0 to 64"),
        ({"num_cubic": True}, "a whole number"),
        ({"num_cubic": -3}, "from 0 to 64"),
        ({"num_hops": 0}, "from 1 to 16"),
        ({"num_hops": 17}, "from 1 to 16"),
        ({"flow_packets": -1}, "from 0 to"),
        ({"flow_packets": 2.5}, "a whole number"),
        ({"slow_start_packets": 1}, "from 2 to"),
        ({"max_window_packets": 9}, "from 10 to"),
        ({"max_window_packets": 10**7}, "from 10 to"),
        ({"max_episode_steps": 0}, "from 1 to"),
        ({"max_episode_steps": "400"}, "a whole number"),
        ({"max_silent_steps": 0}, "from 1 to"),
        ({"features": "all"}, "one of 'paper', 'relative'"),
        ({"trace": 1}, "True or False"),
        ({"bandwith_mbps": 1}, "no option 'bandwith_mbps'; the nearest are bandwidth_mbps"),
        ({"backend": "envpool"}, "backend='envpool' does not go with"),
        ({"vectorization": "async"}, "is a vector environment by itself"),
        ({"num_threads": 0}, "at least 1"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_wrong_options_are_told(options, said):
    with pytest.raises(UsageError, match=said):
        make_env_factory(CONGESTION_CONTROL, **options)


def test_an_unknown_id_is_told():
    with pytest.raises(UsageError, match=r"the nearest are sebulba/CongestionControl-v0"):
        make_env_factory("sebulba/CongestionControl-v1")
    with pytest.raises(UsageError, match="drop it"):
        CongestionControlEnv(render_mode="human")


def run_build(cache, path=os.environ["PATH"]) -> subprocess.Popen:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PATH": str(path)}
    command = [sys.executable, "-m", "sebulba_networks.build"]
    return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)


def test_processes_that_start_together_compile_once(tmp_path):
    """A compiler that notes its calls stands in for g++."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "g++").write_text(
        '#!/bin/sh\nfor last; do :; done\n[ "$last" = --version ] && echo 1 && exit\n'
        f'echo x >> "{tmp_path}/calls"\nprintf library > "$last"\n'
    )
    (tools / "g++").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    starts = [run_build(tmp_path / "cache", path) for _ in range(8)]
    said = {start.communicate(timeout=300) for start in starts}
    assert len(said) == 1 and not next(iter(said))[1]
    assert (tmp_path / "calls").read_text() == "x\n"
    names = {file.name for file in (tmp_path / "cache/sebulba/networks").iterdir()}
    assert len(names) == 2 and "lock" in names  # nothing partial


def test_a_missing_or_failing_compiler_and_a_full_disk_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME"):
        build.library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("-no-such-flag",))
    with pytest.raises(UsageError, match=r"could not compile .*engine\.cc.*\n.*no-such-flag"):
        build.library()
    assert not list(tmp_path.glob("sebulba/networks/*.so"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"g\+\+ is not found; install it"):
        build.library()


class Trained:
    """REINFORCE on small networks, in lockstep."""

    def __init__(self, folder, *num_cycles, resume=False):
        config = SimplePolicyGradientConfig(torso=TorsoConfig(hidden_sizes=(8,)))
        factory = make_env_factory(CONGESTION_CONTROL, **SMALL, max_episode_steps=7)
        agent = SimplePolicyGradient(sebulba.env_spec(factory), config)
        self.state, result, self.notes = run_in_lockstep(
            folder, factory, agent, *num_cycles, resume=resume
        )
        self.counters = result.counters


@pytest.mark.slow
def test_a_lockstep_run_resumes_bit_for_bit(tmp_path):
    never = Trained(tmp_path / "never", 3, 3)
    first = min(f for f in (tmp_path / "never").iterdir() if f.name.isdecimal())
    shutil.copytree(first, tmp_path / "cut" / first.name)
    resumed = Trained(tmp_path / "cut", 3, resume=True)
    assert not resumed.notes
    assert resumed.counters.env_steps == 6 * 8 * 4
    assert leaves_equal(resumed.state, never.state) and resumed.counters == never.counters


def test_the_preset_is_for_it():
    assert PRESETS["congestion-ppo"].make().env.id == CONGESTION_CONTROL


def test_a_tiny_window_is_paid_its_share_of_the_link_if_asked():
    options = {"bandwidth_mbps": 50, "rtt_ms": 40, "buffer_packets": 100, "slow_start_packets": 2}

    def mean_reward(**more):
        env = make_env_factory("sebulba/CongestionControl-v0", **options, **more)(1, [3])
        env.reset()
        steps = [env.step(np.zeros((1, 1), np.float32)) for _ in range(60)]
        env.close()
        return np.mean([step.reward[0] for step in steps[20:]])

    assert mean_reward() > 0.9
    assert mean_reward(reward="capacity") < 0.1

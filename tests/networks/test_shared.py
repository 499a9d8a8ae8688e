"""Flows that share a bottleneck, each with an agent; and what else moves windows."""

from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest
from sebulba_networks import SHARED_BOTTLENECK
from sebulba_networks.options import CongestionControlOptions, SharedBottleneckOptions
from sebulba_networks.tools.fairness import jain, share_of
from sebulba_networks.tools.playing import Figures, columns, ignored, play

import sebulba
from sebulba.agents.configs import SimplePolicyGradientConfig, TorsoConfig
from sebulba.agents.configs.multi_agent import MultiAgentConfig
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.configs.presets import PRESETS
from sebulba.envs import make_env_factory
from sebulba.errors import ActionError, EnvError, UsageError
from tests.support.loop_helpers import leaves_equal, run_in_lockstep
from tests.support.needs import needs_compiler

pytestmark = needs_compiler

SMALL = {
    **{"bandwidth_mbps": (2, 8), "rtt_ms": (4, 20), "buffer_packets": (5, 60)},
    **{"num_agents": 3, "join_s": (0, 0.3), "stay_s": (0.1, 0.5), "max_episode_steps": 12},
}
LINK = {"bandwidth_mbps": 48, "rtt_ms": 40, "buffer_packets": 160}


def make(num_envs=3, *, seeds=None, **options):
    factory = make_env_factory(SHARED_BOTTLENECK, **SMALL | options)
    return factory(num_envs, seeds or list(range(num_envs)))


def played(adapter, num_steps=60, *, seed=0) -> str:
    """Return a hash of everything that random actions show."""
    rng, digest = np.random.default_rng(seed), hashlib.sha256()
    shape = (adapter.num_envs, len(adapter.spec.groups["flow"].slots), 1)
    for _ in range(num_steps):
        output = adapter.step({"flow": rng.uniform(-1, 1, shape).astype(np.float32)})
        for name in ("obs", "reward", "terminated", "truncated", "is_first", "acting"):
            digest.update(np.ascontiguousarray(getattr(output, name)["flow"]).tobytes())
        digest.update(output.episode_end.tobytes())
    return digest.hexdigest()


def test_flows_alike_are_slots_of_a_group_that_wait():
    spec = sebulba.env_spec(SHARED_BOTTLENECK, num_agents=3)
    (group,) = spec.groups.values()
    assert group.slots == ("flow_0", "flow_1", "flow_2") and group.waits
    assert (
        group.spec.observation_space
        == sebulba.env_spec("sebulba/CongestionControl-v0").observation_space
    )


def test_agents_come_take_steps_of_their_own_and_go_once():
    adapter = make(8)
    output = adapter.reset()
    assert output.is_first["flow"].all() and output.acting["flow"].any(axis=1).all()
    acted = output.acting["flow"].astype(int)
    left = np.zeros_like(acted)
    for _ in range(200):
        output = adapter.step({"flow": np.zeros((8, 3, 1), np.float32)})
        ends = output.terminated["flow"] | output.truncated["flow"]
        begins = output.is_first["flow"].all(axis=1)
        acted[begins], left[begins] = 0, 0
        assert not (ends & output.acting["flow"]).any()
        assert not output.reward["flow"][~(ends | output.acting["flow"])].any()
        assert not output.reward["flow"][begins].any() and not ends[begins].any()
        left, acted = left + ends, acted + output.acting["flow"]
        assert (output.episode_end == (left == 1).all(axis=1)).all()
        assert left.max() <= 1 and acted.max() <= 12


def test_threads_and_what_was_put_back_change_nothing():
    hashes = set()
    for threads in (1, 2):
        adapter = make(20, num_threads=threads)
        adapter.reset()
        hashes.add(played(adapter))
    assert len(hashes) == 1
    adapter = make()
    adapter.reset()
    for steps in (0, 3, 11, 24):
        played(adapter, steps, seed=steps)
        state, expected = adapter.state(), played(adapter)
        back = make(seeds=[7, 8, 9])
        back.put_back(state)
        assert played(back) == expected
    with pytest.raises(EnvError, match="state"):
        make(num_agents=2).put_back(state)


def test_one_agent_is_what_it_is_alone():
    """The first agent of a bottleneck that nobody joins sees what a single one sees."""
    alone = {name: SMALL[name] for name in ("bandwidth_mbps", "rtt_ms", "buffer_packets")}
    one = make_env_factory("sebulba/CongestionControl-v0", **alone)(2, [3, 4])
    shared = make_env_factory(SHARED_BOTTLENECK, num_agents=1, **alone)(2, [3, 4])
    expected, output = one.reset(), shared.reset()
    rng = np.random.default_rng(0)
    for _ in range(30):
        assert np.array_equal(output.obs["flow"][:, 0], expected.obs)
        assert np.array_equal(output.reward["flow"][:, 0], expected.reward)
        action = rng.uniform(-2, 2, (2, 1)).astype(np.float32)
        expected, output = one.step(action), shared.step({"flow": action[:, None]})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_agents": 0}, "from 1 to 64; the default is 2"),
        ({"num_agents": 65}, "from 1 to 64"),
        ({"join_s": -1}, "from 0 to 1000; the default is '0-10'"),
        ({"stay_s": "long"}, "a number, a pair of numbers or text"),
        ({"control": "reno"}, "one of 'agent', 'aimd', 'cubic', 'bbr'"),
        ({"num_bbr": -1}, "from 0 to 64"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_wrong_options_are_told(options, said):
    with pytest.raises(UsageError, match=said):
        make_env_factory(SHARED_BOTTLENECK, **options)
    if set(options) & {"num_agents", "join_s", "stay_s"}:
        with pytest.raises(UsageError, match="has no option"):
            make_env_factory("sebulba/CongestionControl-v0", **options)


def test_wrong_actions_are_refused():
    adapter = make()
    adapter.reset()
    for wrong in (np.full((3, 3, 1), 2.1, np.float32), np.zeros((3, 2, 1), np.float32)):
        with pytest.raises(ActionError, match="action"):
            adapter.step({"flow": wrong})


def trained(folder, *num_cycles, resume=False):
    """Train REINFORCE in lockstep; return state, counters and notes of the resumption."""
    config = SimplePolicyGradientConfig(torso=TorsoConfig(hidden_sizes=(8,)))
    factory = make_env_factory(SHARED_BOTTLENECK, **SMALL)
    agent = MultiAgent(sebulba.env_spec(factory), MultiAgentConfig({"*": config}))
    state, result, notes = run_in_lockstep(folder, factory, agent, *num_cycles, resume=resume)
    return state, result.counters, notes


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_lockstep_run_resumes_bit_for_bit(tmp_path):
    never, counters, _ = trained(tmp_path / "never", 3, 3)
    first = min(f for f in (tmp_path / "never").iterdir() if f.name.isdecimal())
    shutil.copytree(first, tmp_path / "cut" / first.name)
    resumed, resumed_counters, notes = trained(tmp_path / "cut", 3, resume=True)
    assert not notes
    assert leaves_equal(resumed, never) and resumed_counters == counters


def test_the_preset_is_for_it():
    assert PRESETS["shared-bottleneck-ppo"].make().env.id == SHARED_BOTTLENECK


# What moves a window by rules.


def ruled(control: str, num_steps: int = 150, **options) -> dict[str, np.ndarray]:
    network = CongestionControlOptions(
        **LINK | options, control=control, max_episode_steps=num_steps
    )
    return columns(play(network, lambda slot: ignored, [3])[0])


@pytest.mark.parametrize("control", ["aimd", "cubic", "bbr"])
def test_rules_fill_the_link_and_do_not_look_at_actions(control):
    flow = ruled(control)
    network = CongestionControlOptions(**LINK, control=control, max_episode_steps=150)
    wild = columns(play(network, lambda slot: lambda seen: 2.0, [3])[0])
    assert all(np.array_equal(flow[name], wild[name]) for name in flow)
    assert Figures.of(play(network, lambda slot: ignored, [3])[0]).throughput > 0.9


def test_aimd_shows_its_sawtooth():
    window = ruled("aimd", 400)["window"]
    falls = np.flatnonzero(window[1:] < 0.6 * window[:-1])
    assert len(falls) >= 3
    between = window[falls[-2] + 2 : falls[-1]]
    assert (np.diff(between) > 0).all() and np.diff(between).max() < 3  # a packet a round trip


def test_bbr_keeps_the_queue_short_and_probes_for_bandwidth_and_delay():
    flow = ruled("bbr", 400, buffer_packets=800)
    product = 48e6 * 0.04 / (8 * 1495)
    settled = flow["window"][20:]
    assert np.median(settled) == pytest.approx(product, rel=0.05)
    assert settled.max() == pytest.approx(1.25 * product, rel=0.1)
    waits = (flow["mean_rtt_ns"] - flow["base_rtt_ns"])[20:]
    assert np.median(waits) < 2e6 and not flow["lost"][20:].any()


def test_two_aimd_flows_come_to_equal_shares():
    options = SharedBottleneckOptions(
        **LINK, control="aimd", join_s=1, stay_s=0, max_episode_steps=700
    )
    share = share_of([columns(seen) for seen in play(options, lambda slot: ignored, [1])])
    assert share["jain"]["second_half"] > 0.95
    assert jain([1, 0]) == 0.5 and jain([2, 2, 2]) == 1 and jain([0, 0]) == 1

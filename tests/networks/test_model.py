"""The engine equals a slow model, written from the rules, packet for packet."""

from __future__ import annotations

import numpy as np
import pytest
from sebulba_networks.native import HAPPENINGS, INFO, NativePool
from sebulba_networks.options import CongestionControlOptions, SharedBottleneckOptions

from tests.support.needs import needs_compiler
from tests.support.network_model import PACKET, Draws, Model, ModelFlow, ModelLink, transmission

pytestmark = needs_compiler

SMALL = {"bandwidth_mbps": (2, 8), "rtt_ms": (4, 30), "buffer_packets": (3, 60)}
CASES = {
    "plain": SMALL,
    "held": {"bandwidth_mbps": 8, "rtt_ms": 10, "buffer_packets": 20},
    "tiny_buffer": SMALL | {"buffer_packets": 1, "rtt_ms": (1, 3)},
    "deep_buffer": SMALL | {"buffer_packets": 200, "max_window_packets": 150},
    "far": SMALL | {"rtt_ms": 150, "bandwidth_mbps": 3},
    "threshold": SMALL | {"slow_start_packets": 14},
    "finite": SMALL | {"flow_packets": 300},
    "random_loss": SMALL | {"random_loss": (0.01, 0.2)},
    "very_lossy": SMALL | {"random_loss": 0.5},
    "constant_rate": SMALL | {"cross_traffic_mbps": (0.5, 1.5)},
    "aimd": SMALL | {"num_aimd": 2, "competitor_start_s": (0, 0.1)},
    "parking_lot": SMALL | {"num_hops": 3, "cross_traffic_mbps": 1, "num_aimd": 1},
    "own_aimd": SMALL | {"control": "aimd", "num_aimd": 1},
    "all": SMALL | {"num_hops": 2, "cross_traffic_mbps": 1, "num_aimd": 1, "random_loss": 0.02},
}


def model_of(options: CongestionControlOptions, seed: int, episode: int = 0) -> Model:
    """Draw the parameters of an episode as the page says, in the order of its table."""
    draws = Draws(seed, episode, 0)
    between = lambda pair: pair[0] + (pair[1] - pair[0]) * draws.uniform()  # noqa: E731
    rate = round(between(options.bandwidth_mbps) * 1e6)
    delay = round(between(options.rtt_ms) * 1e6 / 2) // options.num_hops
    low, high = map(int, options.buffer_packets)
    buffer = low + int((high - low + 1) * draws.uniform())
    loss = between(options.random_loss)
    cross = round(between(options.cross_traffic_mbps) * 1e6)
    start = round(between(options.competitor_start_s) * 1e9)
    links = [
        ModelLink(rate, delay, buffer, loss, Draws(seed, episode, 1 + 2 * hop))
        for hop in range(options.num_hops)
    ]
    most = options.max_window_packets
    begins = [0]
    for _ in range(1, options.num_agents):
        begins.append(round(between(options.join_s) * 1e9))
        between(options.stay_s)
    flows = [
        ModelFlow(
            options.control,
            list(range(options.num_hops)),
            most=most,
            threshold=min(most, options.slow_start_packets),
            size=options.flow_packets or float("inf"),
            start=begin,
            steps=True,
        )
        for begin in begins
    ]
    for hop in range(options.num_hops):
        flows += [ModelFlow("aimd", [hop], most=most, start=start) for _ in range(options.num_aimd)]
        if cross:
            flows.append(ModelFlow("cbr", [hop], most=0, between=transmission(PACKET, cross)))
    return Model(links, flows)


def traced(pool: NativePool) -> list[tuple[int, str, int, int]]:
    kept = ((int(t), HAPPENINGS[kind], int(flow), int(n)) for t, kind, flow, n in pool.trace())
    return [event for event in kept if event[1] != "lost"]


@pytest.mark.parametrize("name", CASES)
def test_the_engine_equals_the_model_packet_for_packet(name):
    options = CongestionControlOptions(**CASES[name], trace=True)
    branches, ends = set(), set()
    for seed in (1, 2):
        pool, rng = NativePool(options, [seed]), np.random.default_rng(seed)
        rows, model = pool.reset(with_info=True), model_of(options, seed)
        obs, *_ = model.observed()
        np.testing.assert_allclose(rows.obs[0], obs, rtol=1e-6)
        silent = 0
        for t in range(60):
            action = np.float32(rng.uniform(-2, 2, 1) * rng.choice([0, 0.2, 1]))
            if name == "held":  # until the smoothed delay is the least there was
                action = np.float32([-0.5 if t < 6 else 0])
            rows = pool.step(action, with_info=True)
            model.step({0: float(action[0])})
            obs, reward, branch = model.observed()
            branches.add(branch)
            info = dict(zip(INFO, rows.info[0], strict=True))
            agent = model.flows[0]
            assert (info["sent"], info["acked"], info["lost"], info["time_ns"]) == (
                *(agent.sent, agent.acked, agent.lost, model.now),
            )
            assert (info["srtt_ns"], info["window"]) == (agent.srtt, agent.window)
            np.testing.assert_allclose(rows.obs[0], obs, rtol=1e-6)
            np.testing.assert_allclose(rows.reward[0], reward, rtol=1e-5, atol=1e-7)
            silent = 0 if agent.acked else silent + 1
            assert rows.terminated[0] == (agent.delivered == agent.size or silent == 20)
            if rows.terminated[0]:
                break
        assert traced(pool) == model.trace
        ends.add((agent.delivered == agent.size, silent == 20))
        pool.close()
    if name == "held":
        assert branches == {"simple", "delayed"}
    if name == "finite":
        assert (True, False) in ends


SHARED = {
    "two": SMALL | {"num_agents": 2, "join_s": (0, 1), "stay_s": 0},
    "at_once": SMALL | {"num_agents": 3, "join_s": 0, "stay_s": 0, "max_episode_steps": 30},
    "coming_and_going": SMALL | {"num_agents": 4, "join_s": (0, 2), "stay_s": (0.2, 1)},
    "finite": SMALL | {"num_agents": 3, "join_s": (0, 0.3), "stay_s": 1, "flow_packets": 200},
    "beside_others": SMALL
    | {"num_agents": 2, "num_hops": 2, "num_aimd": 1, "cross_traffic_mbps": 0.5}
    | {"random_loss": 0.01, "stay_s": (0.5, 2), "join_s": (0, 1)},
}


@pytest.mark.parametrize("name", SHARED)
def test_many_agents_equal_the_model_each_with_its_own_steps(name):
    options = SharedBottleneckOptions(**{"max_episode_steps": 60} | SHARED[name], trace=True)
    for seed in (1, 2):
        pool, rng = NativePool(options, [seed]), np.random.default_rng(seed)
        rows, model = pool.reset(with_info=True), model_of(options, seed)
        num_steps, most = [-1] * options.num_agents, options.max_episode_steps
        assert rows.is_first.all()
        for _ in range(options.num_agents * most + 2):
            shown = rows.acting | rows.terminated | rows.truncated
            assert np.flatnonzero(shown[0]).tolist() == sorted(model.ready)
            for i in model.ready:
                num_steps[i] += 1
                obs, reward, _ = model.observed(i)
                np.testing.assert_allclose(rows.obs[0, i], obs, rtol=1e-6)
                expected = reward if num_steps[i] else 0
                np.testing.assert_allclose(rows.reward[0, i], expected, rtol=1e-5, atol=1e-7)
                assert rows.info[0, i, INFO.index("time_ns")] == model.now
                if not rows.acting[0, i]:
                    model.leave(i)
            if rows.episode_end[0]:
                break
            actions = (rng.uniform(-2, 2, rows.acting.shape) * 0.4).astype(np.float32)
            acting = {i: float(actions[0, i]) for i in np.flatnonzero(rows.acting[0])}
            rows = pool.step(actions, with_info=True)
            model.step(acting)
            assert not rows.is_first.any()
        assert rows.episode_end[0] and max(num_steps) <= most
        assert traced(pool) == model.trace
        pool.close()

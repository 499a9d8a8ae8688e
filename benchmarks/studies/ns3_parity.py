"""The native engine beside ns-3: the same networks, the same actions, packet for packet.

``python -m benchmarks.studies.ns3_parity --json FILE`` plays all of ``CASES``, in some minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sebulba_networks.native import HAPPENINGS, INFO, Rows
from sebulba_networks.options import CongestionControlOptions, SharedBottleneckOptions
from sebulba_networks.pools import Pool, make_pool

MOST_OBS, MOST_REWARD = 1e-4, 1e-5
"""Largest difference of observations, relative where they are above 1, and of rewards, relative."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Networks that are alike, with a seed each."""

    options: CongestionControlOptions
    seeds: Sequence[int]
    num_steps: int = 400


def link(mbps: float, rtt_ms: float, buffer: int, **options: Any) -> Case:
    network = {"bandwidth_mbps": mbps, "rtt_ms": rtt_ms, "buffer_packets": buffer, **options}
    return Case(CongestionControlOptions(**network), (5,))


def drawn(num_steps: int = 150, num_agents: int = 1, **options: Any) -> Case:
    if num_agents > 1:
        shared = SharedBottleneckOptions(num_agents=num_agents, join_s=(0, 1), **options)
        return Case(shared, range(4), num_steps)
    return Case(CongestionControlOptions(**options), range(4), num_steps)


CASES = {
    "64 Mbit/s, 16 ms, 80 packets": link(64, 16, 80),
    "100 Mbit/s, 35 ms, 440 packets": link(100, 35, 440),
    "128 Mbit/s, 64 ms, 800 packets": link(128, 64, 800),
    "96 Mbit/s, 40 ms, 300 packets": link(96, 40, 300),
    "80 Mbit/s, 24 ms, 10 packets": link(80, 24, 10),
    "20 of the training ranges": Case(CongestionControlOptions(), range(20)),
    "2 flows": drawn(num_agents=2),
    "5 flows": drawn(num_agents=5),
    "parking lot of 3 links": drawn(num_hops=3),
    "parking lot of 3 links, constant bit rate on each": drawn(num_hops=3, cross_traffic_mbps=20),
    "constant bit rate beside": drawn(cross_traffic_mbps=(5, 40)),
    "on and off beside": drawn(cross_traffic_mbps=(20, 60), cross_traffic_off_ms=50.0),
    "random loss": drawn(random_loss=(0.001, 0.05)),
    "AIMD, CUBIC and the BBR-like beside": drawn(num_aimd=1, num_cubic=1, num_bbr=1),
    "a flow of 20,000 packets": drawn(flow_packets=20_000),
}
SMALL = Case(
    CongestionControlOptions(
        bandwidth_mbps=(8, 16), rtt_ms=(8, 30), buffer_packets=(5, 60), random_loss=0.005
    ),
    (0,),
    60,
)
"""That of the suite."""


@dataclasses.dataclass(frozen=True)
class Found:
    """How two engines differ over all steps of a case."""

    sent: int
    """Packets sent in all by the native engine."""
    drops: int
    """Packets that its links dropped."""
    packets: int
    """Steps in which the numbers of packets sent, acknowledged, lost or dropped differ."""
    flags: int
    """Steps in which who acts or what ends differs."""
    obs: float
    """Largest difference of observations."""
    reward: float
    """Largest relative difference of rewards."""
    infos: int
    """Numbers in all infos that are not the same to the last bit."""
    events: int
    """Packet events (time, kind, flow, number) that only one has."""
    seconds: tuple[float, float]
    """Of native and of ns-3."""

    @property
    def is_equal(self) -> bool:
        """Packets are the same, and all else within the bounds."""
        return not self.packets + self.flags and self.obs <= MOST_OBS and self.reward <= MOST_REWARD


def compare(case: Case) -> Found:
    """Play a case on both engines."""
    options = dataclasses.replace(case.options, trace=True)
    pools = [
        make_pool(dataclasses.replace(options, engine=engine), case.seeds)
        for engine in ("native", "ns3")
    ]
    try:
        return _compare(pools, case)
    finally:
        for pool in pools:
            pool.close()


def _compare(pools: list[Pool], case: Case) -> Found:
    rng = np.random.default_rng(0)
    num_slots = len(case.seeds) * case.options.num_agents
    exponents = np.zeros(num_slots)
    seconds, shown = [0.0, 0.0], []
    for step in range(case.num_steps + 1):
        exponents, last = rng.uniform(-1, 1, num_slots), exponents
        actions = (exponents - last).astype(np.float32)  # the window does not drift away
        both = []
        for i, pool in enumerate(pools):
            begin = time.perf_counter()
            both.append(pool.step(actions, with_info=True) if step else pool.reset(with_info=True))
            seconds[i] += time.perf_counter() - begin
        shown.append(both)
    differences = [_differences(*both) for both in shown]
    infos = np.array([both[0].info for both in shown])
    events = [
        len(set.symmetric_difference(*(_events(pool, row, case) for pool in pools)))
        for row in range(len(case.seeds))
    ]
    drops = infos[..., INFO.index("num_drops")].reshape(len(shown), len(case.seeds), -1)
    return Found(
        sent=int(infos[..., INFO.index("sent")].sum()),
        drops=int(drops.max((0, 2)).sum()),
        packets=int(sum(one[0] for one in differences)),
        flags=int(sum(one[1] for one in differences)),
        obs=float(max(one[2] for one in differences)),
        reward=float(max(one[3] for one in differences)),
        infos=int(sum(one[4] for one in differences)),
        events=sum(events),
        seconds=(round(seconds[0], 3), round(seconds[1], 3)),
    )


def _differences(one: Rows, other: Rows) -> tuple:
    assert one.info is not None and other.info is not None
    counts = [INFO.index(name) for name in ("sent", "acked", "lost", "num_drops", "inflight")]
    flags = ("terminated", "truncated", "is_first", "acting", "episode_end")
    obs = np.abs(one.obs - other.obs) / np.maximum(1, np.abs(one.obs))
    reward = np.abs(one.reward - other.reward) / np.maximum(1e-6, np.abs(one.reward))
    return (
        (one.info[..., counts] != other.info[..., counts]).any(-1).sum(),
        sum((getattr(one, name) != getattr(other, name)).sum() for name in flags),
        obs.max(),
        reward.max(),
        (one.info != other.info).sum(),
    )


def _events(pool: Pool, row: int, case: Case) -> set[tuple[int, ...]]:
    """Return the events of an episode, without random losses, which ns-3 notes a delay later."""
    events = pool.trace(row)
    if case.options.random_loss != (0, 0):
        events = events[events[:, 1] != HAPPENINGS.index("dropped")]
    return set(map(tuple, events.tolist()))


def main() -> None:
    """Play all cases, print what was found, and exit with 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    found = {}
    for name, case in CASES.items():
        if arguments.only in name:
            found[name] = compare(case)
            print(
                f"{name}: {'equal' if found[name].is_equal else 'DIFFERS'} {found[name]}",
                flush=True,
            )
    if arguments.json is not None:
        content = {
            name: {"networks": len(CASES[name].seeds), "steps": CASES[name].num_steps}
            | {"is_equal": one.is_equal}
            | dataclasses.asdict(one)
            for name, one in found.items()
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    raise SystemExit(not all(one.is_equal for one in found.values()))


if __name__ == "__main__":
    main()

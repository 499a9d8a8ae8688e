"""The AIMD, CUBIC and BBR-like flows of the native engine beside NewReno, Cubic and BBR of ns-3.

``python -m benchmarks.studies.ns3_baselines --json FILE`` plays all of ``NETWORKS``, in some
minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
from sebulba_networks.native import INFO
from sebulba_networks.options import CongestionControlOptions
from sebulba_networks.pools import make_pool

NETWORKS = {  # Mbit/s, ms, packets
    "64 Mbit/s, 16 ms, 80 packets": (64, 16, 80),
    "100 Mbit/s, 35 ms, 440 packets": (100, 35, 440),
    "96 Mbit/s, 40 ms, 300 packets": (96, 40, 300),
    "128 Mbit/s, 64 ms, 800 packets": (128, 64, 800),
    "80 Mbit/s, 24 ms, 100 packets": (80, 24, 100),
}
CONTROLS = ("aimd", "cubic", "bbr")
SECONDS = 60.0
"""Of simulated time in each network."""
BEGIN_S = 10.0
"""What happens before is not counted: slow starts differ."""


def play(options: CongestionControlOptions) -> dict[str, float]:
    """Return goodput in Mbit/s, mean queueing delay in ms, and the share of packets lost."""
    pool = make_pool(options, [0])
    steps, now_s = [], 0.0
    rows = pool.reset(with_info=True)
    while now_s < SECONDS and not rows.episode_end[0]:
        rows = pool.step(np.zeros(1, np.float32), with_info=True)
        assert rows.info is not None
        step = dict(zip(INFO, rows.info[0].tolist(), strict=True))
        now_s = step["time_ns"] / 1e9
        steps.append(step)
    pool.close()
    if rows.truncated[0]:
        return {"seconds": round(now_s, 1)}  # too much work for ns-3
    counted = [step for step in steps if step["time_ns"] / 1e9 > BEGIN_S]
    acked, seconds = sum(s["acked"] for s in counted), sum(s["interval_ns"] for s in counted) / 1e9
    delay = sum(s["acked"] * (s["mean_rtt_ns"] - s["base_rtt_ns"]) for s in counted) / acked / 1e6
    return {
        "seconds": round(now_s, 1),
        "goodput_mbps": round(acked * 1448 * 8 / seconds / 1e6, 2),
        "queueing_delay_ms": round(delay, 2),
        "loss": round(sum(s["lost"] for s in counted) / sum(s["sent"] for s in counted), 6),
    }


def compare(name: str, control: str) -> dict[str, dict[str, float]]:
    """Play a network with one flow on both."""
    mbps, rtt_ms, buffer = NETWORKS[name]
    product = mbps * 1e3 * rtt_ms / 8 / 1495
    options = CongestionControlOptions(
        bandwidth_mbps=mbps,
        rtt_ms=rtt_ms,
        buffer_packets=buffer,
        control=control,  # type: ignore[arg-type]
        slow_start_packets=int(product) + buffer // 2,  # no burst of losses at the beginning
        max_episode_steps=1_000_000,
    )
    tcp = dataclasses.replace(options, engine="ns3", transport="tcp")
    return {"native": play(options), "ns3": play(tcp)}


def main() -> None:
    """Play all, print a table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    found = {}
    for name in NETWORKS:
        for control in CONTROLS:
            both = found[f"{name}, {control}"] = compare(name, control)
            print(f"{name}, {control}: {both}", flush=True)
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

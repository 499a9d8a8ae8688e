"""How long a step of ns-3 lasts under random actions at all corners of the ranges, and its memory.

``python -m benchmarks.studies.ns3_limits --json FILE`` takes some minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
from sebulba_networks.options import CongestionControlOptions
from sebulba_networks.pools import make_pool
from sebulba_networks.process_pool import ProcessPool

CORNERS = itertools.product((64, 128), (16, 64), (80, 800))
STEPS, RESETS = 100, 1000


def longest_step(transport: str, corner: tuple[float, float, float]) -> dict[str, float]:
    """Return the seconds of the longest of many steps, and how many of them were cut short."""
    mbps, rtt_ms, buffer = corner
    options = CongestionControlOptions(
        engine="ns3",
        transport=transport,  # type: ignore[arg-type]
        bandwidth_mbps=mbps,
        rtt_ms=rtt_ms,
        buffer_packets=buffer,
        slow_start_packets=60,  # TCP would end most episodes after a slow start
    )
    pool, rng, seconds, cut = make_pool(options, [0]), np.random.default_rng(0), [], 0
    pool.reset()
    for _ in range(STEPS):
        action = rng.uniform(-2, 2, 1).astype(np.float32)
        begin = time.perf_counter()
        rows = pool.step(action, with_info=True)
        seconds.append(time.perf_counter() - begin)
        assert rows.info is not None
        cut += int(rows.info[0, -1])
    pool.close()
    return {
        "longest_s": round(max(seconds), 3),
        "mean_s": round(float(np.mean(seconds)), 4),
        "cut": cut,
    }


def growth_mb() -> float:
    """Return by how much the memory of a worker process grows over many resets."""
    pool = make_pool(CongestionControlOptions(engine="ns3", bandwidth_mbps=8, rtt_ms=10), [0])
    assert isinstance(pool, ProcessPool)
    worker = pool._envs[0].worker
    assert worker is not None

    def rss() -> int:
        pages = Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1]
        return int(pages) * 4096

    for _ in range(20):
        pool.reset()
    before = rss()
    for _ in range(RESETS):
        pool.reset()
    grown = rss() - before
    pool.close()
    return grown / 2**20


def main() -> None:
    """Measure all, print it, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    growth = {f"growth_mb_of_{RESETS}_resets": round(growth_mb(), 2)}
    print(growth, flush=True)
    steps = {}
    for mbps, rtt_ms, buffer in CORNERS:
        for transport in ("udp", "tcp"):
            name = f"{mbps:g} Mbit/s, {rtt_ms:g} ms, {buffer:g} packets, {transport}"
            steps[name] = longest_step(transport, (mbps, rtt_ms, buffer))
            print(name, steps[name], flush=True)
    found = {**growth, "steps": steps}
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

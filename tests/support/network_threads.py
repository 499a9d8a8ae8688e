"""How much faster two threads step 16 networks: ``python -m tests.support.network_threads``.

All rounds play the same steps: pools are put back to one state before each. On a machine that does
other work only the fastest rounds say what the threads can do, so many short ones are taken.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from sebulba_networks.native import NativePool
from sebulba_networks.options import CongestionControlOptions

from sebulba.tools.bench.harness import machine

NUM_ROWS = 16
MEAN_WINDOW = 321
"""Packets: the mean bandwidth times the mean RTT of the training ranges."""


def main() -> None:
    """Measure, and print the ratio of the fastest rounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--steps", type=int, default=20, help="of all rows, in a round")
    parser.add_argument(
        "--pause-s",
        type=float,
        default=0.0,
        help="before a round; a busy system prefers threads that have rested",
    )
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    figures = measured(given.rounds, given.steps, given.pause_s)
    print(json.dumps(figures, indent=1))
    if given.json:
        Path(given.json).write_text(json.dumps({**figures, "machine": machine()}, indent=1) + "\n")


def measured(num_rounds: int, num_steps: int, pause_s: float) -> dict[str, float]:
    """Return agent steps a second of wall time with 1 and 2 threads, and their ratios."""
    pools = {
        threads: NativePool(CongestionControlOptions(), list(range(NUM_ROWS)), threads)
        for threads in (1, 2)
    }
    state, actions = _begin(pools[1], num_steps)
    seconds: dict[int, list[float]] = {threads: [] for threads in pools}
    for _ in range(num_rounds):
        for threads, pool in pools.items():
            time.sleep(pause_s)
            pool.put_back(state)
            pool.step(actions[-1])  # the threads wake, and the state comes into the caches
            pool.put_back(state)
            began = time.perf_counter()
            for action in actions:
                pool.step(action)
            seconds[threads].append(time.perf_counter() - began)
    for pool in pools.values():
        pool.close()
    least = {threads: min(of) for threads, of in seconds.items()}
    middle = {threads: statistics.median(of) for threads, of in seconds.items()}
    return {
        "rounds": num_rounds,
        "steps_a_round": num_steps * NUM_ROWS,
        "agent_steps_per_s_1_thread": num_steps * NUM_ROWS / least[1],
        "agent_steps_per_s_2_threads": num_steps * NUM_ROWS / least[2],
        "fastest_over_twice": least[1] / least[2] / 2,
        "median_over_twice": middle[1] / middle[2] / 2,
    }


def _begin(pool: NativePool, num_steps: int) -> tuple[bytes, list[np.ndarray]]:
    """Return a state in the middle of episodes, and actions that keep windows near the mean."""
    rng = np.random.default_rng(0)
    window = pool.reset().obs[:, 3]

    def act() -> np.ndarray:
        target = MEAN_WINDOW * rng.uniform(0.7, 1.3, NUM_ROWS)
        return np.clip(np.log2(target / window), -2, 2).astype(np.float32)

    for _ in range(50):
        window = pool.step(act()).obs[:, 3]
    state, actions = pool.state(), []
    for _ in range(num_steps):
        actions.append(act())
        window = pool.step(actions[-1]).obs[:, 3]
    return state, actions


if __name__ == "__main__":
    main()

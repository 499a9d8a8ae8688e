"""What Inferencers elsewhere cost: ``make cluster-figures``.

Speed is env steps per second in the steady state; CPU time is that of the process that trains and
of those of its Inferencers. A busy machine makes speeds worthless, but not CPU times.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from sebulba.options import ClusterOptions
from sebulba.tools.bench import harness
from tests.support.loop_helpers import make_tiny_loop

NUM_ENVS = 16
SLEEP_S = 0.02
"""Of a vector step, in which cores are not the limit."""
UNROLL = 16


class Still(gymnasium.vector.VectorEnv):
    """``num_envs`` environments that do nothing: a step sleeps, and returns the same rows."""

    def __init__(self, num_envs: int, size: int, sleep_s: float) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space = gymnasium.spaces.Box(-1, 1, (size,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._sleep_s = sleep_s
        self._rows = np.zeros((num_envs, size), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict]:
        return self._rows.copy(), {}

    def step(self, actions: np.ndarray) -> tuple:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        never = np.zeros(self.num_envs, bool)
        return self._rows.copy(), np.zeros(self.num_envs), never, never.copy(), {}


def still(num_envs: int, seeds: list[int], size: int, sleep_s: float) -> Still:
    return Still(num_envs, size, sleep_s)


def machine_s() -> float:
    """Return the CPU seconds of all processes of this machine, those of Ray among them."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(
    cluster: ClusterOptions, inferencers: int, rounds: int, size: int, sleep_s: float
) -> dict[str, float]:
    """Return the figures of a run of so many trajectories of each Inferencer that count.

    Args:
      cluster: Where Inferencers are.
      inferencers: How many.
      rounds: How many trajectories of each are counted, after two that are not.
      size: Numbers in an observation.
      sleep_s: Seconds of a vector step.
    """
    seen: list[tuple[float, ...]] = []

    def observe(trajectory: Any, step_infos: Any) -> None:
        cpu_s = time.process_time(), loop.cpu_elsewhere_s, machine_s()
        seen.append((time.perf_counter(), *cpu_s))

    loop, _ = make_tiny_loop(
        functools.partial(still, size=size, sleep_s=sleep_s),
        NUM_ENVS,
        cluster=cluster,
        num_inferencers_per_device=inferencers,
        observe_cycle=observe,
    )
    with loop:
        loop.run(loop.new_state(0, UNROLL), inferencers * (rounds + 2), UNROLL)
        traffic = [node.traffic for node in loop._parts.inferencers.nodes]
    counted = seen[2 * inferencers - 1 :]
    wall_s, cpu_s, elsewhere_s, of_all_s = (
        b - a for a, b in zip(counted[0], counted[-1], strict=True)
    )
    items = len(counted) - 1
    steps = items * UNROLL * NUM_ENVS
    relayed = sum(one.items for one in traffic)
    return {
        "inferencers": inferencers,
        "env_steps_per_s": steps / wall_s,
        "items_per_s": items / wall_s,
        "driver_cpu_ms_an_item": 1e3 * cpu_s / items,
        "elsewhere_cpu_ms_an_item": 1e3 * elsewhere_s / items,
        "busy_cores": (cpu_s + elsewhere_s) / wall_s,
        "busy_cores_of_machine": of_all_s / wall_s,
        "relay_ms_an_item": 1e3 * sum(one.relay_s for one in traffic) / max(1, relayed),
        "bytes_an_item": sum(one.bytes_in for one in traffic) / max(1, relayed),
    }


def scaling(address: str, counts: Sequence[int], rounds: int, per_node: int) -> list[dict]:
    """Measure environments that sleep, with 1 to many Inferencers."""
    found = []
    for inferencers in counts:
        cluster = ClusterOptions(address=address, inferencers_per_node=per_node)
        found.append(measure(cluster, inferencers, rounds, 4, SLEEP_S))
        one = found[0]["env_steps_per_s"] / found[0]["inferencers"]
        found[-1]["of_linear"] = found[-1]["env_steps_per_s"] / (inferencers * one)
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="processes")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--null", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--per-node", type=int, default=16)
    parser.add_argument("--json")
    given = parser.parse_args()
    of = ClusterOptions(address=given.address, inferencers_per_node=given.per_node)
    figures: dict[str, Any] = {
        "sleep": scaling(given.address, given.counts, given.rounds, given.per_node),
        "null": [measure(of, number, given.rounds, 4, 0.0) for number in given.null],
        "sizes": [measure(of, 2, given.rounds, size, 0.0) for size in (4, 400, 4000)],
    }
    for name in ("null", "sizes"):
        for one in figures[name]:
            print(name, one, flush=True)
    keys = {"address": given.address, "per_node": given.per_node}
    settings = {"rounds": given.rounds, "num_envs": NUM_ENVS, "unroll": UNROLL}
    record = harness.record(keys, figures, settings)
    harness.write_json(given.json, record | {"command": "make cluster-figures"})


if __name__ == "__main__":
    main()

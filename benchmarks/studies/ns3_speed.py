"""Speeds of applications on ns-3, as ratios that are measured in turns.

``python -m benchmarks.studies.ns3_speed --json FILE`` takes about two minutes: decisions that are
deferred and eager ones, the adapter of many agents and its bare pool, and 16 simulators at the same
time and one after the other. The program is ``lte_carts.cc``, with a fixed controller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sebulba_ns3
from sebulba_networks.process_pool import ProcessPool
from sebulba_ns3.program import ProgramAdapter
from sebulba_ns3.scenario import read_program

from sebulba.tools.bench.harness import interleave, machine, write_json

PROGRAM = Path(sebulba_ns3.EXAMPLE).parent / "lte_carts.cc"
NUM_ENVS, STEPS, SERVICE_MS = 16, 100, 5
GROUP = "agent"


def adapter(num_envs: int = NUM_ENVS, **parameters: Any) -> ProgramAdapter:
    """Return simulators, seeded from 0 on."""
    library = sebulba_ns3.scenario_library(PROGRAM)
    program = read_program(PROGRAM, library, None, {"agents_on": "carts", **parameters})
    return ProgramAdapter(library, program, range(num_envs), 60)


def controlled(obs: np.ndarray) -> np.ndarray:
    """Return the side to push to, ``[B, A]``, where the pole leans and turns."""
    return (obs[..., 2] + 0.5 * obs[..., 3] > 0).astype(np.int32)


def episode(*, eager: int) -> dict[str, Any]:
    """Play an episode; return its rows, what each agent earned, and seconds."""
    env, rows, earned = adapter(1, eager=eager, service_ms=SERVICE_MS), 0, np.zeros(2)
    output, begin = env.reset(), time.perf_counter()
    while not output.episode_end[0]:
        output = env.step({GROUP: controlled(output.obs[GROUP])})
        rows, earned = rows + 1, earned + output.reward[GROUP][0]
    seconds = time.perf_counter() - begin
    env.close()
    return {"rows": rows, "earned": earned.tolist(), "s": seconds}


def rate(step: Callable[[], Any]) -> Callable[[], float]:
    """Return what measures vector steps a second."""

    def measured() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        return STEPS / (time.perf_counter() - begin)

    return measured


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all, print it, and keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(argv)

    kinds = interleave({e: lambda e=e: episode(eager=e) for e in (0, 1)}, 1)  # type: ignore[misc]
    deferred, eager = kinds[0][0], kinds[1][0]
    assert deferred["earned"] == eager["earned"], (deferred, eager)

    env, alone = adapter(), adapter()
    library, options = sebulba_ns3.scenario_library(PROGRAM), alone._program.options
    singles = [ProcessPool(library, options, [seed]) for seed in range(NUM_ENVS)]
    push = np.zeros((NUM_ENVS, 2), np.int32)
    raw = push.astype(np.float32)
    every: list[Any] = [env, alone, *singles]
    for one in every:
        one.reset()

    def one_after_the_other() -> None:
        for pool, row in zip(singles, raw, strict=True):
            pool.step(row)

    speeds = interleave(
        {
            "adapter": rate(lambda: env.step({GROUP: push})),
            "pool": rate(lambda: alone._pool.step(raw)),
            "one after the other": rate(one_after_the_other),
        },
        given.repeats,
    )
    for one in every:
        one.close()
    ratios = {
        f"{ours} over {theirs}": [
            round(a / b, 3) for a, b in zip(speeds[ours], speeds[theirs], strict=True)
        ]
        for ours, theirs in (("adapter", "pool"), ("pool", "one after the other"))
    }
    found = {
        "rows of deferred over eager": round(deferred["rows"] / eager["rows"], 4),
        "earned": deferred["earned"],
        "ratios": ratios,
        "medians": {name: statistics.median(values) for name, values in ratios.items()},
    }
    print(found)
    if given.json:
        write_json(given.json, {**found, "machine": machine()})
    return 0


if __name__ == "__main__":
    sys.exit(main())

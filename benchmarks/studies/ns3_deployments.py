"""What a deployment costs: who sets the powers of four LTE cells, over backhauls of three rates.

``python -m benchmarks.studies.ns3_deployments --json FILE`` trains PPO in ``cells.cc`` for each
deployment and backhaul, and plays its last policy greedily: return of an agent, throughput of a
user, and bytes that the applications sent in an episode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sebulba_ns3

import sebulba
from sebulba.tools.bench.harness import machine, write_json

PROGRAM = Path(sebulba_ns3.EXAMPLE).parent / "cells.cc"
DEPLOYMENTS, BACKHAULS = ("center", "cells", "models"), (0.1, 1.0, 10.0)
NUM_ENVS, EPISODES = 4, 8


def measured(deployment: str, backhaul: float, seed: int, env_steps: int) -> dict[str, Any]:
    """Train and play."""
    options: dict[str, Any] = {
        "source": str(PROGRAM),
        "deployment": deployment,
        "backhaul_mbps": backhaul,
    }
    with tempfile.TemporaryDirectory() as folder:
        trained = sebulba.train(
            "ppo",
            env={"id": "ns3:program", "options": options},
            num_envs=NUM_ENVS,
            num_inferencers_per_device=1,
            steps_per_cycle=40,
            seed=seed,
            total_env_steps=env_steps,
            run_dir=folder,
            writers=(),
        )
        policy = sebulba.load_policy(folder)
    told: list[dict[str, float]] = []
    make = sebulba.make_env_factory("ns3:program", **options)

    def factory(num_envs: int, seeds: list[int]) -> Any:
        env: Any = make(num_envs, seeds)
        env.on_end = told.append
        return env

    played = sebulba.evaluate(policy, factory, num_episodes=EPISODES, num_envs=4, seed=1000)
    return {
        "return": round(played.episode_return_mean, 2),
        "mbps": round(statistics.mean(one["mbps"] for one in told), 3),
        "kilobytes": round(statistics.mean(one["bytes"] for one in told) / 1000, 2),
        "model_lag": trained.metrics.get("model_lag_mean") if trained else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not in the JSON file yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="from 0; default: 1")
    parser.add_argument("--env-steps", type=int, default=16_000, metavar="N")
    parser.add_argument("--json", required=True, metavar="FILE", help="kept after each training")
    given = parser.parse_args(argv)
    runs = json.loads(Path(given.json).read_text())["runs"] if Path(given.json).exists() else []
    for seed in range(given.seeds):
        for backhaul in BACKHAULS:
            for deployment in DEPLOYMENTS:
                case = {"deployment": deployment, "backhaul": backhaul, "seed": seed}
                key = {**case, "env_steps": given.env_steps}
                if any(key.items() <= run.items() for run in runs):
                    continue
                runs.append({**key, **measured(**key)})
                print(runs[-1], flush=True)
                write_json(given.json, {"runs": runs, "machine": machine()})
    return 0


if __name__ == "__main__":
    sys.exit(main())

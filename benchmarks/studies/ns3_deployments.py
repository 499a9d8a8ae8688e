"""What a deployment costs: who sets the powers of four LTE cells, over backhauls of three rates.

``python -m benchmarks.studies.ns3_deployments --json FILE`` trains PPO in ``cells.cc`` for each
deployment and backhaul, and plays its last policy greedily: return of an agent, mean reward over
the episode (``worth``), throughput of a user, and bytes that the applications sent in an episode.
The same is played with fixed powers.
``--worlds 1`` trains in one world, in which a curve over simulated time is that of one network.
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

import numpy as np
import sebulba_ns3

import sebulba
from sebulba.envs.seeds import seed_block
from sebulba.metrics.plots import read_records
from sebulba.tools.bench.harness import machine, write_json

PROGRAM = Path(sebulba_ns3.EXAMPLE).parent / "cells.cc"
DEPLOYMENTS, BACKHAULS = ("center", "cells", "models"), (0.1, 1.0, 10.0)
FIXED = "fixed"
"""The powers in the middle of their range, set by nobody."""
WORLDS, EPISODES, SEED, PERIOD_S = 4, 8, 1000, 0.05


def measured(
    deployment: str, backhaul: float, seed: int, env_steps: int, worlds: int
) -> dict[str, Any]:
    """Train and play."""
    options: dict[str, Any] = {
        "source": str(PROGRAM),
        "deployment": deployment,
        "backhaul_mbps": backhaul,
    }
    with tempfile.TemporaryDirectory() as folder:
        sebulba.train(
            "ppo",
            env={"id": "ns3:program", "options": options},
            agent={"discount": 0.8, "learning_rate": 1e-3},  # a power counts at once
            num_envs=worlds,
            num_inferencers_per_device=1,
            steps_per_cycle=160 // worlds,
            seed=seed,
            total_env_steps=env_steps,
            run_dir=folder,
            writers=(),
        )
        policy = sebulba.load_policy(folder)
        records = read_records(Path(folder) / "metrics.jsonl")
    returns = [
        (round(record["env_steps"] * PERIOD_S / worlds), round(record["episode_return_mean"], 1))
        for record in records
        if record.get("episode_return_mean") is not None
    ]
    sent = [record["info/bytes"] for record in records if "info/bytes" in record]
    told: list[dict[str, float]] = []
    factory = _telling(told, options)
    played = sebulba.evaluate(policy, factory, num_episodes=EPISODES, num_envs=WORLDS, seed=SEED)
    return {
        "return": round(played.episode_return_mean, 2),
        **_means(told),
        "model_lag": records[-1].get("model_lag_mean"),
        "kilobytes in training": round(statistics.mean(sent) / 1000, 2),
        "return by simulated seconds": returns[:: max(1, len(returns) // 20)],
    }


def with_fixed_powers() -> dict[str, Any]:
    """Play episodes of the same seeds with powers that nobody sets."""
    told: list[dict[str, float]] = []
    options = {"source": str(PROGRAM), "deployment": "center"}
    seeds = seed_block(SEED, inferencer=0, num_inferencers=1, num_envs=WORLDS)
    env = _telling(told, options)(WORLDS, seeds)
    output, earned = env.reset(), 0.0
    while len(told) < EPISODES:
        output = env.step(np.zeros((WORLDS, 4), np.float32))
        earned += float(np.sum(output.reward))
    env.close()
    return {"deployment": FIXED, "return": round(earned / len(told), 2), **_means(told)}


def _telling(told: list[dict[str, float]], options: dict[str, Any]) -> Any:
    """Return what makes environments, which add to ``told`` what an episode's end says."""
    make = sebulba.make_env_factory("ns3:program", **options)

    def factory(num_envs: int, seeds: list[int]) -> Any:
        env: Any = make(num_envs, seeds)
        env.on_end = told.append
        return env

    return factory


def _means(told: list[dict[str, float]]) -> dict[str, float]:
    return {
        "worth": round(statistics.mean(one["worth"] for one in told), 4),
        "mbps": round(statistics.mean(one["mbps"] for one in told), 3),
        "kilobytes": round(statistics.mean(one["bytes"] for one in told) / 1000, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not in the JSON file yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="from 0; default: 1")
    parser.add_argument("--env-steps", type=int, default=16_000, metavar="N")
    parser.add_argument("--worlds", type=int, default=WORLDS, metavar="N")
    parser.add_argument("--backhauls", type=float, nargs="+", default=BACKHAULS, metavar="MBPS")
    parser.add_argument("--json", required=True, metavar="FILE", help="kept after each training")
    given = parser.parse_args(argv)
    runs = json.loads(Path(given.json).read_text())["runs"] if Path(given.json).exists() else []
    if not any(run["deployment"] == FIXED for run in runs):
        runs.append(with_fixed_powers())
        write_json(given.json, {"runs": runs, "machine": machine()})
    for seed in range(given.seeds):
        for backhaul in given.backhauls:
            for deployment in DEPLOYMENTS:
                case = {"deployment": deployment, "backhaul": backhaul, "seed": seed}
                key = {**case, "env_steps": given.env_steps, "worlds": given.worlds}
                if any(key.items() <= run.items() for run in runs):
                    continue
                runs.append({**key, **measured(**key)})
                print(runs[-1], flush=True)
                write_json(given.json, {"runs": runs, "machine": machine()})
    return 0


if __name__ == "__main__":
    sys.exit(main())

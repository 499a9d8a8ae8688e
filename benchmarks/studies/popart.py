"""PopArt where rewards are large: CartPole-v1 whose rewards are 1, 100 and 10,000 times as large.

``python -m benchmarks.studies.popart ppo`` (or ``impala``) trains with and without PopArt, three
seeds each, and writes the curves of returns, in units of the task's own rewards, as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gymnasium

import sebulba
from sebulba.metrics.plots import read_records

SCALES = (1, 100, 10_000)
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ppo": ("ppo", 100_000, {"normalize_rewards": False, "separate_value_torso": False}),
    "impala": ("cartpole", 300_000, {"reward_scale": 1.0}),
}
"""Preset, env steps, and hyper-parameters that are the same with and without PopArt."""


class LargeRewards(gymnasium.RewardWrapper):
    """CartPole-v1 with larger rewards."""

    def __init__(self, scale: int = 1) -> None:
        """Make the environment."""
        super().__init__(gymnasium.make("CartPole-v1"))
        self.scale = scale

    def reward(self, reward: Any) -> float:
        """Return the larger reward."""
        return self.scale * float(reward)


def curve(agent: str, scale: int, seed: int, **changes: Any) -> list[tuple[int, float]]:
    """Train once; return env steps and mean return of 100 episodes."""
    preset, env_steps, same = RUNS[agent]
    with tempfile.TemporaryDirectory() as folder:
        sebulba.train(
            preset,
            env={"id": "benchmarks.studies.popart:LargeRewards", "options": {"scale": scale}},
            agent=same | changes,
            total_env_steps=env_steps,
            schedule="lockstep",
            seed=seed,
            run_dir=f"{folder}/run",
        )
        records = read_records(f"{folder}/run/metrics.jsonl")
    return [
        (record["env_steps"], round(record["episode_return_mean"] / scale, 1))
        for record in records
        if record.get("episode_return_mean") is not None
    ]


def main() -> None:
    """Train all, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agent", choices=RUNS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    curves: dict[str, list] = {}
    for scale in SCALES:
        for popart in (False, True):
            for seed in range(given.seeds):
                name = f"rewards x{scale}, {'PopArt' if popart else 'without'}, seed {seed}"
                curves[name] = curve(given.agent, scale, seed, popart=popart)
                print(name, curves[name][-1], flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"agent": given.agent, "curves": curves}) + "\n")


if __name__ == "__main__":
    main()

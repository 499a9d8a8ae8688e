"""DQN on the CartPole of the network simulator beside Gymnasium's, with 2 to 64 environments.

``python -m sebulba_networks.benchmarks.cart_pole --seeds 3 --json FILE --png FILE``. Each training
is a process of its own, so that its CPU time and memory can be taken. It ends when the mean of 10
greedy episodes, which are played every 4000 env steps, reaches 450 (RayNet's paper has the same
experiment).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sebulba.errors import UsageError
from sebulba.metrics.figures import BLUE, RED, open_frame, picture
from sebulba.support.checks import at_least
from sebulba.tools.bench.harness import machine, write_json
from sebulba_networks import CART_POLE

GOAL = 450
TOTAL_ENV_STEPS = 100_000
EVAL_EVERY = 4000
ENV_STEPS_A_CYCLE = 64
"""As in ``cartpole-dqn``, which makes 16 updates from them, of however many environments."""
SIZES = (2, 4, 8, 16, 32, 64)
ENVS = {
    "simulator": ("--env.id", CART_POLE),
    "gymnasium": ("--env.id", "CartPole-v1", "--env.backend", "gymnasium"),
}
FIGURES = {
    "env_steps": "env steps to 450",
    "seconds": "seconds",
    "cpu_s": "CPU seconds",
    "peak_mb": "memory, MB",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not in the JSON file yet, and draw all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="from 0; default: 3")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N")
    parser.add_argument("--json", required=True, metavar="FILE", help="kept after each training")
    parser.add_argument("--png", metavar="FILE")
    given = parser.parse_args(argv)
    at_least(1, "seeds", given.seeds)
    for size in given.sizes:
        if size < 1 or ENV_STEPS_A_CYCLE % size:
            raise UsageError(f"sizes={size} must divide {ENV_STEPS_A_CYCLE}; use 16")
    runs = json.loads(Path(given.json).read_text())["runs"] if Path(given.json).exists() else []
    for seed in range(given.seeds):
        for size in given.sizes:
            for env in ENVS:  # in turns: both see the same machine
                if any((env, size, seed) == (r["env"], r["num_envs"], r["seed"]) for r in runs):
                    continue
                runs.append(trained(env, size, seed))
                print(runs[-1], flush=True)
                write_json(given.json, {"runs": runs, "goal": GOAL, "machine": machine()})
    if given.png:
        draw(runs, given.png)
    return 0


def trained(
    env: str, num_envs: int, seed: int, *, goal: float = GOAL, total: int = TOTAL_ENV_STEPS
) -> dict[str, Any]:
    """Train until the goal is reached; return what it took.

    Raises:
      RuntimeError: The training failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "sebulba", "train", "cartpole-dqn", *ENVS[env]),
            *("--seed", str(seed), "--num-envs", str(num_envs)),
            *("--steps-per-cycle", str(ENV_STEPS_A_CYCLE // num_envs)),
            *("--stop-at-return", str(goal), "--total-env-steps", str(total)),
            *("--eval-every-env-steps", str(EVAL_EVERY), "--eval-episodes", "10"),
            *("--run-dir", str(Path(folder) / "run")),
        ]
        began = time.monotonic()
        with open(Path(folder) / "said", "w+b") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds = time.monotonic() - began
            if process.returncode:
                said.seek(0)
                raise RuntimeError(f"{' '.join(command)}: {said.read().decode()}")
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    evaluated = [record for record in records if "eval_return_mean" in record]
    reached = [record for record in evaluated if record["eval_return_mean"] >= goal]
    # Another evaluation may have been on its way as the run ended.
    counts = (reached or evaluated[-1:])[0]
    return {
        "env": env,
        "num_envs": num_envs,
        "seed": seed,
        "is_reached": bool(reached),
        "return": round(counts["eval_return_mean"], 1),
        "env_steps": counts["eval_env_steps"],
        "seconds": round(seconds, 1),
        "training_s": round(records[-1]["seconds"], 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mb": round(usage.ru_maxrss / 1024),
    }


def draw(runs: list[dict[str, Any]], file: str) -> None:
    """Draw means over seeds, with every seed as a dot; hollow where 450 was not reached."""
    with picture(file, 11, 6) as figure:
        for axes, (name, title) in zip(figure.subplots(2, 2).flat, FIGURES.items(), strict=True):
            open_frame(axes, "y")
            for color, env in ((BLUE, "simulator"), (RED, "gymnasium")):
                own = [run for run in runs if run["env"] == env]
                sizes = sorted({run["num_envs"] for run in own})
                means = [
                    statistics.mean(run[name] for run in own if run["num_envs"] == size)
                    for size in sizes
                ]
                axes.plot(sizes, means, color=color, label=env)
                for run in own:
                    face = color if run["is_reached"] else "none"
                    axes.scatter(
                        [run["num_envs"]], [run[name]], s=20, edgecolors=color, facecolors=face
                    )
            every = sorted({run["num_envs"] for run in runs})
            axes.set_xscale("log", base=2)
            axes.set_xticks(every, labels=[str(size) for size in every])
            top = 1.1 * max(run[name] for run in runs)
            axes.set(xlabel="environments", ylabel=title, ylim=(0, top))
            axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    sys.exit(main())

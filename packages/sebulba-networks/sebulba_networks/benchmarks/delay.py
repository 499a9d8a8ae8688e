"""Return of CartPole behind a network, over the delay of its observations and over its losses.

``python -m sebulba_networks.benchmarks.delay --seeds 3 --json FILE --png FILE``. For each delay,
PPO is trained with different additions to the observation. The return is the mean of 100 greedy
episodes of the last policy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sebulba
from sebulba.metrics.figures import BLUE, GREY, RED, open_frame, picture
from sebulba.support.checks import at_least
from sebulba.tools.bench.harness import machine, write_json

ENV, PRESET = "networked:CartPole-v1", "cartpole-ppo"
DELAYS = (0, 3, 5, 8, 10)
"""In steps of 20 ms."""
LOSSES = (0.0, 0.1, 0.2, 0.3)
"""Shares of messages that are lost, either way."""
LOSSY_DELAY = 3
"""The delay with which losses are measured."""
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda delay: {},
    "own actions": lambda delay: {"own_actions": delay},
    "observations": lambda delay: {"observations": delay + 1},
    "ages": lambda delay: {"ages": True},
    "LSTM": lambda delay: {},
    "trained without delay": lambda delay: {},
}
"""What is added to the observation."""
COLORS = {
    **{"plain": RED, "own actions": BLUE, "observations": "#3f9b4b", "ages": "#b08a1e"},
    **{"LSTM": "#8a4fb0", "trained without delay": GREY},
}
EPISODES = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not in the JSON file yet, and draw all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="from 0; default: 3")
    parser.add_argument("--delays", type=int, nargs="+", default=DELAYS, metavar="N")
    parser.add_argument("--sees", nargs="+", choices=OPTIONS, default=[*OPTIONS])
    parser.add_argument("--losses", type=float, nargs="+", default=LOSSES, metavar="P")
    parser.add_argument("--env-steps", type=int, default=100_000, metavar="N")
    parser.add_argument("--json", required=True, metavar="FILE", help="kept after each training")
    parser.add_argument("--png", metavar="FILE")
    given = parser.parse_args(argv)
    at_least(1, "seeds", given.seeds)
    runs = json.loads(Path(given.json).read_text())["runs"] if Path(given.json).exists() else []
    cases = [(delay, 0.0) for delay in given.delays]
    cases += [(LOSSY_DELAY, loss) for loss in given.losses if loss]
    for seed in range(given.seeds):
        for delay, loss in cases:
            for sees in given.sees:
                case = {"sees": sees, "delay": delay, "loss": loss, "seed": seed}
                key = {**case, "env_steps": given.env_steps}
                if any(key.items() <= run.items() for run in runs):
                    continue
                runs.append({**key, "return": measured(**key)})
                print(runs[-1], flush=True)
                write_json(given.json, {"runs": runs, "machine": machine()})
    if given.png:
        draw(runs, given.png)
    return 0


def measured(sees: str, delay: int, loss: float, seed: int, env_steps: int) -> float:
    """Train and return the mean return of the policy with this delay and loss."""
    network: dict[str, Any] = {"delay": delay, "loss": loss}
    trained_with: dict[str, Any] = {} if sees == "trained without delay" else network
    options = OPTIONS[sees](delay)
    agent = {"lstm_size": 64, "separate_value_torso": False} if sees == "LSTM" else {}
    with tempfile.TemporaryDirectory() as folder:
        sebulba.train(
            PRESET,
            env={"id": ENV, "options": {**trained_with, **options}},
            agent=agent,
            seed=seed,
            total_env_steps=env_steps,
            run_dir=folder,
            writers=(),
        )
        policy = sebulba.load_policy(folder)
    env = sebulba.make_env_factory(ENV, **network, **options)
    evaluation = sebulba.evaluate(policy, env, num_episodes=EPISODES, num_envs=25, seed=1000)
    return round(evaluation.episode_return_mean, 1)


def draw(runs: list[dict[str, Any]], file: str) -> None:
    """Draw the means over seeds as lines, and every seed as a dot."""
    is_lossy = any(run["loss"] for run in runs)
    with picture(file, 11 if is_lossy else 7, 4.2) as figure:
        left, *rest = figure.subplots(1, 1 + is_lossy, sharey=True, squeeze=False)[0]
        drawn = [run for run in runs if not run["loss"]]
        _draw_over("delay", drawn, left)
        left.set(xlabel="delay of the observation, steps", ylabel="return", ylim=(0, 520))
        for right in rest:
            _draw_over("loss", [run for run in runs if run["delay"] == LOSSY_DELAY], right)
            right.set(xlabel=f"share of messages lost, with a delay of {LOSSY_DELAY} steps")
        left.legend(frameon=False, loc="lower left")


def _draw_over(name: str, runs: list[dict[str, Any]], axes: Any) -> None:
    open_frame(axes, "y")
    for sees, color in COLORS.items():
        own = [run for run in runs if run["sees"] == sees]
        values = sorted({run[name] for run in own})
        means = [
            statistics.mean(run["return"] for run in own if run[name] == value) for value in values
        ]
        if own:
            axes.plot(values, means, color=color, label=sees)
        axes.scatter([run[name] for run in own], [run["return"] for run in own], s=14, color=color)
    axes.set_xticks(sorted({run[name] for run in runs}))


if __name__ == "__main__":
    sys.exit(main())

"""Return of a task behind a network, over the delay of its observations and over its losses.

``python -m sebulba_networks.benchmarks.delay --seeds 3 --json FILE --png FILE``. For each delay,
PPO is trained on CartPole with different additions to the observation; ``--env Pendulum-v1`` trains
SAC. The return is the mean of 100 greedy episodes of the last policy.
"""

from __future__ import annotations

import argparse
import functools
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

TASKS = {"CartPole-v1": ("cartpole-ppo", 100_000, 20), "Pendulum-v1": ("pendulum-sac", 12_000, 50)}
"""The preset that learns it, for how many env steps, and the milliseconds of a step."""
DELAYS = (0, 3, 5, 8, 10)
"""In steps."""
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
    parser.add_argument("--env", choices=TASKS, default="CartPole-v1")
    parser.add_argument("--env-steps", type=int, metavar="N", help="default: those of the task")
    parser.add_argument("--json", required=True, metavar="FILE", help="kept after each training")
    parser.add_argument("--png", metavar="FILE")
    given = parser.parse_args(argv)
    at_least(1, "seeds", given.seeds)
    runs = json.loads(Path(given.json).read_text())["runs"] if Path(given.json).exists() else []
    runs = [{"env": "CartPole-v1", **run} for run in runs]  # files of before there were others
    cases = [(delay, 0.0) for delay in given.delays]
    cases += [(LOSSY_DELAY, loss) for loss in given.losses if loss]
    for seed in range(given.seeds):
        for delay, loss in cases:
            for sees in given.sees:
                case = {"sees": sees, "delay": delay, "loss": loss, "seed": seed}
                env_steps = given.env_steps or TASKS[given.env][1]
                key = {"env": given.env, **case, "env_steps": env_steps}
                if any(key.items() <= run.items() for run in runs):
                    continue
                runs.append({**key, "return": measured(**key)})
                print(runs[-1], flush=True)
                write_json(given.json, {"runs": runs, "machine": machine()})
    if given.png:
        draw(runs, given.png)
    return 0


def measured(env: str, sees: str, delay: int, loss: float, seed: int, env_steps: int) -> float:
    """Train and return the mean return of the policy with this delay and loss."""
    network: dict[str, Any] = {"delay": delay, "loss": loss}
    options = OPTIONS[sees](delay)
    trained_with = options if sees == "trained without delay" else {**network, **options}
    policy = trained(env, json.dumps(trained_with), sees == "LSTM", seed, env_steps)
    factory = sebulba.make_env_factory(f"networked:{env}", **network, **options)
    evaluation = sebulba.evaluate(policy, factory, num_episodes=EPISODES, num_envs=25, seed=1000)
    return round(evaluation.episode_return_mean, 1)


@functools.cache
def trained(env: str, options: str, with_lstm: bool, seed: int, env_steps: int) -> sebulba.Policy:
    """Train; the policy without a delay serves all delays."""
    with tempfile.TemporaryDirectory() as folder:
        sebulba.train(
            TASKS[env][0],
            env={"id": f"networked:{env}", "options": json.loads(options)},
            agent={"lstm_size": 64, "separate_value_torso": False} if with_lstm else {},
            seed=seed,
            total_env_steps=env_steps,
            run_dir=folder,
            writers=(),
        )
        return sebulba.load_policy(folder)


def draw(runs: list[dict[str, Any]], file: str) -> None:
    """Draw the means over seeds as lines, and every seed as a dot."""
    panels = []
    for env in TASKS:
        own = [run for run in runs if run["env"] == env]
        exact, lossy = [run for run in own if not run["loss"]], [run for run in own if run["loss"]]
        if exact:
            label = f"delay of the observation, steps of {TASKS[env][2]} ms"
            panels.append((env, "delay", label, exact))
        if lossy:
            label = f"share of messages lost, with a delay of {LOSSY_DELAY} steps"
            measured_kinds = {run["sees"] for run in lossy}
            late = [r for r in own if r["delay"] == LOSSY_DELAY and r["sees"] in measured_kinds]
            panels.append((env, "loss", label, late))
    with picture(file, 1 + 4.8 * len(panels), 4.2) as figure:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (env, name, label, own) in zip(all_axes, panels, strict=True):
            if axes is not all_axes[0] and env == panels[0][0]:
                axes.sharey(all_axes[0])
            _draw_over(name, own, axes)
            axes.set(title=env, xlabel=label)
        all_axes[0].set_ylabel("return")
        all_axes[0].legend(frameon=False, loc="lower left")


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

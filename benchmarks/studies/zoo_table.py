"""Tables of what agents learned: returns of all seeds beside published ones, and aggregates."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.studies.gallery import LEARN, agent_of
from benchmarks.studies.learning_goals import GOALS
from benchmarks.studies.tables import duration, show, table
from benchmarks.studies.zoo_scores import RETURNS, draw, estimate, scores_by_agent

INTERVALS = "zoo.png"
"""File of the picture of the aggregates, beside the page."""

_FAMILIES = {
    "Classic control": "Acrobot|CartPole|MountainCar|Pendulum",
    "Toy text": "Catch|FrozenLake",
    "Box2D": "BipedalWalker|LunarLander",
    "MuJoCo": "Ant|HalfCheetah|Hopper|Humanoid|Inverted|Pusher|Reacher|Swimmer|Walker2d",
    "MinAtar": ".*MinAtar",
    "MiniGrid": "MiniGrid",
    "Memory": "(?i).*(memory|popgym|t_maze)",
    "Games": "(?!sebulba/)",
    "Networks": "",
}
"""Patterns of environment ids by family; the first that matches the beginning of an id counts."""
_HEADER = (
    *("task", "agent", "result", "env steps", "by seed", "IQM, 95 % interval", "reference"),
    "a run takes",
)

_INTRODUCTION = """\
## Returns by task

Every result of `python -m benchmarks learn RESULT` whose goal is a return to reach. The return of a
seed is the worse of its last two evaluations, or the mean of the last 100 training episodes. IQM is
the interquartile mean over seeds with its bootstrapped interval; with three seeds these are the
mean, and the range from the lowest to the highest. References are published returns, unless they
say otherwise; their versions of the task and their env steps may differ."""
_AGGREGATES = """\
### Aggregates by agent

IQM over all seeds and tasks of the untuned presets (`python -m benchmarks learn neutral`), with the
seeds of each task drawn anew. A score is 0 at the mean return of random actions and 1 at the
reference. For Impala, in three times the env steps, that is PPO's. For SAC it is SBX's, measured
here, and for R2D2 on Acrobot DQN's with velocities. Tasks and budgets differ, so the rows do not
rank the agents. IQM leaves out the best and the worst quarter: tasks that an agent fails are in the
tables above."""


def learned(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the results of training for a return to reach, by name: no exams, no limits."""
    return {
        name: results[f"{LEARN}{name}"]
        for name, goal in GOALS.items()
        if f"{LEARN}{name}" in results and not goal.exam and not goal.is_limit
    }


def markdown(results: Mapping[str, Mapping[str, Any]], has_picture: bool) -> list[str]:
    """Return the section: tables by family, then aggregates; nothing if nothing was learned.

    Args:
      results: Records of ``benchmarks learn`` among others, by name of the file.
      has_picture: The picture of the aggregates is beside the page.
    """
    found = learned(results)
    if not found:
        return []
    rows = {name: row(name, result) for name, result in found.items()}
    families = {name: family(result["config"]["env"]["id"]) for name, result in found.items()}
    parts = [_INTRODUCTION]
    for one in _FAMILIES:
        members = sorted(rows[name] for name in rows if families[name] == one)
        if members:
            parts += [f"### {one}", table(_HEADER, members)]
    scores = scores_by_agent(found)
    if scores:
        totals = [[agent, f"{len(of)}", f"{estimate(of)}"] for agent, of in scores.items()]
        parts += [_AGGREGATES, table(["agent", "tasks", "IQM, 95 % interval"], totals)]
        parts += [f"![Scores of the agents]({INTERVALS})"] if has_picture else []
    return parts


def draw_scores(results: Mapping[str, Mapping[str, Any]], page: Path) -> None:
    """Draw the picture of the aggregates beside the page; none without neutral results."""
    scores = scores_by_agent(learned(results))
    if scores:
        draw(scores, page.with_name(INTERVALS))


def family(env_id: str) -> str:
    """Return the family of a task."""
    return next(name for name, pattern in _FAMILIES.items() if re.match(pattern, env_id))


def row(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return the row of a result; seeds without a return are shown, and leave it without IQM."""
    config, figures = result["config"], result["figures"]
    returns = figures.get(RETURNS, [])
    missing = result["seeds"] - len(returns)
    return [
        config["env"]["id"],
        agent_of(GOALS[name]),
        f"[{name}](#{LEARN}{name})",
        f"{min(config['total_env_steps'], GOALS[name].env_steps):,}",
        ", ".join([*map(show, returns), *["none"] * missing]),
        "" if missing else str(estimate([returns])) if len(returns) > 1 else show(returns[0]),
        GOALS[name].reference,
        duration(statistics.median(figures["run, s"])) if "run, s" in figures else "",
    ]

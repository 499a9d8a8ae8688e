"""The gallery of presets: what was learned, with commands, figures and curves, as a page."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.studies.learn import Goal
from benchmarks.studies.learning_goals import GOALS
from benchmarks.studies.tables import duration, show, table
from sebulba.configs.presets import PRESETS, tasks_with_names

LEARN = "learn-"
"""What names of results of ``benchmarks learn`` begin with."""

_INTRODUCTION = """\
# Gallery of presets

What the presets learn, and the command that repeats it. `python -m benchmarks report` writes this
page from the results of `python -m benchmarks learn NAME`, all of which are shown, those that fell
short, too: every seed counts, and no seed was chosen. Times are those of a machine with 2 cores and
no GPU, of some runs beside other work. The six presets that are named after an agent know nothing
of the task; the others were tuned for theirs, but for those of [more tasks](#more-tasks)."""

_MORE_TASKS = """\
## More tasks

These are the presets that are named after an agent, in another environment: what is shown above as
neutral-AGENT-TASK is what they learn. Some train for as long as the Stable-Baselines3 zoo does, and
a few have hyper-parameters of their own (`sebulba/configs/tasks.py`). What those learn
that have no curve above has not been measured, most games (the last twelve rows) among them."""


def markdown(results: Mapping[str, Mapping[str, Any]], folder: Path, page: Path) -> str:
    """Return the page, in Markdown.

    Args:
      results: Records of ``benchmarks learn`` among others, by name of the file.
      folder: Where they are, with their pictures.
      page: Where the page will be.
    """
    learned = {name: results[f"{LEARN}{name}"] for name in GOALS if f"{LEARN}{name}" in results}
    parts = [_INTRODUCTION]
    for agent in dict.fromkeys(agent_of(GOALS[name]) for name in learned):
        names = [name for name in learned if agent_of(GOALS[name]) == agent]
        parts.append(f"## {agent}")
        parts.append(
            table(
                ["learns", "goal", "seeds that reached it", "at the end, by seed", "a run takes"],
                [_row(name, learned[name]) for name in names],
            )
        )
        for name in names:
            parts += _picture(name, folder, page)
    parts += [_MORE_TASKS, table(["environment", "presets"], _tasks())]
    return "\n\n".join(parts) + "\n"


def _tasks() -> list[list[str]]:
    return [
        [PRESETS[names[0]].make().env.id, ", ".join(f"`{name}`" for name in names)]
        for names in tasks_with_names().values()
    ]


def agent_of(goal: Goal) -> str:
    """Return the name of the agent that a goal's preset trains."""
    config = PRESETS[goal.preset].make().agent
    return type(config).__name__.removesuffix("Config")


def _row(name: str, result: Mapping[str, Any]) -> list[str]:
    figures = result["figures"]
    ends = figures.get("return that counts", [])
    seconds = statistics.median(figures["run, s"])
    reached = round(result["share_of_seeds"] * result["seeds"])
    return [
        f"[{name}](#{_anchor(name)})",
        result.get("goal") or str(GOALS[name]),
        f"{reached} of {result['seeds']}"
        if reached == result["seeds"]
        else f"**{reached} of {result['seeds']}**",
        ", ".join(show(one) for one in ends),
        duration(seconds),
    ]


def _picture(name: str, folder: Path, page: Path) -> list[str]:
    goal = GOALS[name]
    words = " ".join(["sebulba train", goal.preset, *goal.options])
    parts = [f"### {name}", f"`{words}`"]
    if goal.reference:
        parts.append(f"Known: {goal.reference}.")
    file = folder / f"{LEARN}{name}.png"
    if file.exists():
        parts.append(f"![What {name} learned]({os.path.relpath(file, page.parent)})")
    return parts


def _anchor(name: str) -> str:
    return name.lower()

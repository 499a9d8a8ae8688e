"""Interquartile means with intervals, and aggregates of the scores of each agent, with a picture.

The interquartile mean (IQM) and its interval, a percentile bootstrap of seeds stratified by task,
are those of Agarwal et al. 2021 (arXiv 2108.13264). SciPy's trimmed mean and NumPy compute both in
a few lines. The authors' rliable 1.2.0 has the same IQM of the kept results; it would bring arch
and seaborn, and its arch 7.2 does not import with pandas 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.studies.gallery import agent_of
from benchmarks.studies.learning_goals import GOALS, NEUTRAL_TASKS
from benchmarks.studies.tables import show
from sebulba.metrics.figures import BLUE, GREY, open_frame, picture
from sebulba.tools.compare.curves import CONFIDENCE, RESAMPLES, interquartile_mean

RETURNS = "return that counts"
"""Key of the returns of all seeds that finished, among the figures of a result."""


class Estimate(NamedTuple):
    """An interquartile mean and its interval."""

    iqm: float
    """Interquartile mean."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end."""

    def __str__(self) -> str:
        return f"{show(self.iqm)} ({show(self.low)} to {show(self.high)})"


def estimate(tasks: Sequence[Sequence[float]]) -> Estimate:
    """Return the IQM of all seeds of all tasks; the bootstrap draws the seeds of each task anew."""
    random = np.random.default_rng(0)
    drawn = [
        np.asarray(seeds)[random.integers(len(seeds), size=(RESAMPLES, len(seeds)))]
        for seeds in tasks
    ]
    means = interquartile_mean(np.concatenate(drawn, axis=1), axis=1)
    rest = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(means, (rest, 1.0 - rest))
    return Estimate(float(interquartile_mean(np.concatenate(tasks))), float(low), float(high))


def scores_by_agent(results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Return the scores of the seeds of each neutral task, by agent; without a return it is 0."""
    scores: dict[str, list[list[float]]] = {}
    for name, task in NEUTRAL_TASKS.items():
        random = task.random_return_mean
        if name in results and random is not None:
            result = results[name]
            returns = result["figures"].get(RETURNS, [])
            returns = [*returns, *[random] * (result["seeds"] - len(returns))]
            scale = task.episode_return_mean - random
            of_agent = scores.setdefault(agent_of(GOALS[name]), [])
            of_agent.append([(one - random) / scale for one in returns])
    return scores


def draw(scores: Mapping[str, Sequence[Sequence[float]]], png_file: Path) -> None:
    """Draw the aggregate of every agent with its interval."""
    found = [estimate(tasks) for tasks in scores.values()]
    names = [f"{agent} (tasks: {len(tasks)})" for agent, tasks in scores.items()]
    with picture(png_file, 8, 0.9 + 0.4 * len(scores), dots_per_inch=100) as figure:
        axes = figure.add_subplot()
        lows, lengths = [one.low for one in found], [one.high - one.low for one in found]
        axes.barh(names, lengths, left=lows, height=0.5, color=BLUE, alpha=0.5)
        axes.plot([one.iqm for one in found], names, "|", color="black", markersize=16)
        for i, one in enumerate(found):
            text = axes.annotate(f"{one}", (one.high, i), (8, 0), textcoords="offset points")
            text.set(va="center", bbox={"color": "white", "pad": 1})
        for x in (0, 1):
            axes.axvline(x, color=GREY, linestyle=":", linewidth=1)
        axes.invert_yaxis()
        axes.set_xlabel("IQM of scores with its interval: 0 is random actions, 1 the reference")
        open_frame(axes, "x")

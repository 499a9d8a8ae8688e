"""A picture of a data set: returns, lengths, actions, and how observations are spread."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from sebulba.metrics.figures import new_figure, open_frame
from sebulba.metrics.plots import COLOURS
from sebulba_offline.dataset import Dataset, flat_arrays

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 20_000
"""Rows of which the observations are drawn."""
MOST_ACTIONS = 8
"""Components of continuous actions that are drawn."""
BINS = 40


def draw(dataset: Dataset, file: str | Path) -> None:
    """Draw a data set into a file, .png or .svg."""
    episodes = dataset.episodes()
    figure = new_figure(9, 6)
    axes = figure.subplots(2, 2)
    name = dataset.record.get("env") or "a data set"
    figure.suptitle(
        f"{name}: {len(episodes.lengths):,} episodes, {episodes.lengths.sum():,} steps",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    _histogram(axes[0, 0], episodes.returns, "return of an episode")
    _histogram(axes[0, 1], episodes.lengths, "steps of an episode")
    _actions(axes[1, 0], dataset)
    _observations(axes[1, 1], dataset)
    figure.savefig(file, dpi=150)


def _histogram(axes: Axes, values: np.ndarray, what: str) -> None:
    edges = None if np.ptp(values) else (values[0] - 1, values[0] + 1)
    axes.hist(values, bins=BINS, range=edges, color=COLOURS[0])
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel(what)
    axes.set_ylabel("episodes")
    open_frame(axes)


def _actions(axes: Axes, dataset: Dataset) -> None:
    """Draw how often each discrete action is taken, or the spread of each component."""
    rows, space = dataset.rows, dataset.action_space
    acts = ~(rows.terminated | rows.truncated)
    action = rows.action[acts].reshape(int(acts.sum()), -1)
    if isinstance(space, spaces.Discrete):
        shares = np.bincount(action[:, 0] - space.start, minlength=int(space.n)) / len(action)
        axes.bar(np.arange(len(shares)) + space.start, shares, color=COLOURS[0])
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("action")
        axes.set_ylabel("share")
    else:
        axes.violinplot(
            [action[:: 1 + len(action) // MOST_POINTS, k] for k in range(_shown(action))],
            positions=range(_shown(action)),
            widths=0.8,
            showextrema=False,
        )
        axes.set_xlabel("component of the action")
        axes.set_xticks(range(_shown(action)))
    open_frame(axes)


def _shown(action: np.ndarray) -> int:
    return min(action.shape[1], MOST_ACTIONS)


def _observations(axes: Axes, dataset: Dataset) -> None:
    """Draw observations along the two directions in which they, standardised, vary most."""
    numbers = [
        array.reshape(len(array), -1).astype(np.float64)
        for _, array in flat_arrays(dataset.rows.obs, "obs")
    ]
    step = 1 + dataset.rows.num_rows // MOST_POINTS
    table = np.concatenate([one[::step] for one in numbers], axis=1)
    spread = table.std(axis=0)
    table = (table - table.mean(axis=0))[:, spread > 0] / spread[spread > 0]
    places: Any = np.zeros((len(table), 2))
    if table.shape[1] > 1:
        _, directions = np.linalg.eigh(table.T @ table)
        places = table @ directions[:, [-1, -2]]
    elif table.shape[1]:
        places[:, 0] = table[:, 0]
    axes.hexbin(*places.T, gridsize=BINS, bins="log", cmap="Blues", mincnt=1, linewidths=0)
    axes.set_xlabel("observations, first principal component")
    axes.set_ylabel("second")
    open_frame(axes)

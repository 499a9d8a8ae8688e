"""Pictures of a league: who beats whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sebulba.metrics.figures import new_figure
from sebulba_league.matchmakers import DRAWN, WON
from sebulba_league.table import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = "RdBu"
"""Red is lost, blue is won, white is even."""
MOST_WRITTEN = 14
"""Players up to which each cell has its number written in."""


def draw_results(rows: Sequence[Row], file: str | Path, title: str) -> None:
    """Draw the learner's win rates by opponent and seat, and the chances of the next match."""
    figure = new_figure(max(5.0, 2.0 + 0.42 * len(rows)), 3.4)
    axes, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
    rates = np.stack([row.rates for row in rows], axis=1)
    _draw_heat(axes, rates, [f"seat {seat}" for seat in range(len(rates))], figure)
    axes.set_title(title, loc="left", fontsize=10)
    below.bar(range(len(rows)), [row.chance for row in rows], color="0.45", width=0.7)
    below.set_ylabel("next match", fontsize=8)
    below.set_xticks(range(len(rows)), [row.name for row in rows], rotation=90, fontsize=8)
    below.set_xlabel("opponent, the oldest snapshot first", fontsize=8)
    for side in ("top", "right"):
        below.spines[side].set_visible(False)
    figure.savefig(file, dpi=150)


def draw_cross_play(
    names: Sequence[str],
    results: np.ndarray,
    ratings: np.ndarray,
    margins: np.ndarray,
    file: str | Path,
) -> None:
    """Draw who beats whom, and the ratings.

    Args:
      results: ``[N, N, 3]``, as ``cross_play`` returns them.
      ratings: ``[N]``, with ``margins``, as ``elo`` returns them.
    """
    size = len(names)
    figure = new_figure(6.0 + 0.2 * size, 3.0 + 0.2 * size)
    axes, beside = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [3, 1]})
    points = results[..., WON] + results[..., DRAWN] / 2
    _draw_heat(axes, points / results.sum(axis=-1), names, figure, "")
    axes.set_xticks(range(size), names, rotation=90, fontsize=8)
    axes.set_xlabel("in the second seat", fontsize=8)
    axes.set_ylabel("in the first seat", fontsize=8)
    axes.set_title("share of points of the first seat", loc="left", fontsize=10)
    beside.errorbar(ratings, range(size), xerr=margins, fmt="o", color="0.25", markersize=4)
    beside.axvline(0, color="0.8", zorder=0)
    beside.set_xlabel("Elo, 95 % interval", fontsize=8)
    figure.savefig(file, dpi=150)


def _draw_heat(
    axes: Axes,
    rates: np.ndarray,
    labels: Sequence[str],
    figure: Any,
    what: str = "share of points",
) -> None:
    image = axes.imshow(rates, cmap=COLOURS, vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    if max(rates.shape) <= MOST_WRITTEN:
        for (row, column), rate in np.ndenumerate(rates):
            colour = "white" if abs(rate - 0.5) > 0.3 else "black"
            text = f"{100 * rate:.0f}"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=axes, label=what, fraction=0.05)

"""Pictures of a league: who beats whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def draw_league(
    rows: Sequence[Row],
    payoff: np.ndarray,
    records: Sequence[Mapping[str, Any]],
    file: str | Path,
    title: str,
) -> None:
    """Draw whom the learner beats and meets, which snapshot beats which, and ratings over time.

    Args:
      rows: Of the opponents.
      payoff: ``[n, n]``: share of points of snapshots against each other, the oldest first.
      records: Of the run's metrics.
    """
    from matplotlib.ticker import EngFormatter  # slow to import

    figure = new_figure(max(9.0, 4.5 + 0.5 * len(rows)), 6.4)
    grid = {"height_ratios": [1, 1.3], "width_ratios": [1.3, 1]}
    (axes, pairs), (below, curve) = figure.subplots(2, 2, gridspec_kw=grid)
    names, rates = [row.name for row in rows], np.stack([row.rates for row in rows], axis=1)
    _draw_heat(axes, rates, [f"seat {seat}" for seat in range(len(rates))], figure)
    axes.set_title(f"{title}: the learner", loc="left", fontsize=10)
    axes.set_xticks(range(len(rows)), names, rotation=90, fontsize=8)
    places, met = np.arange(len(rows)), [row.chance for row in rows]
    below.bar(places - 0.2, met, 0.4, color="0.45", label="next match")
    shares = [row.meta for row in rows]
    below.bar(places + 0.2, shares, 0.4, color="C1", label="meta-strategy")
    below.set_xticks(range(len(rows)), names, rotation=90, fontsize=8)
    below.set_xlabel("opponent, the oldest snapshot first", fontsize=8)
    below.set_ylabel("share of games", fontsize=8)
    below.legend(fontsize=8, frameon=False)
    _draw_heat(pairs, payoff, names[: len(payoff)], figure)
    pairs.set_xticks(range(len(payoff)), names[: len(payoff)], rotation=90, fontsize=8)
    pairs.set_title("snapshots against each other", loc="left", fontsize=10)
    rated = [record for record in records if record.get("elo_interval")]
    steps, elo, margin = (
        np.array([record[name] for record in rated], np.float64)
        for name in ("env_steps", "elo", "elo_interval")
    )
    curve.fill_between(steps, elo - margin, elo + margin, color="C0", alpha=0.25, linewidth=0)
    curve.plot(steps, elo, color="C0")
    for row in rows:
        if row.generation < 0 and not math.isnan(row.elo):
            curve.axhline(row.elo, color="0.6", linewidth=0.8, linestyle="--")
            curve.annotate(row.name, (1, row.elo), xycoords=("axes fraction", "data"), fontsize=7)
    curve.set_xlabel("env steps", fontsize=8)
    curve.set_ylabel("Elo of the learner, 95 % interval", fontsize=8)
    curve.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (below, curve):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
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

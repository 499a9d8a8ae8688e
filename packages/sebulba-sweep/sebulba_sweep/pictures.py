"""Pictures of a sweep: what matters, which values were good, and how the best trials learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sebulba.metrics.figures import new_figure, open_frame, shorten
from sebulba.metrics.plots import COLOURS, GREY, marker_of
from sebulba_sweep.space import Choices, Range, Space
from sebulba_sweep.study import Ended, Trial
from sebulba_sweep.sweep import described, shown_value
from sebulba_sweep.table import ranked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMPORTANCE, PARALLEL, CURVES = "importance.png", "parallel.png", "best_curves.png"
"""The files, in the folder of a sweep."""
MOST_CURVES = 5
"""Trials whose curves are drawn in colour."""
MARGIN = 0.06
"""Of an axis of values, at either end."""


def draw(
    folder: Path,
    space: Space,
    trials: Sequence[Trial],
    importances: Mapping[str, float],
    every: float,
) -> list[Path]:
    """Draw what there is to draw; return the files. ``every`` are the env steps of an interval."""
    done = [trial for trial in ranked(trials) if trial.ended == Ended.DONE]
    drawn = []
    if importances:
        drawn.append(_save(_importance(importances, len(done)), folder / IMPORTANCE))
    if done:
        drawn.append(_save(_parallel(space, done), folder / PARALLEL))
    if any(trial.returns for trial in done):
        drawn.append(_save(_curves(trials, every), folder / CURVES))
    return drawn


def _save(figure: Figure, file: Path) -> Path:
    figure.savefig(file, dpi=150)
    return file


def _importance(importances: Mapping[str, float], num_done: int) -> Figure:
    figure = new_figure(7, 1.4 + 0.4 * len(importances))
    axes = figure.subplots()
    names, shares = list(importances), list(importances.values())
    bars = axes.barh(names, shares, color=COLOURS[0], height=0.6)
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(shares))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    title = f"importance of options (PED-ANOVA, {num_done} trials that are done)"
    axes.set_title(title, loc="left", fontsize=10)
    return figure


def _parallel(space: Space, done: Sequence[Trial]) -> Figure:
    """Draw a line for each trial through its values, coloured by its return."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    names = list(space)
    figure = new_figure(max(5.0, 2.2 * len(names) + 2.5), 4.2)
    axes = figure.subplots()
    scores = np.array([trial.score for trial in done])
    low, high = scores.min(), scores.max()
    ends = (scores - low) / (high - low) if high > low else np.full(len(done), 0.5)
    columns = np.arange(len(names) + 1)
    for trial, end in reversed(list(zip(done, ends, strict=True))):  # the best on top
        places = [_place(space[name], trial.values[name]) for name in names]
        axes.plot(columns, [*places, end], color=colormaps["viridis_r"](end), linewidth=1.3)
    for column, name in enumerate(names):
        _draw_axis(axes, column, _marks(space[name]))
    marks = [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")] if low < high else [(0.5, f"{low:.4g}")]
    _draw_axis(axes, len(names), marks)
    axes.set_xticks(columns, [*names, "return"])
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(names) + 0.4)
    axes.set_ylim(-MARGIN, 1 + MARGIN)
    axes.spines[:].set_visible(False)
    axes.set_title(f"values and return of {len(done)} trials", loc="left", fontsize=10)
    if low < high:
        scale = ScalarMappable(Normalize(low, high), colormaps["viridis_r"])
        figure.colorbar(scale, ax=axes, label="return", fraction=0.03, pad=0.08)
    return figure


def _draw_axis(axes: Axes, column: int, marks: Sequence[tuple[float, str]]) -> None:
    axes.axvline(column, color=GREY, linewidth=0.8)
    for place, text in marks:
        axes.annotate(
            text.replace("$", r"\$"),
            (column, place),
            (3, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
            color="#333333",
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 0.6},
            zorder=4,
        )


def _place(domain: Choices | Range, value: object) -> float:
    """Return where a value stands on its axis, from 0 to 1."""
    if isinstance(domain, Choices):
        last = len(domain.values) - 1
        return domain.values.index(value) / last if last else 0.5  # type: ignore[arg-type]
    ends = np.array([domain.low, domain.high, value], float)
    low, high, at = np.log(ends) if domain.log else ends
    return float((at - low) / (high - low))


def _marks(domain: Choices | Range) -> list[tuple[float, str]]:
    return [(_place(domain, value), shown_value(value)) for value in domain.ends()]


def _curves(trials: Sequence[Trial], every: float) -> Figure:
    figure = new_figure(8.5, 4.6)
    axes = figure.subplots()
    with_returns = [trial for trial in ranked(trials) if trial.returns]
    best = [trial for trial in with_returns if trial.ended == Ended.DONE][:MOST_CURVES]
    for trial in with_returns:
        look: dict[str, Any] = {"color": GREY, "alpha": 0.3, "linewidth": 0.9}
        if trial in best:
            label = f"{trial.number}: {described(trial.values)}".replace("$", r"\$")
            colour = COLOURS[best.index(trial) % len(COLOURS)]
            look = {"color": colour, "linewidth": 1.8, "label": label, "zorder": 3}
        x, y = every * np.array(list(trial.returns)), list(trial.returns.values())
        axes.plot(x, y, marker=marker_of(y), **look)
    shorten(axes.xaxis)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("mean return of the first seed")
    open_frame(axes, "both")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("the best trials; grey: the others", loc="left", fontsize=10)
    return figure

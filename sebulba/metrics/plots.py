"""Draws the learning curves of runs."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sebulba.errors import refusing
from sebulba.metrics.counters import of_groups
from sebulba.metrics.episode_sample import Episodes, episodes_of
from sebulba.metrics.figures import new_figure, open_frame, shorten
from sebulba.metrics.short_text import duration
from sebulba.support.files import parse_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[int, float]
"""Environment steps, mean return."""
Evaluated = tuple[int, float, float]
"""Environment steps at which the networks were taken, mean return, standard deviation."""

COLOURS = ("#2a78b5", "#d1602a", "#3a9a5b", "#8a5bb5", "#b0892a")
GREY = "#666666"
MOST_COLOURS = 128
"""Colours of a picture, as its file counts them."""
EVALUATION = "evaluation: mean ± standard deviation"
MOST_AVERAGED = 50
"""Episodes in a running mean, or a tenth of those that are drawn, if these are fewer."""
CURVE_POINTS = 200
"""Points of a running mean."""
SHOWN_PERCENT = 99.0
"""The axis of returns reaches over so many of the episodes, and all means; single ones may lie far
away."""


def learning_curve(
    metrics: str | Path,
    picture: str | Path,
    title: str = "",
    *,
    episodes: str | Path | None = None,
    subtitle: str = "",
    goal: float | None = None,
) -> bool:
    """Draw the returns of a run over environment steps, and its evaluations if there were any.

    With several groups of agents, the mean return of each is a dashed line.

    Args:
      metrics: ``metrics.jsonl`` of a run; an incomplete last line is ignored.
      picture: PNG file to write.
      title: Title of the picture.
      episodes: ``episodes.jsonl`` of the run. Without it, as in a run of an older version, the
        mean returns of ``metrics`` are drawn.
      subtitle: What is said beside the title.
      goal: Return to mark by a horizontal line.

    Returns:
      Whether there was anything to draw.

    Raises:
      UsageError: A file cannot be read.
    """
    records = read_records(metrics)
    if not records:
        return False
    sample = None
    if episodes is not None and Path(episodes).exists():
        sample = episodes_of(read_records(episodes))
    training, evaluations = _curves(records)
    figure, axes = _new_figure(title, subtitle)
    shown = [mean + sign * std for _, mean, std in evaluations for sign in (-1, 1)]
    if sample is not None and len(sample.returns):
        before = [point for point in training if point[0] < sample.env_steps[0]]
        total = max(record.get("episodes") or 0 for record in records)
        shown += _draw_episodes(axes, sample, before, total)
    elif training:
        shown += [mean for _, mean in training]
        axes.plot(*_columns(training), color=COLOURS[0], linewidth=1.5, label="mean return")
    _draw_evaluations(axes, evaluations, COLOURS[1], EVALUATION)
    shown += _draw_groups(axes, records)
    nothing = None if shown else "no episode has ended yet"
    if goal is not None:
        shown += _draw_goal(axes, goal, shown)
    axes.set_xlim(0, 1.01 * max(record["env_steps"] for record in records))
    _show_returns(axes, shown)
    _finish(figure, axes, nothing)
    _add_wall_clock(axes, [(r["env_steps"], r["seconds"]) for r in records if r.get("seconds")])
    _save(figure, picture)
    return True


def learning_curves(
    runs: Mapping[str, tuple[Sequence[Point], Sequence[Evaluated]]],
    picture: str | Path,
    *,
    title: str = "",
    line: float | None = None,
) -> None:
    """Draw several runs: lines for training episodes, points for evaluations.

    Args:
      runs: Label to points of training and of evaluations, each in the order of time.
      picture: PNG file to write.
      title: Title of the picture.
      line: Return to mark by a horizontal line.
    """
    figure, axes = _new_figure(title)
    for i, (label, (training, evaluations)) in enumerate(runs.items()):
        colour = COLOURS[i % len(COLOURS)]
        if training:
            axes.plot(*_columns(training), color=colour, linewidth=1.5, label=label)
        _draw_evaluations(axes, evaluations, colour, EVALUATION if i == 0 else "")
    if line is not None:
        _draw_goal(axes, line, [line])
    axes.set_xlim(left=0)
    is_empty = not any(training or evaluations for training, evaluations in runs.values())
    _finish(figure, axes, "no 100 episodes yet" if is_empty else None)
    _save(figure, picture)


def _curves(records: Sequence[Mapping[str, Any]]) -> tuple[list[Point], list[Evaluated]]:
    """Return the mean returns of training and the evaluations that the records have."""
    training = [
        (record["env_steps"], record["episode_return_mean"])
        for record in records
        if record.get("episode_return_mean") is not None
    ]
    evaluations = [
        (record["eval_env_steps"], record["eval_return_mean"], record.get("eval_return_std") or 0.0)
        for record in records
        if record.get("eval_return_mean") is not None
    ]
    return training, evaluations


def running_mean(sample: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """Return environment steps ``[P]``, and there the mean and percentiles 10 and 90 of the returns
    around them: ``[3, P]``."""
    half = max(1, min(MOST_AVERAGED, len(sample.returns) // 10) // 2)
    ends = sample.env_steps
    even = np.linspace(ends[0], ends[-1], CURVE_POINTS)
    env_steps = np.unique(ends[np.searchsorted(ends, even).clip(max=len(ends) - 1)])
    # Those that ended at the same time are one point, in their middle.
    sides = [np.searchsorted(ends, env_steps, side) for side in ("left", "right")]
    centres = (sides[0] + sides[1]) // 2
    windows = [sample.returns[max(0, i - half) : i + half + 1] for i in centres]
    curves = [(w.mean(), *np.percentile(w, (10, 90))) for w in windows]
    return env_steps, np.array(curves).T


# Parts of a picture.


def _new_figure(title: str, subtitle: str = "") -> tuple[Figure, Axes]:
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.set_title(subtitle, loc="right", fontsize=9, color=GREY)
    return figure, axes


def _draw_episodes(
    axes: Axes, sample: Episodes, before: Sequence[Point], total: int
) -> list[float]:
    """Draw episodes, their mean and their band; return what the axis of returns has to show.

    Args:
      axes: Where to draw.
      sample: The episodes.
      before: Mean returns before the first of them, where a run began without a log of episodes.
      total: How many episodes there were.
    """
    num, colour = len(sample.returns), COLOURS[0]
    what = f"{total:,} episodes" if num >= total else f"{num:,} of {total:,} episodes"
    for x, y, size, alpha, label in (
        (sample.env_steps, sample.returns, 4, 0.3, ""),
        ([], [], 8, 0.6, what),  # for the legend
    ):
        dots = axes.plot(x, y, ".", color=colour, markersize=size, alpha=alpha, label=label)
        dots[0].set_markeredgewidth(0)
    env_steps, (mean, low, high) = running_mean(sample)
    is_line = len(env_steps) > 1  # of one point nothing is seen, so the legend leaves it out
    band = "10 % to 90 % of them" if is_line else ""
    axes.fill_between(env_steps, low, high, color=colour, alpha=0.2, linewidth=0, label=band)
    earlier, means = _columns(before) if before else ((), ())
    x, y = [*earlier, *env_steps], [*means, *mean]
    axes.plot(x, y, color=colour, linewidth=1.8, label="running mean" if is_line or before else "")
    rest = (100.0 - SHOWN_PERCENT) / 2
    return [*y, *low, *high, *np.percentile(sample.returns, (rest, 100.0 - rest))]


def _draw_evaluations(
    axes: Axes, evaluations: Sequence[Evaluated], colour: str, label: str
) -> None:
    if evaluations:
        x, y, std = zip(*evaluations, strict=True)
        axes.errorbar(x, y, std, fmt="o", markersize=4, elinewidth=0.8, color=colour, label=label)


def _draw_groups(axes: Axes, records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Draw the mean return of each group of agents, if there are several; return what is drawn."""
    curves: dict[str, list[Point]] = {}
    for record in records:
        for group, mean in of_groups(record).items():
            curves.setdefault(group, []).append((record["env_steps"], mean))
    for i, (group, points) in enumerate(curves.items()):
        colour = COLOURS[(2 + i) % len(COLOURS)]
        axes.plot(*_columns(points), color=colour, linewidth=1.2, linestyle="--", label=group)
    return [mean for points in curves.values() for _, mean in points]


def _draw_goal(axes: Axes, goal: float, shown: Sequence[float]) -> list[float]:
    """Draw the goal; return it if the axis of returns has to show it.

    It has not where it is so far from the returns that they would be a flat line.
    """
    low, high = min(shown, default=goal), max(shown, default=goal)
    is_near = 2 * low - high <= goal <= 2 * high - low
    label = f"goal {goal:g}" if is_near else f"goal {goal:g}, {'below' if goal < low else 'above'}"
    axes.axhline(goal, color="black", linewidth=0.9, linestyle=":", label=label)
    return [goal] if is_near else []


def _show_returns(axes: Axes, returns: Sequence[float]) -> None:
    """Let the axis of returns reach over these, and a little further."""
    if returns:
        low, high = min(returns), max(returns)
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)


def _add_wall_clock(axes: Axes, clock: Sequence[tuple[int, float]]) -> None:
    """Say above every tick of environment steps how long the run had lasted."""
    if not clock:
        return
    env_steps, seconds = _columns([(0, 0.0), *sorted(clock)])
    first, last = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if first <= tick <= last]
    above = axes.secondary_xaxis("top")
    above.set_xticks(ticks, [_time(np.interp(tick, env_steps, seconds)) for tick in ticks])
    above.tick_params(length=3, color=GREY, labelcolor=GREY, labelsize=8)
    above.spines["top"].set_visible(False)
    above.set_xlabel("wall-clock", color=GREY, fontsize=8)


def _finish(figure: Figure, axes: Axes, nothing: str | None) -> None:
    """Add labels, ticks, grid and legend; or say why there is nothing."""
    shorten(axes.xaxis)
    if max(map(abs, axes.get_ylim())) >= 10_000:
        shorten(axes.yaxis)
    axes.set(xlabel="environment steps", ylabel="return")
    open_frame(axes, "both")
    num = len([label for label in axes.get_legend_handles_labels()[1] if label])
    if num:
        columns = {4: 2}.get(num, min(num, 3))  # wider than this, long words are cut off
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    if nothing is not None:
        axes.text(0.5, 0.5, nothing, ha="center", transform=axes.transAxes)


def _save(figure: Figure, picture: str | Path) -> None:
    """Write a PNG whose pixels are an index into its colours, a third of the size."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    Image.open(drawn).convert("RGB").quantize(MOST_COLOURS).save(picture, "PNG", optimize=True)


def _columns(rows: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    x, y = zip(*rows, strict=True)
    return x, y


def marker_of(points: Sequence[Any] | np.ndarray) -> str | None:
    """Return the marker of a curve: a line through a single point is not seen."""
    return "o" if len(points) == 1 else None


def _time(seconds: float) -> str:
    """Return a time of the wall clock: 2.5 s, 45.3 s, 12:30, 3:05:00."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds else "0 s"
    return duration(round(seconds))


def read_records(metrics: str | Path) -> list[dict]:
    """Return the records of a ``metrics.jsonl``.

    An incomplete last line is ignored; other lines that are no records are left out with a warning.

    Raises:
      UsageError: The file cannot be read.
    """
    with refusing(f"{metrics} cannot be read", "give the metrics.jsonl of a run"):
        lines = Path(metrics).read_bytes().split(b"\n")
    # A process that was killed while it wrote leaves half a line at the end.
    records = [record_of(line) for line in lines[:-1] if line]
    if num_damaged := records.count(None):
        warnings.warn(
            f"{metrics}: {num_damaged} of {len(records)} lines are damaged and are left out",
            stacklevel=2,
        )
    return [record for record in records if record is not None]


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of a ``metrics.jsonl``; None if there is none."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("env_steps"), int | float)
    return record if is_record else None

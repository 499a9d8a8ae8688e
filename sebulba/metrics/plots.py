"""Draws the learning curves of runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sebulba.errors import UsageError
from sebulba.files import parse_json

Point = tuple[int, float]
"""Environment steps, mean return."""
Evaluated = tuple[int, float, float]
"""Environment steps at which the networks were taken, mean return, standard deviation."""

COLOURS = ("#2a78b5", "#d1602a", "#3a9a5b", "#8a5bb5", "#b0892a")


def learning_curve(metrics: str | Path, picture: str | Path, title: str = "") -> bool:
    """Draw mean return over environment steps, and the evaluations if there were any.

    Args:
      metrics: ``metrics.jsonl`` of a run; an incomplete last line is ignored.
      picture: PNG file to write.
      title: Title of the picture.

    Returns:
      Whether there was anything to draw.

    Raises:
      UsageError: ``metrics`` cannot be read.
    """
    records = read_records(metrics)
    if not records:
        return False
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
    label = "training, last 100 episodes" if evaluations else ""
    learning_curves({label: (training, evaluations)}, picture, title=title)
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
    # matplotlib's object interface draws without a display and leaves pyplot's state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (label, (training, evaluations)) in enumerate(runs.items()):
        colour = COLOURS[i % len(COLOURS)]
        if training:
            axes.plot(*zip(*training, strict=True), color=colour, linewidth=1.5, label=label)
        if evaluations:
            of_one = COLOURS[1] if len(runs) == 1 else colour
            x, y, std = zip(*evaluations, strict=True)
            what = "evaluation, mean and standard deviation" if i == 0 else ""
            axes.errorbar(
                x, y, std, fmt="o", markersize=4, elinewidth=0.8, color=of_one, label=what
            )
    if line is not None:
        axes.axhline(line, color="black", linewidth=0.8, linestyle=":")
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend(frameon=False)
    axes.set(xlabel="environment steps", ylabel="mean return", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not any(training or evaluations for training, evaluations in runs.values()):
        axes.text(0.5, 0.5, "no 100 episodes yet", ha="center", transform=axes.transAxes)
    figure.savefig(picture, dpi=150)


def read_records(metrics: str | Path) -> list[dict]:
    """Return the records of a ``metrics.jsonl``.

    An incomplete last line is ignored; other lines that are no records are left out with a warning.

    Raises:
      UsageError: The file cannot be read.
    """
    try:
        lines = Path(metrics).read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(
            f"{metrics} cannot be read ({error.strerror}); give the metrics.jsonl of a run"
        ) from error
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

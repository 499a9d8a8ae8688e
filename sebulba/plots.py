"""The learning curve of a run as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from sebulba.errors import UsageError


def learning_curve(metrics: str | Path, picture: str | Path, title: str = "") -> bool:
    """Draw mean return over environment steps, and the evaluations where there were any.

    Args:
      metrics: ``metrics.jsonl`` of a run; a last line cut short is left out.
      picture: PNG to write.
      title: Of the picture.

    Returns:
      Whether there was anything to draw.

    Raises:
      UsageError: ``metrics`` cannot be read.
    """
    records = read_records(metrics)
    points = [
        (record["env_steps"], record["episode_return_mean"])
        for record in records
        if record.get("episode_return_mean") is not None
    ]
    evaluations = [
        (record["eval_env_steps"], record["eval_return_mean"], record.get("eval_return_std") or 0.0)
        for record in records
        if record.get("eval_return_mean") is not None
    ]
    if not records:
        return False
    # The object interface draws without a display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color="#2a78b5",
        linewidth=1.5,
        label="training, last 100 episodes",
    )
    if evaluations:
        x, y, std = zip(*evaluations, strict=True)
        axes.errorbar(
            x,
            y,
            std,
            fmt="o",
            markersize=4,
            elinewidth=0.8,
            color="#d1602a",
            label="evaluation, mean and standard deviation",
        )
        axes.legend(frameon=False)
    axes.set(xlabel="environment steps", ylabel="mean return", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not points and not evaluations:
        axes.text(0.5, 0.5, "no 100 episodes yet", ha="center", transform=axes.transAxes)
    figure.savefig(picture, dpi=150)
    return True


def read_records(metrics: str | Path) -> list[dict]:
    """Return the records of a ``metrics.jsonl``.

    Raises:
      UsageError: It cannot be read.
    """
    try:
        lines = Path(metrics).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(
            f"{metrics} cannot be read ({error.strerror}); give the metrics.jsonl of a run"
        ) from error
    # A process killed while it wrote leaves half a line at the end.
    return [json.loads(line) for line in lines[:-1] if line]

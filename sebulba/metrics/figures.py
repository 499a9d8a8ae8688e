"""Pictures of results. Free of JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba.metrics.short_text import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, RED, GREY = "#2a78b5", "#b5452a", "#7a7a7a"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    # The object interface draws without a display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@contextlib.contextmanager
def picture(
    file: str | Path, width: float, height: float, *, dots_per_inch: int = 150
) -> Iterator[Figure]:
    """Yield an empty figure of this size in inches, and write it to ``file`` as PNG afterwards."""
    figure = new_figure(width, height)
    yield figure
    figure.savefig(file, dpi=dots_per_inch)


def shorten(axis: Any) -> None:
    """Write the numbers of an axis with k or M."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def open_frame(axes: Any, grid: str = "") -> None:
    """Leave out the frame's top and right; draw a grid along ``"x"``, ``"y"`` or ``"both"``."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(alpha=0.25, axis=grid)

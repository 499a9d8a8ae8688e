"""Charts of a run as SVG pictures by matplotlib, which an ``<img>`` holds. Free of JAX.

Sebulba needs matplotlib anyway; its SVG has no script and loads nothing, and a browser runs no
script in a picture either. No text of a run folder is in them: what they show is said beside them.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sebulba.metrics.plots import COLOURS, GREY, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGE = (9.6, 3.2)
"""Inches of the chart of returns."""
SMALL = (3.7, 2.0)
"""Inches of other charts."""
_DRAWING = threading.Lock()
"""Matplotlib's settings are of the process."""
_SETTINGS: Any = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}

Points = Sequence[tuple[float, float]]
"""x and y of each point."""


class Line(NamedTuple):
    """A line of a chart."""

    points: Points
    """In the order of x."""
    label: str = ""
    """Of the legend; no text of a run folder."""
    deviations: Sequence[float] | None = None
    """Standard deviations; with them the points are drawn as such."""


def draw(lines: Sequence[Line], size: tuple[float, float] = SMALL) -> str:
    """Return a chart over environment steps as a ``data:`` address of an SVG picture."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    width, height = size
    with _DRAWING, matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=size)
        FigureCanvasSVG(figure)
        # Fixed margins: a layout that fits itself to its texts takes three times as long.
        figure.subplots_adjust(0.6 / width, 0.3 / height, 1 - 0.15 / width, 1 - 0.12 / height)
        axes = figure.subplots()
        for i, line in enumerate(lines):
            if line.points:
                _draw_line(axes, line, COLOURS[i % len(COLOURS)])
        _finish(axes, (round(width), round(2 * height)))
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    x, y = zip(*line.points, strict=True)
    label = line.label or None
    if line.deviations is None:
        marker = "." if len(x) == 1 else ""
        axes.plot(x, y, color=colour, linewidth=1.4, marker=marker, label=label)
    else:
        points = axes.errorbar(x, y, line.deviations, fmt="o", color=colour, label=label)
        points.lines[0].set_markersize(4)


def _finish(axes: Axes, ticks: tuple[int, int]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axis, most in zip((axes.xaxis, axes.yaxis), ticks, strict=True):
        axis.set_major_locator(MaxNLocator(most))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(float(f"{value:.6g}"))))
    axes.tick_params(colors=GREY, labelsize=8.5)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8.5, loc="best")

"""Charts of a run as SVG pictures, which an ``<img>`` holds. Free of JAX.

A page of a running run is drawn every second, beside a training on the same cores. For one of 13
charts matplotlib took 0.33 s of processor time, and this module takes 0.02 s.

No text of a run folder is in a picture: what it shows is said beside it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sebulba.metrics.plots import COLOURS, GREY
from sebulba.metrics.short_text import short
from sebulba_board.html import Html, joined, tag

LARGE = (1000, 320)
"""Width and height of the chart of returns."""
SMALL = (340, 180)
"""Width and height of other charts."""
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 24
"""Margins: numbers are on the left and below."""
PER_TICK_X, PER_TICK_Y = 85, 28
"""Least distance of the numbers of an axis."""
LEGEND_WIDTH, LEGEND_HEIGHT = 260, 18
"""Of a label above the lines."""


class Line(NamedTuple):
    """A line of a chart."""

    points: Sequence[tuple[float, float]]
    """x and y of each point, in the order of x."""
    label: str = ""
    """Of the legend; no text of a run folder."""
    deviations: Sequence[float] | None = None
    """Standard deviations; with them the points are drawn as such."""


class _Scale(NamedTuple):
    """Where the numbers of an axis are in the picture."""

    low: float
    """Least number."""
    high: float
    """Greatest number."""
    begin: float
    """Where the least one is."""
    end: float
    """Where the greatest one is."""

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


def draw(lines: Sequence[Line], size: tuple[int, int] = SMALL) -> str:
    """Return a chart of lines, at least one with points, as a ``data:`` address of a picture."""
    width, height = size
    top = TOP + LEGEND_HEIGHT * any(line.label for line in lines)
    x = _scale([x for line in lines for x, _ in line.points], LEFT, width - RIGHT, 0.0)
    y = _scale([y for line in lines for y in _reach(line)], height - BOTTOM, top, 0.05)
    drawn = [_axes(x, y)]
    for i, line in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        drawn.append(_curve(line, x, y, colour))
        if line.label:
            drawn.append(_legend(line.label, colour, LEFT + 12 + LEGEND_WIDTH * i))
    svg = tag(
        "svg",
        *drawn,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        font_family="system-ui, sans-serif",
        font_size="11",
    )
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _reach(line: Line) -> Iterator[float]:
    """Yield the values that the axis of a line has to show."""
    deviations = line.deviations or [0.0] * len(line.points)
    for (_, y), deviation in zip(line.points, deviations, strict=True):
        yield from (y - deviation, y + deviation)


def _scale(values: Sequence[float], begin: float, end: float, margin: float) -> _Scale:
    low, high = float(min(values)), float(max(values))
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size or size < 1e-30:  # a point, or a line with one value
        low, high = low - (0.1 * size or 1.0), high + (0.1 * size or 1.0)
    more = margin * (high - low)
    return _Scale(low - more, high + more, begin, end)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most + 1`` round numbers from ``low`` to ``high``, evenly apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * m for m in (1, 2, 2.5, 5, 10, 20) if (high - low) <= most * power * m)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _axes(x: _Scale, y: _Scale) -> Html:
    parts = []
    for value in ticks(x.low, x.high, max(2, int((x.end - x.begin) / PER_TICK_X))):
        parts.append(_line((x(value), y.begin), (x(value), y.end), "#e6e9ec"))
        parts.append(_text(value, x(value), y.begin + 16, "middle"))
    for value in ticks(y.low, y.high, max(2, int((y.begin - y.end) / PER_TICK_Y))):
        parts.append(_line((x.begin, y(value)), (x.end, y(value)), "#e6e9ec"))
        parts.append(_text(value, x.begin - 6, y(value) + 4, "end"))
    corner = (x.begin, y.begin)
    axes = [_line(corner, (x.end, y.begin), GREY), _line(corner, (x.begin, y.end), GREY)]
    return joined([*parts, *axes])


def _line(begin: tuple[float, float], end: tuple[float, float], colour: str) -> Html:
    return tag(
        "line",
        **{"x1": str(begin[0]), "y1": str(begin[1]), "x2": str(end[0]), "y2": str(end[1])},
        stroke=colour,
    )


def _text(value: float, x: float, y: float, anchor: str) -> Html:
    words = short(float(f"{value:.6g}"))
    return tag("text", words, x=str(x), y=str(y), text_anchor=anchor, fill=GREY)


def _curve(line: Line, x: _Scale, y: _Scale, colour: str) -> Html:
    if line.deviations is None and len(line.points) > 1:
        points = " ".join(f"{x(a)},{y(b)}" for a, b in line.points)
        return tag("polyline", points=points, fill="none", stroke=colour, stroke_width="1.6")
    deviations = line.deviations or [0.0] * len(line.points)
    return joined(
        part
        for (a, b), deviation in zip(line.points, deviations, strict=True)
        for part in (
            _line((x(a), y(b - deviation)), (x(a), y(b + deviation)), colour),
            tag("circle", cx=str(x(a)), cy=str(y(b)), r="3", fill=colour),
        )
    )


def _legend(label: str, colour: str, x: int) -> Html:
    words = tag("text", label, x=str(x + 10), y=str(TOP + 4), fill="#1c2126")
    return joined([tag("circle", cx=str(x), cy=str(TOP), r="4", fill=colour), words])

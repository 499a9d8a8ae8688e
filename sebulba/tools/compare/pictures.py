"""``sebulba plot``: groups of runs as a picture or a page, and as a table. Free of JAX."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba.errors import UsageError, refusing, shown
from sebulba.metrics.figures import new_figure, open_frame, shorten
from sebulba.metrics.plots import COLOURS, marker_of
from sebulba.metrics.short_text import short
from sebulba.runs.summary import plain
from sebulba.support.files import check_folder_of, write_report
from sebulba.tools.compare.curves import CONFIDENCE, Curve, Group
from sebulba.tools.compare.tables import number, print_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")
"""What a picture can be written as."""
CAPTION = (
    f"lines: interquartile mean over seeds; bands: {CONFIDENCE:.0%} bootstrap intervals of it; "
    "dashes: mean; over time a seed keeps its last return"
)
_HTML = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>sebulba plot</title>
<style>body {{ font: 14px system-ui, sans-serif }} td {{ padding: 2px 12px }}</style>
<h2>Returns, {kind}</h2>
{svg}
<table>
{table}
</table>
</html>
"""
"""A page that loads nothing and runs no script."""
COLUMNS = ("environment", "group", "seeds", "steps", "time, s", "IQM", "interval", "mean")


def check_picture(file: str) -> None:
    """Raise UsageError if a picture cannot be written under this name."""
    path = Path(file)
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"--out {shown(file)} must end in {', '.join(SUFFIXES)}; choose one of them"
        )
    check_folder_of(file, "--out")


def rows_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return what the groups have come to at the last step that all their seeds reached."""
    rows = []
    for group in groups:
        steps = group.by_env_steps
        rows.append(
            {
                "environment": group.env,
                "group": group.name,
                "seeds": len(group.points),
                "steps": int(steps.x[-1]),
                "time, s": round(group.seconds_until(steps.x[-1]), 1),
                "IQM": float(steps.iqm[-1]),
                "interval": [float(steps.low[-1]), float(steps.high[-1])],
                "mean": float(steps.mean[-1]),
            }
        )
    return rows


def print_groups(groups: Sequence[Group]) -> None:
    """Print a table for each environment, with a line for each of its groups."""
    rows = rows_of(groups)
    for env in dict.fromkeys(row["environment"] for row in rows):
        words = ([*map(plain, _words(row)[1:])] for row in rows if row["environment"] == env)
        print_table((COLUMNS[1], *(f">{name}" for name in COLUMNS[2:])), words, plain(env))


def _words(row: dict[str, Any]) -> list[str]:
    low, high = map(number, row["interval"])
    return [
        *(str(row[name]) for name in COLUMNS[:3]),
        short(float(f"{row['steps']:.3g}")),
        f"{row['time, s']:,.0f}",
        number(row["IQM"]),
        f"{low} to {high}" if row["seeds"] > 1 else "-",
        number(row["mean"]),
    ]


def draw(groups: Sequence[Group], file: str, kind: str) -> None:
    """Draw the groups into a PNG, SVG or HTML file: a row for each environment, over environment
    steps and over seconds."""
    figure = _figure(groups, kind)
    path = Path(file)
    if path.suffix == ".html":
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        write_report(path, _page(groups, drawn.getvalue().partition("<svg")[2], kind))
        return
    with refusing(f"{shown(file)} cannot be written", "use another name"):
        figure.savefig(path, dpi=150)


def _figure(groups: Sequence[Group], kind: str) -> Figure:
    envs = list(dict.fromkeys(group.env for group in groups))
    names = list(dict.fromkeys(group.name for group in groups))
    figure = new_figure(10, 0.6 + 3.4 * len(envs))
    all_axes = figure.subplots(len(envs), 2, sharey="row", squeeze=False)
    for env, (over_steps, over_seconds) in zip(envs, all_axes, strict=True):
        for group in (group for group in groups if group.env == env):
            colour = COLOURS[names.index(group.name) % len(COLOURS)]
            label = f"{_literal(group.name)} ({len(group.points)})"
            _draw_curve(over_steps, group.by_env_steps, colour, label)
            _draw_curve(over_seconds, group.by_seconds, colour, label)
        over_steps.set_title(_literal(env), loc="left", fontweight="bold", fontsize=11)
        _finish(over_steps, "environment steps", f"return, {kind}")
        _finish(over_seconds, "seconds of the wall clock", "")
        over_steps.legend(frameon=False, fontsize=8.5)
    figure.supxlabel(CAPTION, fontsize=8, color="#666666")
    return figure


def _draw_curve(axes: Axes, curve: Curve, colour: str, label: str) -> None:
    axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    marker = marker_of(curve.x)
    axes.plot(curve.x, curve.iqm, color=colour, linewidth=1.8, marker=marker, label=label)
    axes.plot(curve.x, curve.mean, color=colour, linewidth=0.9, linestyle="--")


def _finish(axes: Axes, xlabel: str, ylabel: str) -> None:
    shorten(axes.xaxis)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_xlim(left=0)
    open_frame(axes, "both")


def _literal(text: str) -> str:
    """Return a text that matplotlib does not take for mathematics."""
    return plain(text).replace("$", r"\$")


def _page(groups: Sequence[Group], svg: str, kind: str) -> str:
    """Return the picture and the table of the groups as a page."""
    rows = [COLUMNS, *([plain(word) for word in _words(row)] for row in rows_of(groups))]
    cells = ("".join(f"<td>{html.escape(word)}</td>" for word in row) for row in rows)
    table = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return _HTML.format(kind=kind, svg=f"<svg{svg}", table=table)

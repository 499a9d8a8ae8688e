"""The pages of ``sebulba board`` besides that of a run: the table, two runs, an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sebulba.errors import UsageError
from sebulba.runs.metrics_file import read_sample
from sebulba.runs.summary import RunSummary, read_run
from sebulba.tools.board.charts import LARGE, Line
from sebulba.tools.board.html import (
    Html,
    joined,
    page,
    section,
    stacked,
    table,
    tag,
    text,
    value_text,
)
from sebulba.tools.board.run_details import MOST_RECORDS, Film, points, read_details
from sebulba.tools.board.run_page import badge, chart, footer, run_body, title_of
from sebulba.tools.compare.tables import differences, figures, label

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; media-src 'self'; form-action 'self'; base-uri 'none'"
)
"""What a browser may do for these pages: run ``board.js`` and ask this server alone."""
MOST_OF_FIGURE = 24
"""Characters of a line of a figure in the table: one run must not make it wide."""
_COLUMNS = ("", "run", "changed", "steps", "of", "time", "return", "best", "ended")
_BOTH = ("A", "B")
"""The names of two runs in a chart, which shows no text of theirs."""


def table_page(runs: Mapping[str, RunSummary | UsageError], folder: str) -> str:
    """Return the page with the table of runs.

    Args:
      runs: Every run, or why it is not shown, by its word in addresses.
      folder: Where they are.
    """
    rows = [_row(word, run) for word, run in runs.items() if isinstance(run, RunSummary)]
    left_out = [error for error in runs.values() if isinstance(error, UsageError)]
    compare = tag("p", tag("button", "Compare the two that are chosen", type="submit"))
    shown = joined([table(_COLUMNS, rows, class_="runs"), compare])
    return _page(
        "runs",
        tag("h1", "Runs in ", text(folder)),
        section(
            f"{len(rows):,} runs",
            tag("form", shown, action="/diff", method="get") if rows else "There is none yet.",
        ),
        section("Not shown", tag("ul", *(tag("li", text(str(error), 600)) for error in left_out)))
        if left_out
        else None,
    )


def _row(word: str, run: RunSummary) -> list[str | Html]:
    link = tag("a", text(label(run)), href=f"/run/{word}")
    return [
        tag("input", type="checkbox", name="run", value=word),
        joined([link, tag("small", title_of(run))]),
        *(stacked(figure, MOST_OF_FIGURE) for figure in figures(run)),
        badge(run.ended),
    ]


def run_page(word: str, folder: Path) -> str:
    """Return the page of a run, whose word in addresses is ``word``."""
    details = read_details(folder)
    to_keep = tag("a", "The report, a file to keep", href=f"/run/{word}/report.html")
    body = run_body(details, lambda film: film_address(word, film))
    return _page(text(label(details.run)), body, footer(to_keep, "."))


def film_address(word: str, film: Film) -> str:
    """Return where the server has a film of the run ``word``; its time makes a new one new."""
    changed = film.file.lstat().st_mtime_ns if film.file.exists() else 0
    return f"/run/{word}/film/{film.file.name}?{changed}"


def diff_page(first: Path, second: Path) -> str:
    """Return the page that compares two runs."""
    runs = [
        read_run(folder, lambda file: read_sample(file, MOST_RECORDS)) for folder in (first, second)
    ]
    names = [f"{letter}: {text(label(run))}" for letter, run in zip(_BOTH, runs, strict=True)]
    parts = []
    for title, rows in differences(*runs).items():
        cells = [(text(name), *map(value_text, pair)) for name, pair in rows.items()]
        parts.append(section(title, table(("", *names), cells) if rows else "the same"))
    curves = [
        section(title, chart(name, _two_lines(runs, metric, at), LARGE))
        for title, name, metric, at in (
            ("Return in training", "return", "episode_return_mean", "env_steps"),
            ("Return in evaluations", "return", "eval_return_mean", "eval_env_steps"),
        )
    ]
    return _page("two runs", tag("h1", ", ".join(names)), *curves, *parts)


def _two_lines(runs: list[RunSummary], name: str, at: str) -> list[Line]:
    return [
        Line(points(run.records, name, at), letter) for letter, run in zip(_BOTH, runs, strict=True)
    ]


def error_page(what: str) -> str:
    """Return a page that says what is wrong."""
    return _page("error", tag("h1", "Not shown"), section("Why", tag("p", text(what, 600))))


def _page(title: str, *main: Html | None) -> str:
    home = tag("p", tag("a", "all runs", href="/"))
    script = tag("script", src="/board.js", defer=True)
    return page(f"{title} - sebulba", joined([home, *main]), head=script, policy=POLICY)

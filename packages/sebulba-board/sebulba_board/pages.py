"""The pages of ``sebulba board``, that of a run as a file to keep among them. Free of JAX."""

from __future__ import annotations

import base64
import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sebulba
from sebulba.errors import UsageError
from sebulba.metrics.short_text import count, short
from sebulba.runs.metrics_file import is_number, open_regular
from sebulba.runs.summary import RUNNING, RunSummary, read_run
from sebulba.tools.compare.tables import differences, figures, label, number, return_of, share_done
from sebulba_board.charts import LARGE, SMALL, Line, draw
from sebulba_board.html import (
    Html,
    joined,
    lines_text,
    page,
    section,
    stacked,
    table,
    tag,
    text,
    value_text,
)
from sebulba_board.records import MOST_BYTES, read_sample
from sebulba_board.run_details import (
    MOST_RECORDS,
    SIDES,
    Film,
    RunDetails,
    agent_metrics,
    points,
    time_shares,
)
from sebulba_board.run_index import word_of

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; media-src 'self'; form-action 'self'; base-uri 'none'"
)
"""What a browser may do for the pages of the board: run ``board.js`` and ask this server alone."""
MOST_OF_FIGURE = 24
"""Characters of a line of a figure in the table: one run must not make it wide."""
_COLUMNS = ("", "run", "changed", "steps", "of", "time", "return", "best", "ended")
_BOTH = ("A", "B")
"""The names of two runs in a chart, which shows no text of theirs."""
MOST_CHARTS = 18
"""Charts of what the agent measures."""
MOST_FILM_BYTES = 2**22
"""Of the film that a report holds."""
LEAST_SHARE = 0.001
"""Of a phase that the profile shows."""
SPEEDS = {
    "env_steps_per_s": "environment steps/s",
    "updates_per_s": "updates/s",
    "policy_lag_mean": "policy lag, mean",
    "queue_fill": "how full the queue was, 0 to 1",
}
"""Charts of speed, by metric."""
PHASES = {
    "get": "waits for a trajectory",
    "restart": "replaces failed environments",
    "observe": "reads what the trajectory shows",
    "update": "updates the networks",
    "publish": "stages networks for the Inferencers",
    "metrics": "writes metrics",
    "checkpoint": "copies a checkpoint",
    "take": "takes the newest networks",
    "compile": "compiles",
    "act": "acts",
    "env_step": "steps the environments",
    "cycle": "acts and steps, in one compiled program",
    "finish": "finishes the trajectory",
    "shard": "uploads the trajectory",
    "put": "waits for room in the queue",
}
"""What each phase of a thread's time is, as far as it is known here."""


def run_body(details: RunDetails, source_of: Callable[[Film], str | None]) -> Html:
    """Return what the page of a run shows, without films whose ``source_of`` is None."""
    run = details.run
    versions = [(text(name), text(one)) for name, one in sorted(details.versions.items())]
    return joined(
        [
            _head(run),
            section("Return over environment steps, as in all charts", _returns(run)),
            _films(details, source_of),
            section("Speed", tag("div", *_charts(run, SPEEDS), class_="charts")),
            section("Losses and what else the agent measured", *_losses(run)),
            section("Where the time went", *(_profile(run, side) for side in SIDES)),
            section("Faults and warnings", _faults(details)),
            section("How it ended", *_end(details)),
            section("Configuration", *_configuration(details)),
            section("Checkpoints and policies", *_checkpoints(details)),
            section("Versions", table((), versions)),
        ]
    )


def report_page(folder: Path) -> str:
    """Return the page of a run as a file that needs no other."""
    details = RunDetails(folder)
    now = datetime.datetime.now()
    made = f"Made on {now:%Y-%m-%d at %H:%M}. This page loads nothing and runs no script."
    title = f"{text(label(details.run))}: report of a run"
    newest = next((film for film in details.films if film.num_bytes <= MOST_FILM_BYTES), None)
    body = run_body(details, lambda film: _within(film) if film is newest else None)
    return page(title, joined([body, footer(made)]))


def _within(film: Film) -> str | None:
    """Return a film as an address that holds it."""
    with contextlib.suppress(UsageError, OSError), open_regular(film.file) as opened:
        return f"data:video/mp4;base64,{base64.b64encode(opened.read(MOST_FILM_BYTES)).decode()}"
    return None


def _films(details: RunDetails, source_of: Callable[[Film], str | None]) -> Html | None:
    shown = []
    for film in details.films:
        if (source := source_of(film)) is not None:
            at = "after training" if film.env_steps is None else f"{film.env_steps:,} env steps"
            player = tag("video", src=source, controls=True, preload="metadata", loop=True)
            shown.append(tag("figure", tag("figcaption", at), player))
    return section("Films", tag("div", *shown, class_="charts")) if shown else None


def footer(*more: str | Html) -> Html:
    """Return the last line of a page."""
    return tag("footer", f"Sebulba {sebulba.__version__}. ", *more)


def badge(ended: str) -> Html:
    """Return how a run ended as a coloured word."""
    kind = {"done": "good", RUNNING: "running"}.get(ended, "bad")
    return tag("span", text(ended), class_=f"badge {kind}")


def title_of(run: RunSummary) -> str:
    """Return what a run is, in a line: agent, environment, seed."""
    env = text(run.config.get("env.id")).rpartition(":")[2]
    return f"{text(run.agent_name or None)}, {env}, seed {text(run.config.get('seed'))}"


def _head(run: RunSummary) -> Html:
    share, total = share_done(run), run.config.get("total_env_steps")
    speed = run.env_steps / run.seconds if run.seconds > 0 else None
    _, _, _, time, last, best = figures(run)
    of_total = "" if share is None else f" of {count(total)}"
    tiles = {
        "env steps": f"{count(run.env_steps)}{of_total}",
        "time": time,
        "env steps/s": count(speed),
        "return": last,
        "last evaluation": return_of(run.last_evaluation, run.evaluated_groups),
        "best evaluation": best,
    }
    parts = [
        tag("div", tag("b", stacked(value)), tag("span", name)) for name, value in tiles.items()
    ]
    return joined(
        [
            tag("h1", text(label(run)), " ", badge(run.ended)),
            tag("p", f"{title_of(run)}; written to last on {run.changed:%Y-%m-%d at %H:%M:%S}"),
            None if share is None else _bar(share, "progress"),
            tag("div", *parts, class_="tiles"),
        ]
    )


def _bar(share: float, class_: str = "bar") -> Html:
    percent = 100 * min(max(share, 0.0), 1.0)
    return tag("div", tag("i", style=f"width:{percent:.1f}%"), class_=class_)


def chart(title: str, lines: Sequence[Line], size: tuple[int, int] = SMALL) -> Html:
    """Return a chart over environment steps with its title; one without points says so."""
    if not any(line.points for line in lines):
        return tag("figure", tag("figcaption", title), tag("p", "nothing yet", class_="note"))
    picture = tag("img", src=draw(lines, size), alt=f"{title} over environment steps")
    return tag("figure", tag("figcaption", title), picture)


def _returns(run: RunSummary) -> Html:
    evaluations = [
        record
        for record in run.records
        if is_number(record.get("eval_env_steps")) and is_number(record.get("eval_return_mean"))
    ]
    deviations: list[Any] = [record.get("eval_return_std") for record in evaluations]
    lines = [
        Line(points(run.records, "episode_return_mean"), "training, mean of the last episodes"),
        Line(
            [(record["eval_env_steps"], record["eval_return_mean"]) for record in evaluations],
            "evaluation, mean ± standard deviation",
            [one if is_number(one) and one > 0 else 0.0 for one in deviations],
        ),
    ]
    return chart("return", lines, LARGE)


def _charts(run: RunSummary, titles: Mapping[str, str]) -> list[Html]:
    return [chart(title, [Line(points(run.records, name))]) for name, title in titles.items()]


def _losses(run: RunSummary) -> list[Html]:
    names = agent_metrics(run.records)
    charts = _charts(run, {name: text(name) for name in names[:MOST_CHARTS]})
    left = ", ".join(text(name) for name in names[MOST_CHARTS:])
    notes = [
        "Each is the mean over a window of updates." if names else "There is none yet.",
        f"Not drawn: {left}." if left else "",
        f"{len(run.records):,} records are drawn, evenly over metrics.jsonl (its last "
        f"{MOST_BYTES:,} bytes)."
        if run.metrics.is_sample
        else "",
    ]
    shown = " ".join(note for note in notes if note)
    return [tag("div", *charts, class_="charts"), tag("p", shown, class_="note")]


def _profile(run: RunSummary, side: str) -> Html:
    shares = time_shares(run.records, side)
    rows = [
        (text(phase), PHASES.get(phase, ""), f"{share:.1%}", _bar(share))
        for phase, share in shares.items()
        if share >= LEAST_SHARE
    ]
    if not rows:
        return tag("p", f"The metrics say nothing of the {side} yet.", class_="note")
    rest = 1.0 - sum(shares.values())
    if rest >= LEAST_SHARE:
        rows.append(("rest", "none of these", f"{rest:.1%}", _bar(rest)))
    over = "While programs compile, one phase is within another: together they are more than 100 %."
    whose = "the update loop" if side == "learner" else "the Inferencers, mean over them"
    return joined(
        [
            tag("h3", f"{side} ({whose})"),
            table(("phase", "", "share", ""), rows, class_="profile"),
            tag("p", over, class_="note") if rest < -0.01 else None,
        ]
    )


def _faults(details: RunDetails) -> Html:
    if not details.faults:
        return tag("p", "The run has noted none.")
    return tag("ul", *(tag("li", text(fault)) for fault in details.faults))


def _end(details: RunDetails) -> list[Html]:
    if not details.end:
        if details.run.ended == RUNNING:
            return [tag("p", "It has not ended: a process holds its lock.")]
        return [tag("p", "It left no ended.txt: it was killed, or crashed in native code.")]
    said, _, rest = lines_text(details.end).partition("Last metrics:")
    whole = tag("details", tag("summary", "all of ended.txt"), tag("pre", f"{said}{rest}"))
    return [tag("pre", said.strip()), whole]


def _configuration(details: RunDetails) -> list[Html]:
    config, changed = details.run.config, details.differences
    preset = text(config.get("preset"))
    every = [
        (
            text(name),
            tag("mark", value_text(value)) if name in (changed or {}) else value_text(value),
        )
        for name, value in config.items()
    ]
    parts = [tag("details", tag("summary", f"all {len(every)} options"), table((), every))]
    if changed is None:
        what = f"This Sebulba has no preset {preset}, so nothing is marked that differs from it."
        return [tag("p", what), *parts]
    if not changed:
        return [tag("p", f"As the preset {preset} has it."), *parts]
    rows = [
        (text(name), value_text(before), tag("mark", value_text(now)))
        for name, (before, now) in changed.items()
    ]
    what = f"What differs from the preset {preset}, as this version of Sebulba has it:"
    return [tag("p", what), table(("option", "preset", "run"), rows), *parts]


def _checkpoints(details: RunDetails) -> list[Html]:
    rows = [
        (
            f"{one.env_steps:,}",
            f"{one.saved:%Y-%m-%d %H:%M:%S}",
            "-" if one.num_bytes is None else f"{short(float(f'{one.num_bytes:.3g}'))}B",
            number(one.score),
            "files and sizes are right" if one.problem is None else text(one.problem),
        )
        for one in details.checkpoints
    ]
    head = ("env steps", "saved", "size", "score", "")
    kept = table(head, rows) if rows else tag("p", "There is no checkpoint.")
    policies = "; ".join(f"{name}/: {what}" for name, what in details.policies.items())
    return [kept, tag("p", f"Policies: {policies}." if policies else "There is no policy yet.")]


# The board.


def table_page(runs: Mapping[str, RunSummary | UsageError], folder: str) -> str:
    """Return the page with the table of runs, each by its word in addresses."""
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


def run_page(folder: Path) -> str:
    """Return the page of a run."""
    details, word = RunDetails(folder), word_of(folder.name)

    def address(film: Film) -> str:
        changed = film.file.lstat().st_mtime_ns if film.file.exists() else 0
        return f"/run/{word}/film/{film.file.name}?{changed}"  # a new film is a new address

    to_keep = tag("a", "The report, a file to keep", href=f"/run/{word}/report.html")
    return _page(text(label(details.run)), run_body(details, address), footer(to_keep, "."))


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
        section(
            f"Return in {what}",
            chart(
                "return",
                [
                    Line(points(run.records, metric, at), letter)
                    for letter, run in zip(_BOTH, runs, strict=True)
                ],
                LARGE,
            ),
        )
        for what, metric, at in (
            ("training", "episode_return_mean", "env_steps"),
            ("evaluations", "eval_return_mean", "eval_env_steps"),
        )
    ]
    return _page("two runs", tag("h1", ", ".join(names)), *curves, *parts)


def error_page(what: str) -> str:
    """Return a page that says what is wrong."""
    return _page("error", tag("h1", "Not shown"), section("Why", tag("p", text(what, 600))))


def _page(title: str, *main: Html | None) -> str:
    home = tag("p", tag("a", "all runs", href="/"))
    script = tag("script", src="/board.js", defer=True)
    return page(f"{title} - sebulba", joined([home, *main]), head=script, policy=POLICY)

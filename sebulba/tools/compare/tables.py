"""``sebulba runs``, ``diff`` and ``policies``: tables. Free of JAX."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sebulba.errors import UsageError
from sebulba.metrics.short_text import duration, short
from sebulba.policies.pretrained import Pretrained
from sebulba.runs.metrics_file import is_number
from sebulba.runs.summary import RUNNING, RunSummary, plain, read_run

_STYLES = {"done": "green", RUNNING: "cyan"}
_ABSENT = "-"


def read_runs(folders: Sequence[Path]) -> list[RunSummary]:
    """Return the runs that can be read, the newest first, with a warning for each other one."""
    runs = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except UsageError as error:
            warnings.warn(plain(f"left out: {error}"), stacklevel=2)
    return sorted(runs, key=lambda run: run.changed, reverse=True)


def print_runs(runs: Sequence[RunSummary]) -> None:
    """Print two lines for each run: what, when, how far, how well, how it ended."""
    columns = ("run", ">changed", ">steps", ">of", ">time", ">return", ">best", "ended")
    rows = (
        (_name(run), *figures(run), Text(run.ended, _STYLES.get(run.ended, "yellow")))
        for run in runs
    )
    print_table(columns, rows)


def print_policies(policies: Sequence[Pretrained]) -> None:
    """Print a line for each policy that comes with the package, and what trained them."""
    rows = []
    trained_by: dict[str, list[str]] = {}
    for one in policies:
        spread = f"{number(one.episode_return_mean)} ± {number(one.episode_return_std)}"
        steps = short(_three_digits(one.env_steps))
        rows.append((one.name, one.env_id, one.agent, spread, steps))
        versions = (f"{what} {version}" for what, version in one.versions.items())
        trained_by.setdefault(", ".join(versions), []).append(one.name)
    print_table(("pretrained:", "environment", "agent", ">return", ">steps"), rows)
    console().print("± is the standard deviation of episodes. sebulba eval pretrained:NAME plays.")
    for by, names in trained_by.items():
        console().print(f"{', '.join(names)}: trained by {by}")


def _name(run: RunSummary) -> Text:
    config = run.config
    env = str(config.get("env.id", _ABSENT)).rpartition(":")[2]
    what = f"{run.agent_name or _ABSENT} {env} seed {config.get('seed', _ABSENT)}"
    return Text.assemble(plain(label(run)), "\n", (plain(what), "dim"))


def share_done(run: RunSummary) -> float | None:
    """Return the share of its environment steps that a run has done; None if it is not known."""
    total = run.config.get("total_env_steps")
    return min(run.env_steps / total, 1.0) if is_number(total) and total > 0 else None


def figures(run: RunSummary) -> list[str]:
    """Return what a line says of a run: when, steps, share of them, time, return, best return."""
    share = share_done(run)
    return [
        _when(run.changed),
        short(_three_digits(run.env_steps)),
        _ABSENT if share is None else f"{share:.0%}",
        duration(round(run.seconds)),
        return_of(run.last_return, run.last_groups),
        return_of(run.best_return, run.best_groups),
    ]


def return_of(mean: float | None, groups: Mapping[str, float]) -> str:
    """Return the mean return, or a line for each group of agents where there are several."""
    return "\n".join(f"{name} {number(one)}" for name, one in groups.items()) or number(mean)


def record_of_run(run: RunSummary) -> dict[str, Any]:
    """Return the line of a run as JSON has it."""
    return {
        "folder": str(run.folder),
        "preset": run.config.get("preset"),
        "agent": run.agent,
        "env": run.config.get("env.id"),
        "seed": run.config.get("seed"),
        "changed": run.changed.isoformat(timespec="seconds"),
        "env_steps": run.env_steps,
        "total_env_steps": run.config.get("total_env_steps"),
        "seconds": run.seconds,
        "episode_return_mean": run.last_return,
        "groups": run.last_groups,
        "eval_return_mean": run.last_evaluation,
        "evaluated_groups": run.evaluated_groups,
        "best": run.best_return,
        "best_groups": run.best_groups,
        "ended": run.ended,
    }


Differences = dict[str, dict[str, tuple[Any, Any]]]
"""Of two runs: by section, by name, the values of both; None where a run has none."""


def differences(first: RunSummary, second: RunSummary) -> Differences:
    """Return in what two runs differ, and both results."""
    return {
        "configuration": _different(first.config, second.config),
        "versions": _different(first.versions, second.versions),
        "results": _pairs(_results(first), _results(second)),
    }


def print_differences(first: RunSummary, second: RunSummary) -> None:
    """Print in what two runs differ: configuration, versions, results."""
    for title, rows in differences(first, second).items():
        if not rows:
            console().print(Text(f"{title}: the same"))
            continue
        words = ([plain(word) for word in (name, *map(_word, rows[name]))] for name in rows)
        print_table(("", plain(label(first)), plain(label(second))), words, title)


def label(run: RunSummary) -> str:
    """Return the name of a run's folder."""
    return run.folder.resolve().name


def _results(run: RunSummary) -> dict[str, Any]:
    speed = run.env_steps / run.seconds if run.seconds else None
    return {
        "ended": run.ended,
        "env steps": run.env_steps,
        "seconds": run.seconds,
        "env steps/s": speed,
        **_returns("last training episodes", run.last_return, run.last_groups),
        **_returns("last evaluation", run.last_evaluation, run.evaluated_groups),
        **_returns("best evaluation", run.best_return, run.best_groups),
    }


def _returns(of: str, mean: float | None, groups: Mapping[str, float]) -> dict[str, float | None]:
    """Return the mean return of episodes, or those of the groups or seats where there are any."""
    if not groups:
        return {f"return of the {of}": mean}
    return {f"return of {name} in the {of}": one for name, one in groups.items()}


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (first.get(name), second.get(name)) for name in {**first, **second}}


def _different(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = _pairs(first, second)
    return {name: pair for name, pair in sorted(pairs.items()) if pair[0] != pair[1]}


def _word(value: Any) -> str:
    if value is None:
        return _ABSENT
    return number(value) if isinstance(value, float) else str(value)


def number(value: float | None) -> str:
    """Return a return as tables show it; ``-`` for None."""
    return _ABSENT if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _three_digits(value: int) -> float:
    return float(f"{value:.3g}")


def _when(moment: datetime.datetime) -> str:
    """Return the time of a moment of today, the day of another, with its year if it is not this."""
    now = datetime.datetime.now()
    if moment.date() == now.date():
        return f"{moment:%H:%M}"
    return f"{moment:%d %b}" if moment.year == now.year else f"{moment:%d %b %Y}"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print a table; numbers are in the columns whose name begins with ``>``."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    if title:
        table.title, table.title_justify = Text(title, "bold"), "left"
    for name in columns:
        if name.startswith(">"):
            table.add_column(Text(name[1:]), justify="right", no_wrap=True)
        else:
            table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def console() -> Console:
    """Return a console that takes what it is given as it is: markup may be in names of others."""
    return Console(markup=False, highlight=False, emoji=False)

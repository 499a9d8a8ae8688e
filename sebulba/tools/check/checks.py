"""Checks that run one after the other, what they find, and reports of it.

The failure of a check does not end the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sebulba.errors import describe_error


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "OK"
    """All is well."""
    NOTE = "note"
    """Worth knowing, but nothing has to be done."""
    PROBLEM = "PROBLEM"
    """Something is wrong."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a report."""

    level: Level
    """How bad it is."""
    seen: str
    """What was seen, with values."""
    remedy: str = ""
    """What to do about it."""
    name: str = ""
    """What was looked at; empty for the name of the check."""


ok, note, problem = (functools.partial(Finding, level) for level in Level)
"""Return a finding of that level."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings about one thing."""

    title: str
    """What was looked at."""
    findings: tuple[Finding, ...]
    """All findings, in order."""

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that something is wrong."""
        return tuple(f for f in self.findings if f.level is Level.PROBLEM)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are worth knowing."""
        return tuple(f for f in self.findings if f.level is Level.NOTE)

    def summary(self) -> str:
        """Return the title with the numbers of problems and notes."""
        counts = ((len(self.problems), "problem"), (len(self.notes), "note"))
        words = [f"{n or 'no'} {word}{'' if n == 1 else 's'}" for n, word in counts]
        return f"{self.title}: {', '.join(words)}"

    def record(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "title": self.title,
            "problems": len(self.problems),
            "notes": len(self.notes),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    def __str__(self) -> str:
        return "\n".join([*map(plain_line, self.findings), self.summary()])


def plain_line(finding: Finding) -> str:
    """Return a finding as text, with its remedy on a line of its own."""
    seen = finding.seen.replace("\n", f"\n{'':<9}")
    line = f"{finding.level:<8} {finding.name}: {seen}"
    return f"{line}\n{'':<8} -> {finding.remedy}" if finding.remedy else line


@dataclasses.dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    """Name in the report."""
    run: Callable[[], Finding | Iterable[Finding] | None]
    """Returns what it finds."""
    needs: tuple[str, ...] = ()
    """Names of checks that have to pass before this one makes sense."""


def checks_of(subject: Any, *rows: tuple[Any, ...]) -> list[Check]:
    """Return a check for each (name, function of the subject, *names that it needs)."""
    return [
        Check(name, functools.partial(run, subject), tuple(needs)) for name, run, *needs in rows
    ]


class Begun(NamedTuple):
    """A check begins."""

    name: str
    """Its name."""


class Done(NamedTuple):
    """A check has ended, or was skipped."""

    name: str
    """Its name."""
    passed: bool
    """It found no problem."""
    because: tuple[str, ...] = ()
    """Names of the checks that failed, so that this one was skipped."""


Event = Begun | Done | Finding


def run_checks(checks: Iterable[Check], passed: Mapping[str, bool]) -> Iterator[Event]:
    """Run checks in order, but not those in ``passed``, and yield what happens."""
    has_passed = dict(passed)
    for check in checks:
        if check.name in passed:
            continue
        because = tuple(name for name in check.needs if not has_passed.get(name, False))
        if because:
            has_passed[check.name] = False
            yield Done(check.name, False, because)
            continue
        yield Begun(check.name)
        has_passed[check.name] = True
        for finding in _findings(check):
            has_passed[check.name] &= finding.level is not Level.PROBLEM
            yield finding
        yield Done(check.name, has_passed[check.name])


def _findings(check: Check) -> Iterator[Finding]:
    try:
        found = check.run() or ()
        for finding in [found] if isinstance(found, Finding) else found:
            yield finding if finding.name else dataclasses.replace(finding, name=check.name)
    except (Exception, SystemExit) as error:
        yield failure(check.name, error)


def failure(name: str, error: BaseException) -> Finding:
    """Return the finding that the check ``name`` raised an error."""
    return problem(describe_error(error), "correct the code that raises it", name)


# Printed: a table on a terminal, lines elsewhere.

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


def print_findings(title: str, events: Iterable[Event]) -> Report:
    """Print findings, on a terminal as a table at the end, elsewhere as they come; return them."""
    console = Console()
    findings: list[Finding] = []
    wait: Any = console.status("starting") if sys.stdout.isatty() else contextlib.nullcontext()
    with wait as status:
        for event in events:
            if isinstance(event, Finding):
                findings.append(event)
                if status is None:
                    print(plain_line(event), flush=True)
            elif isinstance(event, Begun) and status is not None:
                status.update(f"checking {event.name}")
    report = Report(title, tuple(findings))
    if status is None:
        print(report.summary())
    else:
        console.print(table(report))
        console.print(Text(report.summary(), "bold red" if report.problems else "bold green"))
    return report


def table(report: Report) -> Table:
    """Return a report as a table, with each remedy below its finding."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    result.add_column(no_wrap=True)
    result.add_column(no_wrap=True, style="bold")
    result.add_column(overflow="fold", ratio=1)
    for finding in report.findings:
        text = Text(finding.seen)
        if finding.remedy:
            style = "dim" if finding.level is Level.OK else _STYLES[finding.level]
            text.append(f"\n-> {finding.remedy}", style.removeprefix("bold "))
        result.add_row(Text(finding.level, _STYLES[finding.level]), finding.name, text)
    return result

"""Printed reports: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sebulba.tools.check.checks import Begun, Event, Finding, Level, Report, plain_line

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


def print_findings(title: str, events: Iterable[Event]) -> Report:
    """Print findings: on a terminal as a table at the end, elsewhere line by line as they come.

    Returns:
      The report.
    """
    if not sys.stdout.isatty():
        report = collect(title, events, lambda finding: print(plain_line(finding), flush=True))
        print(report.summary())
        return report
    console = Console()
    with console.status("starting") as status:
        report = collect(title, events, begun=lambda name: status.update(f"checking {name}"))
    console.print(table(report))
    style = "bold red" if report.problems else "bold green"
    console.print(Text(report.summary(), style))
    return report


def collect(
    title: str,
    events: Iterable[Event],
    found: Callable[[Finding], None] = lambda finding: None,
    begun: Callable[[str], None] = lambda name: None,
) -> Report:
    """Return findings as a report; ``begun`` is told the name of every check that begins."""
    findings = []
    for event in events:
        if isinstance(event, Begun):
            begun(event.name)
        elif isinstance(event, Finding):
            findings.append(event)
            found(event)
    return Report(title, tuple(findings))


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

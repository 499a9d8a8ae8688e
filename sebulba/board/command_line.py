"""``sebulba report`` and ``sebulba board``: their options. Free of JAX."""

from __future__ import annotations

import argparse
from pathlib import Path

from sebulba.errors import UsageError, shown


def report(argv: list[str]) -> int:
    """Write a run as one page; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sebulba report",
        description="Write a run as one HTML page that needs no other file: what ran, how it "
        "ended, curves, where the time went, faults, checkpoints, versions.",
    )
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="folder of the run, such as runs/NAME"
    )
    parser.add_argument(
        "--out", default="report.html", metavar="FILE", help="page to write; default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    from sebulba.board.markup import joined, page, text
    from sebulba.board.run_details import read_details
    from sebulba.board.run_page import footer, made_now, run_body
    from sebulba.comparison.tables import label

    details = read_details(arguments.run)
    body = joined([run_body(details), footer(made_now())])
    whole = page(f"{text(label(details.run))}: report of a run", body)
    try:
        Path(arguments.out).write_text(whole, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--out {shown(arguments.out)} cannot be written ({error.strerror}); choose another"
        ) from error
    print(f"written: {arguments.out} ({len(whole.encode()) / 1000:,.0f} kB)")
    return 0

"""``sebulba report`` and ``sebulba board``: their options. Free of JAX."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sebulba.commands.options import number, option, parse
from sebulba.errors import UsageError, shown
from sebulba.support.files import write_report
from sebulba_board.pages import report_page

PORT = 8080
"""Where the board is if nothing else is said."""


def report(argv: list[str]) -> int:
    """Write a run as one page; returns the exit code."""
    what = (
        "Write an HTML report of a run, in one file: configuration, how it ended, curves, "
        "where the time went, faults, checkpoints, versions."
    )
    out = "page to write; default: %(default)s"
    options = (
        option("run", "folder of the run, such as runs/NAME", metavar="RUN", type=Path),
        option("--out", out, default="report.html", metavar="FILE"),
    )
    given = parse("report", what, argv, options)
    whole = report_page(given.run)
    write_report(given.out, whole)
    print(f"written: {given.out} ({len(whole.encode()) / 1000:,.0f} kB)")
    return 0


def board(argv: list[str]) -> int:
    """Serve the runs of a folder on loopback until Ctrl-C; returns the exit code."""
    what = (
        "Show the runs of a folder in a browser on this machine: a table, a live page for each, "
        "and two beside each other."
    )
    place = {"metavar": "FOLDER", "nargs": "?", "default": "runs", "type": Path}
    options = (
        option("folder", "default: runs", **place),
        number("--port", PORT, "0: any free port"),
    )
    given = parse("board", what, argv, options)
    if not os.path.isdir(given.folder):
        raise UsageError(f"{shown(str(given.folder))} is not a folder; give one with runs in it")
    if not 0 <= given.port < 2**16:
        raise UsageError(f"--port {given.port} must be from 0 to 65535; choose another")
    from sebulba_board.server import LOOPBACK, listen, server

    serving = server(given.folder)
    with listen(given.port) as bound, contextlib.suppress(KeyboardInterrupt):
        where = f"http://{LOOPBACK}:{bound.getsockname()[1]}/"
        print(f"{where} shows the runs in {given.folder}; Ctrl-C ends it", flush=True)
        serving.run(sockets=[bound])
    return 0

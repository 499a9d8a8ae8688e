"""``sebulba report`` and ``sebulba board``: their options. Free of JAX."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from sebulba.errors import UsageError, shown

PORT = 8080
"""Where the board is if nothing else is said."""


def report(argv: list[str]) -> int:
    """Write a run as one page; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sebulba report",
        description="Write an HTML report of a run, in one file: configuration, how it "
        "ended, curves, where the time went, faults, checkpoints, versions.",
    )
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="folder of the run, such as runs/NAME"
    )
    parser.add_argument(
        "--out", default="report.html", metavar="FILE", help="page to write; default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    from sebulba.tools.board.run_details import read_details
    from sebulba.tools.board.run_page import report_page

    whole = report_page(read_details(arguments.run))
    try:
        Path(arguments.out).write_text(whole, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--out {shown(arguments.out)} cannot be written ({error.strerror}); choose another"
        ) from error
    print(f"written: {arguments.out} ({len(whole.encode()) / 1000:,.0f} kB)")
    return 0


def board(argv: list[str]) -> int:
    """Serve the runs of a folder on loopback until Ctrl-C; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sebulba board",
        description="Show the runs of a folder in a browser on this machine: a table, a live page "
        "for each, and two beside each other.",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="runs", type=Path, help="default: runs"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help="0: any free port; default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    if not arguments.folder.is_dir():
        raise UsageError(
            f"{shown(str(arguments.folder))} is not a folder; give one with runs in it"
        )
    if not 0 <= arguments.port < 2**16:
        raise UsageError(f"--port {arguments.port} must be from 0 to 65535; choose another")
    from sebulba.tools.board.server import LOOPBACK, listen, server

    serving = server(arguments.folder)
    with listen(arguments.port) as bound, contextlib.suppress(KeyboardInterrupt):
        where = f"http://{LOOPBACK}:{bound.getsockname()[1]}/"
        print(f"{where} shows the runs in {arguments.folder}; Ctrl-C ends it", flush=True)
        serving.run(sockets=[bound])
    return 0

"""``sebulba runs``, ``policies``, ``plot`` and ``diff``: their options. Free of JAX."""

from __future__ import annotations

import argparse
from pathlib import Path

from sebulba.errors import UsageError
from sebulba.policies import pretrained
from sebulba.runs.summary import read_run, run_folders
from sebulba.support.files import write_json
from sebulba.tools.compare import curves, tables

_RUNS = "folder of a run, or a folder with runs in it"


def runs(argv: list[str]) -> int:
    """Print a table of runs; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sebulba runs",
        description="List runs, newest first: configuration, date, steps, returns, how they ended.",
    )
    parser.add_argument(
        "places", metavar="FOLDER", nargs="*", default=["runs"], help=f"{_RUNS}; default: runs"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table to FILE")
    arguments = parser.parse_args(argv)
    found = tables.read_runs(run_folders(arguments.places))
    tables.print_runs(found)
    if arguments.json is not None:
        write_json(arguments.json, {"runs": [tables.record_of_run(run) for run in found]})
    return 0


def policies(argv: list[str]) -> int:
    """Print a table of the policies that come with the package; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sebulba policies",
        description="List the pretrained policies. sebulba eval, video, watch and export, and "
        "sebulba.load_policy, take pretrained:NAME instead of a run.",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table to FILE")
    arguments = parser.parse_args(argv)
    found = [pretrained.about(name) for name in pretrained.names()]
    tables.print_policies(found)
    if arguments.json is not None:
        write_json(arguments.json, {"policies": [one._asdict() for one in found]})
    return 0


def plot(argv: list[str]) -> int:
    """Draw runs by groups; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sebulba plot",
        description="Draw the returns of runs over env steps and wall clock. Runs that differ only "
        "in their seed share a curve.",
    )
    parser.add_argument("places", metavar="RUN", nargs="+", help=_RUNS)
    parser.add_argument(
        "--by",
        default="preset",
        metavar="KEY",
        help="runs with an equal KEY share a curve: agent, preset, name, or a dotted name of "
        "config.json such as agent.learning_rate; default: %(default)s",
    )
    parser.add_argument(
        "--of", choices=curves.KINDS, help="default: evaluation, if all runs have evaluations"
    )
    parser.add_argument(
        "--out",
        default="plot.png",
        metavar="FILE",
        help=".png, .svg or .html; default: %(default)s",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table to FILE")
    arguments = parser.parse_args(argv)
    from sebulba.tools.compare import pictures

    pictures.check_picture(arguments.out)
    found = tables.read_runs(run_folders(arguments.places))
    if not found:
        raise UsageError("none of the runs can be read; give others")
    kind = arguments.of or curves.kind_of(found)
    groups = curves.grouped(found, arguments.by, kind)
    pictures.print_groups(groups)
    pictures.draw(groups, arguments.out, kind)
    print(f"drawn: {arguments.out}")
    if arguments.json is not None:
        write_json(
            arguments.json, {"of": kind, "by": arguments.by, "groups": pictures.rows_of(groups)}
        )
    return 0


def diff(argv: list[str]) -> int:
    """Print in what two runs differ; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="sebulba diff",
        description="Compare two runs: configurations, versions, results.",
    )
    for name in ("first", "second"):
        parser.add_argument(name, metavar="RUN", type=Path, help="folder of a run")
    arguments = parser.parse_args(argv)
    tables.print_differences(*(read_run(run) for run in (arguments.first, arguments.second)))
    return 0

"""``sebulba runs``, ``policies``, ``plot`` and ``diff``. Free of JAX."""

from __future__ import annotations

from pathlib import Path

from sebulba.commands.options import json_of, option, parse
from sebulba.errors import UsageError
from sebulba.policies import pretrained
from sebulba.runs.summary import read_run, run_folders
from sebulba.support.files import write_json
from sebulba.tools.compare import curves, tables

_RUNS = "folder of a run, or a folder with runs in it"
_JSON = json_of("the table")


def runs(argv: list[str]) -> int:
    """Print a table of runs; returns the exit code."""
    what = "List runs, newest first: configuration, date, steps, returns, how they ended."
    places = f"{_RUNS}; default: runs"
    options = (option("places", places, metavar="FOLDER", nargs="*", default=["runs"]), _JSON)
    given = parse("runs", what, argv, options)
    found = tables.read_runs(run_folders(given.places))
    tables.print_runs(found)
    if given.json is not None:
        write_json(given.json, {"runs": [tables.record_of_run(run) for run in found]})
    return 0


def policies(argv: list[str]) -> int:
    """Print a table of the policies that come with the package; returns the exit code."""
    what = (
        "List the pretrained policies. sebulba eval, video, watch and export, and "
        "sebulba.load_policy, take pretrained:NAME instead of a run."
    )
    given = parse("policies", what, argv, (_JSON,))
    found = [pretrained.about(name) for name in pretrained.names()]
    tables.print_policies(found)
    if given.json is not None:
        write_json(given.json, {"policies": [one._asdict() for one in found]})
    return 0


def plot(argv: list[str]) -> int:
    """Draw runs by groups; returns the exit code."""
    by = (
        "runs with an equal KEY share a curve: agent, preset, name, or a dotted name of "
        "config.json such as agent.learning_rate; default: %(default)s"
    )
    out = ".png, .svg or .html; default: %(default)s"
    options = (
        option("places", _RUNS, metavar="RUN", nargs="+"),
        option("--by", by, default="preset", metavar="KEY"),
        option("--of", "default: evaluation, if all runs have evaluations", choices=curves.KINDS),
        option("--out", out, default="plot.png", metavar="FILE"),
        _JSON,
    )
    what = (
        "Draw the returns of runs over env steps and wall clock. Runs that differ only in their "
        "seed share a curve."
    )
    given = parse("plot", what, argv, options)
    from sebulba.tools.compare import pictures

    pictures.check_picture(given.out)
    found = tables.read_runs(run_folders(given.places))
    if not found:
        raise UsageError("no run can be read; name others")
    kind = given.of or curves.kind_of(found)
    groups = curves.grouped(found, given.by, kind)
    pictures.print_groups(groups)
    pictures.draw(groups, given.out, kind)
    print(f"drawn: {given.out}")
    if given.json is not None:
        record = {"of": kind, "by": given.by, "groups": pictures.rows_of(groups)}
        write_json(given.json, record)
    return 0


def diff(argv: list[str]) -> int:
    """Print in what two runs differ; returns the exit code."""
    one = {"metavar": "RUN", "type": Path}
    options = [option(name, "folder of a run", **one) for name in ("first", "second")]
    what = "Compare two runs: configurations, versions, results."
    given = parse("diff", what, argv, options)
    tables.print_differences(read_run(given.first), read_run(given.second))
    return 0

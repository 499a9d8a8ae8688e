"""The command line: ``sebulba COMMAND``, with the commands of ``USAGE``.

Wrong names of commands, configurations and options, and values that break a rule by themselves, are
found before JAX is imported; what only the environment knows, before anything runs.
"""

from __future__ import annotations

import difflib
import errno
import faulthandler
import importlib
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import sebulba
from sebulba.errors import UsageError, text_of
from sebulba.runs.exit_codes import (
    EXIT_CHECKPOINT,
    EXIT_ENV,
    EXIT_HANG,
    EXIT_HOST,
    EXIT_NOT_FINITE,
    EXIT_OK,
    EXIT_OTHER,
    EXIT_USAGE,
    exit_code_of,
    joined_hosts,
    tell_hosts,
)
from sebulba.runs.huge_pages import COMMANDS as LONG_COMMANDS
from sebulba.runs.huge_pages import restart_with_huge_pages
from sebulba.support import plugins
from sebulba.support.streams import make_streams_safe
from sebulba.support.user_code import import_from_here

USAGE = """\
usage: sebulba train CONFIG [options]      train an agent
       sebulba resume RUN [options]        continue a run that ended or was stopped
       sebulba eval RUN [options]          play a trained policy
       sebulba policies                    list the pretrained policies
       sebulba runs [FOLDER]               list runs: steps, returns, how they ended
       sebulba plot RUN... [options]       draw the returns of runs over seeds
       sebulba diff RUN RUN                compare two runs
       sebulba video RUN [--out FILE]      film a trained policy
       sebulba watch RUN                   watch a policy in a window or the terminal
       sebulba export RUN --to FORM        write a policy as StableHLO or ONNX
       sebulba bench BENCHMARK [options]   measure speed and memory on this machine
       sebulba doctor [options]            check this machine and the installation
       sebulba check-env ENV [options]     check an environment
       sebulba check-agent AGENT [options] check an agent
       sebulba --version

"sebulba train --help" lists the configurations, "sebulba train CONFIG --help" its options.
"""

SYSTEM_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EMFILE, errno.ENFILE, errno.EIO),
)
"""Of disks that are full, read-only or broken, and of too many open files."""

_PLAIN_WARNING = warnings.formatwarning


def main(
    argv: Sequence[str] | None = None, command: Callable[[list[str]], int] | None = None
) -> int:
    """Run a command and return its exit code.

    Args:
      argv: Arguments after the program's name; None takes those of the process.
      command: Runs the arguments of another program, whose errors end it as those of this one do.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(argv) if command is None else command(argv)
    except SystemExit as exit_:  # tyro and argparse have printed why
        return exit_code_of(exit_)
    except BaseException as error:
        code = exit_code_of(error)
        if code in (EXIT_ENV, EXIT_OTHER) and not _is_of_the_system(error):
            traceback.print_exc()
        print(f"sebulba: {_describe(code, error)}", file=sys.stderr)
        tell_hosts(error)
        return code


def _is_of_the_system(error: BaseException) -> bool:
    """Tell whether a disk or a limit of the system is at fault, which a traceback says nothing of.

    One that an environment raised may be its own.
    """
    return (
        isinstance(error, OSError)
        and exit_code_of(error) == EXIT_OTHER
        and (error.errno in SYSTEM_ERRORS or "No usable temporary directory" in str(error))
    )


def _describe(code: int, error: BaseException) -> str:
    """Say in a line what ended the command."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    what = {
        EXIT_NOT_FINITE: "not finite",
        EXIT_HANG: "hang",
        EXIT_CHECKPOINT: "checkpoint",
        EXIT_HOST: "hosts",
        EXIT_ENV: "environment",
    }.get(code, "error")
    if code in (EXIT_ENV, EXIT_OTHER):
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return f"{what}: {text_of(error)}{notes}"
    return f"{what}: {error}"


def entry_point(
    command: Callable[[list[str]], int] | None = None, long: Container[str] = LONG_COMMANDS
) -> None:
    """Run the command of this process and end it.

    A crash in native code prints the Python stacks of all threads. A training continues if nothing
    can be printed any more; any other command then fails.

    Args:
      command: Runs the arguments of another program.
      long: First words of commands that run programs for long.
    """
    stdout = make_streams_safe()
    faulthandler.enable()
    restart_with_huge_pages(sys.argv[1:], long)
    trains = command is None and sys.argv[1:2] in (["train"], ["resume"])
    warnings.formatwarning = _words_of_warning
    code = main(command=command)
    sys.stdout.flush()
    sys.stderr.flush()
    if stdout.is_lost and not trains:
        code = code or EXIT_OTHER
    ours = ("inferencer-", "evaluator")
    if any(thread.name.startswith(ours) for thread in threading.enumerate()):
        # One that hangs inside XLA would abort the interpreter's own way out.
        os._exit(code)
    hosts = joined_hosts()
    if hosts is not None and hosts.has_failed:
        os._exit(code)  # jax.distributed would wait for hosts that are gone
    sys.exit(code)


def _words_of_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning of this package in its words alone, and of others with where it is from."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"sebulba: warning: {message}\n"
    return _PLAIN_WARNING(message, category, filename, lineno, line)


COMMANDS = {
    "train": "training:train",
    "resume": "training:resume",
    "eval": "playing:evaluate",
    "policies": "compare:policies",
    "runs": "compare:runs",
    "plot": "compare:plot",
    "diff": "compare:diff",
    "video": "playing:video",
    "watch": "playing:watch",
    "export": "playing:export",
    "bench": "bench:main",
    "doctor": "check:doctor",
    "check-env": "check:check_env",
    "check-agent": "check:check_agent",
}
"""Module of this folder and function of each command; it is imported when it is called."""
NAME_CODE_AT_ONCE = ("bench", "check-env")
"""Commands whose words may name code of the current folder, whoever wrote it."""


def _command(argv: list[str]) -> int:
    if not argv:
        print(_usage(), end="", file=sys.stderr)
        return EXIT_USAGE
    word, *rest = argv
    if word in ("-h", "--help"):
        print(_usage(), end="")
        return EXIT_OK
    if word == "--version":
        print(f"sebulba {sebulba.__version__}")
        return EXIT_OK
    entry = plugins.find(plugins.COMMANDS, word, COMMANDS)
    if entry is not None:
        return plugins.load(plugins.COMMANDS, entry)(rest) or EXIT_OK
    if word not in COMMANDS:
        plugins.check_not_apart(plugins.COMMANDS, word, f"the command {word!r}")
        known = [*COMMANDS, *plugins.names(plugins.COMMANDS)]
        near = difflib.get_close_matches(word, known, n=3, cutoff=0.6) or known
        raise UsageError(
            f"command {word!r} is unknown; use {' or '.join(near)}, see sebulba --help"
        )
    if word in NAME_CODE_AT_ONCE:
        import_from_here()
    module, _, function = COMMANDS[word].partition(":")
    return getattr(importlib.import_module(f"sebulba.commands.{module}"), function)(rest)


def _usage() -> str:
    """Return the usage, with the commands that installed packages bring."""
    before, version, after = USAGE.partition("       sebulba --version\n")
    group, lines = plugins.COMMANDS, []
    for word in plugins.names(group, but=COMMANDS):
        usage = f"sebulba {word} ..."
        lines.append(f"       {usage:<36}of the package {plugins.package_of(group, word)}\n")
    return "".join((before, *lines, version, after))


if __name__ == "__main__":
    entry_point()

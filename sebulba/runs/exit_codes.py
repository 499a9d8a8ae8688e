"""What the exit code of a command says."""

from __future__ import annotations

import sys
from typing import Any

from sebulba.errors import (
    CheckpointError,
    EnvError,
    HangError,
    HostError,
    NotFiniteError,
    UsageError,
    is_env_failure,
)

EXIT_OK = 0
EXIT_OTHER = 1
EXIT_USAGE = 2
EXIT_ENV = 3
EXIT_NOT_FINITE = 4
EXIT_HANG = 5
EXIT_CHECKPOINT = 6
EXIT_HOST = 7
EXIT_SIGNAL = 128
"""Plus the number of the signal that ended the run: 130 for Ctrl-C, 143 for SIGTERM, 129 for
SIGHUP."""

MEANINGS = {
    EXIT_OK: "done",
    EXIT_OTHER: "an error that is none of these",
    EXIT_USAGE: "usage: an argument, an option or a configuration breaks a rule",
    EXIT_ENV: "environment: one raised, died or broke its contract",
    EXIT_NOT_FINITE: "not finite: a loss or a gradient is NaN or infinite",
    EXIT_HANG: "hang: a thread was silent, or did not end",
    EXIT_CHECKPOINT: "run folder: it was deleted or cannot be written, or no checkpoint is whole",
    EXIT_HOST: "hosts: another host that learned with this one is gone, or has failed",
    EXIT_SIGNAL + 1: "stopped by SIGHUP (a closed terminal)",
    EXIT_SIGNAL + 2: "stopped by Ctrl-C",
    EXIT_SIGNAL + 6: "aborted by native code, such as jax.distributed where host 0 is lost",
    EXIT_SIGNAL + 15: "stopped by SIGTERM",
}

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (UsageError, EXIT_USAGE),
    (NotFiniteError, EXIT_NOT_FINITE),
    (HangError, EXIT_HANG),
    (CheckpointError, EXIT_CHECKPOINT),
    (EnvError, EXIT_ENV),
    (HostError, EXIT_HOST),
    (KeyboardInterrupt, EXIT_SIGNAL + 2),
)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ``error`` ended."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_USAGE
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return EXIT_ENV if is_env_failure(error) else EXIT_OTHER


def joined_hosts() -> Any:
    """Return the hosts that learn with this one; None if it has joined none. Imports nothing."""
    join = sys.modules.get("sebulba.cluster.hosts.join")
    return join.joined() if join is not None else None


def tell_hosts(error: BaseException) -> None:
    """Tell the hosts that learn with this one, if there are any, that it ends and why."""
    if (hosts := joined_hosts()) is not None:
        hosts.end_after(error)

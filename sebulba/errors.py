"""The errors that Sebulba raises on purpose; each names the value, the rule and the remedy."""

from __future__ import annotations

import contextlib
import errno
import signal
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class UsageError(ValueError):
    """An argument, an option or a configuration breaks a rule (exit code 2)."""


class EnvError(RuntimeError):
    """An environment broke its contract: shape, dtype, NaN, a dead worker (exit code 3)."""


class LostNodeError(EnvError):
    """A process or an actor with Inferencers has ended, and another may take its place (exit code
    3)."""


class ActionError(EnvError):
    """An agent's action is not in the environment's action space (exit code 3)."""


class ReplayError(RuntimeError):
    """A trajectory manager is gone, and with it a part of the replay (exit code 1)."""


class NotFiniteError(FloatingPointError):
    """A loss, a gradient or another metric of an update is not finite (exit code 4)."""


class HangError(RuntimeError):
    """A thread did not end when it was asked to, or was silent for too long (exit code 5)."""


class EnvHangError(EnvError, HangError):
    """An environment did not return in time (exit code 5)."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be read back whole (exit code 6)."""


class OutOfMemoryError(RuntimeError):
    """A device has not enough memory for the run; nothing tries it again (exit code 1)."""


class HostError(RuntimeError):
    """Another host of those that learn together is gone or has failed (exit code 7)."""


@contextlib.contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Raise UsageError, ``what (why); remedy``, in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} ({error.strerror or error}); {remedy}") from error


MORE_OPEN_FILES = "raise the limit (ulimit -n 4096) in the shell that starts this"


def text_of(error: BaseException) -> str:
    """Return ``Type: message``, even if the ``__str__`` of a user's exception raises.

    Where the limit of open files was met, the remedy follows.
    """
    try:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            text += f"; {MORE_OPEN_FILES}"
        return text
    except Exception:
        return f"{type(error).__name__}: (its __str__ raises)"


def shown(value: Any) -> str:
    """Return ``repr(value)`` in one line of at most 80 characters, even if ``__repr__`` raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; those of the real time have only numbers."""
    return {one.value: one.name for one in signal.Signals}.get(number, f"signal {number}")


def describe_error(error: BaseException) -> str:
    """Return an error's type, first line and place; an error of ours needs only its message."""
    if isinstance(error, EnvError | HostError | ReplayError | UsageError):
        return str(error)
    message = text_of(error).splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    # The user's own code is the better place even if a library below it raised the error.
    own = [frame for frame in frames if not is_installed(frame.filename)] or frames[-1:]
    return message + "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in own[-1:])


def is_installed(file: str) -> bool:
    """Tell whether a file of source code is Python's or a package's, and not the user's own."""
    places = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return file.startswith(("<", f"{Path(__file__).parent}/", *places))


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether JAX could not allocate memory on a device."""
    of_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return of_jax and "RESOURCE_EXHAUSTED" in str(error)


def is_env_failure(error: BaseException) -> bool:
    """Tell whether ``error`` was raised in an environment or in its adapter.

    An action outside the action space is no failure of the environment: the agent chose it.
    """
    if isinstance(error, EnvError):
        return not isinstance(error, ActionError)
    if is_out_of_memory(error):
        return False  # new environments would need as much
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # Python turns one that leaves a generator into a RuntimeError
    return any(
        frame.f_globals.get("__name__", "").startswith("sebulba.envs.")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )

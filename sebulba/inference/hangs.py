"""Waits for threads to end, and describes those that do not end or stay silent."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Sequence

from sebulba.errors import EnvHangError, HangError
from sebulba.inference.env_thread import Task
from sebulba.inference.inferencer import ENV_PHASES, Inferencer

AnyThread = threading.Thread | Task
"""What one waits for: a thread, or a task in one."""
JOIN_S = 60.0
"""How long a stop waits for a thread to end the program or the compile that it is in."""
SAVE_FIRST_S = 5.0
"""A stop that has waited this long saves what was learned before it waits on."""


def join(threads: Sequence[AnyThread], wait_s: float) -> list[AnyThread]:
    """Wait up to ``wait_s`` seconds for threads to end; return those that have not ended."""
    deadline = time.monotonic() + wait_s
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


def hang_error(threads: Sequence[AnyThread], waited_s: float) -> HangError:
    """Return the error that names the threads that still run and shows their stacks."""
    alive = [thread for thread in threads if thread.is_alive()]
    return HangError(
        f"{len(alive)} threads did not end within {waited_s:.0f} s of being stopped; an "
        f"environment that does not return from step is the usual cause. Their stacks:\n"
        f"{stacks(alive)}"
    )


def silence_error(inferencer: Inferencer, phase: str, silent_s: float) -> HangError:
    """Return the error of an Inferencer that has been in one phase for too long."""
    in_env = phase in ENV_PHASES
    kind = EnvHangError if in_env else HangError
    where = "its environment did not return" if in_env else f"it did not leave {phase!r}"
    remedy = "repair the environment, or raise hang_timeout_s if it is only slow"
    if phase == "compile":
        where = "XLA has been compiling the program of its fused cycle"
        remedy = "raise hang_timeout_s, or use cycle='stepped', whose programs are smaller"
    return kind(
        f"thread {inferencer.thread_name!r} is silent: {where} for {silent_s:.0f} s, in cycle "
        f"{inferencer.cycle}; {remedy}"
    )


def stacks(threads: Sequence[AnyThread]) -> str:
    """Return the Python stack of each thread, under its name."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )

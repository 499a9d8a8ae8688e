"""The process that runs the checks."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection

from sebulba.errors import UsageError
from sebulba.tools.check.checks import Begun, failure, run_checks
from sebulba.tools.check.isolation import STACK_SHARE


def main(events_fd: int) -> None:
    """Run the checks that come on the standard input; send what happens, and None at the end."""
    os.set_inheritable(events_fd, False)
    events = Connection(events_fd, readable=False)
    faulthandler.enable()
    payload, passed = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        suite, arguments, timeout_s = pickle.loads(payload)
        module, _, function = suite.partition(":")
        checks = getattr(importlib.import_module(module), function)(*arguments)
    except UsageError as error:
        events.send(error)
        return
    except Exception as error:
        checks = []
        events.send(failure("importing", error))
    for event in run_checks(checks, passed):
        if isinstance(event, Begun):
            faulthandler.dump_traceback_later(STACK_SHARE * timeout_s)
        events.send(event)
    faulthandler.cancel_dump_traceback_later()
    events.send(None)
    os._exit(0)  # threads that an environment left behind must not keep the process alive


def _end_with_parent() -> None:
    """End this process when the standard input ends, which the parent's end closes."""
    while sys.stdin.buffer.read(1):
        pass
    os.killpg(0, signal.SIGKILL)

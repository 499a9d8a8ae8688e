"""``sebulba train`` in a sweep: it is saved and ends when the process of the sweep ends."""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""

if __name__ == "__main__":
    if sys.platform == "linux":  # no other system has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    runpy.run_module("sebulba", run_name="__main__", alter_sys=True)

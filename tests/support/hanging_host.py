"""A host that hangs in native code, which keeps the interpreter's lock: ``COORDINATOR HOST``."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from pathlib import Path

from sebulba.configs.presets import PRESETS
from sebulba.options import DistributedOptions
from sebulba.runs.meet_hosts import joined_config

HANGS = "hangs; catches SIGABRT: "

if __name__ == "__main__":
    where = DistributedOptions(coordinator=sys.argv[1], num_hosts=2, host=int(sys.argv[2]))
    joined_config(
        dataclasses.replace(PRESETS["cartpole"].make(), distributed=where, run_dir="none")
    )
    status = Path("/proc/self/status").read_text().split()
    caught = int(status[status.index("SigCgt:") + 1], 16)
    print(f"{HANGS}{caught >> 5 & 1}", flush=True)
    ctypes.PyDLL(None).sleep(100_000)

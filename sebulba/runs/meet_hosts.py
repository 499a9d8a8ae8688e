"""``--distributed``: meets the other hosts before anything else."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import os
import signal

from sebulba.cluster.hosts.join import join_hosts
from sebulba.configs.experiment import ExperimentConfig
from sebulba.runs.exit_codes import EXIT_HOST, EXIT_SIGNAL
from sebulba.runs.jax_setup import configure_jax

STDERR = 2
_keeps: list[object] = []
"""Handlers that the system may call until this process ends."""


def joined_config(config: ExperimentConfig) -> ExperimentConfig:
    """Meet the other hosts; return ``config`` with their number and the number of this one.

    Raises:
      UsageError: The hosts are not told where to meet, or JAX runs already.
      HostError: Not all hosts came in time.
    """
    where = config.distributed
    print(f"sebulba: waiting for the other hosts at {where.coordinator}", flush=True)
    configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
    # Python would see Ctrl-C only when all hosts have come.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        hosts = join_hosts(where)
    finally:
        signal.signal(signal.SIGINT, before)
    print(f"sebulba: {hosts}", flush=True)
    explain_aborts(hosts.index)
    distributed = dataclasses.replace(where, num_hosts=hosts.number, host=hosts.index)
    return dataclasses.replace(config, distributed=distributed)


def explain_aborts(host: int) -> None:
    """Have an abort of this process say that a host is gone, and end with ``EXIT_HOST``.

    ``jax.distributed`` aborts where host 0 is gone, in a thread of its own. A handler of Python
    would never run: the process has ended before the main thread comes to it.
    """
    gone = "host 0, where all hosts meet," if host else "another host"
    words = (
        f"sebulba: hosts: jax.distributed has aborted host {host}, as it does if {gone} is gone. "
        "The lines above show whether something else did. Start all hosts again with sebulba "
        "resume RUN and the same --distributed options; they continue from the newest checkpoint "
        "that all of them have saved\n"
    ).encode()
    process = os.getpid()

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def aborted(which: int) -> None:
        if os.getpid() != process:  # what an environment forked
            os._exit(EXIT_SIGNAL + which)
        faulthandler.dump_traceback(STDERR)
        os.write(STDERR, words)
        os._exit(EXIT_HOST)

    _keeps.append(aborted)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(aborted, ctypes.c_void_p))

"""``--distributed``: meets the other hosts before anything else."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator

from sebulba.cluster.hosts.join import join_hosts
from sebulba.configs.experiment import ExperimentConfig
from sebulba.runs.jax_setup import configure_jax
from sebulba.runs.parent_process import note_hosts


def joined_config(config: ExperimentConfig) -> ExperimentConfig:
    """Meet the other hosts; return ``config`` with their number and the number of this one.

    Raises:
      UsageError: The hosts are not told where to meet, or JAX runs already.
      HostError: Not all hosts came in time.
    """
    where = config.distributed
    print(f"sebulba: waiting for the other hosts at {where.coordinator}", flush=True)
    configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
    with _ctrl_c_ends():
        hosts = join_hosts(where)
    print(f"sebulba: {hosts}", flush=True)
    note_hosts(hosts.index, hosts.number)
    distributed = dataclasses.replace(where, num_hosts=hosts.number, host=hosts.index)
    return dataclasses.replace(config, distributed=distributed)


@contextlib.contextmanager
def _ctrl_c_ends() -> Iterator[None]:
    """Let Ctrl-C end the process at once: Python would see it only when all hosts have come."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

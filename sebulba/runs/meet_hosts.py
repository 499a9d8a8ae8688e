"""``--distributed``: meets the other hosts before anything else."""

from __future__ import annotations

import dataclasses
import signal

from sebulba.cluster.hosts.join import join_hosts
from sebulba.configs.experiment import ExperimentConfig
from sebulba.runs.jax_setup import configure_jax


def joined_config(config: ExperimentConfig) -> ExperimentConfig:
    """Meet the other hosts; return ``config`` with their number and the number of this one."""
    where = config.distributed
    print(f"sebulba: waiting for the other hosts at {where.coordinator}", flush=True)
    configure_jax(config.platform, config.num_cpu_devices, config.compile_cache, preallocate=True)
    # Python would see Ctrl-C only when all hosts have come.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        hosts = join_hosts(where)
    finally:
        signal.signal(signal.SIGINT, before)
    # JAX aborts in a thread of its own, where nothing of Python can say it.
    print(
        f"sebulba: {hosts}. If host 0 is lost, jax.distributed aborts the others; start all hosts "
        "again with sebulba resume RUN and the same --distributed options",
        flush=True,
    )
    distributed = dataclasses.replace(where, num_hosts=hosts.number, host=hosts.index)
    return dataclasses.replace(config, distributed=distributed)

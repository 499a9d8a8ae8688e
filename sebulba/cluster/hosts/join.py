"""Joins the other hosts, before JAX starts."""

from __future__ import annotations

import atexit
import os
from typing import Any

import jax

from sebulba.cluster.hosts.hosts import Hosts
from sebulba.cluster.hosts.watch import Notes, Watch
from sebulba.errors import HostError, UsageError
from sebulba.options import DistributedOptions

POOL_THREADS = 8
"""XLA's threads on a CPU, at least: fewer can starve a collective."""
JAX_HEARTBEAT_S = 100
"""After so many seconds, at least, JAX aborts the process itself; ours is to come first."""
SHUTDOWN_S = 60

_joined: Hosts | None = None


def joined() -> Hosts | None:
    """Return the hosts that this process has joined, if any."""
    return _joined


def join_hosts(options: DistributedOptions) -> Hosts:
    """Meet the other hosts and start ``jax.distributed``, unless this process has done so.

    It has to be called before anything else starts JAX's backend, such as ``jax.devices()`` or the
    agent's first array. A process that has called ``jax.distributed.initialize`` itself is taken
    as it is.

    Args:
      options: Where hosts meet, how many there are, and which this is.

    Returns:
      The hosts; the same at every call.

    Raises:
      UsageError: The options name no coordinator, none is found, or JAX runs already.
      HostError: Not all hosts came in time.
    """
    global _joined
    from jax._src import distributed

    if not options.is_on:
        raise UsageError("distributed.coordinator=None is not an address; use HOST:PORT or auto")
    if _joined is None:
        if not jax.distributed.is_initialized():
            _initialize(options)
        state = distributed.global_state
        index, number, notes = state.process_id, state.num_processes, Notes()
        watch = Watch(notes, index, number, options.heartbeat_timeout_s)
        waits_s = options.start_timeout_s
        _joined = Hosts(index, number, notes, start_timeout_s=waits_s, watch=watch)
        atexit.register(_joined.finish)
    _check_fits(options, _joined)
    return _joined


def _check_fits(options: DistributedOptions, hosts: Hosts) -> None:
    for name, there in (("num_hosts", hosts.number), ("host", hosts.index)):
        given = getattr(options, name)
        if given is not None and given != there:
            raise UsageError(
                f"distributed.{name}={given}, but jax.distributed says {there}; leave it out"
            )


def _initialize(options: DistributedOptions) -> None:
    os.environ["NPROC"] = str(max(POOL_THREADS, int(os.environ.get("NPROC", 0))))
    # JAX's preemption service would take SIGTERM, which is to save the run.
    _set_if_known("jax_enable_preemption_service", False)
    _set_if_known("jax_cpu_collectives_implementation", "gloo")
    is_auto = options.coordinator == "auto"
    where: dict[str, Any] = {"cluster_detection_method": None if is_auto else "deactivate"}
    if not is_auto:
        where["coordinator_address"] = options.coordinator
    try:
        jax.distributed.initialize(
            num_processes=options.num_hosts,
            process_id=options.host,
            initialization_timeout=int(options.start_timeout_s),
            heartbeat_timeout_seconds=max(JAX_HEARTBEAT_S, int(3 * options.heartbeat_timeout_s)),
            shutdown_timeout_seconds=SHUTDOWN_S,
            **where,
        )
    except ValueError as error:
        raise UsageError(
            f"distributed.coordinator='auto' found neither SLURM, Kubernetes, Open MPI nor a TPU "
            f"({error}); use HOST:PORT, --distributed.num-hosts N and --distributed.host I"
        ) from error
    except RuntimeError as error:
        if "must be called before" in str(error):
            raise UsageError(
                "JAX already runs in this process; call sebulba.join_hosts(options) before "
                "anything starts it"
            ) from error
        raise HostError(
            f"the hosts did not meet at {options.coordinator} within "
            f"{options.start_timeout_s:.0f} s: {str(error).partition(chr(10))[0]}. Check that all "
            "hosts are started, that host 0 has this address, and that its port is free and open"
        ) from error


def _set_if_known(name: str, value: Any) -> None:
    """Set an option of JAX, which another version may not have."""
    if hasattr(jax.config, name):
        jax.config.update(name, value)

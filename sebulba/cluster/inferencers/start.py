"""Where Inferencers are: in processes of this machine, or in actors of Ray."""

from __future__ import annotations

from sebulba.cluster.inferencers.cycle_server import Given
from sebulba.cluster.inferencers.processes import process_workers
from sebulba.cluster.inferencers.ray_actors import ActorWorkers
from sebulba.cluster.inferencers.workers import Workers
from sebulba.errors import UsageError
from sebulba.options import ClusterOptions


def new_workers(given: Given, cluster: ClusterOptions, num_inferencers: int) -> Workers | None:
    """Return the factory of environments elsewhere; None where all are here.

    Raises:
      UsageError: All Inferencers would be here although ``cluster.address`` is not threads, or
        something cannot be sent.
    """
    if cluster.address == "threads":
        return None
    number = num_inferencers - cluster.infer_here
    if number < 1:
        raise UsageError(
            f"cluster.infer_here={cluster.infer_here} must be less than the {num_inferencers} "
            "Inferencers, of which some are elsewhere; use fewer, or --cluster.address threads"
        )
    if cluster.address == "processes":
        return process_workers(given, cluster, number)
    return ActorWorkers(given, cluster, number)

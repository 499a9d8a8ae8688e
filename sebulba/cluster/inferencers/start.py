"""Where Inferencers are: in processes of this machine, or in actors of Ray."""

from __future__ import annotations

from sebulba.cluster.inferencers.inferencer_server import Given
from sebulba.cluster.inferencers.processes import process_workers
from sebulba.cluster.inferencers.ray_actors import ActorWorkers
from sebulba.cluster.inferencers.workers import Workers
from sebulba.options import ClusterOptions


def new_workers(given: Given, cluster: ClusterOptions, num_inferencers: int) -> Workers | None:
    """Return the factory of environments elsewhere; None where all are here.

    Raises:
      UsageError: Something cannot be sent.
    """
    if cluster.address == "threads":
        return None
    if cluster.address == "processes":
        return process_workers(given, cluster, num_inferencers)
    return ActorWorkers(given, cluster, num_inferencers)

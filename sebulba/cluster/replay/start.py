"""Where trajectory managers are: in this process, in others, or in actors of Ray."""

from __future__ import annotations

import contextlib

from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.cluster.inferencers import processes, ray_actors
from sebulba.cluster.inferencers.remote_inferencer import pickled
from sebulba.cluster.replay.sharded_replay import ManagerElsewhere, ManagerHere, ShardedReplay
from sebulba.options import ClusterOptions

SERVER = "sebulba.cluster.replay.manager_server:ManagerServer"
"""What answers for a manager in a worker."""


def start_managers(agent: OffPolicyAgent, cluster: ClusterOptions) -> ShardedReplay:
    """Start the managers of the replay of ``agent``, where ``cluster`` says.

    With Ray, Inferencers have connected to it before.

    Raises:
      UsageError: The agent cannot be sent to them.
    """
    number, where = cluster.trajectory_managers, cluster.address
    if where == "threads":
        return ShardedReplay(agent, [ManagerHere(agent) for _ in range(number)])
    start = processes.manager_worker if where == "processes" else ray_actors.manager_worker
    given = pickled(agent, where)
    with contextlib.ExitStack() as stack:
        managers = []
        for _ in range(number):
            managers.append(ManagerElsewhere(start(given, SERVER)))
            stack.callback(managers[-1].close)
        stack.pop_all()
    return ShardedReplay(agent, managers)

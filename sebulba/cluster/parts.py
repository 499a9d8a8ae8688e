"""The one door to what may be in other processes or on other machines: nobody else asks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from sebulba.agent import Agent
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.cluster.hosts.join import join_hosts
from sebulba.cluster.hosts.mesh import HostMesh, devices_of_hosts
from sebulba.cluster.hosts.rounds import Rounds
from sebulba.cluster.inferencers import ray_actors
from sebulba.cluster.inferencers.nodes import Worker
from sebulba.cluster.inferencers.processes import ProcessNode
from sebulba.cluster.inferencers.remote_inferencer import pickled
from sebulba.cluster.inferencers.remote_places import RemotePlaces
from sebulba.cluster.replay.managed_update import ManagedUpdater
from sebulba.cluster.replay.sharded_replay import (
    ManagerElsewhere,
    ManagerHere,
    ShardedReplay,
    check_managers,
)
from sebulba.errors import LostNodeError, UsageError, shown
from sebulba.inference.places import Given, Places
from sebulba.learning.peers import Peers
from sebulba.learning.update import Updater
from sebulba.options import ClusterOptions, DistributedOptions, LoopOptions
from sebulba.support import plugins
from sebulba.support.key_streams import UPDATE_STREAM
from sebulba.transport.hand_off import HandOffToHost, HandOffToMesh
from sebulba.transport.item import HandOff
from sebulba.transport.mesh import UpdateMesh

MANAGERS = "sebulba.cluster.replay.trajectory_manager:ManagerServer"
"""What answers for a trajectory manager in a worker."""


class Parts(NamedTuple):
    """What a loop is put together from, wherever each part is."""

    agent: Agent
    """The agent, as the loop has it."""
    inferencers: Places
    """Makes environments and cycles."""
    hand_off: HandOff
    """Places what a cycle made where the updater takes it."""
    updater: Updater
    """Holds the state, and learns."""
    peers: Peers
    """Who else learns."""

    def close(self) -> None:
        """End what is in other processes; may be called twice."""
        try:
            self.updater.close()
        finally:
            self.inferencers.close()


def join(options: DistributedOptions, *, inference_only: bool) -> None:
    """Meet the hosts that learn together, if there are any, before anything asks for devices."""
    if not options.is_on:
        return
    if inference_only:
        where = f"distributed.coordinator={shown(options.coordinator)}"
        raise UsageError(f"inference_only=True does not go with {where}; leave one out")
    join_hosts(options)


def parts(
    given: Given,
    options: LoopOptions,
    update_devices: Sequence[jax.Device],
    num_inferencers: int,
    by_member: Mapping[str, Sequence[jax.Device]] | None = None,
    *,
    inference_only: bool = False,
) -> Parts:
    """Return the parts of a loop, each where ``options`` say; ``join`` comes first.

    Args:
      given: What Inferencers work with; its agent is the user's.
      by_member: Update devices that members have for their own, by name.
      inference_only: Nothing is learned, so that there is no replay.

    Raises:
      UsageError: Something cannot be sent, Ray is missing, or the agent has no replay for managers.
    """
    cluster, agent = options.cluster, given.agent
    managers = 0 if inference_only else cluster.trajectory_managers
    if managers:
        check_managers(agent, managers, num_inferencers)
        assert isinstance(agent, OffPolicyAgent)
        given = given._replace(agent=agent.with_managers())
    mesh, peers = UpdateMesh(update_devices), Peers()
    if options.distributed.is_on:
        hosts = join_hosts(options.distributed)
        mesh = HostMesh(update_devices, devices_of_hosts(update_devices, hosts.number))
        peers = Rounds(hosts, mesh)
    key = jax.random.fold_in(jax.random.key(options.seed), UPDATE_STREAM)
    of_updater = given.agent, mesh, key, options.faults.on_not_finite == "skip"
    hand_off: HandOff = HandOffToMesh(given.agent, mesh)
    updater: Updater
    with contextlib.ExitStack() as stack:
        places = new_places(given, options, num_inferencers)
        stack.callback(places.close)
        if managers:
            assert isinstance(agent, OffPolicyAgent)
            store = start_managers(agent, cluster)
            hand_off, updater = HandOffToHost(), ManagedUpdater(*of_updater, store=store)
        elif by_member:
            hand_off, new = (lambda item: item), plugins.parallel_members().parallel_updater
            updater = new(agent, by_member, *of_updater[2:], schedule=options.schedule)
        else:
            updater = Updater(*of_updater)
        stack.pop_all()
    return Parts(given.agent, places, hand_off, updater, peers)


def new_places(given: Given, options: LoopOptions, number: int) -> Places:
    """Return where so many Inferencers are: in threads, in processes, or in actors of Ray."""
    cluster, restarts = options.cluster, options.env_restarts_allowed
    if cluster.address == "threads":
        return Places(given)
    sent = pickled(given, cluster.address)
    if cluster.address == "processes":
        per_node = cluster.inferencers_per_node
        return RemotePlaces(lambda room: ProcessNode(sent, room), number, per_node, restarts)
    return ray_actors.ActorPlaces(sent, cluster, number, restarts)


def start_managers(agent: OffPolicyAgent, cluster: ClusterOptions) -> ShardedReplay:
    """Start the managers of the replay of ``agent``; with Ray, after ``new_places``."""
    number = cluster.trajectory_managers
    if cluster.address == "threads":
        return ShardedReplay(agent, [ManagerHere(agent) for _ in range(number)])
    given = pickled(agent, cluster.address)
    with contextlib.ExitStack() as stack:
        managers = []
        for _ in range(number):
            managers.append(ManagerElsewhere(_manager(given, cluster)))
            stack.callback(managers[-1].close)
        stack.pop_all()
    return ShardedReplay(agent, managers)


def _manager(given: bytes, cluster: ClusterOptions) -> Worker:
    new = ProcessNode if cluster.address == "processes" else ray_actors.new_actor
    node = new(given, 1, MANAGERS, "a trajectory manager")
    worker = node.take()
    if worker is None:
        raise LostNodeError(f"the {node.name} of a trajectory manager ended before it had begun")
    return worker

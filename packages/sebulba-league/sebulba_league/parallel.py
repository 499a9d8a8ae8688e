"""Members that share nothing learn on devices of their own, each at its own pace.

Behind the loop's ``Updater`` stand as many as there are sets of devices. Each has its members' part
of the state, a thread and programs of its own, and gets its part of every trajectory. In lockstep
all learn from all trajectories. In async the loop goes on as soon as one set has nothing to do, and
a set that has a trajectory waiting misses the next.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import Agent, AgentState, Loss, is_spec
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.agents.multi.update_rates import MARKS
from sebulba.errors import UsageError
from sebulba.learning.update import Updater
from sebulba.options import Schedule
from sebulba.support.trees import on_device
from sebulba.transport.hand_off import HandOffToMesh
from sebulba.transport.item import Item
from sebulba.transport.mesh import UpdateMesh
from sebulba.types import COMMON, PyTree, RunSpec

MOST_IN_HAND = 2
"""Async: trajectories that a set may have; it learns from one of them."""
KEPT_VERSIONS = 1000
"""Publishes of which is known what they brought."""
LOSS, GRAD_NORM = "loss", "grad_norm"


class Part(MultiAgent):
    """Some members of a ``MultiAgent``: what it makes is a part of what the whole would make."""

    def __init__(self, whole: MultiAgent, names: Collection[str]) -> None:
        """Take the members ``names`` out of ``whole``."""
        vars(self).update(vars(whole))
        self._whole = whole
        self.members = {n: member for n, member in whole.members.items() if n in names}
        vars(self)["_schedules"] = {n: x for n, x in whole._schedules.items() if n in names}

    def for_run(self, run: RunSpec) -> Part:  # type: ignore[override]
        return Part(self._whole.for_run(run), self.members)

    @property
    def is_paced(self) -> bool:
        """Whether members of the whole have different numbers of updates."""
        return bool(self._schedules)

    def _keys(self, key: jax.Array) -> dict[str, jax.Array]:
        return self._whole._keys(key)

    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Loss:
        total, (new, metrics) = super().loss(networks, opt, experience, key)
        if len(self.members) == 1 < len(self._whole.members):
            (name,) = self.members
            metrics = {f"{name}/{metric}": value for metric, value in metrics.items()}
        return total, (new, metrics)

    def of_item(self, item: Item) -> Item:
        """Return what the members learn from: rows of their groups, and their step states."""
        rows = item.trajectory
        groups = {member.group for member in self.members.values() if member.trains} | {COMMON}

        def mine(tree: PyTree, names: Collection[str]) -> PyTree:
            return {n: x for n, x in tree.items() if n in names} if isinstance(tree, dict) else tree

        return Item(
            rows._replace(
                env_step=type(rows.env_step)(*(mine(field, groups) for field in rows.env_step)),
                action=mine(rows.action, groups),
                extras=mine(rows.extras, self.members),
            ),
            mine(item.initial_step_state, self.members),
            mine(item.final_step_state, self.members),
            item.step_infos,
        )


def part_of(tree: PyTree, names: Collection[str]) -> PyTree:
    """Return what members have of the networks, optimizer states or experiences of all."""
    if isinstance(tree, dict):
        kept = {name: own for name, own in tree.items() if name in names}
        return kept | ({MARKS: part_of(tree[MARKS], names)} if MARKS in tree else {})
    return type(tree)(*(part_of(x, names) for x in tree)) if isinstance(tree, tuple) else tree


def joined(parts: Sequence[PyTree]) -> PyTree:
    """Return the tree of which ``part_of`` returned these parts; of counts the largest is taken."""
    if isinstance(parts[0], tuple):
        return type(parts[0])(*map(joined, zip(*parts, strict=True)))
    if not isinstance(parts[0], dict):
        return max(parts, key=int)
    whole: dict[str, list[PyTree]] = {}
    for part in parts:
        for name, own in part.items():
            whole.setdefault(name, []).append(own)
    return {name: joined(own) if len(own) > 1 else own[0] for name, own in whole.items()}


class Learners:
    """The members on one set of devices: their part of the state, and a thread that learns."""

    def __init__(self, name: str, part: Part, devices: Sequence[jax.Device], *more: Any) -> None:
        """Prepare them; ``more`` is what ``Updater`` takes after the mesh."""
        self.name = name
        self.devices = devices
        self.updater = Updater(part, mesh := UpdateMesh(devices), *more)
        self.acting: PyTree = None
        """The newest acting networks that are ready."""
        self.given: PyTree = None
        """Those that the loop was given last."""
        self.missed = 0
        """Trajectories that came while the set was busy."""
        self.skipped = 0
        """Updates that were skipped since ``pop_skipped``."""
        self._part = part
        self._hand_off = HandOffToMesh(part, mesh)
        self._version = 0
        """How many publishes have brought new networks of these members."""
        self._versions: dict[int, int] = {}
        """That number, by the policy version of the newest publishes."""
        self._published: PyTree = None
        self._lags: list[int] = []
        self._cycle = 0
        self.newest_metrics: dict[str, float] = {}
        """Those that ``take_metrics`` returned last."""
        self.has_learned = False
        """Whether there was an update."""
        self._metrics: dict[str, float] = {}
        self._metrics_wanted = False
        self._tasks: collections.deque[Future] = collections.deque()
        self._thread = ThreadPoolExecutor(1, f"learners-{name}")

    # In the thread of the loop.

    def begin(self, run: RunSpec) -> None:
        """Prepare for runs of these sizes."""
        self.settle()  # a run that was interrupted may have left a task
        run = dataclasses.replace(run, num_update_devices=len(self.devices))
        self._part = self._part.for_run(run)
        self.updater.begin(run)

    def place(self, state: AgentState) -> None:
        """Copy their part of the state."""
        self.settle()
        networks, opt, experience = (part_of(x, self._part.members) for x in state[:3])
        self.updater.place(AgentState(networks, opt, experience, ()))
        self._cycle = int(state.experience.cycle) if self._part.is_paced else 0
        self.acting = self.updater.acting_networks()

    def in_hand(self) -> list[Future]:
        """Return what is still to be done, in order; raise what has failed."""
        while self._tasks and self._tasks[0].done():
            self._tasks.popleft().result()
        return list(self._tasks)

    def finish(self) -> None:
        """Wait until nothing is to be done; raise what has failed."""
        while self._tasks:
            self._tasks.popleft().result()

    def settle(self) -> None:
        """Wait until nothing is to be done, and forget what has failed."""
        wait(self._tasks)
        self._tasks.clear()

    def placed(self, item: Item) -> Item:
        """Return their part of a trajectory on their devices."""
        return self._hand_off(self._part.of_item(item))

    def learn(self, item: Item, updates: int, due: int) -> None:
        """Have the thread learn from what ``placed`` returned."""
        self._cycle += 1
        acted = self._versions.get(int(item.trajectory.policy_version))
        task = self._thread.submit(self._learn, item, updates, self._due(due), acted)
        self._tasks.append(task)

    def prepare(self, item: Item, due: int) -> None:
        """Have the thread do ``Updater.prepare``."""
        own, due = self._part.of_item(item), self._due(due, 1)
        self._tasks.append(self._thread.submit(self.updater.prepare, own, due=due))

    def _due(self, due: int, ahead: int = 0) -> int:
        """Return their number of updates, where the whole has ``due``."""
        if not self._part.is_paced:
            return due
        return self._part.num_off_policy_optims_per_cycle(self._cycle + ahead)

    def published(self, version: int) -> None:
        """Note that what was ``given`` is published under this policy version."""
        self._version += self.given is not self._published
        self._published = self.given
        self._versions[version] = self._version
        while len(self._versions) > KEPT_VERSIONS:
            del self._versions[next(iter(self._versions))]

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of their updates; while they learn, those of the time before.

        Then the thread takes them after the trajectory in hand, for the next time.
        """
        is_busy = bool(self.in_hand())
        if not is_busy:
            self._take_metrics()
        means, self._metrics = self._metrics, {}
        self._metrics_wanted = is_busy
        self.newest_metrics = means or self.newest_metrics
        lags, self._lags = self._lags, []
        if means and lags:
            means |= {f"{self.name}/policy_lag": sum(lags) / len(lags)}
        return means

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    # In its own thread.

    def _learn(self, item: Item, updates: int, due: int, acted: int | None) -> None:
        if acted is not None:
            self._lags.append(self._version - acted)
        acting = self.updater.consume(item, updates=updates, due=due)
        self.updater.wait()
        if acting is not None:
            self.acting = jax.block_until_ready(acting)
        self.has_learned = self.has_learned or due > 0
        if self._metrics_wanted:
            self._metrics_wanted = False
            self._take_metrics()

    def _take_metrics(self) -> None:
        self._metrics = self.updater.take_metrics() or self._metrics
        self.skipped += self.updater.pop_skipped()


class ParallelUpdater(Updater):
    """An ``Updater`` of all members, behind which each set of devices has one of its own."""

    def __init__(
        self, agent: MultiAgent, learners: Sequence[Learners], *, waits_for_all: bool
    ) -> None:
        """Take the sets; ``begin`` comes next."""
        self._agent = agent
        self.learners = learners
        """The sets."""
        self._waits_for_all = waits_for_all

    def begin(self, run: RunSpec) -> None:
        self._agent = self._agent.for_run(run)
        for one in self.learners:
            one.begin(run)

    def close(self) -> None:
        for one in self.learners:
            one.close()

    def place(self, state: AgentState) -> None:
        for one in self.learners:
            one.place(state)

    def wait(self) -> None:
        """Wait until no set has anything to do."""
        for one in self.learners:
            one.finish()

    def _updaters(self) -> Iterator[Updater]:
        self.wait()
        return (one.updater for one in self.learners)

    def learned(self) -> tuple[PyTree, PyTree]:
        networks, opt = zip(*(updater.learned() for updater in self._updaters()), strict=True)
        return joined(networks), joined(opt)

    def experience(self) -> PyTree:
        return joined([updater.experience() for updater in self._updaters()])

    def of_this_host(self, tree: PyTree) -> PyTree:
        return tree

    def experience_bytes(self) -> int:
        return sum(updater.experience_bytes() for updater in self._updaters())

    def lasting_experience(self) -> PyTree:
        return joined([updater.lasting_experience() for updater in self._updaters()])

    def is_whole(self) -> bool:
        for one in self.learners:
            one.settle()
        return all(one.updater.is_whole() for one in self.learners)

    def state(self, step: Sequence[PyTree]) -> AgentState:
        """Return the state of all, on the devices of the first set."""
        mesh = UpdateMesh(self.learners[0].devices).whole
        specs = P(), P(), self._agent.experience_spec()
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
        whole = jax.device_put((*self.learned(), self.experience()), shardings)
        return AgentState(whole[0], whole[1], whole[2], tuple(step))

    def consume(self, item: Item, *, updates: int, due: int) -> PyTree | None:
        """Give every set its part of a trajectory; in async, but to those that are busy.

        Returns:
          None in lockstep, since ``acting_networks`` waits for all. In async what is newest, once
          one of the sets has nothing to do.
        """
        idle = self.learners
        if not self._waits_for_all:
            idle = [one for one in idle if len(one.in_hand()) < MOST_IN_HAND]
        # All have their copies before one learns and so takes over the arrays that it was given.
        placed = [one.placed(item) for one in idle]
        for one, own in zip(idle, placed, strict=True):
            one.learn(own, updates, due)
        if self._waits_for_all:
            return None
        for one in self.learners:
            one.missed += one not in idle
        while all(tasks := [one.in_hand() for one in self.learners]):
            wait([of_set[0] for of_set in tasks], return_when=FIRST_COMPLETED)
        for one in self.learners:
            if not one.has_learned:  # while it compiles, a short run would pass
                one.finish()
        return self._newest()

    def _newest(self) -> PyTree:
        for one in self.learners:
            one.given = one.acting
        return joined([one.given for one in self.learners])

    def prepare(self, item: Item, *, due: int) -> None:
        for one in self.learners:
            one.prepare(item, due)

    def acting_networks(self) -> PyTree:
        """Return the acting networks of all, once all have learned from what they were given."""
        self.wait()
        return on_device(self._newest(), self.learners[0].devices[0])

    def published(self, version: int) -> None:
        for one in self.learners:
            one.published(version)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of all sets that have any: ``loss`` is their sum."""
        if self._waits_for_all:
            self.wait()
        taken = [means for one in self.learners if (means := one.take_metrics())]
        if not taken:
            return {}
        whole = {name: mean for means in taken for name, mean in means.items()}
        newest = [one.newest_metrics for one in self.learners if one.newest_metrics]
        whole[LOSS] = sum(means[LOSS] for means in newest)
        whole[GRAD_NORM] = math.hypot(*(means[GRAD_NORM] for means in newest))
        if not self._waits_for_all:
            whole |= {f"{one.name}/missed": float(one.missed) for one in self.learners}
        return whole

    def pop_skipped(self) -> int:
        skipped = sum(one.skipped for one in self.learners)
        for one in self.learners:
            one.skipped = 0
        return skipped


def devices_of(words: Sequence[Any]) -> tuple[list[int | str], dict[str, int]]:
    """Return devices, and how many of them each member has, in order, of words such as main=0,1.

    Raises:
      UsageError: A word is not such a word, or names a member again.
    """
    devices: list[int | str] = []
    counts: dict[str, int] = {}
    for word in words:
        name, _, own = word.partition("=") if isinstance(word, str) else ("", "", "")
        if not name or not own or name in counts:
            raise UsageError(
                f"update_devices={list(words)} must name each member once, with its devices, or "
                "devices alone; use main=0 exploiter=1,2, or 0 1 2"
            )
        parts = own.split(",")
        counts[name] = len(parts)
        devices += (int(part) if part.isdecimal() else part for part in parts)
    return devices, counts


def parallel_updater(
    agent: Agent, devices: Mapping[str, Sequence[jax.Device]], *more: Any, schedule: Schedule
) -> Updater:
    """Return what has members learn on devices of their own.

    Args:
      agent: Of all members.
      devices: By the name of a member, or of a group for its members that are not named.
      more: What ``Updater`` takes after the mesh.
      schedule: In lockstep nobody goes on before all have learned.

    Raises:
      UsageError: Members share something, a name is of none, or one has no device.
    """
    shared = _shared(agent)
    if shared is not None:
        raise UsageError(
            f"update_devices gives devices to {', '.join(devices)}, but {shared}; name devices "
            "alone, such as --update-devices 0 1, which all members share"
        )
    assert isinstance(agent, MultiAgent)
    members = _members_of(agent, devices)
    frozen = [name for name, member in agent.members.items() if not member.trains]
    members[next(iter(members))] += frozen
    parts = {name: Part(agent, names) for name, names in members.items()}
    learners = [Learners(name, part, devices[name], *more) for name, part in parts.items()]
    return ParallelUpdater(agent, learners, waits_for_all=schedule == "lockstep")


def _shared(agent: Agent) -> str | None:
    """Return why no members of the agent can learn apart; None if they can."""
    if type(agent) is not MultiAgent:
        return f"{type(agent).__name__} has no members that learn apart"
    if agent.auxiliaries:
        return f"the auxiliary {next(iter(agent.auxiliaries))!r} learns from what all members do"
    critics = [name for name, member in agent.members.items() if member.sees_all]
    return f"the central critic of {critics[0]!r} sees what all members do" if critics else None


def _members_of(agent: MultiAgent, names: Collection[str]) -> dict[str, list[str]]:
    """Return the members that learn on the devices of each name."""
    learning = {name: member for name, member in agent.members.items() if member.trains}
    left = dict.fromkeys(name for name in learning if name not in names)
    members: dict[str, list[str]] = {}
    for name in names:
        of_group = [other for other in left if learning[other].group == name]
        members[name] = [name] if name in learning else of_group
        for other in of_group if name not in learning else ():
            del left[other]
        if not members[name]:
            raise UsageError(
                f"update_devices gives devices to {name!r}, and no member that learns has that "
                f"name, or is one of that group and has no devices yet; use {', '.join(learning)}"
            )
    if left:
        raise UsageError(
            f"update_devices gives no device to {', '.join(left)}; add {next(iter(left))}=DEVICE, "
            "or name devices alone, which all members share"
        )
    return members

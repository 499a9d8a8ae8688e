"""How a loop runs, as frozen dataclasses that check themselves. Free of JAX.

``GymnasiumLoop`` takes ``LoopOptions``, or any of their fields as keywords; the configuration of an
experiment has the same fields. The command line parses and refuses them before any device starts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, TypedDict

from sebulba.errors import UsageError, shown
from sebulba.support.checks import at_least, at_most, check_types, nearest, require, require_number

Schedule = Literal["async", "lockstep"]
"""How networks and trajectories are exchanged: as they come, or in rounds that the seed decides."""
CycleKind = Literal["auto", "stepped", "fused"]
"""How an Inferencer runs a cycle."""

JAX_LIBRARIES = ("gymnax", "brax", "playground", "jumanji", "pgx", "jaxmarl")
"""Libraries of JAX environments, whose ids are ``LIBRARY:ID``. So no module of an environment of
one's own can have one of these names."""

ENV_LIBRARIES = (*JAX_LIBRARIES, "pettingzoo")
"""All libraries whose ids are ``LIBRARY:ID``."""
SUBTRACT_OFFSET = "sebulba.envs.wrappers:SubtractOffset"
"""The wrapper that a run adds by itself where observations are far from 0."""

INT32 = range(-(2**31), 2**31)
MOST_INFERENCERS = 1024
"""Inferencers of one device."""
MOST_EPISODE_STEPS = 27_000
"""Steps after which an episode of an evaluation is cut, unless another limit is given: half an hour
of an Atari game. A policy that always takes the best action may go in circles for ever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """What becomes of a run in which something fails.

    Raises:
      UsageError: A value breaks a rule.
    """

    on_env_failure: Literal["raise", "restart"] = "raise"
    """raise: a failed environment ends the run. restart: an Inferencer whose environment raised,
    died or hangs gets new environments with new seeds, and the run counts the loss. An evaluation
    is played again in new environments. Inline runs always raise."""
    max_env_restarts: int = 10
    """Most restarts, in training and in evaluation each; the next failure ends the run."""
    on_not_finite: Literal["raise", "skip"] = "raise"
    """raise: a loss, gradient or metric that is NaN or infinite ends the run. skip: the update is
    not applied, and counted; after 100 skipped updates the next one ends the run."""
    hang_timeout_s: float | None = 300.0
    """Most seconds that a thread may stay in one phase; after that the run ends with a HangError,
    or on_env_failure decides if its environment hangs. The default is longer than any known
    compile. None: no limit, as in inline runs."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self, "faults.")
        at_least(0, "faults.max_env_restarts", self.max_env_restarts)
        timeout_s = self.hang_timeout_s
        positive = timeout_s is None or timeout_s > 0
        require(
            positive, "faults.hang_timeout_s", timeout_s, "must be positive", "use 300, or None"
        )

    @classmethod
    def of_record(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a record without those that earlier versions had."""
        return {name: value for name, value in fields.items() if name != "max_skipped_updates"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When a run is saved, for ``sebulba resume``. The end of a run is always saved.

    Raises:
      UsageError: A value breaks a rule.
    """

    every_s: float = 600.0
    """Seconds between checkpoints."""
    every_updates: int | None = None
    """Updates between checkpoints, instead of every_s."""
    replay_every_s: float = 1800.0
    """Seconds between saves of a replay of at least 64 MB, which has a file of its own."""
    keep_last: int = 3
    """Newest checkpoints that are kept, besides the best and the milestones."""
    milestone_env_steps: int | None = None
    """Environment steps between checkpoints that are never deleted."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self, "checkpoint.")
        for name in ("every_s", "replay_every_s"):
            require_number(f"checkpoint.{name}", getattr(self, name), 0, math.inf, "use 600")
        for name in ("every_updates", "keep_last", "milestone_env_steps"):
            at_least(1, f"checkpoint.{name}", getattr(self, name))


_HOST_AND_PORT = re.compile(r"[A-Za-z0-9._-]+:[1-9][0-9]{0,4}")
_LARGEST_PORT = 65535


def _is_host_and_port(address: str) -> bool:
    """Tell whether ``address`` is HOST:PORT."""
    port = address.rpartition(":")[2]
    return bool(_HOST_AND_PORT.fullmatch(address)) and int(port) <= _LARGEST_PORT


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Where Inferencers run, and where a replay is.

    Raises:
      UsageError: A value breaks a rule.
    """

    address: str = "threads"
    """Where each Inferencer runs. threads: in the training process. processes: in a worker process
    on this machine, for environments that are slow in Python. With Ray, in an actor: local starts a
    cluster on this machine, auto uses the cluster of this machine, HOST:PORT the cluster with that
    head."""
    nodes: int = 0
    """Machines that the Ray cluster must have before Inferencers start; the run waits for them. 0:
    use the machines that are up."""
    inferencers_per_node: int = 1
    """Inferencers in each worker process or actor (a node). They share its interpreter and one copy
    of the networks."""
    trajectory_managers: int = 0
    """Managers that hold the replay, a part each: in processes or actors as address says, with
    threads in the training process. 0: the replay is on the update devices."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self, "cluster.")
        names = ("threads", "processes", "local", "auto")
        require(
            self.address in names or _is_host_and_port(self.address),
            "cluster.address",
            self.address,
            f"must be {', '.join(names)} or HOST:PORT",
            "use processes on one machine, and auto on a machine of a Ray cluster",
        )
        at_least(0, "cluster.nodes", self.nodes)
        at_least(1, "cluster.inferencers_per_node", self.inferencers_per_node)
        at_least(0, "cluster.trajectory_managers", self.trajectory_managers)
        require(
            self.address != "threads" or self.inferencers_per_node == 1,
            "cluster.inferencers_per_node",
            self.inferencers_per_node,
            "cannot be combined with cluster.address=threads, where all Inferencers are in this "
            "process",
            "add --cluster.address processes",
        )
        require(
            not self.nodes or self.address not in names[:3],
            "cluster.nodes",
            self.nodes,
            f"cannot be combined with cluster.address={self.address!r}, which has one",
            "leave it at 0, or use cluster.address=auto",
        )

    @classmethod
    def of_record(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a record without those that earlier versions had."""
        gone = ("infer_here", "min_nodes")
        return {name: value for name, value in fields.items() if name not in gone}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedOptions:
    """The hosts that learn together. Each runs the same command, but for its number.

    Raises:
      UsageError: A value breaks a rule.
    """

    coordinator: str | None = None
    """HOST:PORT of host 0, where the hosts meet. auto: take it, num_hosts and host from SLURM,
    Kubernetes, Open MPI or a TPU pod. None: this host learns alone."""
    num_hosts: int | None = None
    """Hosts that learn together, a process each, with the same number of devices. auto finds it."""
    host: int | None = None
    """Number of this host, from 0. auto finds it."""
    start_timeout_s: float = 300.0
    """Most seconds that the hosts wait for each other at the start."""
    heartbeat_timeout_s: float = 30.0
    """A host that is silent for so many seconds counts as lost, and all others end."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self, "distributed.")
        one_host, is_auto = self.coordinator is None, self.coordinator == "auto"
        require(
            one_host or is_auto or _is_host_and_port(str(self.coordinator)),
            "distributed.coordinator",
            self.coordinator,
            "must be auto or HOST:PORT",
            "use the address of host 0 and a free port there, such as 10.0.0.1:7777",
        )
        for name in ("num_hosts", "host"):
            value = getattr(self, name)
            require(
                value is None or not one_host,
                f"distributed.{name}",
                value,
                "needs the address where hosts meet",
                "give --distributed.coordinator HOST:PORT, or auto",
            )
            require(
                value is not None or one_host or is_auto,
                f"distributed.{name}",
                None,
                f"must be given with distributed.coordinator={shown(self.coordinator)}",
                "use --distributed.num-hosts N, and --distributed.host from 0 to N - 1",
            )
        at_least(1, "distributed.num_hosts", self.num_hosts)
        at_least(0, "distributed.host", self.host)
        if self.num_hosts is not None and self.host is not None:
            at_most(self.num_hosts - 1, "distributed.host", self.host)
        require_number("distributed.start_timeout_s", self.start_timeout_s, 1, 86_400, "use 300")
        require_number(
            "distributed.heartbeat_timeout_s", self.heartbeat_timeout_s, 5, 86_400, "use 30"
        )

    @property
    def is_on(self) -> bool:
        """Whether hosts learn together."""
        return self.coordinator is not None

    @property
    def hosts(self) -> int:
        """How many hosts learn; 1 as long as auto has not found it out."""
        return self.num_hosts or 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a loop runs.

    Raises:
      UsageError: A value breaks a rule.
    """

    seed: int = 0
    """Seed of environments and updates, and in an experiment also of networks and actions: a 32-bit
    integer."""
    num_inferencers_per_device: int | None = None
    """Inferencers per inference device, each a thread with its own environments. None: 2, or with
    many cores more, by a rule that the run prints. 0: one per device, in the calling thread, for
    debuggers."""
    pin_inferencers: bool = True
    """Bind each Inferencer and the threads of its envpool to a share of the cores, if it infers on
    the CPU. It needs cores that can be divided, and num_threads of at most the cores of a share."""
    schedule: Schedule = "async"
    """async is fastest; lockstep gives bit-identical networks for the same seed."""
    cycle: CycleKind = "auto"
    """How an Inferencer runs a cycle. stepped: one program per step. fused: one program per cycle.
    auto: fused if the environment has an XLA handle and inference is on a CPU, or if it is written
    in JAX."""
    max_policy_lag: int | None = None
    """Drop trajectories that are more policy versions behind than this; None keeps all."""
    queue_size: int = 2
    """Trajectories that may wait for the update; Inferencers wait if the queue is full."""
    metrics_interval_s: float = 0.5
    """Seconds between records of metrics, rounded up to whole cycles; the first records come
    sooner."""
    inference_devices: tuple[int | str, ...] | None = None
    """Devices that infer, by number or by name (0, cpu:0, gpu:1); None: the first quarter, if there
    are several."""
    update_devices: tuple[int | str, ...] | None = None
    """Devices that update, by number or by name; None: as many of the others as divide
    environments, batches and minibatches. main=0 exploiter=1,2 gives members devices of their
    own."""
    faults: FaultOptions = FaultOptions()
    """What a run does after a failure."""
    cluster: ClusterOptions = ClusterOptions()
    """Where Inferencers run, and where the replay is."""
    distributed: DistributedOptions = DistributedOptions()
    """Hosts that learn together."""

    open_fields: ClassVar[tuple[str, ...]] = ()
    """A subclass names its fields here whose types are not to be checked."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self, open_fields=self.open_fields)
        require(
            self.seed in INT32,
            "seed",
            self.seed,
            "must be a 32-bit integer",
            f"use one from {INT32[0]} to {INT32[-1]}",
        )
        at_least(0, "num_inferencers_per_device", self.num_inferencers_per_device)
        number = self.num_inferencers_per_device or 0
        at_most(MOST_INFERENCERS, "num_inferencers_per_device", number)
        at_least(0, "max_policy_lag", self.max_policy_lag)
        at_least(1, "queue_size", self.queue_size)
        require_number("metrics_interval_s", self.metrics_interval_s, 0, math.inf, "use 0.5")
        require(
            self.schedule == "async" or self.max_policy_lag != 0,
            "max_policy_lag",
            0,
            "would drop every trajectory in lockstep, where the lag is 1",
            "use 1 or None",
        )
        require(
            not (self.inline and self.cluster.address != "threads"),
            "cluster.address",
            self.cluster.address,
            "needs Inferencers, and num_inferencers_per_device=0 has none",
            "use num_inferencers_per_device=1",
        )
        require(
            not (self.distributed.is_on and self.cluster.trajectory_managers),
            "cluster.trajectory_managers",
            self.cluster.trajectory_managers,
            "cannot be combined with "
            f"distributed.coordinator={shown(self.distributed.coordinator)}: each host has its "
            "own replay",
            "use one of the two",
        )

    def whole_cycles(self, env_steps: int, cycle_env_steps: int, num_inferencers: int) -> int:
        """Return the trajectories over all Inferencers that ``env_steps`` take, rounded up.

        Args:
          env_steps: Environment steps of all hosts.
          cycle_env_steps: Those of a trajectory of one host.
          num_inferencers: In lockstep, trajectories come in rounds of one from each Inferencer.
        """
        cycles = -(-env_steps // (cycle_env_steps * self.distributed.hosts))
        if self.schedule == "lockstep":
            cycles = -(-cycles // num_inferencers) * num_inferencers
        return cycles

    @property
    def inline(self) -> bool:
        """The Inferencers run in the calling thread."""
        return self.num_inferencers_per_device == 0

    @property
    def env_restarts_allowed(self) -> int:
        """How often environments are replaced; 0 where their failures are raised."""
        return self.faults.max_env_restarts if self.faults.on_env_failure == "restart" else 0

    def changed(self, changes: Mapping[str, Any], others: Collection[str] = ()) -> LoopOptions:
        """Return these options with ``changes``: fields of ``LoopOptions`` or ``FaultOptions``.

        Args:
          changes: Values by name.
          others: Names that the caller knows besides, for the message about an unknown one.

        Raises:
          UsageError: There is no such option, or a value breaks a rule.
        """
        names = {field.name for field in dataclasses.fields(LoopOptions)}
        of_faults = {field.name for field in dataclasses.fields(FaultOptions)}
        for name, value in changes.items():
            if name not in names | of_faults:
                raise UsageError(
                    f"{name}={shown(value)} is not an option of GymnasiumLoop"
                    f"{nearest(name, names | of_faults | set(others))}"
                )
        own = {name: value for name, value in changes.items() if name in names}
        faults = {name: value for name, value in changes.items() if name in of_faults}
        before = own.get("faults", self.faults)
        if faults and isinstance(before, FaultOptions):
            try:
                own["faults"] = dataclasses.replace(before, **faults)
            except UsageError as error:  # which names faults.NAME; here it was given as NAME
                raise UsageError(str(error).removeprefix("faults.")) from None
        return dataclasses.replace(self, **own)


class LoopKeywords(TypedDict, total=False):
    """The fields of ``LoopOptions`` and ``FaultOptions`` as keywords, for type checkers."""

    seed: int
    num_inferencers_per_device: int | None
    pin_inferencers: bool
    schedule: Schedule
    max_policy_lag: int | None
    cluster: ClusterOptions
    distributed: DistributedOptions
    queue_size: int
    metrics_interval_s: float
    faults: FaultOptions
    on_env_failure: Literal["raise", "restart"]
    max_env_restarts: int
    on_not_finite: Literal["raise", "skip"]
    hang_timeout_s: float | None

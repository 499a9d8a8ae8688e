"""What a loop keeps from one run to the next, and a checkpoint from one process to the next."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sebulba.agent import Agent
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.errors import HangError, HostError
from sebulba.inference.cycle import CyclePrograms
from sebulba.inference.inferencer import Inferencer
from sebulba.inference.loop_envs import LoopEnvs
from sebulba.loops.evaluation_thread import Evaluator
from sebulba.metrics.counters import Counters
from sebulba.metrics.timer import PhaseTimer
from sebulba.metrics.window import RecentEpisodes
from sebulba.options import LoopOptions
from sebulba.transport.item import Item
from sebulba.transport.staging import Staging
from sebulba.types import Callback, MetricWriter, StepInfos, Trajectory

LEARNER_PHASES = ("get", "restart", "observe", "update", "publish", "metrics", "checkpoint")

ObserveCycle = Callable[[Trajectory, StepInfos], Mapping[str, Any] | None]

OnHang = Callable[[HangError | HostError], None]
"""Called where the calling thread of ``run()`` itself is silent, so that nothing can be raised
there, also because it waits for a host that is gone: a command ends its process here, after it has
said why."""


@dataclasses.dataclass(frozen=True)
class Attached:
    """What a user attaches to a loop; see ``GymnasiumLoop``."""

    metric_writer: MetricWriter | None
    """Gets the records of metrics."""
    callbacks: tuple[Callback, ...]
    """Get them after it, and may end the run."""
    observe_cycle: ObserveCycle | None
    """Sees every trajectory."""
    evaluator: Evaluator | None
    """Plays the acting networks now and then."""
    checkpointer: Checkpointer | None
    """Saves the run."""
    on_hang: OnHang | None
    """Is called if the update loop hangs."""


@dataclasses.dataclass
class Session:
    """One training, over all runs of its loop: who takes part, and how far they are."""

    options: LoopOptions
    """How the loop runs."""
    agent: Agent
    """The algorithm."""
    attached: Attached
    """What the user attached."""
    staging: Mapping[jax.Device, Staging]
    """The slot of each inference device."""
    inference_only: bool = False
    """Act and never update."""
    num_hosts: int = 1
    """Hosts that learn together."""
    envs: LoopEnvs = dataclasses.field(init=False)
    """The environments of all Inferencers."""
    programs: CyclePrograms | None = None
    """The programs of a cycle, with the sizes of the run; None before the first run."""
    inferencers: list[Inferencer] = dataclasses.field(default_factory=list)
    """All Inferencers, in the order of their index."""
    timer: PhaseTimer = dataclasses.field(default_factory=lambda: PhaseTimer(*LEARNER_PHASES))
    """The time of the thread that learns."""
    counters: Counters = dataclasses.field(default_factory=Counters)
    """Totals over all runs."""
    episodes: RecentEpisodes = dataclasses.field(default_factory=RecentEpisodes)
    """The last training episodes that ended."""
    kept_round: list[Item] = dataclasses.field(default_factory=list)
    """Lockstep: the round that was in flight when the last run stopped."""
    seconds_before: float = 0.0
    """After a resume: seconds that the run lasted in earlier processes."""
    began: float = 0.0
    """``time.perf_counter()`` from which the seconds of this run count."""
    target: int = 0
    """Count of cycles at which this run ends."""
    stop_requested: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Ends this run; the next one gets another."""
    stop_reason: str | None = None
    """What the first callback said that ended this run."""

    @property
    def seconds(self) -> float:
        """Seconds since the run began, those of earlier processes included."""
        return time.perf_counter() - self.began

    @property
    def has_cycles_left(self) -> bool:
        """Whether the run has not come to its last cycle, as where a stop ended it."""
        return self.counters.cycles < self.target

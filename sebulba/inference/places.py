"""Where Inferencers are: these are in this process; ``cluster/`` has those in others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from sebulba.agent import Agent
from sebulba.errors import UsageError
from sebulba.inference.cores import Cores, shares_of_cores
from sebulba.inference.cycle import Cycle, CyclePrograms
from sebulba.inference.fused_cycle import FusedCycle
from sebulba.inference.inferencer import Inferencer
from sebulba.inference.stepped_cycle import SteppedCycle
from sebulba.metrics.timer import PhaseTimer
from sebulba.options import CycleKind, Schedule
from sebulba.types import EnvAdapter, EnvFactory

T = TypeVar("T")
MakeCycle = Callable[[EnvAdapter, CyclePrograms, jax.Device, PhaseTimer], Cycle]


class Given(NamedTuple):
    """What Inferencers work with, wherever they are."""

    factory: EnvFactory
    """Makes the environments."""
    agent: Agent
    """Acts."""
    kind: CycleKind | MakeCycle
    """How a cycle runs."""
    schedule: Schedule
    """async or lockstep."""


class Places:
    """Has the Inferencers of a loop in this process. A subclass has all of them elsewhere."""

    takes_long = False
    """New environments may take minutes to come, and have limits of their own."""
    num_restarts = 0
    """How often a place was lost before the run began; runs count them as ``env_restarts``."""
    nodes: Sequence[Any] = ()
    """The processes that Inferencers are in, if that is not this one."""
    cpu_s = 0.0
    """CPU seconds of all nodes, as of the last cycle of each."""

    def __init__(self, given: Given) -> None:
        """Work with ``given``."""
        self._given = given

    def cores(self, number: int, *, pin: bool) -> list[Cores | None]:
        """Return the cores of each Inferencer and its environment; None lets them run on any.

        Without ``pin`` all are None, and so they are of a factory other than that of envpools: no
        other says how many threads an environment has.
        """
        num_threads = getattr(self._given.factory, "num_threads", None) if pin else None
        return shares_of_cores(number, num_threads)

    def make(self, num_envs: int, seeds: list[int]) -> EnvAdapter:
        """Make the environments of an Inferencer; an ``EnvFactory``."""
        return self._given.factory(num_envs, seeds)

    def make_cycle(
        self, env: EnvAdapter, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> tuple[Cycle, str]:
        """Make the cycle of an Inferencer; return the reason for its kind, too."""
        kind, schedule = self._given.kind, self._given.schedule
        return make_cycle(kind, env, programs, device, timer, schedule=schedule)

    def start(self, make: Callable[[], T], make_again: Callable[[], T] | None = None) -> T:
        """Return what ``make`` returns, before the run begins.

        Args:
          make: Makes it; what it raises is raised.
          make_again: Makes it after its place was lost; None calls ``make`` again.
        """
        return make()

    def begin(self) -> None:
        """Prepare for a run: wait for environments again."""

    def started(self, policy_version: int, limit_s: float | None, *, patient: bool) -> None:
        """Replace environments from now on, and count for ``figures``.

        Args:
          policy_version: Number of publishes so far.
          limit_s: Seconds that new environments may take; None waits for ever.
          patient: The place of one that is lost may be waited for as long as there are others.
        """

    def stop(self) -> None:
        """Wait for no new environments any more."""

    def kill(self, env: EnvAdapter) -> None:
        """End environments that hang, which no thread can do to another."""

    def figures(self, elapsed_s: float, policy_version: int) -> dict[str, Any]:
        """Return the metrics of the nodes for a window, which the next one follows."""
        return {}

    def lines(self, inferencers: Sequence[Inferencer]) -> list[str]:
        """Return a line for people on each node."""
        return []

    def close(self) -> None:
        """End all nodes; may be called twice."""


def make_cycle(
    kind: CycleKind | MakeCycle,
    env: EnvAdapter,
    programs: CyclePrograms,
    device: jax.Device,
    timer: PhaseTimer,
    *,
    schedule: Schedule = "async",
) -> tuple[Cycle, str]:
    """Make the cycle of one Inferencer; "auto" is fused where possible, on a CPU or in JAX alone.

    Args:
      kind: As the user said, or a function that makes one.
      schedule: In lockstep nothing that is compiled may depend on how fast the machine is.

    Returns:
      The cycle, and the reason for its kind.

    Raises:
      UsageError: ``kind="fused"`` and the environment or the device does not allow it.
    """
    if callable(kind):
        return kind(env, programs, device, timer), "given"
    if (own := programs.agent.make_cycle(env, programs, device, timer)) is not None:
        return own, "of the agent"
    if hasattr(env, "make_cycle"):  # an environment that nobody steps
        return env.make_cycle(programs, device, timer), "of the environment"
    if kind == "stepped":
        return SteppedCycle(env, programs, device, timer), "asked for"
    fused = env.fused()
    is_pure = not isinstance(fused, str) and fused.is_pure
    if not isinstance(fused, str) and device.platform != "cpu" and not is_pure:
        fused = f"inference is on a {device.platform}, and a fused cycle runs on a CPU"
    if isinstance(fused, str):
        if kind == "fused":
            raise UsageError(f"cycle='fused' is not possible: {fused}; use cycle='auto'")
        return SteppedCycle(env, programs, device, timer), fused
    if kind == "fused":
        why = "asked for"
    elif is_pure:
        why = "the environment is written in JAX"
    else:
        why = "the environment has an XLA handle, inference a CPU"
    return FusedCycle(env, fused, programs, device, timer, adapts=schedule == "async"), why

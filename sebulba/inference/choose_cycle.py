"""The rule that chooses between a stepped and a fused cycle."""

from __future__ import annotations

from collections.abc import Callable

import jax

from sebulba.errors import UsageError
from sebulba.inference.cycle import Cycle, CyclePrograms
from sebulba.inference.fused_cycle import FusedCycle
from sebulba.inference.stepped_cycle import SteppedCycle
from sebulba.metrics.timer import PhaseTimer
from sebulba.options import CycleKind, Schedule
from sebulba.types import EnvAdapter

MakeCycle = Callable[[EnvAdapter, CyclePrograms, jax.Device, PhaseTimer], Cycle]


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

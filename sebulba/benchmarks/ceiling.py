"""What a machine could do, and what keeps a run from it: arithmetic on measured costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

STAGES = ("cycle", "hand-off", "update")
"""What a run executes; each is measured alone."""
BREAKDOWN = ("environment", "inference")
"""The two parts of a cycle, measured apart; they need not add up to it."""

WRONG_ABOVE = 1.02
"""A run that is faster than its ceiling by more than noise was measured wrongly."""
GOOD = 0.85
"""From this share of the ceiling on, the slowest stage is what limits the run."""
BUSY = 0.9
"""From this share of the cores' time on, the cores count as busy."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one environment step."""

    wall_us: float
    """Microseconds, all threads of the stage together; its inverse is the stage's speed."""
    cpu_us: float
    """Microseconds of CPU, summed over all threads of the process."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What of a run decides which of its settings could help."""

    cores: int
    """Cores that this process may use."""
    shares_cores: bool
    """Every stage runs on these cores: no device but the CPU takes part."""
    num_envs: int
    steps_per_cycle: int
    num_inferencers_per_device: int
    cycle: str
    """``"stepped"`` or ``"fused"``."""
    could_fuse: bool
    """The cycle is stepped, and could be fused."""


@dataclasses.dataclass(frozen=True)
class Training:
    """How a run went."""

    env_steps_per_s: float
    cpu_us: float
    """CPU microseconds of the whole process, per environment step."""
    learner_waits: float
    """Share of its time that the update loop waited for a trajectory."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the figures mean."""

    ceiling_env_steps_per_s: float
    achieved_over_ceiling: float
    suspect: bool
    """The run was faster than its ceiling: a wrong measurement, not a success."""
    slowest_stage: str
    slowest_stage_env_steps_per_s: float
    """Its speed alone: where it cannot use all cores, a run cannot reach the ceiling either."""
    bottleneck: str
    """A stage, or ``"python"``, ``"waits"``, ``"contention"``; see ``loss``."""
    advice: str
    """The one setting to change, and why."""


def ceiling(costs: Mapping[str, Cost], setup: Setup) -> float:
    """Return the environment steps per second that the stages allow.

    Where stages share cores, the cores divided by the sum of their CPU seconds; where they have
    hardware of their own, the slowest.
    """
    if setup.shares_cores:
        return 1e6 * setup.cores / sum(costs[stage].cpu_us for stage in STAGES)
    return 1e6 / max(costs[stage].wall_us for stage in STAGES)


def shares(costs: Mapping[str, Cost], setup: Setup) -> dict[str, float]:
    """Return each stage's part of what the ceiling allows.

    Of all CPU seconds where stages share cores; of the slowest stage's time where they do not.
    """
    if setup.shares_cores:
        total = sum(costs[stage].cpu_us for stage in STAGES)
        return {stage: costs[stage].cpu_us / total for stage in STAGES}
    slowest = max(costs[stage].wall_us for stage in STAGES)
    return {stage: costs[stage].wall_us / slowest for stage in STAGES}


def largest_stage(costs: Mapping[str, Cost], setup: Setup) -> str:
    """Return the stage with the largest share."""
    share = shares(costs, setup)
    return max(STAGES, key=share.__getitem__)


def _part(stage: str, costs: Mapping[str, Cost], setup: Setup) -> str:
    """Return ``stage``, or the larger part of a cycle."""
    if stage != "cycle":
        return stage

    def size(part: str) -> float:
        return costs[part].cpu_us if setup.shares_cores else costs[part].wall_us

    return max(BREAKDOWN, key=size)


def judge(costs: Mapping[str, Cost], training: Training, setup: Setup) -> Verdict:
    """Set a run against its ceiling, and name what to change.

    Args:
      costs: Of ``STAGES`` and of ``BREAKDOWN``, each measured alone.
      training: The run.
      setup: Its configuration and machine.
    """
    most = ceiling(costs, setup)
    achieved = training.env_steps_per_s / most
    slowest = max(STAGES, key=lambda stage: costs[stage].wall_us)
    slowest_speed = 1e6 / costs[slowest].wall_us
    if achieved >= GOOD:
        bottleneck = _part(largest_stage(costs, setup), costs, setup)
    elif training.env_steps_per_s >= GOOD * slowest_speed:
        bottleneck = _part(slowest, costs, setup)
    else:
        bottleneck = loss(training, setup)
    return Verdict(
        most,
        achieved,
        achieved > WRONG_ABOVE,
        slowest,
        slowest_speed,
        bottleneck,
        _advice(bottleneck, costs, training, setup),
    )


def busy_cores(training: Training) -> float:
    """Return how many cores the run kept busy."""
    return training.env_steps_per_s * training.cpu_us / 1e6


def loss(training: Training, setup: Setup) -> str:
    """Return what keeps a run far below its ceiling.

    ``"contention"``: the cores are busy, so that the same work costs more CPU together than alone.
    ``"update"``: they are not, but the update loop is, and everything else waits for it.
    ``"python"``: the update loop waits, for threads of stepped cycles that take turns at the
    interpreter's lock. ``"waits"``: it waits for fused cycles, where that cannot be.
    """
    if setup.shares_cores and busy_cores(training) >= BUSY * setup.cores:
        return "contention"
    if training.learner_waits < 1 - GOOD:
        return "update"
    return "python" if setup.cycle == "stepped" else "waits"


def _leaves_cores_idle(cost: Cost, setup: Setup) -> bool:
    return cost.cpu_us < GOOD * setup.cores * cost.wall_us


def _advice(bottleneck: str, costs: Mapping[str, Cost], training: Training, setup: Setup) -> str:
    more_envs = f"--num-envs {2 * setup.num_envs}"
    per_device = setup.num_inferencers_per_device
    match bottleneck:
        case "environment" if setup.shares_cores:
            return (
                f"{more_envs} spreads the cost of a call over more environments; beyond that only "
                "a cheaper environment or more cores help"
            )
        case "environment":
            threads = max(1, setup.cores // max(1, per_device))
            return f"--env.num-threads {threads} steps the environments on all cores"
        case "inference":
            return f"{more_envs} spreads the cost of acting over more environments"
        case "hand-off":
            return (
                f"--steps-per-cycle {2 * setup.steps_per_cycle} hands over half as often; "
                "--inference-devices that are also update devices need no transfer"
            )
        case "update" if setup.shares_cores and _leaves_cores_idle(costs["update"], setup):
            devices = " ".join(map(str, range(setup.cores)))
            return (
                f"--num-cpu-devices {setup.cores} --update-devices {devices} splits every update "
                f"over the cores, of which it uses "
                f"{costs['update'].cpu_us / costs['update'].wall_us:.1f}"
            )
        case "update" if setup.shares_cores:
            return (
                f"--steps-per-cycle {2 * setup.steps_per_cycle} takes one update for twice the "
                "environment steps; beyond that only a smaller network (--agent.torso) helps"
            )
        case "update":
            return "--update-devices with one device more splits every update"
        case "contention" if per_device > 1:
            return (
                f"--num-inferencers-per-device {per_device - 1}: the cores are busy, and a step "
                f"costs {training.cpu_us:.2f} us of CPU where its stages alone take "
                f"{sum(costs[stage].cpu_us for stage in STAGES):.2f}"
            )
        case "contention":
            return "--env.num-threads 1: the cores are busy with more threads than there is work"
        case "python" if setup.could_fuse:
            return "--cycle fused has no Python, hence no interpreter lock, in a cycle"
        case "python":
            return (
                f"{more_envs} does more work per visit to the interpreter, whose lock the "
                "Inferencers and the update share"
            )
        case _ if per_device < setup.cores:
            return f"--num-inferencers-per-device {per_device + 1}: the update waits for cycles"
        case _:
            return f"{more_envs} does more work for the fixed costs of a cycle"

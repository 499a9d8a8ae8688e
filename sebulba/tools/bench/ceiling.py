"""What a machine could do, and what keeps a run from it, calculated from measured costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

STAGES = ("cycle", "hand-off", "update")
"""The programs of a run; each is measured alone."""
BREAKDOWN = ("environment", "inference")
"""The two parts of a cycle, measured apart; they need not add up to a cycle."""
ACTING = ("upload", "act", "fetch")
"""The parts of inference in a stepped cycle: rows to the device, the policy, actions to the
host."""
RAW = "raw environment"
"""The environment by itself, as its own library steps it, with random actions."""
RELAY = "relay"
"""The way of a cycle that runs in another process or on another machine, measured where it is."""

WRONG_ABOVE = 1.02
"""Share of the ceiling above which a run was measured wrongly; below it, the excess is noise."""
GOOD = 0.85
"""Share of the ceiling from which on the slowest stage limits the run."""
BUSY = 0.9
"""Share of the cores' time from which on the cores count as busy."""
ALONE = "environment of one"
"""The environment of one Inferencer, with none beside it."""
TURNS = 1.3
"""Environments of several Inferencers that are no more times as fast as that of one, and keep no
more cores busy, take turns."""
IN_PYTHON = 0.5
"""Share of a cycle's time that environments in Python take where an interpreter for each pays."""
LOST = 0.25
"""Share of their time that Inferencers lose to the lock, from which on it pays."""
LONG_WAY = 0.2
"""Share of a cycle's time from which on the way of its items is worth a change."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one environment step."""

    wall_us: float
    """Microseconds, all threads of the stage together; its inverse is the stage's speed."""
    cpu_us: float
    """Microseconds of CPU, summed over all threads of the process."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The properties of a run and its machine that decide which setting could help."""

    cores: int
    """Cores that this process may use."""
    shares_cores: bool
    """Every stage runs on these cores: no device but the CPU takes part."""
    num_envs: int
    """Environments of an Inferencer."""
    steps_per_cycle: int
    """Length of an unroll."""
    num_inferencers_per_device: int
    """Inferencers on each inference device."""
    cycle: str
    """``"stepped"`` or ``"fused"``."""
    could_fuse: bool
    """The cycle is stepped, and could be fused."""
    num_inferencers: int = 1
    """Inferencers on all inference devices."""
    address: str = "threads"
    """Where the Inferencers are."""
    gil_share: float | None = None
    """Share of their time that stepped Inferencers lose to one interpreter, if it was measured."""


@dataclasses.dataclass(frozen=True)
class Training:
    """The figures of a run."""

    env_steps_per_s: float
    """Speed."""
    cpu_us: float
    """CPU microseconds of the whole process, per environment step."""
    learner_waits: float
    """Share of its time that the update loop waited for a trajectory."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the figures mean."""

    ceiling_env_steps_per_s: float
    """Speed that the stages allow."""
    achieved_over_ceiling: float
    """Speed of the run over that of the ceiling."""
    suspect: bool
    """The run was faster than its ceiling, so the measurement is wrong."""
    slowest_stage: str
    """Stage with the most wall time."""
    slowest_stage_env_steps_per_s: float
    """Its speed alone: if it cannot use all cores, a run cannot reach the ceiling either."""
    bottleneck: str
    """A stage or a part of one, ``"interpreter"``, see ``takes_turns``, or ``"python"``,
    ``"waits"``, ``"contention"``, see ``loss``."""
    advice: str
    """The one setting to change, and why."""


def _sizes(costs: Mapping[str, Cost], setup: Setup) -> dict[str, float]:
    """Return what of each cost limits a run: CPU time on shared cores, else wall time."""
    unit = "cpu_us" if setup.shares_cores else "wall_us"
    return {name: getattr(cost, unit) for name, cost in costs.items()}


def ceiling(costs: Mapping[str, Cost], setup: Setup) -> float:
    """Return the environment steps per second that the stages allow.

    If the stages share cores, these are the cores divided by the sum of the stages' CPU seconds; if
    they have hardware of their own, those of the slowest stage.
    """
    stages = [_sizes(costs, setup)[stage] for stage in STAGES]
    return 1e6 * (setup.cores / sum(stages) if setup.shares_cores else 1 / max(stages))


def shares(costs: Mapping[str, Cost], setup: Setup) -> dict[str, float]:
    """Return the stages' shares of all CPU time or, without shared cores, of the longest time."""
    sizes = _sizes(costs, setup)
    whole = (sum if setup.shares_cores else max)(sizes[stage] for stage in STAGES)
    return {stage: sizes[stage] / whole for stage in STAGES}


def _part(stage: str, costs: Mapping[str, Cost], setup: Setup) -> str:
    """Return ``stage`` or, for the cycle, the larger of its parts."""
    sizes = _sizes(costs, setup)
    parts = [part for part in (*BREAKDOWN, RELAY) if part in costs]
    return max(parts, key=sizes.__getitem__) if stage == "cycle" else stage


def judge(costs: Mapping[str, Cost], training: Training, setup: Setup) -> Verdict:
    """Compare a run with its ceiling, and name what to change."""
    most = ceiling(costs, setup)
    achieved = training.env_steps_per_s / most
    slowest = max(STAGES, key=lambda stage: costs[stage].wall_us)
    slowest_speed = 1e6 / costs[slowest].wall_us
    if achieved >= GOOD:
        share = shares(costs, setup)
        bottleneck = _part(max(STAGES, key=share.__getitem__), costs, setup)
    elif training.env_steps_per_s >= GOOD * slowest_speed:
        bottleneck = _part(slowest, costs, setup)
    else:
        bottleneck = loss(training, setup)
    if achieved < GOOD and bottleneck in ("environment", "python") and takes_turns(costs, setup):
        bottleneck = "interpreter"
    return Verdict(
        most,
        achieved,
        achieved > WRONG_ABOVE,
        slowest,
        slowest_speed,
        bottleneck,
        _advice(bottleneck, costs, training, setup),
    )


def takes_turns(costs: Mapping[str, Cost], setup: Setup) -> bool:
    """Tell whether the environments take turns at the lock of one interpreter, and it matters.

    Those of several Inferencers together are then no faster than that of one, and keep one core
    busy. In native code or asleep they are faster together, unless each keeps all cores busy.
    """
    environment = costs["environment"]
    return (
        setup.address == "threads"
        and ALONE in costs
        and setup.cores > 1
        and costs[ALONE].wall_us <= TURNS * environment.wall_us
        and environment.cpu_us <= TURNS * environment.wall_us
        and environment.wall_us >= IN_PYTHON * costs["cycle"].wall_us
        and (setup.gil_share is None or setup.gil_share >= LOST)
    )


def busy_cores(training: Training) -> float:
    """Return how many cores the run kept busy."""
    return training.env_steps_per_s * training.cpu_us / 1e6


def loss(training: Training, setup: Setup) -> str:
    """Return what keeps a run far below its ceiling.

    ``"contention"``: the cores are busy, so the same work costs more CPU together than alone.
    ``"update"``: the cores are not busy, but the update loop is, and everything waits for it.
    ``"python"``: the update loop waits for stepped cycles, whose threads take turns at the
    interpreter's lock. ``"waits"``: it waits for fused cycles, which need no lock.
    """
    if setup.shares_cores and busy_cores(training) >= BUSY * setup.cores:
        return "contention"
    if training.learner_waits < 1 - GOOD:
        return "update"
    is_here = setup.address == "threads"
    return "python" if setup.cycle == "stepped" and is_here else "waits"


def _shorter_way(setup: Setup) -> str:
    return (
        f"--steps-per-cycle {2 * setup.steps_per_cycle} sends half as often: the way of items to "
        "the process that trains is a large part of a cycle; beyond that --cluster.address threads"
    )


def _advice(bottleneck: str, costs: Mapping[str, Cost], training: Training, setup: Setup) -> str:
    more_envs = f"--num-envs {2 * setup.num_envs}"
    per_device = setup.num_inferencers_per_device
    way = costs[RELAY].wall_us if RELAY in costs else 0.0
    busy_cores_of_update = costs["update"].cpu_us / costs["update"].wall_us
    leaves_cores_idle = setup.cores > 1 and busy_cores_of_update < GOOD * setup.cores
    match bottleneck:
        case "interpreter":
            share = costs["environment"].wall_us / costs["cycle"].wall_us
            return (
                f"--cluster.address processes gives each of the {setup.num_inferencers} "
                f"Inferencers an interpreter: their environments are stepped in Python, which is "
                f"{share:.0%} of a cycle, and take turns on one of {setup.cores} cores"
            )
        case "relay":
            return _shorter_way(setup)
        case "waits" if RELAY in costs and way > LONG_WAY * costs["cycle"].wall_us:
            return _shorter_way(setup)
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
        case "update" if setup.shares_cores and leaves_cores_idle:
            devices = " ".join(map(str, range(setup.cores)))
            return (
                f"--num-cpu-devices {setup.cores} --update-devices {devices} splits every update "
                f"over the cores, of which it uses {busy_cores_of_update:.1f}"
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

"""``bench train CONFIG``: how near training is to what the machine could do, and what to change.

Trains, and beside it measures alone the very programs that the run executes: the cycle with all
its Inferencers, the hand-off, and the update on a kept batch.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sebulba.agent import Agent, AgentState
from sebulba.benchmarks import ceiling, harness
from sebulba.benchmarks.ceiling import Cost, Setup, Training
from sebulba.benchmarks.stages import Stages
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
from sebulba.experiment import build_agent, build_loop, configure_jax
from sebulba.loops.gymnasium_loop import Result
from sebulba.types import EnvFactory, StepInfos, Trajectory

STAGE_SECONDS = 1.0
"""How long one stage is measured in a round."""


@dataclasses.dataclass(frozen=True)
class Round:
    """One stretch of training in its steady state."""

    env_steps_per_s: float
    cpu_us: float
    """CPU microseconds of the process, per environment step."""
    policy_lags: Mapping[int, int]
    """How many trajectories had which policy lag."""
    queue_fill: float
    """Mean, from 0 to 1, as the update loop found the queue."""
    time_shares: Mapping[str, float]
    """Of the update loop's and of the mean Inferencer's phases."""


class TrainingCase:
    """One loop, trained on and on, a round at a time.

    A round is timed between two of its trajectories, when the update loop begins with them, and
    not from the call of ``run()`` to its return: there, threads and networks are set up, the first
    cycles fill an empty queue, and the cycles in flight at the end are dropped. These are costs of
    a start, once a run, which a round of some seconds would weigh as if they went on for ever. The
    first trajectories, until every queue is as full as it stays, do not count either: their
    Inferencers did not have to share the cores with updates.
    """

    def __init__(self, config: ExperimentConfig, factory: EnvFactory, agent: Agent) -> None:
        """Make the loop, as ``sebulba train`` does, with writers that only keep their records."""
        self._steps_per_cycle = config.steps_per_cycle
        self._env_steps_per_cycle = config.steps_per_cycle * config.num_envs
        self._seen: list[tuple[float, float]] = []
        self._records: list[Mapping[str, Any]] = []
        self.loop = build_loop(config, factory, agent, self, self._observe)
        self.state: AgentState = self.loop.new_state(config.seed, config.steps_per_cycle)
        self.result: Result | None = None
        self._num_cycles = 0
        # As many as can be under way: waiting, being made, and waiting to be put.
        in_flight = config.queue_size + 2 * self.loop.num_inferencers
        self._first = -(-in_flight // self.loop.num_inferencers) * self.loop.num_inferencers

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Keep a record; see ``MetricWriter``."""
        self._records.append(metrics)

    def close(self) -> None:
        """Free the environments."""
        self.loop.close()

    def _observe(self, trajectory: Trajectory, step_infos: StepInfos) -> None:
        del trajectory, step_infos
        self._seen.append((time.perf_counter(), time.process_time()))

    def warm_up(self, seconds: float) -> None:
        """Compile, and find the number of cycles that take about ``seconds``."""
        self.run_cycles(1)  # compiles
        num_cycles = self._first
        while True:
            speed = self.run_cycles(num_cycles).env_steps_per_s
            wanted = math.ceil(seconds * speed / self._env_steps_per_cycle)
            if wanted <= 4 * num_cycles:
                break
            num_cycles *= 4
        # In lockstep cycles come in whole rounds.
        per_round = self.loop.num_inferencers
        self._num_cycles = -(-wanted // per_round) * per_round

    def measure(self) -> Round:
        """Train for one round; ``warm_up`` comes first."""
        return self.run_cycles(self._num_cycles)

    def run_cycles(self, num_cycles: int) -> Round:
        """Train for ``num_cycles`` after those that fill the queue."""
        self._seen.clear()
        self._records.clear()
        per_round = self.loop.num_inferencers
        num_cycles = self._first + -(-num_cycles // per_round) * per_round
        self.result = self.loop.run(self.state, num_cycles, self._steps_per_cycle)
        self.state = self.result.state
        (wall_began, cpu_began), (wall_ended, cpu_ended) = (
            self._seen[self._first - 1],
            self._seen[-1],
        )
        env_steps = (len(self._seen) - self._first) * self._env_steps_per_cycle
        return Round(
            env_steps / (wall_ended - wall_began),
            1e6 * (cpu_ended - cpu_began) / env_steps,
            **reduce_records(self._records),
        )


def reduce_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return lags, queue fill and time shares of a run's records.

    The first is of the start and the last of the end, so they are left out where there are others.
    """
    kept = records[1:-1] or records
    lags: collections.Counter[int] = collections.Counter()
    for record in kept:
        lags.update(record["policy_lag_counts"])
    return {
        "policy_lags": lags,
        "queue_fill": statistics.fmean(record["queue_fill"] or 0.0 for record in kept),
        "time_shares": {
            name: statistics.fmean(record[name] for record in kept)
            for name in kept[-1]
            if name.startswith("time/")
        },
    }


def run(
    config: ExperimentConfig,
    *,
    preset: str,
    repeats: int = 5,
    seconds: float = 8.0,
    stage_seconds: float = STAGE_SECONDS,
    json_file: str | None = None,
) -> dict[str, Any]:
    """Measure, print tables, write JSON.

    Args:
      config: The experiment.
      preset: Its name.
      repeats: Interleaved rounds.
      seconds: Of training, a round.
      stage_seconds: Of each stage alone, a round.
      json_file: Where to write, or None.

    Returns:
      The record that was written.

    Raises:
      UsageError: Something in ``config`` breaks a rule.
    """
    configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
    factory = make_env_factory(config.env.id, **config.env.factory_arguments())
    agent = build_agent(config, env_spec(factory))
    training = TrainingCase(config, factory, agent)
    stages = Stages(config, factory, agent, stage_seconds)
    rounds: list[Round] = []
    costs: list[dict[str, Cost]] = []

    def train() -> float:
        rounds.append(training.measure())
        return rounds[-1].env_steps_per_s

    def measure_stages() -> float:
        assert training.result is not None, "training comes first"
        stages.use(training.state, training.result.acting_networks, training.result.counters.cycles)
        costs.append(stages.measure())
        return sum(costs[-1][stage].cpu_us for stage in ceiling.STAGES)

    cases: dict[str, Callable[[], float]] = {"train": train, "stages": measure_stages}
    try:
        training.warm_up(seconds)
        harness.interleave(cases, repeats)
        devices = training.loop.describe()
    finally:
        stages.close()
        training.close()
    rounds, costs = rounds[1:], costs[1:]  # the first warmed up
    setup = setup_of(config, stages)
    result = harness.record(
        *summarize(rounds, costs, setup),
        {"preset": preset, "repeats": repeats, "devices": devices, **dataclasses.asdict(config)},
    )
    print_result(result, setup)
    harness.write_json(json_file, result)
    return result


def setup_of(config: ExperimentConfig, stages: Stages) -> Setup:
    """Return what of a run decides which of its settings could help."""
    return Setup(
        cores=len(os.sched_getaffinity(0)),
        shares_cores=stages.shares_cores,
        num_envs=config.num_envs,
        steps_per_cycle=config.steps_per_cycle,
        num_inferencers_per_device=config.num_inferencers_per_device,
        cycle=stages.kind,
        could_fuse=stages.could_fuse,
    )


def best_costs(costs: Sequence[Mapping[str, Cost]]) -> dict[str, Cost]:
    """Return the least of each stage's costs over the rounds: what the machine can do."""
    return {
        stage: Cost(
            min(cost[stage].wall_us for cost in costs), min(cost[stage].cpu_us for cost in costs)
        )
        for stage in costs[0]
    }


def summarize(
    rounds: Sequence[Round], costs: Sequence[Mapping[str, Cost]], setup: Setup
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the promised keys, and the figures of every round."""
    best = best_costs(costs)
    shares = {
        name: statistics.fmean(each.time_shares[name] for each in rounds)
        for name in rounds[0].time_shares
    }
    training = Training(
        statistics.median(each.env_steps_per_s for each in rounds),
        statistics.median(each.cpu_us for each in rounds),
        shares.get("time/learner/get", 0.0),
    )
    verdict = ceiling.judge(best, training, setup)
    lags: collections.Counter[int] = collections.Counter()
    for each in rounds:
        lags.update(each.policy_lags)
    keys = {
        "env_steps_per_s": training.env_steps_per_s,
        **dataclasses.asdict(verdict),
        "training_cpu_us": training.cpu_us,
        "busy_cores": ceiling.busy_cores(training),
        "stages": {stage: dataclasses.asdict(cost) for stage, cost in best.items()},
        "policy_lag": {
            "mean": sum(lag * count for lag, count in lags.items()) / max(1, lags.total()),
            "max": max(lags, default=0),
        },
        "queue_fill": statistics.fmean(each.queue_fill for each in rounds),
        "time_shares": shares,
    }
    figures = {
        "train_env_steps_per_s": [each.env_steps_per_s for each in rounds],
        "train_cpu_us": [each.cpu_us for each in rounds],
    }
    for stage in best:
        figures[f"{stage}_wall_us"] = [cost[stage].wall_us for cost in costs]
        figures[f"{stage}_cpu_us"] = [cost[stage].cpu_us for cost in costs]
    return keys, figures


def print_result(result: Mapping[str, Any], setup: Setup) -> None:
    """Print the table of stages and what it means."""
    console = Console()
    config, figures = result["config"], result["figures"]
    console.print(f"\n{config['devices']}")
    harness.print_table(
        f"bench train {config['preset']}: training, {len(figures['train_cpu_us'])} rounds",
        "env steps/s",
        {"training": figures["train_env_steps_per_s"]},
        [],
    )
    console.print(stage_table(result, setup))
    for line in verdict_lines(result, setup):
        console.print(line, highlight=False)


def stage_table(result: Mapping[str, Any], setup: Setup) -> Table:
    """Return the costs of each stage alone, and of training."""
    costs = {stage: Cost(**cost) for stage, cost in result["stages"].items()}
    share = ceiling.shares(costs, setup)
    table = Table(
        title="each stage alone, best of the rounds, microseconds per environment step",
        title_justify="left",
    )
    table.add_column("")
    for column in ("wall us", "CPU us", "env steps/s alone", "share"):
        table.add_column(column, justify="right")
    rows = [("cycle", *ceiling.BREAKDOWN), ("hand-off",), ("update",)]
    for stage, *parts in rows:
        table.add_row(stage, *_cells(costs[stage]), f"{share[stage]:.0%}")
        for part in parts:
            table.add_row(f"  {part} apart", *_cells(costs[part]), "")
    table.add_section()
    speed = result["env_steps_per_s"]
    table.add_row("training", *_cells(Cost(1e6 / speed, result["training_cpu_us"])), "")
    return table


def _cells(cost: Cost) -> tuple[str, str, str]:
    return f"{cost.wall_us:.2f}", f"{cost.cpu_us:.2f}", f"{1e6 / cost.wall_us:,.0f}"


def verdict_lines(result: Mapping[str, Any], setup: Setup) -> list[str]:
    """Return what the figures mean, in sentences."""
    how = (
        f"{setup.cores} cores over the CPU time of cycle, hand-off and update"
        if setup.shares_cores
        else "the slowest stage"
    )
    lag, share = result["policy_lag"], result["time_shares"]
    lines = [
        f"achieved {result['env_steps_per_s']:,.0f} of {result['ceiling_env_steps_per_s']:,.0f} "
        f"env steps/s ({how}): achieved_over_ceiling {result['achieved_over_ceiling']:.2f}",
        f"the slowest stage, {result['slowest_stage']}, does "
        f"{result['slowest_stage_env_steps_per_s']:,.0f} env steps/s alone: "
        f"{result['env_steps_per_s'] / result['slowest_stage_env_steps_per_s']:.2f} of it",
        f"busy: {result['busy_cores']:.2f} of {setup.cores} cores; "
        f"policy lag: mean {lag['mean']:.1f}, max {lag['max']}; "
        f"queue fill: {result['queue_fill']:.0%}",
        *(
            f"{who} time: "
            + ", ".join(
                f"{name.rpartition('/')[2]} {value:.0%}"
                for name, value in share.items()
                if name.startswith(f"time/{key}/") and value >= 0.005
            )
            for who, key in (("update loop", "learner"), ("mean Inferencer", "inferencer"))
        ),
        f"bottleneck: {result['bottleneck']}",
        f"change: {result['advice']}",
    ]
    if result["suspect"]:
        lines.append(
            f"this measurement is wrong: a run cannot be {result['achieved_over_ceiling']:.2f} "
            "times as fast as its parts allow; measure again on a machine that does nothing else"
        )
    return lines

"""``bench train CONFIG``: how near training is to what the machine could do, and what to change.

Trains, and beside it measures alone the very programs that the run executes: the cycle with all
its Inferencers, the hand-off, and the update on a kept batch.
"""

from __future__ import annotations

import collections
import contextlib
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
from sebulba.benchmarks.comparisons import COMPARISONS, PrototypeCase, check_comparisons
from sebulba.benchmarks.gil import CycleProcesses, gil_share
from sebulba.benchmarks.stages import Stages
from sebulba.commands.experiment import build_agent, build_loop, configure_jax
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
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
    first trajectories, until every queue is as full as it stays, and as many at the end do not
    count either: there, Inferencers and updates do not share the cores.
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
        self._in_flight = -(-in_flight // self.loop.num_inferencers) * self.loop.num_inferencers

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
        num_cycles = self._in_flight
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
        """Train for ``num_cycles``, after those that fill the queue and before the last."""
        self._seen.clear()
        self._records.clear()
        per_round = self.loop.num_inferencers
        num_cycles = -(-num_cycles // per_round) * per_round
        total = num_cycles + 2 * self._in_flight
        self.result = self.loop.run(self.state, total, self._steps_per_cycle)
        self.state = self.result.state
        counted = self._seen[self._in_flight - 1 : len(self._seen) - self._in_flight]
        (wall_began, cpu_began), (wall_ended, cpu_ended) = counted[0], counted[-1]
        env_steps = (len(counted) - 1) * self._env_steps_per_cycle
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
    compare: tuple[str, ...] = (),
    json_file: str | None = None,
    png_file: str | None = None,
) -> dict[str, Any]:
    """Measure, print tables, write JSON and PNG.

    Args:
      config: The experiment.
      preset: Its name.
      repeats: Interleaved rounds.
      seconds: Of training, a round.
      stage_seconds: Of each stage alone, a round.
      compare: Any of ``"stepped"``, ``"fused"``, ``"prototype"``: what to set the run against.
      json_file: Where to write, or None.
      png_file: Where to draw, or None.

    Returns:
      The record that was written.

    Raises:
      UsageError: Something in ``config`` breaks a rule.
    """
    check_comparisons(compare)
    configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
    with Bench(config, seconds, stage_seconds, compare) as bench:
        speeds = harness.interleave(bench.cases, repeats)
        setup = setup_of(config, bench.stages)
        devices = bench.training.loop.describe()
    # The first round warmed up.
    keys, figures = summarize(bench.rounds[1:], bench.costs[1:], setup)
    keys |= compared(speeds)
    figures |= {name: values for name, values in speeds.items() if name not in MEASURED_ANYWAY}
    result = harness.record(
        keys,
        figures,
        {
            "preset": preset,
            "repeats": repeats,
            "seconds": seconds,
            "devices": devices,
            **dataclasses.asdict(config),
        },
    )
    print_result(result, setup)
    harness.write_json(json_file, result)
    if png_file is not None:
        draw(result, setup, png_file)
    return result


MEASURED_ANYWAY = ("train", "stages")


class Bench:
    """Everything that is measured in turn; a context manager, for it owns environments."""

    def __init__(
        self, config: ExperimentConfig, seconds: float, stage_seconds: float, compare: Sequence[str]
    ) -> None:
        """Build and compile."""
        self.rounds: list[Round] = []
        self.costs: list[dict[str, Cost]] = []
        self._seconds = seconds
        self._stage_seconds = stage_seconds
        self._config = config
        self._factory = make_env_factory(config.env.id, **config.env.factory_arguments())
        self._agent = build_agent(config, env_spec(self._factory))
        with contextlib.ExitStack() as resources:
            self._resources = resources
            self.training = self._make_training(config)
            self.stages = self._make_stages(config)
            self._use_trained_state()
            self.cases: dict[str, Callable[[], float]] = {"train": self._train}
            for name in compare:
                self.cases[name] = self._make_comparison(name)
            self.cases["stages"] = self._measure_stages
            # Several processes would not fit into one accelerator's memory.
            if "stepped" in compare and self.stages.shares_cores:
                self.cases["gil_share"] = self._make_gil_case()
            self._resources = resources.pop_all()

    def _make_training(self, config: ExperimentConfig) -> TrainingCase:
        training = TrainingCase(config, self._factory, self._agent)
        self._resources.callback(training.close)
        training.warm_up(self._seconds)
        return training

    def _make_stages(self, config: ExperimentConfig) -> Stages:
        stages = Stages(config, self._factory, self._agent, self._stage_seconds)
        self._resources.callback(stages.close)
        return stages

    def _use_trained_state(self) -> None:
        result = self.training.result
        assert result is not None, "warming up has trained"
        self.stages.use(result.state, result.acting_networks, result.counters.cycles)

    def _train(self) -> float:
        self.rounds.append(self.training.measure())
        return self.rounds[-1].env_steps_per_s

    def _measure_stages(self) -> float:
        self._use_trained_state()
        self.costs.append(self.stages.measure())
        return sum(self.costs[-1][stage].cpu_us for stage in ceiling.STAGES)

    def _make_comparison(self, name: str) -> Callable[[], float]:
        """Return what measures ``name``, in environment steps per second."""
        if name == self.stages.kind:
            return lambda: self.rounds[-1].env_steps_per_s  # the run itself, of this round
        if name == "prototype":
            prototype = PrototypeCase(self._config, self._agent)
            self._resources.callback(prototype.close)
            prototype.warm_up(self._seconds)
            return prototype.measure
        other = self._make_training(dataclasses.replace(self._config, cycle=name))  # type: ignore[arg-type]
        return lambda: other.measure().env_steps_per_s

    def _make_gil_case(self) -> Callable[[], float]:
        """Return what measures the share of ``gil_share``: threads, then processes."""
        # A process with one Inferencer has all cores, so its threads are not bound to a share.
        stepped = dataclasses.replace(self._config, cycle="stepped", pin_inferencers=False)
        threads = self._make_stages(stepped)
        threads.use_new_state()
        processes = CycleProcesses(stepped, threads.num_inferencers, self._stage_seconds)
        self._resources.callback(processes.close)
        return lambda: gil_share(1e6 / threads.measure_cycle().wall_us, processes.measure())

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()


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


def compared(speeds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return speeds and their ratios, within a round, of what the run was set against."""
    keys = {
        f"{name}_env_steps_per_s": statistics.median(speeds[name])
        for name in COMPARISONS
        if name in speeds
    }
    for over, under in (("fused", "stepped"), ("stepped", "prototype")):
        if over in speeds and under in speeds:
            keys[f"{over}_over_{under}"] = harness.ratio(speeds, over, under)
    if "gil_share" in speeds:
        keys["gil_share"] = statistics.median(speeds["gil_share"])
    return keys


def print_result(result: Mapping[str, Any], setup: Setup) -> None:
    """Print the table of stages and what it means."""
    console = Console()
    config, figures = result["config"], result["figures"]
    console.print(f"\n{config['devices']}")
    harness.print_table(
        f"bench train {config['preset']}: training, {len(figures['train_cpu_us'])} rounds",
        "env steps/s",
        {"training": figures["train_env_steps_per_s"]}
        | {name: figures[name] for name in COMPARISONS if name in figures},
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
        *comparison_lines(result),
        f"bottleneck: {result['bottleneck']}",
        f"change: {result['advice']}",
    ]
    if result["suspect"]:
        lines.append(
            f"this measurement is wrong: a run cannot be {result['achieved_over_ceiling']:.2f} "
            "times as fast as its parts allow; measure again on a machine that does nothing else"
        )
    return lines


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the ratios to what the run was set against, and what the threads lost to the lock."""
    lines = [
        f"{name}: {result[name]:.2f}"
        for name in ("fused_over_stepped", "stepped_over_prototype")
        if name in result
    ]
    if "gil_share" in result:
        lines.append(
            f"gil_share: stepped Inferencers lose {result['gil_share']:.0%} of their time to "
            "sharing one interpreter (threads against processes, no update running)"
        )
    return lines


def draw(result: Mapping[str, Any], setup: Setup, png_file: str) -> None:
    """Draw where the time of a step goes, stages alone and in training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit = "cpu_us" if setup.shares_cores else "wall_us"
    left = 0.0
    for stage, color in zip(ceiling.STAGES, ("#2a78b5", "#e0a030", "#b5482a"), strict=True):
        cost = result["stages"][stage][unit]
        # What shares cores adds up; what does not runs side by side.
        begin = left if setup.shares_cores else 0.0
        row = "stages alone" if setup.shares_cores else f"{stage} alone"
        axes.barh(row, cost, left=begin, color=color, label=stage)
        left += cost
    cores = setup.cores if setup.shares_cores else 1
    total = cores * 1e6 / result["env_steps_per_s"]
    if setup.shares_cores:
        busy = result["training_cpu_us"]
        axes.barh("training", busy, color="#777777", label="training, cores busy")
        axes.barh("training", total - busy, left=busy, color="#dddddd", label="training, idle")
    else:
        axes.barh("training", total, color="#777777", label="training")
    axes.invert_yaxis()
    axes.set(
        xlabel="core-microseconds per environment step"
        if setup.shares_cores
        else "microseconds per environment step",
        title=f"{result['config']['preset']}: {result['achieved_over_ceiling']:.2f} of the ceiling",
    )
    axes.grid(alpha=0.25, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        fontsize="small", ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False
    )
    figure.savefig(png_file, dpi=150)

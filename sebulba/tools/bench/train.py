"""``bench train CONFIG``: how near training is to what the machine could do, and what to change.

Trains, and in turn measures alone the very programs that the run executes: the cycle with all its
Inferencers, the hand-off, and the update on a kept batch.
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
from types import MappingProxyType
from typing import Any

from sebulba.agent import Agent, AgentState
from sebulba.configs.experiment import ExperimentConfig
from sebulba.loops.gymnasium_loop import GymnasiumLoop, Result
from sebulba.metrics.figures import open_frame, picture
from sebulba.options import ClusterOptions
from sebulba.runs.jax_setup import set_up_jax
from sebulba.tools.bench import ceiling, harness
from sebulba.tools.bench.budget import Budget
from sebulba.tools.bench.ceiling import Cost, Setup, Training
from sebulba.tools.bench.gil import cycle_processes, gil_share
from sebulba.tools.bench.stages import Stages
from sebulba.types import EnvFactory, StepInfos, Trajectory

PLACES = ("threads", "processes")
"""Where the Inferencers of a run can be, to compare."""
COMPARISONS = ("stepped", "fused", *PLACES)
"""What a run can be compared with: the other way of a cycle, another place."""
STAGE_SECONDS = 1.0
"""Duration of the measurement of one stage in a round."""
STAGES_A_ROUND = 7
"""Measurements of that duration in a round, roughly."""
BUDGET_S = 60.0
"""Seconds that everything may take."""
SHARE_OF_ROUNDS = 0.5
"""Share of the time after the first compilation that is planned for rounds: stages compile, too."""
MOST_LATE_S = 10.0
"""Seconds beyond the budget after which training is cut, measured or not."""
LEAST_SHARE = 0.05
"""Least share of the seconds that were asked for."""


Others = Mapping[
    str,
    Callable[[ExperimentConfig, Agent, float, contextlib.ExitStack], Callable[[], float]],
]
"""What makes the same training by other code, by name: of a run, seconds of a round, and what
closes it, in environment steps per second."""


@dataclasses.dataclass(frozen=True)
class Round:
    """One stretch of training in its steady state."""

    env_steps_per_s: float
    """Speed."""
    cpu_us: float
    """CPU microseconds of the process, and of those of its Inferencers, per environment step."""
    policy_lags: Mapping[int, int]
    """Number of trajectories by their policy lag."""
    queue_fill: float
    """Mean fill of the queue, from 0 to 1, when the update loop looked."""
    time_shares: Mapping[str, float]
    """Shares of time of the phases of the update loop and of the mean Inferencer."""


class TrainingCase:
    """One loop that is trained on and on, a round at a time.

    The clock of a round starts and stops when the update loop begins with a trajectory, not when
    ``run()`` is called and returns. Setting up threads and networks, the first cycles, which fill
    an empty queue, and the cycles that are dropped at the end cost time once a run, and would weigh
    too much in a round of some seconds. For the same reason two groups of trajectories do not
    count: the first, until every queue is as full as it stays, and as many at the end, when
    Inferencers and updates no longer share the cores.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        factory: EnvFactory,
        agent: Agent,
        budget: Budget | None = None,
    ) -> None:
        """Make the loop as ``sebulba train`` does, with writers that only keep their records.

        Where ``budget`` has no time left, training ends once it is measured, and at the latest
        ``MOST_LATE_S`` seconds later.
        """
        self._budget = budget or Budget()
        self._steps_per_cycle = config.steps_per_cycle
        self._env_steps_per_cycle = config.steps_per_cycle * config.num_envs
        self._seen: list[tuple[float, float]] = []
        self._records: list[Mapping[str, Any]] = []
        self.loop = GymnasiumLoop(
            factory,
            agent,
            config.num_envs,
            options=config,
            metric_writer=self,
            observe_cycle=self._observe,
        )
        self.state: AgentState = self.loop.new_state(config.seed, config.steps_per_cycle)
        self.result: Result | None = None
        self.is_cut = False
        """Whether the last round ended before there was a trajectory that counts."""
        self._num_cycles = 0
        # The most that can be under way: waiting, being made, and waiting to be put.
        self._in_flight = self._whole_rounds(config.queue_size + 2 * self.loop.num_inferencers)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Keep a record; see ``MetricWriter``."""
        self._records.append(metrics)

    def close(self) -> None:
        """Free the environments."""
        self.loop.close()

    def _observe(self, trajectory: Trajectory, step_infos: StepInfos) -> None:
        del trajectory, step_infos
        cpu_s = time.process_time() + self.loop.cpu_elsewhere_s
        self._seen.append((time.perf_counter(), cpu_s))
        late_s = -self._budget.left()
        least = 1 if late_s > MOST_LATE_S else 2 * self._in_flight + 1
        if late_s > 0 and len(self._seen) > least:
            self.loop.stop()

    def compile(self) -> None:
        """Train for the first time, for as few cycles as compile all programs."""
        # The first cycle compiles the update, the second the shorter chunks of a fused cycle.
        self._train(3 * self.loop.num_inferencers)

    def _train(self, num_cycles: int) -> None:
        self._seen.clear()
        self._records.clear()
        self.result = self.loop.run(self.state, num_cycles, self._steps_per_cycle)
        self.state = self.result.state

    def warm_up(self, seconds: float) -> None:
        """Compile, and find the number of cycles that take about ``seconds``."""
        if self.result is None:
            self.compile()

        def cycles_per_s(num_cycles: int) -> float:
            return self.run_cycles(num_cycles).env_steps_per_s / self._env_steps_per_cycle

        self._num_cycles = harness.count_for(seconds, cycles_per_s, self._in_flight)

    def measure(self) -> Round:
        """Train for one round, after a call of ``warm_up``."""
        return self.run_cycles(self._num_cycles)

    def run_cycles(self, num_cycles: int) -> Round:
        """Train for ``num_cycles`` that count, between those of the start and of the end."""
        self._train(self._whole_rounds(num_cycles) + 2 * self._in_flight)
        counted = self._seen[self._in_flight - 1 : len(self._seen) - self._in_flight]
        self.is_cut = len(counted) < 2
        if self.is_cut:
            counted = self._seen
        (wall_began, cpu_began), (wall_ended, cpu_ended) = counted[0], counted[-1]
        env_steps = (len(counted) - 1) * self._env_steps_per_cycle
        return Round(
            env_steps / (wall_ended - wall_began),
            1e6 * (cpu_ended - cpu_began) / env_steps,
            **reduce_records(self._records),
        )

    def _whole_rounds(self, num_cycles: int) -> int:
        """Round up to a multiple of the number of Inferencers, as lockstep requires."""
        per_round = self.loop.num_inferencers
        return -(-num_cycles // per_round) * per_round


def reduce_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return lags, queue fill and time shares of a run's records.

    The first and the last record, which tell of the start and of the end, are left out if there
    are others.
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
    budget_s: float = BUDGET_S,
    compare: Sequence[str] = (),
    json_file: str | None = None,
    png_file: str | None = None,
    others: Others = MappingProxyType({}),
) -> dict[str, Any]:
    """Measure, print tables, write JSON and PNG.

    The arguments are the options of the command, see ``commands/bench.py``, and ``others``, which
    ``compare`` may name as well.

    Raises:
      UsageError: Something in ``config`` breaks a rule.
    """
    with contextlib.ExitStack() as resources:
        budget = resources.enter_context(Budget(budget_s))
        budget.doing("JAX starts")
        config = set_up_jax(config)
        bench = Bench(config, seconds, stage_seconds, compare, resources, others, budget, repeats)
        speeds = harness.interleave(bench.cases, repeats, budget=budget)
        gil_shares = speeds.get("gil_share")
        setup = setup_of(
            config, bench.stages, statistics.median(gil_shares) if gil_shares else None
        )
        devices = bench.training.loop.describe()
    # The first round was to warm up, if there was time for another.
    counted = slice(1, None) if len(bench.rounds) > 1 else slice(None)
    keys, figures = summarize(bench.rounds[counted], bench.costs[counted], setup)
    compared_with = names_compared(speeds)
    if all(bench.cut[counted]):
        keys["bottleneck"] = f"unknown: {budget_s:.0f} s were over with the first trajectories"
        keys["advice"] = f"--budget-s {3 * budget_s:.0f}, to measure more than these"
    figures |= {name: speeds[name] for name in (*compared_with, "gil_share") if name in speeds}
    rounds = len(bench.rounds[counted])
    settings = {"preset": preset, "repeats": rounds, "seconds": bench.seconds, "devices": devices}
    settings |= {"budget_s": budget_s, "raw_environment": bench.stages.raw_name}
    result = harness.record(keys | compared(speeds), figures, settings | dataclasses.asdict(config))
    print_result(result, setup, compared_with)
    harness.write_json(json_file, result)
    if png_file is not None:
        draw(result, setup, png_file)
    return result


class Bench:
    """Everything that is measured in turn."""

    def __init__(
        self,
        config: ExperimentConfig,
        seconds: float,
        stage_seconds: float,
        compare: Sequence[str],
        resources: contextlib.ExitStack,
        others: Others,
        budget: Budget,
        repeats: int,
    ) -> None:
        """Make the cases, which train until they are warm; ``resources`` closes what is made.

        The budget shortens rounds and stages where the time would not be enough.
        """
        self._budget = budget
        self.rounds: list[Round] = []
        self.cut: list[bool] = []
        """Of each round, ``TrainingCase.is_cut``."""
        self.costs: list[dict[str, Cost]] = []
        self.seconds = seconds
        """Seconds of training in a round, as far as the budget allows."""
        self._stage_seconds = stage_seconds
        self._config = config
        self._resources = resources
        self._others = others
        self._factory, self._agent = harness.env_and_agent(config)
        budget.doing("compiling the run")
        self.training = self._make_training(config, warm_up=False)
        self.training.compile()
        self._fit(1 + len(compare), repeats)
        budget.doing("training until it is warm")
        self.training.warm_up(self.seconds)
        budget.doing("compiling each stage alone")
        self.stages = self._make_stages(config)
        self._use_trained_state()
        self.cases: dict[str, Callable[[], float]] = {"train": self._train}
        for name in compare:
            budget.doing(f"compiling {name}, to compare with")
            self.cases[name] = self._make_comparison(name)
        self.cases["stages"] = self._measure_stages
        # Several processes would not fit into one accelerator's memory.
        if "stepped" in compare and self.stages.shares_cores:
            self.cases["gil_share"] = self._make_gil_case()

    def _fit(self, num_trainings: int, repeats: int) -> None:
        """Shorten training and stages so that all rounds are likely to fit."""
        share = fitting_share(
            self._budget.left(),
            (repeats + 1) * (num_trainings * self.seconds + STAGES_A_ROUND * self._stage_seconds),
        )
        self.seconds, self._stage_seconds = share * self.seconds, share * self._stage_seconds

    def _make_training(self, config: ExperimentConfig, *, warm_up: bool = True) -> TrainingCase:
        training = TrainingCase(config, self._factory, self._agent, self._budget)
        self._resources.callback(training.close)
        if warm_up:
            training.warm_up(self.seconds)
        return training

    def _make_stages(self, config: ExperimentConfig) -> Stages:
        stages = Stages(config, self._factory, self._agent, self._stage_seconds)
        self._resources.callback(stages.close)
        return stages

    def _use_trained_state(self) -> None:
        result = self.training.result
        assert result is not None, "warming up has trained"
        self.stages.use(result.state, result.counters.cycles)

    def _train(self) -> float:
        self.rounds.append(self.training.measure())
        self.cut.append(self.training.is_cut)
        return self.rounds[-1].env_steps_per_s

    def _measure_stages(self) -> float:
        self._use_trained_state()
        self.costs.append(self.stages.measure())
        return sum(self.costs[-1][stage].cpu_us for stage in ceiling.STAGES)

    def _make_comparison(self, name: str) -> Callable[[], float]:
        """Return what measures ``name``, in environment steps per second."""
        if name == self.stages.kind:
            return lambda: self.rounds[-1].env_steps_per_s  # the run itself, of this round
        if name in self._others:
            make = self._others[name]
            return make(self._config, self._agent, self.seconds, self._resources)
        if name in PLACES and name == self._config.cluster.address:
            return lambda: self.rounds[-1].env_steps_per_s
        changes: dict[str, Any] = {"cycle": name}
        if name in PLACES:
            managers = self._config.cluster.trajectory_managers
            changes = {"cluster": ClusterOptions(address=name, trajectory_managers=managers)}
        other = self._make_training(dataclasses.replace(self._config, **changes))
        return lambda: other.measure().env_steps_per_s

    def _make_gil_case(self) -> Callable[[], float]:
        """Return what measures ``gil_share``: threads, then processes."""
        # A process with one Inferencer may use all cores, so the threads are not bound to theirs.
        stepped = dataclasses.replace(
            self._config, cycle="stepped", pin_inferencers=False, cluster=ClusterOptions()
        )
        threads = self._make_stages(stepped)
        threads.use_new_state()
        processes = cycle_processes(stepped, threads.num_inferencers, self._stage_seconds)
        measure = self._resources.enter_context(processes)
        return lambda: gil_share(1e6 / threads.measure_cycle().wall_us, measure())


def fitting_share(left_s: float, wanted_s: float) -> float:
    """Return which share of the wanted seconds is to be measured.

    Args:
      left_s: Seconds that are left of the budget.
      wanted_s: Seconds of all rounds.
    """
    return min(1.0, max(LEAST_SHARE, SHARE_OF_ROUNDS * left_s / wanted_s))


def setup_of(config: ExperimentConfig, stages: Stages, gil_share: float | None = None) -> Setup:
    """Return the properties of a run that decide which setting could help."""
    return Setup(
        cores=len(os.sched_getaffinity(0)),
        shares_cores=stages.shares_cores,
        num_envs=config.num_envs,
        steps_per_cycle=config.steps_per_cycle,
        num_inferencers_per_device=stages.per_device,
        cycle=stages.kind,
        could_fuse=stages.could_fuse,
        num_inferencers=stages.num_inferencers,
        address=config.cluster.address,
        gil_share=gil_share,
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
    """Return the keys of the JSON, and the figures of every round."""
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
        "num_inferencers": setup.num_inferencers,
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


def names_compared(speeds: Mapping[str, list[float]]) -> list[str]:
    """Return what the run was compared with."""
    return [name for name in speeds if name not in ("train", "stages", "gil_share")]


def compared(speeds: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the speeds of the comparisons, and their ratios within a round."""
    names = names_compared(speeds)
    keys = {f"{name}_env_steps_per_s": statistics.median(speeds[name]) for name in names}
    ours = "stepped" if "stepped" in speeds else "fused"  # a JAX environment is never stepped
    others = [name for name in names if name not in COMPARISONS]
    pairs = [("fused", "stepped"), ("processes", "threads"), *((ours, name) for name in others)]
    for over, under in pairs:
        if over in speeds and under in speeds:
            keys[f"{over}_over_{under}"] = harness.ratio(speeds, over, under)
    if "gil_share" in speeds:
        keys["gil_share"] = statistics.median(speeds["gil_share"])
    return keys


def print_result(
    result: Mapping[str, Any], setup: Setup, compared_with: Sequence[str] = ()
) -> None:
    """Print the speeds, those of ``compared_with`` among them, the costs of each stage, and what
    they mean."""
    config, figures = result["config"], result["figures"]
    speeds = {"training": figures["train_env_steps_per_s"]}
    speeds |= {name: figures[name] for name in compared_with}
    harness.print_notes(["", config["devices"]])
    title = f"bench train {config['preset']}: training, {len(figures['train_cpu_us'])} rounds"
    harness.print_table(title, "env steps/s", speeds)
    harness.print_rows(
        "each stage alone, best of the rounds, microseconds per environment step",
        ("wall us", "CPU us", "env steps/s alone", "share"),
        stage_rows(result, setup),
    )
    harness.print_notes(verdict_lines(result, setup))


def stage_rows(result: Mapping[str, Any], setup: Setup) -> dict[str, list[str]]:
    """Return the costs of each stage alone, and of training."""
    costs = {stage: Cost(**cost) for stage, cost in result["stages"].items()}
    share = ceiling.shares(costs, setup)
    training = Cost(1e6 / result["env_steps_per_s"], result["training_cpu_us"])
    stages = {stage: [*_cells(costs[stage]), f"{share[stage]:.0%}"] for stage in ceiling.STAGES}
    parts = {f"  {part} apart": [*_cells(costs[part]), ""] for part in ceiling.BREAKDOWN}
    if ceiling.RELAY in costs:
        parts["  relay, in it"] = [*_cells(costs[ceiling.RELAY]), ""]
    for part in ceiling.ACTING:
        if part in costs:
            parts[f"    {part}, in inference"] = [*_cells(costs[part]), ""]
    if ceiling.RAW in costs:
        parts[f"  {ceiling.RAW}"] = [*_cells(costs[ceiling.RAW]), ""]
    cycle = {"cycle": stages.pop("cycle")}
    return cycle | parts | stages | {"training": [*_cells(training), ""]}


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
        *raw_lines(result),
        *relay_lines(result),
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


def raw_lines(result: Mapping[str, Any]) -> list[str]:
    """Return how near training is to the environment alone, and where the budget cut rounds."""
    lines, config = [], result.get("config", {})
    if raw := result.get("stages", {}).get(ceiling.RAW):
        share = result["env_steps_per_s"] * raw["wall_us"] / 1e6
        lines.append(f"training is {share:.2f} of the {ceiling.RAW} ({config['raw_environment']})")
    budget_s = config.get("budget_s", math.inf)
    if math.isfinite(budget_s):
        lines.append(
            f"measured {config['repeats']} rounds of {config['seconds']:.1f} s; --budget-s "
            f"{budget_s:.0f} limits all of it, compilation included; a larger one measures more"
        )
    return lines


def relay_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what it costs that cycles run elsewhere, if they do."""
    relay = result.get("stages", {}).get(ceiling.RELAY)
    if relay is None:
        return []
    config, inferencers = result["config"], result["num_inferencers"]
    item_ms = relay["wall_us"] * inferencers * config["steps_per_cycle"] * config["num_envs"] / 1e3
    return [
        f"relay: {item_ms:.2f} ms an item from where its cycle ran, "
        f"{relay['wall_us'] / result['stages']['cycle']['wall_us']:.0%} of a cycle; "
        f"{relay['cpu_us']:.2f} us of CPU an environment step in the process that trains"
    ]


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the ratios of the comparisons, and the share that threads lost to the lock."""
    lines = [
        f"{name}: {ratio:.2f}"
        for name, ratio in result.items()
        if "_over_" in name and name != "achieved_over_ceiling"
    ]
    if "gil_share" in result:
        lines.append(
            f"gil_share: stepped Inferencers lose {result['gil_share']:.0%} of their time to "
            "sharing one interpreter (threads against processes, no update running)"
        )
    return lines


def draw(result: Mapping[str, Any], setup: Setup, png_file: str) -> None:
    """Draw where the time of a step goes, stages alone and in training."""
    shared = setup.shares_cores
    unit, label = ("cpu_us", "core-microseconds") if shared else ("wall_us", "microseconds")
    total = (setup.cores if shared else 1) * 1e6 / result["env_steps_per_s"]
    with picture(png_file, 7, 2.6) as figure:
        axes = figure.add_subplot()
        left = 0.0
        for stage, color in zip(ceiling.STAGES, ("#2a78b5", "#e0a030", "#b5482a"), strict=True):
            cost = result["stages"][stage][unit]
            # Stages that share cores add up; others run side by side.
            row, begin = ("stages alone", left) if shared else (f"{stage} alone", 0.0)
            axes.barh(row, cost, left=begin, color=color, label=stage)
            left += cost
        if shared:
            busy = result["training_cpu_us"]
            axes.barh("training", busy, color="#777777", label="training, cores busy")
            axes.barh("training", total - busy, left=busy, color="#dddddd", label="training, idle")
        else:
            axes.barh("training", total, color="#777777", label="training")
        axes.invert_yaxis()
        share = f"{result['achieved_over_ceiling']:.2f} of the ceiling"
        axes.set(
            xlabel=f"{label} per environment step", title=f"{result['config']['preset']}: {share}"
        )
        open_frame(axes, "x")
        axes.legend(
            fontsize="small", ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False
        )

"""``bench scale``: speed and memory as the work grows, one axis at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from sebulba.benchmarks import harness
from sebulba.benchmarks.trial import (
    Measurement,
    Trial,
    measure_in_turn,
    ready_trials,
)
from sebulba.benchmarks.worker import share_accelerator
from sebulba.commands import experiment
from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError
from sebulba.loops.devices import local_devices

TOLERANCE = 0.10
"""A cost per step that is higher by less than this share counts as level: machines are noisy."""

IMAGE_TORSOS = ("nature_cnn", "impala_resnet")

CPU_DEVICES_NOTE = "  the devices of a CPU share its cores: more devices do not add any"

Value = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A setting, and the values between which the work grows."""

    name: str
    """As on the command line."""
    values: tuple[Value, ...]
    """In the order in which the work grows."""
    change: Callable[[ExperimentConfig, Any], ExperimentConfig]
    """Returns a configuration with another value."""
    per_parameter: bool = False
    """The cost that must not grow is that of a step and a parameter of the networks."""
    note: str = ""
    """What to know when reading its figures."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One value of an axis, measured; the figures of all points of an axis were taken in turn."""

    value: Value
    parameters: int
    """Of the networks."""
    measurements: tuple[Measurement, ...]
    """By round."""

    @property
    def env_steps_per_s(self) -> list[float]:
        """By round."""
        return [measurement.env_steps_per_s for measurement in self.measurements]

    @property
    def us_per_env_step(self) -> float:
        """Microseconds, the median."""
        return 1e6 / statistics.median(self.env_steps_per_s)

    @property
    def rss_mb(self) -> float:
        """Peak resident memory."""
        return max(measurement.rss_mb for measurement in self.measurements)

    @property
    def device_mb(self) -> float:
        """Device memory; see ``Measurement``."""
        return max(measurement.device_mb for measurement in self.measurements)

    def record(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        speeds = self.env_steps_per_s
        return {
            "env_steps_per_s": {
                "median": statistics.median(speeds),
                "lowest": min(speeds),
                "highest": max(speeds),
            },
            "us_per_env_step": self.us_per_env_step,
            "rss_mb": self.rss_mb,
            "device_mb": self.device_mb,
            "parameters": self.parameters,
        }


@dataclasses.dataclass(frozen=True)
class AxisResult:
    """An axis, measured."""

    axis: Axis
    points: tuple[Point, ...]
    failed: Mapping[Value, str]
    """Values that cannot run here, and why."""

    def offenders(self) -> dict[Value, float]:
        """Return the points whose cost rose, and to how many times the lowest cost before."""
        return cost_rises(self.axis, self.points)

    def record(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        offenders = self.offenders()
        return {
            "points": {label(point.value): point.record() for point in self.points},
            "cost_falls": not offenders,
            "offenders": {label(value): ratio for value, ratio in offenders.items()},
            "failed": {label(value): why for value, why in self.failed.items()},
        }


def run(
    config: ExperimentConfig,
    *,
    preset: str = "",
    repeats: int = 5,
    seconds: float = 1.0,
    axes: Sequence[str] = (),
    json_file: str | None = None,
    png_file: str | None = None,
) -> dict:
    """Measure every axis, print tables, write JSON and a picture.

    Args:
      config: What the axes go through.
      preset: Its name.
      repeats: Interleaved rounds.
      seconds: Length of a measurement, stretched to two cycles of each Inferencer.
      axes: Names of those to measure; none means all.
      json_file: Where to write, or None.
      png_file: Where to draw, or None.

    Returns:
      The record that was written.

    Raises:
      UsageError: An axis is unknown, or no value of one can run.
    """
    experiment.configure_jax(config.platform, None, "off")
    share_accelerator()
    chosen = choose_axes(all_axes(config, local_devices()), axes)
    console = Console()
    title = f"bench scale: {preset or config.env.id}"
    results = []
    for axis in chosen:
        print(f"{axis.name}: starting {len(axis.values)} processes ...", flush=True)
        results.append(measure_axis(axis, config, repeats, seconds))
        console.print(axis_table(title, results[-1]))
        for note in axis_notes(results[-1]):
            print(note, flush=True)
    figures = {
        f"{result.axis.name}={label(point.value)}": point.env_steps_per_s
        for result in results
        for point in result.points
    }
    keys = {"axes": {result.axis.name: result.record() for result in results}}
    keys["cost_falls"] = {name: axis["cost_falls"] for name, axis in keys["axes"].items()}
    settings = {"preset": preset, **dataclasses.asdict(config)}
    record = harness.record(keys, figures, {**settings, "repeats": repeats, "seconds": seconds})
    harness.write_json(json_file, record)
    if png_file is not None:
        draw(results, title, png_file)
    return record


# What is measured.


def choose_axes(axes: Sequence[Axis], names: Sequence[str]) -> list[Axis]:
    """Return the axes of these names, all without a name.

    Raises:
      UsageError: An unknown name.
    """
    by_name = {axis.name: axis for axis in axes}
    for name in names:
        if name not in by_name:
            raise UsageError(f"axis {name!r} is unknown; use {', '.join(by_name)}")
    return [by_name[name] for name in names or by_name]


def all_axes(config: ExperimentConfig, devices: Sequence[jax.Device]) -> list[Axis]:
    """Return the axes of a configuration, whose own value is one of each but that of devices.

    Args:
      config: The configuration.
      devices: Those of this machine. A CPU is split into more, accelerators are used as they are.
    """
    on_cpu = devices[0].platform == "cpu"
    numbers = tuple(n for n in (1, 2, 4, 8) if n <= (4 if on_cpu else len(devices)))
    axes = [
        _whole_axis(config, "num_envs", 8, 16, 32, 64, 128, 256, 512),
        _whole_axis(config, "steps_per_cycle", 4, 8, 16, 32, 64, 128),
        _whole_axis(config, "num_inferencers_per_device", 1, 2, 3, 4),
        Axis(
            "devices",
            numbers,
            lambda config, n: with_devices(config, n, on_cpu),
            note=CPU_DEVICES_NOTE if on_cpu else "",
        ),
        _network_axis(config),
    ]
    return [axis for axis in axes if len(axis.values) > 1]


def _whole_axis(config: ExperimentConfig, field: str, *values: int) -> Axis:
    every = tuple(sorted({*values, getattr(config, field)}))
    name = field.replace("_", "-")
    return Axis(name, every, lambda c, value: dataclasses.replace(c, **{field: value}))


def with_devices(config: ExperimentConfig, num_devices: int, on_cpu: bool) -> ExperimentConfig:
    """Return the configuration on so many devices: half infer, half update, a single one both.

    Halves keep the update devices a power of two, by which the environments can be divided.
    """
    half = num_devices // 2
    return dataclasses.replace(
        config,
        num_cpu_devices=num_devices if on_cpu else None,
        inference_devices=tuple(range(half)) or (0,),
        update_devices=tuple(range(half, num_devices)),
    )


def _network_axis(config: ExperimentConfig) -> Axis:
    of_preset: Any = config.agent
    torso = of_preset.torso

    def with_torso(config: ExperimentConfig, **changes: Any) -> ExperimentConfig:
        agent: Any = config.agent
        agent = dataclasses.replace(agent, torso=dataclasses.replace(agent.torso, **changes))
        return dataclasses.replace(config, agent=agent)

    if torso.kind in IMAGE_TORSOS:
        features = tuple(sorted({128, 256, 512, 1024, torso.image_features}))
        return Axis("image-features", features, lambda c, n: with_torso(c, image_features=n), True)
    depth = len(torso.hidden_sizes) or 2
    sizes = {torso.hidden_sizes, *((size,) * depth for size in (32, 64, 128, 256, 512))}
    by_work = tuple(sorted(sizes, key=lambda size: sum(size)))
    return Axis("hidden-sizes", by_work, lambda c, s: with_torso(c, hidden_sizes=s), True)


def measure_axis(axis: Axis, config: ExperimentConfig, repeats: int, seconds: float) -> AxisResult:
    """Train every value in a process of its own, in turn.

    Raises:
      UsageError: None of them can run.
    """
    failed: dict[Value, str] = {}
    with contextlib.ExitStack() as stack:
        trials: dict[Value, Trial] = {}
        for value in axis.values:
            try:
                trials[value] = stack.enter_context(Trial(axis.change(config, value), seconds))
            except UsageError as error:
                failed[value] = str(error)
        trials = ready_trials(trials, failed)
        measurements = measure_in_turn(trials, repeats, failed)
    if not measurements:
        value, why = next(iter(failed.items()))
        raise UsageError(f"no value of {axis.name} can run here; {label(value)}: {why}")
    points = (Point(v, trials[v].parameters, tuple(m)) for v, m in measurements.items())
    return AxisResult(axis, tuple(points), failed)


# What it says.


def cost_rises(axis: Axis, points: Sequence[Point]) -> dict[Value, float]:
    """Return the points that cost more than a point with less work, beyond the tolerance.

    Costs are compared round by round with the point before that is cheapest by its median, so
    that a machine that drifts from round to round does not decide.

    Returns:
      By value, the median of the ratios of the costs.
    """
    rises: dict[Value, float] = {}
    cheapest: Point | None = None
    for point in points:
        if cheapest is not None:
            ratio = statistics.median(
                one / other
                for one, other in zip(_costs(axis, point), _costs(axis, cheapest), strict=True)
            )
            if ratio > 1 + TOLERANCE:
                rises[point.value] = ratio
        if cheapest is None or _cost(axis, point) < _cost(axis, cheapest):
            cheapest = point
    return rises


def _costs(axis: Axis, point: Point) -> list[float]:
    """Return microseconds per environment step (and parameter) of each round."""
    parameters = point.parameters if axis.per_parameter else 1
    return [1e6 / speed / parameters for speed in point.env_steps_per_s]


def _cost(axis: Axis, point: Point) -> float:
    return statistics.median(_costs(axis, point))


def label(value: Value) -> str:
    """Return a value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def axis_table(title: str, result: AxisResult) -> Table:
    """Return median and spread of each point, cost and memory."""
    table = Table(title=f"{title}, {result.axis.name}", title_justify="left")
    per_parameter = result.axis.per_parameter
    columns = (
        "",
        "env steps/s",
        "lowest",
        "highest",
        "us/step",
        *(("ps/step, parameter",) if per_parameter else ()),
        "peak RSS MB",
        "device MB",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for point in result.points:
        speeds = point.env_steps_per_s
        table.add_row(
            label(point.value),
            *(f"{x:,.0f}" for x in (statistics.median(speeds), min(speeds), max(speeds))),
            f"{point.us_per_env_step:,.2f}",
            *((f"{1e6 * _cost(result.axis, point):,.1f}",) if per_parameter else ()),
            f"{point.rss_mb:,.0f}",
            f"{point.device_mb:,.1f}",
        )
    return table


def axis_notes(result: AxisResult) -> list[str]:
    """Say whether the cost fell, and what could not run."""
    offenders = result.offenders()
    what = "cost per env step" + (" and parameter" if result.axis.per_parameter else "")
    notes = [f"cost_falls: {str(not offenders).lower()} ({what}, within {TOLERANCE:.0%})"]
    notes += [
        f"  {result.axis.name} {label(value)}: {ratio:.2f} times the lowest cost before it"
        for value, ratio in offenders.items()
    ]
    notes += [
        f"  {result.axis.name} {label(v)} cannot run: {why}" for v, why in result.failed.items()
    ]
    return [*notes, result.axis.note, ""] if result.axis.note else [*notes, ""]


def draw(results: Sequence[AxisResult], title: str, png_file: str) -> None:
    """Draw one panel per axis: speed with its spread, and memory."""
    # The object interface draws without a display and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, result in enumerate(results, 1):
        _draw_axis(figure.add_subplot(rows, columns, number), result)
    figure.savefig(png_file, dpi=150)


def _draw_axis(axes: Any, result: AxisResult) -> None:
    places = range(len(result.points))
    speeds = [point.env_steps_per_s for point in result.points]
    axes.fill_between(places, [*map(min, speeds)], [*map(max, speeds)], color="#2a78b5", alpha=0.2)
    medians = [statistics.median(speed) for speed in speeds]
    axes.plot(places, medians, color="#2a78b5", marker="o", markersize=4)
    axes.set_xticks(places, [label(point.value) for point in result.points])
    axes.set_xlabel(result.axis.name)
    axes.set_ylabel("env steps/s", color="#2a78b5")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    memory = axes.twinx()
    rss = [point.rss_mb for point in result.points]
    memory.plot(places, rss, color="#c05621", marker="s", markersize=3, linestyle="--")
    memory.set_ylabel("resident memory, MB", color="#c05621")
    memory.set_ylim(bottom=0)
    for side in (axes, memory):
        side.spines["top"].set_visible(False)

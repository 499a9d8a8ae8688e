"""``bench scale``: speed and memory as the work grows, one axis at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from sebulba.agents.configs import TorsoConfig
from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError
from sebulba.loops.devices import local_devices
from sebulba.metrics.figures import BLUE, picture
from sebulba.runs.jax_setup import configure_jax
from sebulba.tools.bench import harness
from sebulba.tools.bench.trial import Series, Trial, measure_in_turn
from sebulba.tools.bench.worker import WorkerError

TOLERANCE = 0.10
"""A cost per step that rises by less than this share counts as level: machines are noisy."""

CPU_DEVICES_NOTE = "  the devices of a CPU share its cores: more devices do not add any"

Value = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Axis:
    """A setting, and the values that it takes."""

    name: str
    """Name on the command line."""
    values: tuple[Value, ...]
    """Values, in the order in which the work grows."""
    change: Callable[[ExperimentConfig, Any], ExperimentConfig]
    """Returns a configuration with another value."""
    per_parameter: bool = False
    """The cost that must not rise is that of a step and a parameter of the networks."""
    note: str = ""
    """What to know when reading its figures."""


@dataclasses.dataclass(frozen=True)
class AxisResult:
    """An axis, measured."""

    axis: Axis
    """The axis."""
    points: Mapping[Value, Series]
    """Measurements of the values that could be measured, in turn."""
    failed: Mapping[Value, str]
    """The values that cannot run here, and why."""

    @functools.cached_property
    def offenders(self) -> dict[Value, float]:
        """``cost_rises`` of the points."""
        return cost_rises(self.axis, self.points)

    def record(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        return {
            "points": {label(value): record_of(series) for value, series in self.points.items()},
            "cost_falls": not self.offenders,
            "offenders": {label(value): ratio for value, ratio in self.offenders.items()},
            "failed": {label(value): why for value, why in self.failed.items()},
        }


def record_of(series: Series) -> dict[str, Any]:
    """Return the figures of a value as JSON."""
    speeds = series.speeds
    return {
        "env_steps_per_s": {"median": series.speed, "lowest": min(speeds), "highest": max(speeds)},
        "us_per_env_step": series.us_per_env_step,
        "rss_mb": series.rss_mb,
        "device_mb": series.device_mb,
        "parameters": series.parameters,
    }


def run(
    config: ExperimentConfig,
    *,
    preset: str,
    repeats: int = 5,
    seconds: float = 1.0,
    axes: Sequence[str] = (),
    json_file: str | None = None,
    png_file: str | None = None,
) -> dict:
    """Measure every axis, print tables, write JSON and a picture.

    The arguments are the options of the command, see ``commands/bench.py``.

    Raises:
      UsageError: An axis is unknown, or no value of one can run.
    """
    configure_jax(config.platform, None, "off")
    config = harness.with_inferencers(config)
    chosen = choose_axes(all_axes(config, local_devices()), axes)
    title = f"bench scale: {preset}"
    results = []
    for axis in chosen:
        print(f"{axis.name}: starting {len(axis.values)} processes ...", flush=True)
        results.append(measure_axis(axis, config, repeats, seconds))
        print_axis(title, results[-1])
    figures = {
        f"{result.axis.name}={label(value)}": series.speeds
        for result in results
        for value, series in result.points.items()
    }
    keys = {"axes": {result.axis.name: result.record() for result in results}}
    keys["cost_falls"] = {name: axis["cost_falls"] for name, axis in keys["axes"].items()}
    settings = {"preset": preset, **dataclasses.asdict(config)}
    record = harness.record(keys, figures, {**settings, "repeats": repeats, "seconds": seconds})
    harness.write_json(json_file, record)
    if png_file is not None:
        draw(results, title, png_file)
    return record


def choose_axes(axes: Sequence[Axis], names: Sequence[str]) -> list[Axis]:
    """Return the axes of these names, or all axes if there is no name.

    Raises:
      UsageError: A name is unknown.
    """
    by_name = {axis.name: axis for axis in axes}
    for name in names:
        if name not in by_name:
            raise UsageError(f"axis {name!r} is unknown; use {', '.join(by_name)}")
    return [by_name[name] for name in names or by_name]


def all_axes(config: ExperimentConfig, devices: Sequence[jax.Device]) -> list[Axis]:
    """Return the axes of a configuration; its own value is on each of them, but that of devices."""
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
        *_network_axes(config),
    ]
    return [axis for axis in axes if len(axis.values) > 1]


def _whole_axis(config: ExperimentConfig, field: str, *values: int) -> Axis:
    every = tuple(sorted({*values, getattr(config, field)} - {None}))
    name = field.replace("_", "-")
    return Axis(name, every, lambda c, value: dataclasses.replace(c, **{field: value}))


def with_devices(config: ExperimentConfig, num_devices: int, on_cpu: bool) -> ExperimentConfig:
    """Return the configuration on so many devices: half infer, half update; a single one does both.

    With halves the number of update devices, by which the environments are divided, remains a power
    of two.
    """
    half = num_devices // 2
    return dataclasses.replace(
        config,
        num_cpu_devices=num_devices if on_cpu else None,
        inference_devices=tuple(range(half)) or (0,),
        update_devices=tuple(range(half, num_devices)),
    )


def _network_axes(config: ExperimentConfig) -> list[Axis]:
    torso = getattr(config.agent, "torso", None)
    if not isinstance(torso, TorsoConfig) or torso.is_own:
        return []

    def with_torso(config: ExperimentConfig, **changes: Any) -> ExperimentConfig:
        agent: Any = config.agent
        agent = dataclasses.replace(agent, torso=dataclasses.replace(agent.torso, **changes))
        return dataclasses.replace(config, agent=agent)

    if torso.kind not in ("auto", "mlp"):
        features = tuple(sorted({128, 256, 512, 1024, torso.image_features}))
        if torso.kind in ("small_cnn", "board_cnn"):  # which have at most 128
            features = tuple(sorted({16, 32, 64, 128, min(128, torso.image_features)}))
        return [
            Axis("image-features", features, lambda c, n: with_torso(c, image_features=n), True)
        ]
    depth = len(torso.hidden_sizes) or 2
    sizes = {torso.hidden_sizes, *((size,) * depth for size in (32, 64, 128, 256, 512))}
    by_work = tuple(sorted(sizes, key=lambda size: sum(size)))
    return [Axis("hidden-sizes", by_work, lambda c, s: with_torso(c, hidden_sizes=s), True)]


def measure_axis(axis: Axis, config: ExperimentConfig, repeats: int, seconds: float) -> AxisResult:
    """Train every value in a process of its own, in turn.

    Raises:
      UsageError: None of the values can run.
    """
    failed: dict[Value, str] = {}
    trials: dict[Value, Trial] = {}
    with contextlib.ExitStack() as stack:
        for value in axis.values:
            try:
                trials[value] = stack.enter_context(Trial(axis.change(config, value), seconds))
            except UsageError as error:
                failed[value] = str(error)
        for value, trial in list(trials.items()):
            try:
                trial.ready()
            except WorkerError as error:
                failed[value] = str(error)
                del trials[value]
        measured = measure_in_turn(trials, repeats, failed)
    if not measured:
        value, why = next(iter(failed.items()))
        raise UsageError(f"no value of {axis.name} can run on this machine; {label(value)}: {why}")
    return AxisResult(axis, measured, failed)


def cost_rises(axis: Axis, points: Mapping[Value, Series]) -> dict[Value, float]:
    """Return the points that cost more than a point with less work, beyond the tolerance.

    Costs are compared with the point before that is cheapest by its median, and within a round, so
    that a machine whose speed drifts from round to round does not decide.

    Returns:
      By value, the median of the ratios of the costs.
    """

    rises: dict[Value, float] = {}
    cheapest, *others = points.values()
    for value, series in zip(list(points)[1:], others, strict=True):
        fewer = cheapest.parameters / series.parameters if axis.per_parameter else 1.0
        ratio = cheapest.gain_over(series) * fewer
        if ratio > 1 + TOLERANCE:
            rises[value] = ratio
        if series.us_per_env_step * fewer < cheapest.us_per_env_step:
            cheapest = series
    return rises


def label(value: Value) -> str:
    """Return a value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def print_axis(title: str, result: AxisResult) -> None:
    """Print the speed of each point with its spread, its cost and memory, and the notes."""
    per_parameter = result.axis.per_parameter
    columns = ["env steps/s", "lowest", "highest", "us/step"]
    columns += ["ps/step, parameter"] * per_parameter + ["peak RSS MB", "device MB"]
    rows = {}
    for value, series in result.points.items():
        cost_us = series.us_per_env_step
        rows[label(value)] = [
            *(f"{x:,.0f}" for x in (series.speed, min(series.speeds), max(series.speeds))),
            f"{cost_us:,.2f}",
            *[f"{1e6 * cost_us / series.parameters:,.1f}"] * per_parameter,
            f"{series.rss_mb:,.0f}",
            f"{series.device_mb:,.1f}",
        ]
    harness.print_rows(f"{title}, {result.axis.name}", columns, rows)
    harness.print_notes(axis_notes(result))


def axis_notes(result: AxisResult) -> list[str]:
    """Say whether the cost fell, and what could not run."""
    what = "cost per env step" + (" and parameter" if result.axis.per_parameter else "")
    notes = [f"cost_falls: {str(not result.offenders).lower()} ({what}, within {TOLERANCE:.0%})"]
    notes += [
        f"  {result.axis.name} {label(value)}: {ratio:.2f} times the lowest cost before it"
        for value, ratio in result.offenders.items()
    ]
    notes += [
        f"  {result.axis.name} {label(v)} cannot run: {why}" for v, why in result.failed.items()
    ]
    return [*notes, result.axis.note, ""] if result.axis.note else [*notes, ""]


def draw(results: Sequence[AxisResult], title: str, png_file: str) -> None:
    """Draw one panel per axis: speed with its spread, and memory."""
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    with picture(png_file, 5 * columns, 3.6 * rows) as figure:
        figure.suptitle(title)
        for number, result in enumerate(results, 1):
            _draw_axis(figure.add_subplot(rows, columns, number), result)


def _draw_axis(axes: Any, result: AxisResult) -> None:
    places = range(len(result.points))
    all_series = result.points.values()
    lowest, highest = ([edge(one.speeds) for one in all_series] for edge in (min, max))
    axes.fill_between(places, lowest, highest, color=BLUE, alpha=0.2)
    axes.plot(places, [one.speed for one in all_series], color=BLUE, marker="o", markersize=4)
    axes.set_xticks(places, [label(value) for value in result.points])
    axes.set_xlabel(result.axis.name)
    axes.set_ylabel("env steps/s", color=BLUE)
    axes.grid(alpha=0.25)
    memory, orange = axes.twinx(), "#c05621"
    rss = [one.rss_mb for one in all_series]
    memory.plot(places, rss, color=orange, marker="s", markersize=3, linestyle="--")
    memory.set_ylabel("resident memory, MB", color=orange)
    for side in (axes, memory):
        side.set_ylim(bottom=0)
        side.spines["top"].set_visible(False)

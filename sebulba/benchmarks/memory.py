"""``bench memory``: does a run's memory grow, and is it what queue, staging and trajectories imply.

The training is that of ``sebulba train``, writers included, watched from a thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sebulba.agent import Agent
from sebulba.benchmarks import harness
from sebulba.benchmarks.memory_use import MB, allocator_mb, device_bytes, rss_bytes
from sebulba.commands import experiment
from sebulba.commands.run_folder import RunFolder
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
from sebulba.errors import UsageError
from sebulba.loops.gymnasium_loop import GymnasiumLoop
from sebulba.metrics.writers import CompositeWriter, JsonLinesWriter, TensorBoardWriter
from sebulba.types import PyTree, RunSpec

SETTLE_S = 60.0
"""Compiling, and filling queue and allocator; the slope is taken after it."""
ENDLESS_CYCLES = 1_000_000_000
WINDOW_S = 15.0
"""Samples are reduced to windows of this length. An update takes and frees more than what stays,
every second or so; the median of many samples does not see that rhythm."""
PROGRESS_S = 30.0


@dataclasses.dataclass(frozen=True)
class Sample:
    """Memory at one moment."""

    minute: float
    """Since the run began."""
    rss_mb: float
    """Resident memory of the process, 10^6 bytes."""
    device_mb: float
    """In use on all devices, or, where the backend does not count it, of all living arrays; on a
    CPU a part of the resident memory."""
    allocated_mb: float | None
    """Given out by glibc's allocator and not returned; None on other systems."""
    kept_mb: float | None
    """Returned to glibc's allocator, which has not returned it to the system (nor need all of it be
    resident); None on other systems."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The samples of some seconds."""

    minute: float
    """Of the middle sample."""
    rss_mb: float
    """Median."""
    rss_lowest_mb: float
    rss_highest_mb: float
    device_mb: float
    """The highest: what has to be within the bound."""
    allocated_mb: float | None
    """Mean: what comes and goes is there for a steady share of the time."""
    kept_mb: float | None
    """Median."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of what a run holds several of."""

    trajectory: int
    """One, with its row T."""
    row: int
    """Its environment step at one time."""
    step_state: int
    """One, of an Inferencer."""
    networks: int
    acting_networks: int
    opt: int
    experience: int


def run(
    config: ExperimentConfig,
    *,
    preset: str,
    minutes: float = 10.0,
    interval_s: float = 0.1,
    window_s: float = WINDOW_S,
    settle_s: float = SETTLE_S,
    json_file: str | None = None,
    png_file: str | None = None,
) -> dict:
    """Train for a while, watch memory, print a table, write JSON and a picture.

    Args:
      config: What to train; how long is said by ``minutes``.
      preset: Its name.
      minutes: Of training.
      interval_s: Seconds between samples.
      window_s: Seconds of samples that make one point.
      settle_s: Seconds at the beginning that do not count.
      json_file: Where to write, or None.
      png_file: Memory over time, or None.

    Returns:
      The record that was written.

    Raises:
      UsageError: Too short to see a slope.
    """
    if 60 * minutes < settle_s + 3 * window_s:
        raise UsageError(
            f"minutes={minutes:g} must leave three windows of {window_s:g} s after the first "
            f"{settle_s:g} s; use {math.ceil((settle_s + 3 * window_s) / 60)} or more"
        )
    experiment.configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
    samples, bound = watch_training(config, 60 * minutes, interval_s)
    windows = windows_of(samples, window_s)
    settled = [window for window in windows if 60 * window.minute >= settle_s]
    keys = keys_of(settled, bound)
    print_result(preset, settled, keys, bound)
    columns = [field.name for field in dataclasses.fields(Window)]
    result = harness.record(
        keys,
        {name: [getattr(window, name) for window in windows] for name in columns},
        {
            "preset": preset,
            "minutes": minutes,
            "interval_s": interval_s,
            "window_s": window_s,
            "settle_s": settle_s,
            **dataclasses.asdict(config),
        },
    )
    result["bound_mb"] = {part: num_bytes / MB for part, num_bytes in bound.items()}
    harness.write_json(json_file, result)
    if png_file is not None:
        draw(result, png_file)
    return result


def windows_of(samples: Sequence[Sample], window_s: float) -> list[Window]:
    """Reduce samples to windows; a last one that is not full is left out."""
    numbers = [int(60 * sample.minute / window_s) for sample in samples]
    return [
        _window([sample for sample, its in zip(samples, numbers, strict=True) if its == number])
        for number in sorted(set(numbers))
        if number < numbers[-1]
    ]


def _window(samples: Sequence[Sample]) -> Window:
    rss = [sample.rss_mb for sample in samples]
    allocated = [sample.allocated_mb for sample in samples if sample.allocated_mb is not None]
    kept = [sample.kept_mb for sample in samples if sample.kept_mb is not None]
    return Window(
        minute=statistics.median(sample.minute for sample in samples),
        rss_mb=statistics.median(rss),
        rss_lowest_mb=min(rss),
        rss_highest_mb=max(rss),
        device_mb=max(sample.device_mb for sample in samples),
        allocated_mb=statistics.fmean(allocated) if allocated else None,
        kept_mb=statistics.median(kept) if kept else None,
    )


def keys_of(settled: Sequence[Window], bound: Mapping[str, int]) -> dict[str, Any]:
    """Return the promised key and its companions.

    Args:
      settled: The windows that count.
      bound: As ``bound_bytes`` returned it.
    """
    minutes = [window.minute for window in settled]

    def slope(name: str) -> float | None:
        values = [getattr(window, name) for window in settled]
        return None if None in values else theil_sen(minutes, values)

    rss_mb = [window.rss_mb for window in settled]
    device_mb = max(window.device_mb for window in settled)
    bound_mb = sum(bound.values()) / MB
    return {
        "rss_slope_mb_per_min": theil_sen(minutes, rss_mb),
        "rss_slope_error_mb_per_min": slope_error(minutes, rss_mb),
        "rss_slope_least_squares_mb_per_min": float(np.polyfit(minutes, rss_mb, 1)[0]),
        "allocated_slope_mb_per_min": slope("allocated_mb"),
        "device_slope_mb_per_min": slope("device_mb"),
        "rss_highest_mb": max(window.rss_highest_mb for window in settled),
        "device_highest_mb": device_mb,
        "device_bound_mb": bound_mb,
        "device_is_within_bound": device_mb <= bound_mb,
    }


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of points (Theil 1950, Sen 1968).

    Resident memory moves in jumps, as the allocator takes and returns whole arenas. One jump near
    an end tilts a least-squares line; this median stands until 29 % of the points are displaced.
    """
    first, second = np.triu_indices(len(x), 1)
    x_array, y_array = np.asarray(x), np.asarray(y)
    return float(np.median((y_array[second] - y_array[first]) / (x_array[second] - x_array[first])))


def slope_error(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the standard error of a least-squares slope, from how ``y`` scatters about it.

    Tells whether a slope can be told from none at all.
    """
    residuals = np.asarray(y) - np.polyval(np.polyfit(x, y, 1), x)
    return float(np.sqrt((residuals**2).sum() / (len(x) - 2)) / (np.std(x) * len(x) ** 0.5))


# The bound.


def bound_bytes(
    sizes: Sizes,
    *,
    num_inferencers: int,
    num_inference_devices: int,
    num_update_devices: int,
    queue_size: int,
) -> dict[str, int]:
    """Return the most bytes of arrays that a run may hold at a time, by what holds them.

    What a program needs while it runs (activations, gradients) is not in arrays and not counted.

    Args:
      sizes: Of one of each.
      num_inferencers: Each fills one trajectory and hands one over.
      num_inference_devices: Each has networks staged.
      num_update_devices: Each has the networks and the optimizer's state.
      queue_size: Trajectories that may wait.
    """
    handed_over = sizes.trajectory + 2 * sizes.step_state  # with initial and final step state
    return {
        "trajectories being filled": num_inferencers * (sizes.trajectory + 2 * sizes.row),
        "trajectories being handed over": num_inferencers * handed_over,
        "trajectories waiting": queue_size * handed_over,
        "trajectory being consumed": handed_over,
        "step states of Inferencers": 3 * num_inferencers * sizes.step_state,
        # The state that run() was given stays its caller's, hence all twice.
        "experience": 2 * sizes.experience,
        "networks and optimizer": 2 * num_update_devices * (sizes.networks + sizes.opt),
        # Staged, taken by each Inferencer, and being published.
        "acting networks": (num_inference_devices + num_inferencers + num_update_devices)
        * sizes.acting_networks,
    }


def sizes_of(agent: Agent, run_spec: RunSpec) -> Sizes:
    """Return the bytes of what a run of this agent holds; nothing is computed."""
    key = jax.random.key(0)
    state = jax.eval_shape(lambda key: agent.new_state(key, run_spec), key)
    acting = jax.eval_shape(agent.acting_networks, state.networks, state.experience)
    trajectory = jax.eval_shape(lambda acting: agent.empty_trajectory(acting, run_spec), acting)
    return Sizes(
        trajectory=_bytes(trajectory),
        row=_bytes(trajectory.env_step) // (run_spec.steps_per_cycle + 1),
        step_state=_bytes(state.step[0]),
        networks=_bytes(state.networks),
        acting_networks=_bytes(acting),
        opt=_bytes(state.opt),
        experience=_bytes(state.experience),
    )


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# Training and watching.


def watch_training(
    config: ExperimentConfig, seconds: float, interval_s: float
) -> tuple[list[Sample], dict[str, int]]:
    """Train as ``sebulba train`` does, in a folder that is removed, and sample its memory.

    Returns:
      The samples, and the bound of ``bound_bytes``.
    """
    factory = make_env_factory(config.env.id, **config.env.factory_arguments())
    agent = experiment.build_agent(config, env_spec(factory))
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = RunFolder(Path(temporary))
        writers = CompositeWriter(
            JsonLinesWriter(folder.metrics), TensorBoardWriter(folder.tensorboard)
        )
        loop = stack.enter_context(experiment.build_loop(config, factory, agent, writers))
        stack.enter_context(contextlib.closing(writers))
        run_spec = RunSpec(
            config.num_envs, loop.num_inferencers, config.steps_per_cycle, len(loop.update_devices)
        )
        state = loop.new_state(config.seed, config.steps_per_cycle)
        ended = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as watcher:
            samples = watcher.submit(watch, loop, seconds, interval_s, ended)
            try:
                # In lockstep a multiple of the number of Inferencers.
                loop.run(state, ENDLESS_CYCLES * loop.num_inferencers, config.steps_per_cycle)
            finally:
                ended.set()
        bound = bound_bytes(
            sizes_of(agent, run_spec),
            num_inferencers=loop.num_inferencers,
            num_inference_devices=len(loop.inference_devices),
            num_update_devices=len(loop.update_devices),
            queue_size=config.queue_size,
        )
        return samples.result(), bound


def watch(
    loop: GymnasiumLoop, seconds: float, interval_s: float, ended: threading.Event
) -> list[Sample]:
    """Sample memory, once at least, until ``seconds`` are over or the run ends; then stop it."""
    samples: list[Sample] = []
    began, said, elapsed = time.perf_counter(), 0.0, 0.0
    try:
        while elapsed < seconds and not ended.is_set():
            samples.append(
                Sample(elapsed / 60, rss_bytes() / MB, device_bytes() / MB, *allocator_mb())
            )
            if elapsed >= said + PROGRESS_S:
                said = elapsed
                print(f"{elapsed / 60:5.1f} min: {samples[-1].rss_mb:,.0f} MB resident", flush=True)
            ended.wait(min(interval_s, seconds - elapsed))
            elapsed = time.perf_counter() - began
    finally:
        loop.stop()
    return samples


# Showing.


def print_result(
    preset: str, settled: Sequence[Window], keys: Mapping[str, Any], bound: Mapping[str, int]
) -> None:
    """Print what was seen, and what the bound consists of."""
    names = {
        "resident memory (median)": "rss_mb",
        "resident memory (highest)": "rss_highest_mb",
        "arrays on devices (highest)": "device_mb",
        "given out by glibc (mean)": "allocated_mb",
        "kept by glibc (median)": "kept_mb",
    }
    figures = {
        title: [getattr(sample, name) for sample in settled]
        for title, name in names.items()
        if getattr(settled[0], name) is not None
    }
    slope, is_within = keys["rss_slope_mb_per_min"], keys["device_is_within_bound"]
    harness.print_table(
        f"bench memory: sebulba train {preset}, {len(settled)} windows after the start",
        "MB",
        figures,
        [
            f"rss_slope_mb_per_min: {slope:.2f} ± {keys['rss_slope_error_mb_per_min']:.2f} (median "
            "over all pairs of windows; a longer run is surer)",
            f"arrays on devices: at most {keys['device_highest_mb']:.1f} MB, "
            f"{'within' if is_within else 'ABOVE'} the bound of {keys['device_bound_mb']:.1f} MB",
        ],
    )
    rows = {part: [harness.number(num_bytes / MB)] for part, num_bytes in bound.items()}
    harness.print_rows("what the bound consists of", ["MB"], rows)


def draw(result: Mapping[str, Any], picture: str | Path) -> None:
    """Draw memory over time, with the bound, from a record of this benchmark."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures, minutes = result["figures"], result["figures"]["minute"]
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    lowest, highest = figures["rss_lowest_mb"], figures["rss_highest_mb"]
    upper.fill_between(minutes, lowest, highest, color="#2a78b5", alpha=0.15, linewidth=0)
    upper.plot(minutes, figures["rss_mb"], color="#2a78b5", label="resident")
    if None not in figures["allocated_mb"]:
        given_out = figures["allocated_mb"]
        upper.plot(minutes, given_out, color="#7a7a7a", linewidth=1, label="given out by glibc")
    slope = result["rss_slope_mb_per_min"]
    upper.set(ylabel="MB", title=f"{result['config']['preset']}: {slope:+.2f} MB/min")
    lower.plot(minutes, figures["device_mb"], color="#2a78b5", label="arrays")
    lower.axhline(result["device_bound_mb"], color="#b5452a", linewidth=1, label="bound")
    lower.set(xlabel="minutes", ylabel="MB on devices")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.axvspan(0, result["config"]["settle_s"] / 60, color="black", alpha=0.06, linewidth=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(picture, dpi=100)

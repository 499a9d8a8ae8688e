"""``bench memory``: whether a run's memory grows, and whether its arrays are those it has to hold.

Trains as ``sebulba train`` does, writers included, while a thread samples the memory in use.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from sebulba.agent import Agent
from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError
from sebulba.loops.gymnasium_loop import GymnasiumLoop
from sebulba.metrics.figures import BLUE, GREY, RED, open_frame, picture
from sebulba.metrics.writers import CompositeWriter, JsonLinesWriter, TensorBoardWriter
from sebulba.runs.folder import RunFolder
from sebulba.runs.jax_setup import set_up_jax
from sebulba.tools.bench import harness
from sebulba.tools.bench.memory_use import MB, allocator_mb, device_bytes, rss_bytes
from sebulba.types import PyTree, RunSpec

SETTLE_S = 60.0
"""Seconds at the beginning that do not count: they compile, and fill queue and allocator."""
ENDLESS_CYCLES = 1_000_000_000
"""More cycles than a benchmark runs; the watching thread stops the loop."""
WINDOW_S = 15.0
"""Seconds of samples that make one point. Every second or so an update takes and frees more memory
than what stays; the median over many samples hides that rhythm."""
PROGRESS_S = 30.0
"""Seconds between printed lines."""


class Sample(NamedTuple):
    """Memory at one moment, in 10^6 bytes."""

    minute: float
    """Minutes since the run began."""
    rss_mb: float
    """Resident memory of the process."""
    device_mb: float
    """Memory in use on all devices or, if the backend does not count it, of all living arrays; on a
    CPU it is part of the resident memory."""
    allocated_mb: float | None
    """Memory that glibc's allocator has given out; None on other systems."""
    kept_mb: float | None
    """Memory returned to glibc's allocator but not to the system, resident or not; None on other
    systems."""


WINDOW: dict[str, tuple[str, Callable]] = {
    "minute": ("minute", np.median),
    "rss_mb": ("rss_mb", np.median),
    "device_mb": ("device_mb", np.max),  # which the bound is for
    "allocated_mb": ("allocated_mb", np.mean),  # what comes and goes takes a steady share of time
    "kept_mb": ("kept_mb", np.median),
    "rss_lowest_mb": ("rss_mb", np.min),
    "rss_highest_mb": ("rss_mb", np.max),
}
"""What the samples of some seconds become: field of ``Sample`` and its reduction, by name."""
Windows = dict[str, list[Any]]
"""A value for each window, by the names of ``WINDOW``; None where samples have None."""


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

    The arguments are options of the command, see ``commands/bench.py``, and the seconds between
    samples, those of a point, and those at the beginning that do not count.

    Raises:
      UsageError: ``minutes`` is too short for a slope.
    """
    if 60 * minutes < settle_s + 3 * window_s:
        raise UsageError(
            f"minutes={minutes:g} must leave three windows of {window_s:g} s after the first "
            f"{settle_s:g} s; use {math.ceil((settle_s + 3 * window_s) / 60)} or more"
        )
    config = set_up_jax(config)
    samples, bound = watch_training(config, 60 * minutes, interval_s)
    figures = windows_of(samples, window_s)
    is_settled = [60 * minute >= settle_s for minute in figures["minute"]]
    settled = {name: list(compress(values, is_settled)) for name, values in figures.items()}
    keys = keys_of(settled, bound)
    print_result(preset, settled, keys, bound)
    times = {"interval_s": interval_s, "window_s": window_s, "settle_s": settle_s}
    settings = {"preset": preset, "minutes": minutes, **times, **dataclasses.asdict(config)}
    keys["bound_mb"] = {part: num_bytes / MB for part, num_bytes in bound.items()}
    result = harness.record(keys, figures, settings)
    harness.write_json(json_file, result)
    if png_file is not None:
        draw(result, png_file)
    return result


def windows_of(samples: Sequence[Sample], window_s: float) -> Windows:
    """Reduce samples to windows; a last window that is not full is left out."""
    groups = groupby(samples, lambda sample: int(60 * sample.minute / window_s))
    tables = [np.array(list(its_samples), float) for _, its_samples in groups][:-1]

    def column(field: str, reduce: Callable) -> list[float | None]:
        values = [reduce(table[:, Sample._fields.index(field)]) for table in tables]
        return [None if np.isnan(value) else float(value) for value in values]

    return {name: column(*how) for name, how in WINDOW.items()}


def keys_of(settled: Windows, bound: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys of the JSON."""
    minutes, rss_mb, device_mb = (settled[name] for name in ("minute", "rss_mb", "device_mb"))
    allocated_mb, bound_mb = settled["allocated_mb"], sum(bound.values()) / MB
    return {
        "rss_slope_mb_per_min": theil_sen(minutes, rss_mb),
        "rss_slope_error_mb_per_min": slope_error(minutes, rss_mb),
        "rss_slope_least_squares_mb_per_min": float(stats.linregress(minutes, rss_mb).slope),
        "allocated_slope_mb_per_min": None
        if None in allocated_mb
        else theil_sen(minutes, allocated_mb),
        "device_slope_mb_per_min": theil_sen(minutes, device_mb),
        "rss_highest_mb": max(settled["rss_highest_mb"]),
        "device_highest_mb": max(device_mb),
        "device_bound_mb": bound_mb,
        "device_is_within_bound": max(device_mb) <= bound_mb,
    }


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of points (Theil 1950, Sen 1968).

    Resident memory moves in jumps, because the allocator takes and returns whole arenas. One jump
    near an end tilts a least-squares line; this median holds until 29 % of the points are off.
    """
    return float(stats.theilslopes(y, x).slope)


def slope_error(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the standard error of a least-squares slope, from how ``y`` scatters about the line.

    A slope that is not larger than this cannot be told from none.
    """
    return float(stats.linregress(x, y).stderr)


def bound_bytes(
    sizes: Mapping[str, int],
    *,
    num_inferencers: int,
    num_inference_devices: int,
    num_update_devices: int,
    queue_size: int,
) -> dict[str, int]:
    """Return the most bytes of arrays that a run may hold at a time, by what holds them.

    What a program needs while it runs (activations, gradients) is not in arrays and not counted.
    """
    # Handed over together with the initial and the final step state.
    handed_over = sizes["trajectory"] + 2 * sizes["step_state"]
    # Staged, held by each Inferencer, and being published.
    num_acting_networks = num_inference_devices + num_inferencers + num_update_devices
    return {
        "trajectories being filled": num_inferencers * (sizes["trajectory"] + 2 * sizes["row"]),
        "trajectories being handed over": num_inferencers * handed_over,
        "trajectories waiting": queue_size * handed_over,
        "trajectory being consumed": handed_over,
        "step states of Inferencers": 3 * num_inferencers * sizes["step_state"],
        # As a run begins, the state that it is given and its own copy both exist.
        "experience": 2 * sizes["experience"],
        "networks and optimizer": 2 * num_update_devices * (sizes["networks"] + sizes["opt"]),
        "acting networks": num_acting_networks * sizes["acting_networks"],
    }


def sizes_of(agent: Agent, run_spec: RunSpec) -> dict[str, int]:
    """Return the bytes of one of each thing that a run holds, without computing any of them.

    ``"trajectory"`` includes the bootstrap row; ``"row"`` is the environment step of one time.
    """
    agent, key = agent.for_run(run_spec), jax.random.key(0)
    state = jax.eval_shape(lambda key: agent.new_state(key, run_spec), key)
    acting = jax.eval_shape(agent.staged, state.networks, state.experience)
    trajectory = jax.eval_shape(lambda acting: agent.empty_trajectory(acting, run_spec), acting)
    return {
        "trajectory": _bytes(trajectory),
        "row": _bytes(trajectory.env_step) // (run_spec.steps_per_cycle + 1),
        "step_state": _bytes(state.step[0]),
        "networks": _bytes(state.networks),
        "acting_networks": _bytes(acting),
        "opt": _bytes(state.opt),
        "experience": _bytes(state.experience),
    }


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def watch_training(
    config: ExperimentConfig, seconds: float, interval_s: float
) -> tuple[list[Sample], dict[str, int]]:
    """Train as ``sebulba train`` does, in a folder that is removed, and sample the memory.

    Returns:
      The samples, and the bound of ``bound_bytes``.
    """
    factory, agent = harness.env_and_agent(config)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = RunFolder(Path(temporary))
        writers = CompositeWriter(
            JsonLinesWriter(folder.metrics), TensorBoardWriter(folder.tensorboard)
        )
        loop = stack.enter_context(
            GymnasiumLoop(factory, agent, config.num_envs, options=config, metric_writer=writers)
        )
        stack.enter_context(contextlib.closing(writers))
        run_spec = loop.run_spec(config.steps_per_cycle)
        state = loop.new_state(config.seed, config.steps_per_cycle)
        ended = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as watcher:
            samples = watcher.submit(watch, loop, seconds, interval_s, ended)
            try:
                # Lockstep requires a multiple of the number of Inferencers.
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
    """Sample memory, at least once, until ``seconds`` are over or the run ends; then stop it."""
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


def print_result(
    preset: str, settled: Windows, keys: Mapping[str, Any], bound: Mapping[str, int]
) -> None:
    """Print the memory in use, and what the bound consists of."""
    titles = {
        "rss_mb": "resident memory (median)",
        "rss_highest_mb": "resident memory (highest)",
        "device_mb": "arrays on devices (highest)",
        "allocated_mb": "given out by glibc (mean)",
        "kept_mb": "kept by glibc (median)",
    }
    figures = {title: settled[name] for name, title in titles.items() if None not in settled[name]}
    slope, is_within = keys["rss_slope_mb_per_min"], keys["device_is_within_bound"]
    harness.print_table(
        f"bench memory: sebulba train {preset}, {len(settled['minute'])} windows after the start",
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


def draw(result: Mapping[str, Any], png_file: str) -> None:
    """Draw memory over time, with the bound, from a record of this benchmark."""
    figures, minutes = result["figures"], result["figures"]["minute"]
    lowest, highest = figures["rss_lowest_mb"], figures["rss_highest_mb"]
    slope = result["rss_slope_mb_per_min"]
    with picture(png_file, 7, 5, dots_per_inch=100) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        upper.fill_between(minutes, lowest, highest, color=BLUE, alpha=0.15, linewidth=0)
        upper.plot(minutes, figures["rss_mb"], color=BLUE, label="resident")
        if None not in figures["allocated_mb"]:
            given_out = figures["allocated_mb"]
            upper.plot(minutes, given_out, color=GREY, linewidth=1, label="given out by glibc")
        upper.set(ylabel="MB", title=f"{result['config']['preset']}: {slope:+.2f} MB/min")
        lower.plot(minutes, figures["device_mb"], color=BLUE, label="arrays")
        lower.axhline(result["device_bound_mb"], color=RED, linewidth=1, label="bound")
        lower.set(xlabel="minutes", ylabel="MB on devices")
        settle_min = result["config"]["settle_s"] / 60
        for axes in (upper, lower):
            axes.set_ylim(bottom=0)
            axes.axvspan(0, settle_min, color="black", alpha=0.06, linewidth=0)
            open_frame(axes, "both")
            axes.legend(frameon=False, fontsize="small")

"""Trains for a while with checkpoints on: does memory grow, does training get slower?

    python -m tests.faults.soak --minutes 20 [--json FILE] [PRESET ...]

Training is ``sebulba train`` in a process of its own. Its speed is set against a bare loop of
acting and stepping in this process: the two take turns, training standing still meanwhile, after
the first minute and at the end, since a machine's speed changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import envpool
import jax

from benchmarks.studies.bare import bare_loop
from sebulba.configs.presets import PRESETS
from sebulba.envs import env_spec, make_env_factory
from sebulba.runs.build import build_agent
from sebulba.runs.jax_setup import configure_jax
from sebulba.tools.bench import harness
from sebulba.tools.bench.memory import slope_error, theil_sen
from sebulba.types import RunSpec
from tests.faults.children import Child

SETTLE_S = 60.0
"""Compiling, and filling caches; memory and speed count from here on."""
WINDOW_S = 15.0
"""Samples of memory are reduced to the mean of such a window."""
TURN_S, TURNS = 5.0, 8
"""How long training and bare loop take turns, and how often, at the begin and at the end."""
CHECKPOINT_EVERY_S = 30.0
TAIL_BYTES = 20_000
"""Enough for the last record; reading all of them would slow training down at the end."""
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


class Soaked(NamedTuple):
    """What was seen of a preset."""

    minutes: list[float]
    """Middle of each window, since the start."""
    rss_mb: list[float]
    """Mean of each window, resident memory of the training process. The temporaries of Pong's
    update, half a gigabyte, come and go every second: they are there for a steady share of the
    time, and a median would jump between with and without."""
    anonymous_mb: list[float]
    """The part of it that only the process can give back, in the same way."""
    file_mb: list[float]
    """The rest: code of libraries, which the kernel drops when it likes and reads again."""
    at_begin: list[float]
    """Speed of training over that of the bare loop, turn by turn."""
    at_end: list[float]

    def keys(self) -> dict[str, Any]:
        """Return the figures that count."""
        begin, end = statistics.median(self.at_begin), statistics.median(self.at_end)
        return {
            "rss_slope_mb_per_min": theil_sen(self.minutes, self.rss_mb),
            "rss_slope_error_mb_per_min": slope_error(self.minutes, self.rss_mb),
            "anonymous_slope_mb_per_min": theil_sen(self.minutes, self.anonymous_mb),
            "anonymous_slope_error_mb_per_min": slope_error(self.minutes, self.anonymous_mb),
            "file_slope_mb_per_min": theil_sen(self.minutes, self.file_mb),
            "rss_highest_mb": max(self.rss_mb),
            "speed_over_bare_at_begin": begin,
            "speed_over_bare_at_end": end,
            "end_over_begin": end / begin,
        }


def soak(preset: str, minutes: float) -> Soaked:
    """Train ``preset`` for so many minutes, and watch it."""
    bare = bare_case(preset)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["train", preset, "--run-dir", str(run), "--total-env-steps", "1000000000000"]
        words += ["--no-anneal-learning-rate", "--checkpoint.every-s", str(CHECKPOINT_EVERY_S)]
        with Child(words, Path(folder) / "log") as child:
            child.wait_until(lambda: child.age_s >= SETTLE_S, deadline_s=2 * SETTLE_S)
            at_begin = take_turns(child, run, bare)
            samples = watch(child, 60 * minutes - 2 * TURNS * TURN_S)
            at_end = take_turns(child, run, bare)
            child.send(signal.SIGTERM)
            code = child.wait()
            if code != 128 + signal.SIGTERM:
                raise RuntimeError(f"{preset} ended with {code}:\n{child.printed[-2000:]}")
    groups = itertools.groupby(samples, lambda sample: sample.age_s // WINDOW_S)
    windows = [list(window) for _, window in groups]
    return Soaked(
        minutes=[statistics.fmean(sample.age_s for sample in window) / 60 for window in windows],
        rss_mb=[statistics.fmean(s.anonymous_mb + s.file_mb for s in window) for window in windows],
        anonymous_mb=[statistics.fmean(s.anonymous_mb for s in window) for window in windows],
        file_mb=[statistics.fmean(s.file_mb for s in window) for window in windows],
        at_begin=at_begin,
        at_end=at_end,
    )


class Sample(NamedTuple):
    """Resident memory of the training process at one moment."""

    age_s: float
    anonymous_mb: float
    file_mb: float
    """With what is shared."""


def watch(child: Child, until_s: float) -> list[Sample]:
    """Return what memory the process has, ten times a second."""
    samples, training = [], child.pid
    while child.age_s < until_s:
        if child.has_ended:
            raise RuntimeError(f"it ended by itself:\n{child.printed[-2000:]}")
        pages = Path(f"/proc/{training}/statm").read_text().split()
        resident_mb, file_mb = int(pages[1]) * PAGE_MB, int(pages[2]) * PAGE_MB
        samples.append(Sample(child.age_s, resident_mb - file_mb, file_mb))
        time.sleep(0.1)
    return samples


def take_turns(child: Child, run: Path, bare: Callable[[float], float]) -> list[float]:
    """Return the speed of training over that of the bare loop, for each pair of turns."""
    ratios, training = [], child.pid
    for _ in range(TURNS):
        os.kill(training, signal.SIGSTOP)
        try:
            bare_env_steps_per_s = bare(TURN_S)
        finally:
            os.kill(training, signal.SIGCONT)
        ratios.append(training_speed(run, TURN_S) / bare_env_steps_per_s)
    return ratios


def training_speed(run: Path, seconds: float) -> float:
    """Return environment steps per second, from the records of about so many seconds."""

    def newest() -> tuple[float, int]:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - TAIL_BYTES))
            line = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        record = json.loads(line)
        return record["seconds"], record["env_steps"]

    before = newest()
    while (first := newest()) == before:  # its window may hold the time that it stood still
        time.sleep(0.05)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or (last := newest()) == first:
        time.sleep(0.05)
    return (last[1] - first[1]) / (last[0] - first[0])


def bare_case(preset: str) -> Callable[[float], float]:
    """Return what runs a bare loop for some seconds, and returns environment steps per second."""
    config = PRESETS[preset].make()
    agent = build_agent(config, env_spec(make_env_factory(config.env.id, **_arguments(config))))
    run = RunSpec(config.num_envs, 1, config.steps_per_cycle, 1)
    state = jax.jit(lambda key: agent.new_state(key, run))(jax.random.key(0))
    step = jax.jit(agent.step, donate_argnums=1)
    arguments = {k: v for k, v in _arguments(config).items() if k not in ("backend", "num_threads")}
    arguments.pop("vectorization", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # spaces warn about precision when they are first read
        pool = envpool.make(
            config.env.id, env_type="gymnasium", num_envs=config.num_envs, seed=0, **arguments
        )
        assert pool.observation_space and pool.action_space
    step_state, steps_a_call = state.step[0], 20
    networks = agent.acting_networks(state.networks, state.experience)

    def measure(seconds: float) -> float:
        nonlocal step_state
        num_steps, began = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - began) < seconds:
            step_state = bare_loop(step, networks, step_state, pool, steps_a_call)
            num_steps += steps_a_call
        return num_steps * config.num_envs / elapsed_s

    measure(0.5)  # compiles
    return measure


def _arguments(config: Any) -> dict[str, Any]:
    return config.env.factory_arguments()


def main(argv: Sequence[str] | None = None) -> None:
    """Soak the presets one after the other, print and write what was seen."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=["cartpole", "pong"])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--json")
    arguments = parser.parse_args(argv)
    least = (SETTLE_S + 4 * TURNS * TURN_S + 4 * WINDOW_S) / 60
    if arguments.minutes < least:
        parser.error(f"--minutes {arguments.minutes:g} must be at least {least:.1f}")
    configure_jax("cpu")
    soaked = {preset: soak(preset, arguments.minutes) for preset in arguments.presets}
    keys = {preset: result.keys() for preset, result in soaked.items()}
    for preset, figures in keys.items():
        print(preset, *(f"{name}={value:.3f}" for name, value in figures.items()), sep="  ")
    figures = {preset: result._asdict() for preset, result in soaked.items()}
    config = {
        "minutes": arguments.minutes,
        "checkpoint_every_s": CHECKPOINT_EVERY_S,
        "settle_s": SETTLE_S,
    }
    command = " ".join(["python -m tests.faults.soak", *(argv or sys.argv[1:])])
    harness.write_json(arguments.json, harness.record(keys, figures, config) | {"command": command})


if __name__ == "__main__":
    main()

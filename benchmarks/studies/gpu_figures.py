"""Every figure of docs/accelerators.md, in one call of under ten minutes: ``make gpu-figures``.

Each row is a child process of its own with a limit: one that fails or hangs costs only its row, and
the JSON file is written after each. The speed of a run is that of the second half of its time. Runs
on the CPU stand beside those of the default placement, in the same call on the same machine. Where
a call may not last ten minutes, two of them have ``--only raw pong`` and the names of the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sebulba.tools.bench import harness

START_S = 75
"""Seconds that a row may take to start: a program for a GPU may be compiled anew."""
LOOK_S = 0.1
"""Seconds between two looks for the first record of a run."""
ENDS_S = 30
"""Seconds that a run may take to end after its signal."""
SOLVED = 18.0
"""Mean return of the last 100 episodes at which Pong is said to be learned."""
BEFORE = {"atari-dqn": 2_700.0}
"""Env steps/s of the first GPU that was measured, before anything was chosen for it."""
MOST_STEPS = ("--total-env-steps", "1000000000")
JAX_ENVS = (64, 4096, 8192)
"""Numbers of JAX environments."""

RAW = """
import os, sys, time, envpool, numpy as np
num_envs, batch, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
options = dict(num_envs=num_envs, batch_size=batch, num_threads=len(os.sched_getaffinity(0)))
pool = envpool.make_gymnasium("Pong-v5", **options)
pool.async_reset()
steps, began = 0, None
while began is None or time.perf_counter() - began < seconds:
    obs, *_, info = pool.recv()
    pool.send(np.zeros(batch, np.int32), info["env_id"])
    if began is None and steps > 20 * batch:
        steps, began = 0, time.perf_counter()
    steps += batch
print(steps / (time.perf_counter() - began))
"""

PROTOTYPE = """
import sys, time
from benchmarks.studies.jax_prototype import JaxPrototype
from sebulba.configs.presets import PRESETS
config = PRESETS["breakout-minatar"].make()
num_envs, seconds = int(sys.argv[1]), float(sys.argv[2])
prototype = JaxPrototype("Breakout-MinAtar", config.agent, num_envs, config.steps_per_cycle, 100000)
at_once = max(1, 640 // num_envs)  # trajectories of one call, which many environments make long
prototype.train(at_once)
cycles, began = 0, time.perf_counter()
while time.perf_counter() - began < seconds:
    prototype.train(at_once)
    cycles += at_once
print(cycles * prototype.env_steps_per_cycle / (time.perf_counter() - began))
"""


class Row(NamedTuple):
    """One figure."""

    name: str
    seconds: float
    """Of the measurement, without the start."""
    measure: Measure
    """What measures."""


Figures = dict[str, float]
Measure = Callable[[float, float], Figures]
"""Takes the seconds of the measurement and those that are left, start included; returns env steps/s
under the name "", and others by what they are."""


def train(*words: str, until: float | None = None) -> Measure:
    """Return what trains so many seconds after the first record, and returns the speed of the
    second half of them.

    With ``until``, it ends at this mean return; what it reached, and when, are figures, too.
    """
    if until is not None:
        words = (*words, "--stop-at-return", str(until))

    def measure(seconds: float, left: float) -> Figures:
        ends = time.monotonic() + left
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = [sys.executable, "-m", "sebulba", "train", *words, "--run-dir", str(run)]
            metrics, errors = run / "metrics.jsonl", Path(folder) / "errors"
            # A file: a child that fills a pipe, which nobody reads meanwhile, would stand still.
            with errors.open("w") as file:
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
            while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
                if time.monotonic() > ends:
                    break
                time.sleep(LOOK_S)
            try:
                process.wait(max(0.0, min(seconds, ends - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            said = errors.read_text(errors="replace")
            reached = {} if until is None else reached_in(metrics, until)
            return {"": speed_of(metrics, said), **reached}

    return measure


def reached_in(metrics: Path, goal: float) -> Figures:
    """Return the highest mean return of a run, and at how many seconds and env steps it was there.

    Without an episode that ended, nothing is returned.
    """
    records = [one for one in _records(metrics) if one.get("episode_return_mean") is not None]
    if not records:
        return {}
    best = next(
        (one for one in records if one["episode_return_mean"] >= goal),
        max(records, key=lambda one: one["episode_return_mean"]),
    )
    return {
        "highest mean return": best["episode_return_mean"],
        "seconds until then": best["seconds"],
        "env steps until then": best["env_steps"],
    }


def speed_of(metrics: Path, said: str) -> float:
    """Return env steps/s of the second half of a run.

    Raises:
      RuntimeError: It left no two records; the message has the end of what it said.
    """
    records = [one for one in _records(metrics) if "env_steps" in one]
    if len(records) < 2:
        why = "" if records else said.strip().rpartition("\n")[2]
        raise RuntimeError(why or "it made no two records")
    last = records[-1]
    first = next(one for one in records if one["seconds"] >= last["seconds"] / 2)
    if first is last:
        first = records[-2]
    return (last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"])


def _records(metrics: Path) -> list[dict]:
    """Return the records of a run that may have been killed while it wrote the last one."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def program(code: str, *words: int) -> Measure:
    """Return what runs a program that takes numbers and seconds, and prints a speed."""

    def measure(seconds: float, left: float) -> Figures:
        command = [sys.executable, "-c", code, *map(str, words), str(seconds)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took more than {left:.0f} s") from None
        if done.returncode:
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
        return {"": float(done.stdout.split()[-1])}

    return measure


def rows() -> list[Row]:
    """Return what is measured, in this order: Pong has what the rows before it leave of the time,
    and those of the most JAX environments have what Pong leaves.
    """

    def both(name: str, seconds: float, *words: str) -> list[Row]:
        words = (name, *words, *MOST_STEPS)
        on_cpu = Row(f"{name} --platform cpu", seconds, train(*words, "--platform", "cpu"))
        return [Row(name, seconds, train(*words)), on_cpu]

    raw = [
        Row(
            f"raw envpool Pong, {envs} environments, batches of {batch}",
            6,
            program(RAW, envs, batch),
        )
        for envs, batch in ((64, 64), (256, 256), (256, 128))
    ]
    *jax_envs, most_jax_envs = (
        [
            Row(
                f"breakout-minatar --num-envs {envs}",
                8,
                train("breakout-minatar", "--num-envs", str(envs), *MOST_STEPS),
            ),
            Row(f"PureJaxRL's form, {envs} environments", 6, program(PROTOTYPE, envs)),
        ]
        for envs in JAX_ENVS
    )
    return [
        *raw,
        *both("cartpole", 8),
        Row("cartpole --num-envs 4096", 10, train("cartpole", "--num-envs", "4096", *MOST_STEPS)),
        *both("cartpole-dqn", 10),
        *both("pendulum-sac", 10),
        *itertools.chain(*jax_envs),
        Row("atari-dqn", 25, train("atari-dqn", *MOST_STEPS)),
        Row("pong", 300, train("pong", *MOST_STEPS, until=SOLVED)),
        *most_jax_envs,
    ]


def ratios(found: dict[str, float]) -> dict[str, float]:
    """Return the ratios of docs/accelerators.md of which both figures are there."""
    raw = [speed for name, speed in found.items() if name.startswith("raw envpool")]
    pairs = {
        "pong / best raw envpool": ("pong", max(raw, default=0.0)),
        **{
            f"{name} / --platform cpu": (name, found.get(f"{name} --platform cpu", 0.0))
            for name in ("cartpole", "cartpole-dqn", "pendulum-sac")
        },
        **{
            f"breakout-minatar / PureJaxRL's form, {envs}": (
                f"breakout-minatar --num-envs {envs}",
                found.get(f"PureJaxRL's form, {envs} environments", 0.0),
            )
            for envs in JAX_ENVS
        },
        **{f"{name} / {speed:,.0f} before": (name, speed) for name, speed in BEFORE.items()},
    }
    return {
        name: found[over] / under
        for name, (over, under) in pairs.items()
        if over in found and under
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="rows whose names begin with one of these")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all limits")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=540.0,
        help="seconds of everything, without the end of the last row",
    )
    parser.add_argument("--json", default="gpu-figures.json")
    given = parser.parse_args(words)
    began = time.monotonic()
    found: dict[str, float] = {}
    others: dict[str, Figures] = {}
    failed: dict[str, str] = {}
    for row in rows():
        if given.only and not row.name.startswith(tuple(given.only)):
            continue
        left = given.budget_s - (time.monotonic() - began)
        if left <= 0:
            failed[row.name] = "no time was left"
            continue
        print(f"{row.name} ...", flush=True)
        try:
            seconds = given.scale * row.seconds
            others[row.name] = row.measure(seconds, min(left, START_S + 2 * seconds))
            found[row.name] = others[row.name].pop("")
            print(f"{row.name}: {found[row.name]:,.0f} env steps/s", flush=True)
        except Exception as error:
            failed[row.name] = str(error) or type(error).__name__
            print(f"{row.name}: {failed[row.name]}", flush=True)
        # Without the machine, whose devices JAX would take from the rows that follow.
        harness.write_json(given.json, _keys(found, others, failed) | {"figures": found})
    harness.print_rows(
        "env steps/s", ["env steps/s"], {name: [f"{speed:,.0f}"] for name, speed in found.items()}
    )
    keys = _keys(found, others, failed)
    for title, places in (("learning", 1), ("ratios", 2)):
        if keys[title]:
            cells = {name: [f"{x:,.{places}f}"] for name, x in keys[title].items()}
            harness.print_rows(title, [""], cells)
    for name, why in failed.items():
        print(f"not measured: {name}: {why}", flush=True)
    record = harness.record(keys, found, {"scale": given.scale})
    harness.write_json(given.json, record | {"command": "make gpu-figures"})


def _keys(found: Figures, others: Mapping[str, Figures], failed: Mapping[str, str]) -> dict:
    """Return what stands in the JSON file beside the speeds."""
    more = {f"{name}, {what}": x for name, each in others.items() for what, x in each.items()}
    return {"ratios": ratios(found), "learning": more, "failed": dict(failed)}


if __name__ == "__main__":
    main()

"""``bench tune``: the fastest setting of a configuration on this machine, as a file to train from.

Environments, unroll length, Inferencers and the devices' split are changed one at a time, up or
down for as long as it pays. Each candidate is measured in turn with the best so far, and the winner
at the end with the start.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sebulba.benchmarks import harness
from sebulba.benchmarks.trial import (
    Measurement,
    Trial,
    measure_in_turn,
)
from sebulba.benchmarks.worker import WorkerError, share_accelerator
from sebulba.commands import experiment
from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.files import config_options, write_config_file
from sebulba.errors import UsageError
from sebulba.loops.devices import local_devices

MIN_GAIN = 0.05
"""A change must pay at least this share: less is noise, and not worth another batch size."""
ROUNDS = 3
"""Of a candidate against the best so far."""
REPEATS = 5
"""Rounds of the winner against the start."""
MEMORY_SHARE = 0.8
"""Of the memory that is free, where no limit is given."""
RESTART_S = 10.0
"""What a process takes to start, about."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """Something to tune."""

    name: str
    """As on the command line."""
    values: tuple[Any, ...]
    """In the order in which the search goes through them."""
    fields: tuple[str, ...]
    """Of the configuration; a value of several is a tuple."""

    def get(self, config: ExperimentConfig) -> Any:
        """Return its value in a configuration."""
        values = tuple(getattr(config, field) for field in self.fields)
        return values if len(values) > 1 else values[0]

    def set(self, config: ExperimentConfig, value: Any) -> ExperimentConfig:
        """Return a configuration with another value."""
        values = value if len(self.fields) > 1 else (value,)
        return dataclasses.replace(config, **dict(zip(self.fields, values, strict=True)))

    def label(self, config: ExperimentConfig) -> str:
        """Return the value as people read it."""
        if self.name != "devices":
            return f"{self.name} {self.get(config)}"
        num_cpu, infer, update = self.get(config)
        if infer is None and update is None:
            return f"devices {f'{num_cpu} of the CPU' if num_cpu else 'as they are'}"
        return f"devices {_indices(infer)} infer, {_indices(update)} update"


def _indices(devices: Sequence[int] | None) -> str:
    return "the others" if devices is None else " ".join(map(str, devices))


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A candidate, and what became of it."""

    change: str
    gain: float | None
    """Its speed over that of the best before it; None where it could not run."""
    env_steps_per_s: float | None
    rss_mb: float | None
    """Peak resident memory."""
    verdict: str


def run(
    config: ExperimentConfig,
    *,
    preset: str,
    output: str,
    memory_limit_gb: float | None = None,
    seconds_per_trial: float = 3.0,
    budget_s: float = 300.0,
    keep: Sequence[str] = (),
    max_batch_growth: float = 4.0,
    json_file: str | None = None,
) -> dict:
    """Search, write the configuration file, print what was gained and what it changes.

    Args:
      config: The start.
      preset: The preset that it is made of.
      output: Configuration file to write, for ``sebulba train``.
      memory_limit_gb: Most that a process may take, on the host and on a device, 10^9 bytes;
        None takes 0.8 of what is free.
      seconds_per_trial: Measured of each candidate, start and compile not counted.
      budget_s: About how long all of it may take.
      keep: Names of what must stay: num-envs, steps-per-cycle, num-inferencers-per-device, devices.
      max_batch_growth: A trajectory, which is the batch of an update, may become this many times
        as large as the start's.
      json_file: Where to write the record, or None.

    Returns:
      The record that was written.

    Raises:
      UsageError: A number is not positive, the start cannot run here, a name is unknown, or the
        file cannot be written.
    """
    began = time.monotonic()
    _check_output(output)
    _check_positive(
        memory_limit_gb=1.0 if memory_limit_gb is None else memory_limit_gb,
        seconds_per_trial=seconds_per_trial,
        max_batch_growth=max_batch_growth,
    )
    experiment.configure_jax(config.platform, None, "off")
    share_accelerator()
    devices = local_devices()
    knobs = choose_knobs(config, devices, keep)
    limit_mb = 1000 * memory_limit_gb if memory_limit_gb else MEMORY_SHARE * free_memory_mb()
    seconds = seconds_per_trial / ROUNDS
    confirm_s = RESTART_S + 2 * (REPEATS + 1) * seconds
    max_batch = int(max_batch_growth * batch(config))
    _say(
        f"bench tune: {preset}, at most {limit_mb:,.0f} MB a process, trajectories of at most "
        f"{max_batch:,} env steps, about {budget_s:.0f} s"
    )
    with Contest(config, seconds, limit_mb, max_batch) as contest:
        climb(knobs, contest, lambda: time.monotonic() - began < budget_s - confirm_s)
        start, tuned = contest.confirm(config)
        best = contest.best if tuned is not start else config
    gain = _gain(tuned, start)
    options = config_options(best, preset)
    keys = {
        "start_env_steps_per_s": _speed(start),
        "tuned_env_steps_per_s": _speed(tuned),
        "gain": gain,
        "options": options,
        "rss_mb": max(m.rss_mb for m in tuned),
        "device_mb": max(m.device_mb for m in tuned),
        "policy_lag_mean": statistics.fmean(m.policy_lag_mean for m in tuned),
        "memory_limit_mb": limit_mb,
        "attempts": [dataclasses.asdict(attempt) for attempt in contest.attempts],
    }
    figures = {name: [m.env_steps_per_s for m in ms] for name, ms in _named(start, tuned).items()}
    record = harness.record(keys, figures, {"preset": preset, **dataclasses.asdict(config)})
    measured = {name: keys[name] for name in MEASURED} | {"machine": record["machine"]}
    write_config_file(output, preset, options, measured)
    harness.write_json(json_file, record)
    harness.print_table(f"bench tune: {preset}", "env steps/s", figures, [])
    for note in notes(knobs, config, best, start, tuned):
        _say(note)
    _say(f"train with it: sebulba train {output}")
    return record


MEASURED = ("tuned_env_steps_per_s", "start_env_steps_per_s", "gain", "rss_mb", "policy_lag_mean")
"""Keys that the configuration file repeats for its reader."""


_say = functools.partial(print, flush=True)


def batch(config: ExperimentConfig) -> int:
    """Return the environment steps of a trajectory, which is the batch of an update."""
    return config.num_envs * config.steps_per_cycle


def _named(
    start: Sequence[Measurement], tuned: Sequence[Measurement]
) -> dict[str, Sequence[Measurement]]:
    return {"start": start, "tuned": tuned} if tuned is not start else {"start": start}


def _check_output(output: str) -> None:
    """Refuse before minutes of measuring what could not be written after them."""
    if not output.endswith(".json"):
        raise UsageError(
            f"output={output!r} must end in .json, by which sebulba train knows it; "
            f"use {output}.json"
        )
    if not Path(output).absolute().parent.is_dir():
        raise UsageError(f"output={output!r} is in a folder that does not exist; make it")


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise UsageError(f"{name}={value} must be positive; leave it out for the default")


# The search.


def choose_knobs(
    config: ExperimentConfig, devices: Sequence[jax.Device], keep: Sequence[str]
) -> list[Knob]:
    """Return what to tune: what leaves the batch of an update alone comes first.

    Args:
      config: The start, whose own values are among those of each.
      devices: Those of this machine.
      keep: Names of what must stay.

    Raises:
      UsageError: An unknown name in ``keep``, or nothing is left.
    """
    doublings = [2**n for n in range(13)]
    knobs = [
        _devices_knob(config, devices),
        _knob(config, "num_inferencers_per_device", [1, 2, 3, 4]),
        _knob(config, "num_envs", doublings),
        _knob(config, "steps_per_cycle", doublings[2:]),
    ]
    names = [knob.name for knob in knobs]
    for name in keep:
        if name not in names:
            raise UsageError(f"keep={name!r} is unknown; use {', '.join(names)}")
    chosen = [knob for knob in knobs if knob.name not in keep and len(knob.values) > 1]
    if not chosen:
        raise UsageError(f"keep={' '.join(keep)!r} leaves nothing to tune; leave out one of them")
    return chosen


def _knob(config: ExperimentConfig, field: str, values: Sequence[int]) -> Knob:
    every = tuple(sorted({*values, getattr(config, field)}))
    return Knob(field.replace("_", "-"), every, (field,))


def _devices_knob(config: ExperimentConfig, devices: Sequence[jax.Device]) -> Knob:
    """Return the splits: whole or halved on a CPU; on accelerators, how many only infer."""
    knob = Knob("devices", (), ("num_cpu_devices", "inference_devices", "update_devices"))
    if devices[0].platform == "cpu":
        splits: list[tuple] = [(None, None, None), (2, (0,), (1,))]
    else:
        every = tuple(range(len(devices)))
        splits = [(None, every, every)]
        splits += [(None, every[:n], every[n:]) for n in (1, 2, 4, 8) if n < len(every)]
    here = knob.get(config)
    if here not in splits:
        splits.insert(0, here)
    return dataclasses.replace(knob, values=tuple(splits))


def climb(knobs: Sequence[Knob], contest: Contest, has_time: Callable[[], bool]) -> None:
    """Change one knob after the other, as far as it pays, until none pays any more."""
    tried = {_key(knobs, contest.best)}
    while True:
        before = contest.best
        for knob in knobs:
            # Down only where up did not pay.
            any(_go(knob, step, knobs, contest, tried, has_time) for step in (1, -1))
        if contest.best is before or not has_time():
            return


def _go(
    knob: Knob,
    step: int,
    knobs: Sequence[Knob],
    contest: Contest,
    tried: set,
    has_time: Callable[[], bool],
) -> bool:
    """Go in one direction for as long as it pays; True if it did."""
    pays = False
    while has_time():
        place = knob.values.index(knob.get(contest.best)) + step
        if not 0 <= place < len(knob.values):
            break
        candidate = knob.set(contest.best, knob.values[place])
        key = _key(knobs, candidate)
        if key in tried:
            break
        tried.add(key)
        if not contest.challenge(knob.label(candidate), candidate):
            break
        pays = True
    return pays


def _key(knobs: Sequence[Knob], config: ExperimentConfig) -> tuple:
    return tuple(knob.get(config) for knob in knobs)


class Contest:
    """The best configuration so far, whose process stays alive to be measured against."""

    def __init__(
        self,
        start: ExperimentConfig,
        seconds: float,
        limit_mb: float,
        max_batch: int,
    ) -> None:
        """Begin with ``start``.

        Args:
          start: Best so far.
          seconds: Length of a measurement.
          limit_mb: Memory that a trial may take.
          max_batch: Environment steps that a trajectory may have.

        Raises:
          UsageError: It cannot run here.
        """
        self.best = start
        self.attempts: list[Attempt] = []
        self._seconds = seconds
        self._limit_mb = limit_mb
        self._max_batch = max_batch
        try:
            self._trial = self._ready(start)
        except WorkerError as error:
            raise UsageError(
                f"the configuration to start from cannot run here ({error}); "
                "start from a smaller one, such as with --num-envs 8"
            ) from error

    def _ready(self, config: ExperimentConfig) -> Trial:
        trial = Trial(config, self._seconds, memory_limit_mb=self._limit_mb)
        try:
            trial.ready()
        except BaseException:
            trial.close()
            raise
        return trial

    def challenge(self, change: str, config: ExperimentConfig) -> bool:
        """Measure a configuration against the best so far; it takes its place if it pays."""
        if batch(config) > self._max_batch:
            why = f"its trajectories have {batch(config):,} env steps, above the limit"
            return self._judge(change, [], [], why)
        try:
            trial = self._ready(config)
        except WorkerError as error:
            return self._judge(change, [], [], str(error))
        failed: dict[str, str] = {}
        measured = measure_in_turn({"best": self._trial, "new": trial}, ROUNDS, failed)
        if "best" not in measured:
            trial.close()
            raise WorkerError(f"the best configuration so far failed: {failed['best']}")
        if not self._judge(change, measured["best"], measured.get("new", []), failed.get("new")):
            trial.close()
            return False
        self._trial.close()
        self._trial, self.best = trial, config
        return True

    def _judge(
        self,
        change: str,
        best: Sequence[Measurement],
        new: Sequence[Measurement],
        failure: str | None,
    ) -> bool:
        if failure is not None:
            attempt = Attempt(change, None, None, None, f"discarded: {failure}")
        else:
            gain = _gain(new, best)
            verdict = "taken" if gain >= 1 + MIN_GAIN else "not worth it"
            attempt = Attempt(change, gain, _speed(new), max(m.rss_mb for m in new), verdict)
        self.attempts.append(attempt)
        figures = ""
        if attempt.gain is not None:
            figures = (
                f"{attempt.env_steps_per_s:,.0f} env steps/s, {attempt.gain:.2f} times the best "
                f"so far, {attempt.rss_mb:,.0f} MB: "
            )
        _say(f"  {change}: {figures}{attempt.verdict}")
        return attempt.verdict == "taken"

    def confirm(
        self, start: ExperimentConfig
    ) -> tuple[Sequence[Measurement], Sequence[Measurement]]:
        """Measure start and best in turn.

        Returns:
          Measurements of both, by round; the same object where the start remains the best.
        """
        trials = {"best": self._trial}
        if self.best is not start:
            trials["start"] = self._ready(start)
        try:
            failed: dict[str, str] = {}
            measured = measure_in_turn(trials, REPEATS, failed)
        finally:
            if "start" in trials:
                trials["start"].close()
        for name, why in failed.items():
            raise WorkerError(f"the {name} configuration failed at the end: {why}")
        best = measured["best"]
        first = measured.get("start", best)
        return (first, best) if best is first or _gain(best, first) > 1 else (first, first)

    def close(self) -> None:
        """End the process of the best."""
        self._trial.close()

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _speed(measurements: Sequence[Measurement]) -> float:
    return statistics.median(m.env_steps_per_s for m in measurements)


def _gain(new: Sequence[Measurement], old: Sequence[Measurement]) -> float:
    """Return the median of the ratios of speed, round by round."""
    pairs: Mapping[str, list[float]] = {
        "new": [m.env_steps_per_s for m in new],
        "old": [m.env_steps_per_s for m in old],
    }
    return harness.ratio(pairs, "new", "old")


def free_memory_mb() -> float:
    """Return the memory that is free on this machine, 10^6 bytes."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024 / 1e6


# What it says.


def notes(
    knobs: Sequence[Knob],
    start: ExperimentConfig,
    best: ExperimentConfig,
    started: Sequence[Measurement],
    tuned: Sequence[Measurement],
) -> list[str]:
    """Say what changed, what it gained, and that another batch learns something else."""
    changes = [
        f"{knob.label(start)} -> {knob.label(best).removeprefix(knob.name + ' ')}"
        for knob in knobs
        if knob.get(start) != knob.get(best)
    ]
    if not changes:
        return ["nothing paid: the start is the fastest that was found"]
    lag = [statistics.fmean(m.policy_lag_mean for m in ms) for ms in (started, tuned)]
    lines = [
        f"gain: {_gain(tuned, started):.2f} times the start ({'; '.join(changes)})",
        f"policy lag, mean: {lag[0]:.1f} -> {lag[1]:.1f} policy versions",
    ]
    before, after = batch(start), batch(best)
    if before != after or start.steps_per_cycle != best.steps_per_cycle:
        lines.append(
            f"caution: this changes what is learned, not only how fast. A trajectory has {after} "
            f"env steps instead of {before} ({best.num_envs} x {best.steps_per_cycle}), so a run "
            f"of as many env steps has {before / after:.2f} times the trajectories and updates. "
            "Look at the return, or fix the batch with --keep num-envs steps-per-cycle"
        )
    return lines

"""``bench tune``: the fastest setting of a configuration on this machine, as a file to train from.

The split of the devices, the number of Inferencers and, where trajectories may grow, the number of
environments and the unroll length are changed one at a time, up or down for as long as it pays.
Each candidate is measured in turn with the best so far, and the winner at the end in turn with the
start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.files import config_options, write_config_file
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError
from sebulba.loops.devices import local_devices
from sebulba.runs.configurations import start_of
from sebulba.runs.jax_setup import configure_jax
from sebulba.runs.placement import num_cpu_devices_for
from sebulba.support import machine
from sebulba.tools.bench import harness
from sebulba.tools.bench.budget import Budget
from sebulba.tools.bench.memory_use import MB
from sebulba.tools.bench.trial import Series, Trial, measure_in_turn
from sebulba.tools.bench.worker import START_TIMEOUT_S, WorkerError

MIN_GAIN = 0.05
"""Least share by which a change must pay: less is noise, and not worth another batch size."""
ROUNDS = 3
"""Rounds of a candidate against the best so far."""
REPEATS = 5
"""Rounds of the winner against the start."""
MEMORY_SHARE = 0.8
"""Share of the free memory that a process may take, if no limit is given."""
BATCH = ("num-envs", "steps-per-cycle")
"""Settings that change the batch of an update, and so what is learned."""
MEASURED = ("tuned_env_steps_per_s", "start_env_steps_per_s", "gain", "rss_mb", "policy_lag_mean")
"""Keys that the configuration file repeats for its reader."""

_say = functools.partial(print, flush=True)


@dataclasses.dataclass(frozen=True)
class Knob:
    """A setting that is tuned."""

    name: str
    """Name on the command line."""
    values: tuple[Any, ...]
    """Values, in the order in which the search goes through them."""
    fields: tuple[str, ...]
    """Fields of the configuration; a value of several fields is a tuple."""

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
    """A candidate and its fate."""

    change: str
    """The setting that was changed, and its value."""
    gain: float | None
    """Its speed over that of the best before it; None if it could not run."""
    env_steps_per_s: float | None
    """Speed; None if it could not run."""
    rss_mb: float | None
    """Peak resident memory; None if it could not run."""
    verdict: str
    """Whether it was taken, and if not, why."""


def run(
    config: ExperimentConfig,
    *,
    preset: str,
    output: str,
    memory_limit_gb: float | None = None,
    seconds_per_trial: float = 3.0,
    budget_s: float = 60.0,
    keep: Sequence[str] = (),
    max_batch_growth: float = 1.0,
    json_file: str | None = None,
) -> dict:
    """Search, write the configuration file, print what was gained and what it changes.

    The arguments are the options of the command, see ``commands/bench.py``.

    Raises:
      UsageError: The start cannot run here, a name in ``keep`` is unknown, or ``output`` does not
        end in .json.
    """
    budget = Budget(budget_s)
    if not output.endswith(".json"):
        raise UsageError(
            f"output={output!r} must end in .json, by which sebulba train knows it; "
            f"use {output}.json"
        )
    default = start_of(preset, trust=False, command="sebulba bench tune").config
    configure_jax(config.platform, None, "off")
    config = harness.with_inferencers(config)
    keep = [*keep, *(BATCH if max_batch_growth == 1 else ())]
    knobs = choose_knobs(config, local_devices(), keep)
    free_mb = machine.memory().available / MB
    limit_mb = 1000 * memory_limit_gb if memory_limit_gb else MEMORY_SHARE * free_mb
    seconds = seconds_per_trial / ROUNDS
    measure_s = 2 * (REPEATS + 1) * seconds
    max_batch = int(max_batch_growth * batch(config))
    _say(
        f"bench tune: {preset}, at most {limit_mb:,.0f} MB a process, trajectories of at most "
        f"{max_batch:,} env steps, about {budget_s:.0f} s"
    )
    with budget:
        budget.doing(f"the start: {preset}")
        contest = Contest(config, seconds, limit_mb, max_batch, budget)
        with contest:
            # The end measures the start again, which takes as long as a candidate.
            climb(knobs, contest, lambda: budget.fits_again(budget.longest_s + measure_s))
            budget.doing("the start and the best, in turn")
            start, tuned = contest.confirm(config)
        best = contest.best if tuned is not start else config
    options = config_options(best, preset, default)
    keys = keys_of(start, tuned) | {
        "options": options,
        "memory_limit_mb": limit_mb,
        "attempts": [dataclasses.asdict(attempt) for attempt in contest.attempts],
    }
    figures = {"start": start.speeds}
    if tuned is not start:
        figures["tuned"] = tuned.speeds
    record = harness.record(keys, figures, {"preset": preset, **dataclasses.asdict(config)})
    measured = {name: keys[name] for name in MEASURED} | {"machine": record["machine"]}
    write_config_file(output, preset, options, measured)
    harness.write_json(json_file, record)
    harness.print_table(f"bench tune: {preset}", "env steps/s", figures)
    for note in notes(knobs, config, best, start, tuned):
        _say(note)
    trust = " --trust" if best.named_code() or preset not in PRESETS else ""
    _say(f"train with it: sebulba train {output}{trust}")
    return record


def keys_of(start: Series, tuned: Series) -> dict[str, Any]:
    """Return the keys of the JSON that are figures."""
    return {
        "start_env_steps_per_s": start.speed,
        "tuned_env_steps_per_s": tuned.speed,
        "gain": tuned.gain_over(start),
        "rss_mb": tuned.rss_mb,
        "device_mb": tuned.device_mb,
        "policy_lag_mean": tuned.policy_lag_mean,
    }


def batch(config: ExperimentConfig) -> int:
    """Return the environment steps of a trajectory, which is the batch of an update."""
    return config.num_envs * config.steps_per_cycle


def choose_knobs(
    config: ExperimentConfig, devices: Sequence[jax.Device], keep: Sequence[str]
) -> list[Knob]:
    """Return the settings to tune but those in ``keep``, first those that do not change the batch
    of an update. The own value of ``config`` is among the values of each.

    Raises:
      UsageError: A name in ``keep`` is unknown, or nothing is left to tune.
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
        raise UsageError(f"keep={' '.join(keep)!r} leaves nothing to tune; keep fewer")
    return chosen


def _knob(config: ExperimentConfig, field: str, values: Sequence[int]) -> Knob:
    every = tuple(sorted({*values, getattr(config, field)}))
    return Knob(field.replace("_", "-"), every, (field,))


def _devices_knob(config: ExperimentConfig, devices: Sequence[jax.Device]) -> Knob:
    """Return the splits: of a CPU, whether and how; of accelerators, the number that only infer."""
    knob = Knob("devices", (), ("num_cpu_devices", "inference_devices", "update_devices"))
    if devices[0].platform == "cpu":
        # Next to the start are the other two ways; it may have been split over the cores itself.
        is_split = num_cpu_devices_for(config) > 1
        other: tuple = (1, None, None) if is_split else (2, (0,), (0, 1))
        splits: list[tuple] = [(2, (0,), (1,)), (None, None, None), other]
    else:
        every = tuple(range(len(devices)))
        splits = [(None, every, every)]
        splits += [(None, every[:n], every[n:]) for n in (1, 2, 4, 8) if n < len(every)]
    here = knob.get(config)
    if here not in splits:
        splits.insert(0, here)
    return dataclasses.replace(knob, values=tuple(splits))


def climb(knobs: Sequence[Knob], contest: Contest, has_time: Callable[[], bool]) -> None:
    """Change one setting after the other, as far as it pays, until no change pays any more."""

    def values(config: ExperimentConfig) -> tuple:
        return tuple(knob.get(config) for knob in knobs)

    tried = {values(contest.best)}

    def pays(knob: Knob, step: int) -> bool:
        """Take one step from the best; tell whether it was taken."""
        place = knob.values.index(knob.get(contest.best)) + step
        if not has_time() or not 0 <= place < len(knob.values):
            return False
        candidate = knob.set(contest.best, knob.values[place])
        if values(candidate) in tried:
            return False
        tried.add(values(candidate))
        return contest.challenge(knob.label(candidate), candidate)

    before = None
    while before is not contest.best:
        before = contest.best
        for knob in knobs:
            for step in (1, -1):
                at_first = contest.best
                while pays(knob, step):
                    pass
                if contest.best is not at_first:
                    break  # go down only if going up did not pay


class Contest(contextlib.AbstractContextManager):
    """The best configuration so far; its process stays alive to be measured against."""

    def __init__(
        self,
        start: ExperimentConfig,
        seconds: float,
        limit_mb: float,
        max_batch: int,
        budget: Budget | None = None,
    ) -> None:
        """Begin with ``start`` as the best, with limits to the memory of a trial and to the
        environment steps of a trajectory. A candidate that compiles beyond the budget is given up.

        Raises:
          UsageError: ``start`` cannot run here.
        """
        self.best = start
        self.attempts: list[Attempt] = []
        self._seconds = seconds
        self._limit_mb = limit_mb
        self._max_batch = max_batch
        self._budget = budget or Budget()
        try:
            self._trial = self._ready(start)
        except WorkerError as error:
            raise UsageError(
                f"the initial configuration cannot run on this machine ({error}); "
                "use a smaller one, for example --num-envs 8"
            ) from error

    def _ready(self, config: ExperimentConfig, timeout_s: float = START_TIMEOUT_S) -> Trial:
        trial = Trial(config, self._seconds, memory_limit_mb=self._limit_mb)
        try:
            trial.ready(timeout_s)
        except BaseException:
            trial.close()
            raise
        return trial

    def challenge(self, change: str, config: ExperimentConfig) -> bool:
        """Measure a configuration against the best so far, which it replaces if it pays.

        Returns:
          Whether it is the best now.
        """
        if batch(config) > self._max_batch:
            return self._discard(
                change, f"its trajectories have {batch(config):,} env steps, above the limit"
            )
        try:
            self._budget.doing(change)
            trial = self._ready(config, min(START_TIMEOUT_S, max(1.0, self._budget.left())))
        except WorkerError as error:
            return self._discard(change, str(error))
        failed: dict[str, str] = {}
        measured = measure_in_turn({"best": self._trial, "new": trial}, ROUNDS, failed)
        if "best" in measured and "new" in measured:
            if self._is_taken(change, measured["new"], measured["best"]):
                self._trial.close()
                self._trial, self.best = trial, config
                return True
        elif "best" in measured:
            self._discard(change, failed["new"])
        trial.close()
        if "best" not in measured:
            raise WorkerError(f"the best configuration so far failed: {failed['best']}")
        return False

    def _discard(self, change: str, why: str) -> bool:
        self.attempts.append(Attempt(change, None, None, None, f"discarded: {why}"))
        _say(f"  {change}: discarded: {why}")
        return False

    def _is_taken(self, change: str, new: Series, best: Series) -> bool:
        gain = new.gain_over(best)
        is_taken = gain >= 1 + MIN_GAIN
        verdict = "taken" if is_taken else "not worth it"
        self.attempts.append(Attempt(change, gain, new.speed, new.rss_mb, verdict))
        _say(
            f"  {change}: {new.speed:,.0f} env steps/s, {gain:.2f} times the best so far, "
            f"{new.rss_mb:,.0f} MB: {verdict}"
        )
        return is_taken

    def confirm(self, start: ExperimentConfig) -> tuple[Series, Series]:
        """Measure start and best in turn.

        Returns:
          Measurements of both; the same object if the start remains the best.
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
        return (first, best) if best is first or best.gain_over(first) > 1 else (first, first)

    def close(self) -> None:
        """End the process of the best."""
        self._trial.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def notes(
    knobs: Sequence[Knob],
    start: ExperimentConfig,
    best: ExperimentConfig,
    started: Series,
    tuned: Series,
) -> list[str]:
    """Return what changed, what it gained, and a caution if the batch is another."""
    changes = [
        f"{knob.label(start)} -> {knob.label(best).removeprefix(knob.name + ' ')}"
        for knob in knobs
        if knob.get(start) != knob.get(best)
    ]
    if not changes:
        return ["nothing paid: the start is the fastest that was found"]
    lags = f"{started.policy_lag_mean:.1f} -> {tuned.policy_lag_mean:.1f}"
    lines = [
        f"gain: {tuned.gain_over(started):.2f} times the start ({'; '.join(changes)})",
        f"policy lag, mean: {lags} policy versions",
    ]
    before, after = batch(start), batch(best)
    if before != after or start.steps_per_cycle != best.steps_per_cycle:
        lines.append(
            f"caution: this changes what is learned, not only how fast. A trajectory has {after} "
            f"env steps instead of {before} ({best.num_envs} x {best.steps_per_cycle}), so a run "
            f"of as many env steps has {before / after:.2f} times the trajectories and updates. "
            "Look at the return, or keep the batch: without --max-batch-growth it stays"
        )
    return lines

"""Runs the trials of a sweep, some at a time, and tells the study what comes of them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.files import option_words
from sebulba.errors import UsageError
from sebulba.runs.exit_codes import EXIT_NOT_FINITE, EXIT_OK, MEANINGS
from sebulba.runs.placement import visible_gpus
from sebulba_sweep.space import Value
from sebulba_sweep.study import Ended, Study, Trial
from sebulba_sweep.training import Measure, Training

POLL_S = 0.5
"""Seconds between looks at the trainings."""
MOST_FAILED_FIRST = 3
"""So many trials that fail before any other ends end the sweep: something is wrong with all."""


class Plan(NamedTuple):
    """What all trials have in common."""

    config: ExperimentConfig
    """What all trainings but for their values and seeds are."""
    words: tuple[str, ...]
    """Configuration and options of ``sebulba train``."""
    seeds: tuple[int, ...]
    """Of each trial's trainings, one after the other."""
    measure: Measure
    """Which returns count."""
    folder: Path
    """Of the sweep."""

    def train_words(self, values: dict[str, Value], seed: int) -> list[str]:
        """Return the configuration and options of a training."""
        return [*self.words, *words_of(self.config, values), f"--seed={seed}"]

    def run_folder(self, number: int, seed: int) -> Path:
        """Return the folder of a training."""
        return self.folder / f"trial-{number:04d}-seed-{seed}"


def words_of(default: ExperimentConfig, values: dict[str, Value]) -> list[str]:
    """Return values of options as words of the command line."""
    return [word for name, value in values.items() for word in option_words(default, name, value)]


@dataclasses.dataclass
class _Running:
    """A trial in progress."""

    trial: Trial
    """The trial."""
    training: Training
    """The training of the seed that it has come to."""
    scores: list[float]
    """Mean returns at the end of the seeds before."""
    gpu: str | None = None
    """The one that it has to itself, if there are several."""
    is_pruned: bool = False
    """Whether it was asked to end because others were better."""


class Sweep:
    """Trials, some at a time, until there are enough."""

    def __init__(
        self, plan: Plan, study: Study, num_trials: int, parallel: int, say: Callable[[str], None]
    ) -> None:
        """Prepare; nothing runs yet. ``num_trials`` includes those that have ended before."""
        self._plan = plan
        self._study = study
        self._num_trials = num_trials
        self._parallel = parallel
        self._say = say
        self._running: list[_Running] = []
        self._gpus = gpus_of_trials(plan.config, parallel)
        self._is_stopped = False

    def stop(self) -> None:
        """Save the trainings in progress and come to an end; the sweep can be resumed."""
        self._is_stopped = True

    def run(self) -> None:
        """Run until there are enough trials, or until it is stopped.

        Raises:
          UsageError: The first trials all failed.
        """
        waiting = [trial for trial in self._study.trials() if trial.ended == Ended.OPEN]
        try:
            while not self._is_stopped:
                self._begin(waiting)
                if not self._running:
                    return
                time.sleep(POLL_S)
                for running in list(self._running):
                    self._look_at(running)
                self._check_any_succeeds()
        finally:
            self._stop_all()

    def _begin(self, waiting: list[Trial]) -> None:
        """Begin trials while there is room: first those that an earlier process left open."""
        while len(self._running) < self._parallel:
            if waiting:
                trial = waiting.pop(0)
            elif len(self._study.trials()) < self._num_trials:
                trial = self._study.ask()
            else:
                return
            self._say(f"trial {trial.number}: {described(trial.values)}")
            taken = [running.gpu for running in self._running]
            gpu = min(self._gpus, key=taken.count, default=None)
            training = self._train(trial, self._plan.seeds[0], gpu)
            self._running.append(_Running(trial, training, [], gpu))

    def _train(self, trial: Trial, seed: int, gpu: str | None) -> Training:
        plan = self._plan
        folder = plan.run_folder(trial.number, seed)
        return Training(plan.train_words(trial.values, seed), folder, plan.measure, gpu)

    def _look_at(self, running: _Running) -> None:
        code = running.training.ended()  # before its metrics are read, so that none is missed
        returns = running.training.new_returns()
        if not running.scores:  # a trial is pruned by its first seed
            for interval, value in returns.items():
                if self._study.report(running.trial.number, interval, value) and code is None:
                    running.is_pruned = True
                    running.training.stop()
        if code is not None and not self._is_stopped:
            self._take_end(running, code)

    def _take_end(self, running: _Running, code: int) -> None:
        """Go on to the next seed, or tell the study how the trial ended."""
        number, last = running.trial.number, running.training.last
        if code == EXIT_OK and last is not None:
            running.scores.append(last)
            if len(running.scores) < len(self._plan.seeds):
                seed = self._plan.seeds[len(running.scores)]
                running.training = self._train(running.trial, seed, running.gpu)
                return
            score = statistics.fmean(running.scores)
            self._study.tell(number, Ended.DONE, score)
            self._say(f"trial {number}: {score:.4g}")
        elif running.is_pruned:
            self._study.tell(number, Ended.PRUNED, note="worse than the median")
            self._say(f"trial {number}: pruned, worse than the median")
        elif code == EXIT_NOT_FINITE:
            self._study.tell(number, Ended.PRUNED, note="not finite")
            self._say(f"trial {number}: pruned, its loss or gradient was not finite")
        else:
            note = _failure(running.training, code)
            self._study.tell(number, Ended.FAILED, note=note)
            self._say(f"trial {number}: failed, {note}; see {running.training.log}")
        self._running.remove(running)

    def _check_any_succeeds(self) -> None:
        ended = [trial for trial in self._study.trials() if trial.ended != Ended.OPEN]
        failed = [trial for trial in ended if trial.ended == Ended.FAILED]
        if len(failed) == len(ended) >= MOST_FAILED_FIRST:
            raise UsageError(
                f"the first {len(failed)} trials failed, the last one by: {failed[-1].note}; see "
                f"{self._plan.folder}/*.log, and begin again in another folder"
            )

    def _stop_all(self) -> None:
        """Ask the trainings in progress to be saved, and wait for them."""
        for running in self._running:
            running.training.stop()
        while any(running.training.ended() is None for running in self._running):
            time.sleep(POLL_S / 5)


def gpus_of_trials(config: ExperimentConfig, parallel: int) -> list[str]:
    """Return the GPUs of which each trial gets one; none if all trials see all GPUs."""
    names_devices = config.inference_devices is not None or config.update_devices is not None
    gpus = [] if parallel == 1 or names_devices or config.platform == "cpu" else visible_gpus()
    return gpus if len(gpus) > 1 else []


def described(values: dict[str, Value]) -> str:
    """Return the values of a trial in a line."""
    return ", ".join(f"{name}={shown_value(value)}" for name, value in values.items())


def shown_value(value: Value) -> str:
    """Return a value with at most four digits, where it is no integer."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _failure(training: Training, code: int) -> str:
    if code == EXIT_OK:
        return "no return was measured; give more --total-env-steps"
    meaning = MEANINGS.get(code, f"ended by signal {-code}" if code < 0 else f"exit code {code}")
    return f"{meaning.partition(':')[0]} ({training.last_words()[:200]})"

"""Optuna: which values a trial gets, and whether it is worth going on. Nothing else imports it.

Every trial has a sampler of its own, seeded by the sweep's seed and the trial's number, so a sweep
that is resumed proposes what it would have proposed anyway.
"""

from __future__ import annotations

import enum
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from sebulba.errors import UsageError, shown
from sebulba_sweep.space import Choices, Range, Space, Value

JOURNAL = "journal.log"
"""In the folder of a sweep: every trial, its values and its returns, as Optuna keeps them."""
LEAST_DONE = 8
"""Trials, of fewer of which nobody can tell what matters."""
NAME = "sweep"
NOTE = "note"
MOST_SEED = 2**32
PRIME = 1_000_003
"""Distance between the seeds of sweeps whose seeds are neighbours."""


class Ended(enum.Enum):
    """How a trial has ended."""

    DONE = "done"
    PRUNED = "pruned"
    FAILED = "failed"
    OPEN = "open"
    """It has not."""


STATES = {"COMPLETE": Ended.DONE, "PRUNED": Ended.PRUNED, "FAIL": Ended.FAILED}
"""How a trial has ended, by Optuna's word for it."""


class Trial(NamedTuple):
    """One set of values, and what came of it."""

    number: int
    """Its place in the sweep, from 0."""
    values: dict[str, Value]
    """Value by option."""
    returns: dict[int, float]
    """Mean returns by the number of the interval of training, in order."""
    ended: Ended
    """How it has ended."""
    score: float | None
    """Mean return at its end, over its seeds; the last one of a trial that was pruned."""
    note: str
    """Why it failed or was pruned."""


class Study:
    """The trials of a sweep, in a file."""

    def __init__(self, folder: Path, space: Space, seed: int, min_trials: int) -> None:
        """Open the file, or begin it; a trial may be pruned once ``min_trials`` are done.

        Raises:
          UsageError: Optuna is not installed, the file is damaged, or it has a trial with other
            options or values than those that are searched.
        """
        optuna = self._optuna = import_optuna()
        self._seed = seed
        self._domains = {name: _distribution(optuna, domain) for name, domain in space.items()}
        file = folder / JOURNAL
        try:
            journal = optuna.storages.journal.JournalFileBackend(str(file))
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(journal),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=min_trials),
                study_name=NAME,
                direction="maximize",
                load_if_exists=True,
            )
            trials = self.trials()
        except Exception as error:  # whatever Optuna meets in a file that it did not write
            raise UsageError(
                f"{file} is damaged ({type(error).__name__}: {shown(str(error))}); begin the sweep "
                "again in another --sweep-dir"
            ) from error
        for trial in trials:
            self._check(trial, file)

    def trials(self) -> list[Trial]:
        """Return all trials, in order."""
        return [self._trial(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def _check(self, trial: Trial, file: Path) -> None:
        """Raise UsageError if a trial has options or values that are not searched."""
        wrong = next((n for n, v in trial.values.items() if not self._allows(n, v)), "")
        if wrong or not _is_sound(trial):
            what = f"{wrong}={shown(trial.values.get(wrong))}" if wrong else "impossible returns"
            raise UsageError(
                f"{file}: trial {trial.number} has {shown(what)}, which this sweep does not "
                "search; use another --sweep-dir"
            )

    def _allows(self, name: str, value: Any) -> bool:
        domain = self._domains.get(name)
        try:
            return domain is not None and bool(domain._contains(domain.to_internal_repr(value)))
        except (TypeError, ValueError, self._optuna.exceptions.OptunaError):
            return False

    def ask(self) -> Trial:
        """Begin a trial with values of Optuna's choice."""
        number = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = self._optuna.samplers.TPESampler(
            seed=(self._seed * PRIME + number) % MOST_SEED
        )
        self._study.ask(self._domains)
        return self.trials()[number]

    def report(self, number: int, interval: int, value: float) -> bool:
        """Keep a return of a trial, the first of each interval; tell whether the trial should be
        pruned."""
        trial = self._open_trial(number)
        if interval in self.trials()[number].returns:
            return False
        trial.report(value, interval)
        return trial.should_prune()

    def tell(self, number: int, ended: Ended, score: float | None = None, note: str = "") -> None:
        """End a trial."""
        name = next(name for name, state in STATES.items() if state == ended)
        self._open_trial(number).set_user_attr(NOTE, note)
        self._study.tell(number, score, self._optuna.trial.TrialState[name])

    def importances(self) -> dict[str, float]:
        """Return how much each option matters (PED-ANOVA), the most important first.

        It is empty where fewer than ``LEAST_DONE`` trials are done or all returned the same.
        """
        scores = [trial.score for trial in self.trials() if trial.ended == Ended.DONE]
        if len(scores) < LEAST_DONE or len(set(scores)) < 2:
            return {}
        # It warns of few trials, which the number of them says, too.
        with warnings.catch_warnings(action="ignore"):
            return dict(self._optuna.importance.get_param_importances(self._study))

    def _open_trial(self, number: int) -> Any:
        frozen = self._study.get_trials(deepcopy=False)[number]
        return self._optuna.trial.Trial(self._study, frozen._trial_id)

    def _trial(self, frozen: Any) -> Trial:
        return Trial(
            number=frozen.number,
            values=dict(frozen.params),
            returns=dict(sorted(frozen.intermediate_values.items())),
            ended=STATES.get(frozen.state.name, Ended.OPEN),
            score=frozen.value,
            note=frozen.user_attrs.get(NOTE, ""),
        )


def _is_sound(trial: Trial) -> bool:
    """Tell whether a trial that is done has a score, and whether its returns are numbers."""
    numbers = [*trial.returns.values(), *([] if trial.score is None else [trial.score])]
    is_scored = trial.ended != Ended.DONE or trial.score is not None
    return is_scored and isinstance(trial.note, str) and all(map(math.isfinite, numbers))


def import_optuna() -> Any:
    """Return Optuna.

    Raises:
      UsageError: It is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "sebulba sweep needs Optuna, which is not installed; pip install 'optuna>=5'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, domain: Choices | Range) -> Any:
    kinds = optuna.distributions
    if isinstance(domain, Choices):
        return kinds.CategoricalDistribution(domain.values)
    if domain.is_integer:
        step = 1 if domain.step is None else domain.step
        return kinds.IntDistribution(domain.low, domain.high, log=domain.log, step=step)
    return kinds.FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.step)

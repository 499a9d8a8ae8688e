"""The trials of a sweep as a table, the best first, and as JSON. Free of JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from sebulba.runs.summary import plain
from sebulba.tools.compare.tables import console, number, print_table
from sebulba_sweep.study import Ended, Trial
from sebulba_sweep.sweep import shown_value

_STYLES = {Ended.DONE: "green", Ended.PRUNED: "yellow", Ended.FAILED: "red", Ended.OPEN: "cyan"}
_ORDER = list(Ended)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials, those that are done first, and of these the best."""
    return sorted(
        trials,
        key=lambda t: (_ORDER.index(t.ended), -(t.score if t.score is not None else -1e300)),
    )


def print_trials(trials: Sequence[Trial], importances: Mapping[str, float]) -> None:
    """Print a line for each trial, and how much each option matters."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    rows = (
        (
            *(str(trial.number), number(trial.score)),
            *(plain(shown_value(trial.values.get(name, "-"))) for name in names),
            Text(_ended(trial), _STYLES[trial.ended]),
        )
        for trial in ranked(trials)
    )
    print_table((">trial", ">return", *map(plain, names), "ended"), rows)
    if importances:
        said = ", ".join(f"{name} {share:.0%}" for name, share in importances.items())
        console().print(Text(f"what matters: {plain(said)}"))


def _ended(trial: Trial) -> str:
    note = plain(trial.note)
    return f"{trial.ended.value}: {note}" if note else trial.ended.value


def record_of_trial(trial: Trial) -> dict[str, Any]:
    """Return the line of a trial as JSON has it."""
    return {
        "trial": trial.number,
        "values": trial.values,
        "ended": trial.ended.value,
        "return": trial.score,
        "note": trial.note,
        "returns": {str(interval): value for interval, value in trial.returns.items()},
    }

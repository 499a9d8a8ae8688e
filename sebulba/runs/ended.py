"""Why a run ended, left in its folder for a person."""

from __future__ import annotations

import datetime
import json
import shlex
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from sebulba.errors import text_of
from sebulba.runs.exit_codes import EXIT_OK, EXIT_SIGNAL, MEANINGS, exit_code_of
from sebulba.runs.folder import RunFolder

SHOWN_METRICS = (
    *("env_steps", "updates", "seconds", "episode_return_mean", "eval_return_mean", "loss"),
    *("policy_lag_mean", "queue_fill", "dropped_cycles", "env_restarts", "skipped_updates"),
)


def write_end(
    folder: RunFolder,
    *,
    code: int = EXIT_OK,
    error: BaseException | None = None,
    reason: str | None = None,
    metrics: Mapping[str, Any],
    last_transition: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write ``ended.txt``; failing here is a warning, since why the run ended must be seen.

    Args:
      code: Exit code, if there is no error.
      reason: What a callback said that ended it early.
      last_transition: What the environment that failed had shown and was given, by name.
    """
    code = code if error is None else exit_code_of(error)
    try:
        if last_transition:
            np.savez(folder.last_transition, **last_transition)  # type: ignore[arg-type]
        text = _text(folder, code, error, reason, metrics, bool(last_transition))
        folder.ended.write_text(text, encoding="utf-8")
    except Exception as failure:
        warnings.warn(f"no {folder.ended}: {type(failure).__name__}: {failure}", stacklevel=2)


def _text(
    folder: RunFolder,
    code: int,
    error: BaseException | None,
    reason: str | None,
    metrics: Mapping[str, Any],
    has_transition: bool,
) -> str:
    meaning = MEANINGS.get(code, f"stopped by signal {code - EXIT_SIGNAL}")
    lines = [f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}  exit code {code}: {meaning}", ""]
    if reason is not None:
        lines += [f"Ended early: {reason}", ""]
    if code > EXIT_SIGNAL:
        lines += [f"To go on: sebulba resume {shlex.quote(str(folder.path))}", ""]
    if error is not None:
        lines += [text_of(error), ""]
    if has_transition:
        lines += [
            f"What the environment that failed was given last: {folder.last_transition.name} "
            "(numpy.load; obs and action of all environments of that Inferencer)",
            "",
        ]
    if shown := {name: metrics[name] for name in SHOWN_METRICS if name in metrics}:
        lines += ["Last metrics:", *(f"  {name:<20} {value}" for name, value in shown.items()), ""]
    lines += ["Exit codes:", *(f"  {code:>3}  {what}" for code, what in MEANINGS.items()), ""]
    if error is not None:
        lines += ["Traceback:", "".join(traceback.format_exception(error)).rstrip(), ""]
    if metrics:
        lines += ["All of the last metrics:", json.dumps(dict(metrics), default=str), ""]
    return "\n".join(lines)

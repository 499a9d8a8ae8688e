"""Self-play with and without regularisation: the exam of the last policy, row by row.

``python -m benchmarks.studies.self_play kuhn`` trains three seeds of each row of ``ROWS`` and
prints a Markdown table. ``--rows "KL 5"`` takes the rows that begin so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import sebulba
from benchmarks.studies.games import EXAMS
from benchmarks.studies.learning_goals import GOALS
from benchmarks.studies.tables import table
from sebulba.configs.presets import PRESETS


def _row(first: float, last: float | None, kl: float, **more: Any) -> dict[str, Any]:
    """Return hyper-parameters, given the temperature at both ends and the weight of the KL."""
    fields = {"entropy_coefficient": first, "final_entropy_coefficient": last}
    return {**fields, "kl_coefficient": kl, "magnet_rate": 0.0, **more}


POKER: Mapping[str, Mapping[str, Any]] = {
    "none": _row(0.0, None, 0.0, learning_rate=1e-3, normalize_advantages=True),
    "entropy 0.2": _row(0.2, None, 0.0, learning_rate=1e-3, normalize_advantages=True),
    "entropy 0.3 to 0.02": _row(0.3, 0.02, 0.0),
    "KL 5, temperature 0.05": _row(0.05, None, 5.0),
    "KL 5, temperature 0.3 to 0.02": _row(0.3, 0.02, 5.0),
    "KL 5, temperature 0.3 to 0": _row(0.3, 0.0, 5.0),
    "KL 1, temperature 0.3 to 0.02": _row(0.3, 0.02, 1.0),
    "KL 20, temperature 0.3 to 0.02": _row(0.3, 0.02, 20.0),
    "KL 5, temperature 0.3 to 0.02, advantages normalised": _row(
        0.3, 0.02, 5.0, normalize_advantages=True
    ),
    "KL 5, temperature 0.2, a magnet that moves": _row(0.2, None, 5.0, magnet_rate=0.002),
    "KL 5, temperature 0.3, a slow magnet": _row(0.3, None, 5.0, magnet_rate=0.0005),
    "KL 5, temperature 0.3, a magnet that moves": _row(0.3, None, 5.0, magnet_rate=0.001),
    "KL 5, temperature 0.4, a magnet that moves": _row(0.4, None, 5.0, magnet_rate=0.002),
    "KL 10, temperature 1, a magnet that moves": _row(1.0, None, 10.0, magnet_rate=0.002),
}
"""What each row changes in the preset."""
ROWS = {"kuhn": POKER, "leduc": POKER}


def figure(game: str, fields: Mapping[str, Any], seed: int, **run: Any) -> tuple[float, float]:
    """Return the exam's figure of a trained policy, and the seconds of the training."""
    config = PRESETS[game].make()
    agent = dataclasses.replace(config.agent, **fields)  # type: ignore[call-arg]
    config = dataclasses.replace(config, agent=agent, seed=seed, writers=(), **run)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            sebulba.train(config, run_dir=str(Path(folder) / "run"))
        seconds = time.perf_counter() - began
        policy: Any = sebulba.load_policy(Path(folder) / "run/policy/player")
        return EXAMS[GOALS[game].exam](policy), seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("game", choices=sorted(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", default="", help="only those that begin so")
    parser.add_argument("--total-env-steps", type=int)
    given = parser.parse_args(argv)
    run = {"total_env_steps": given.total_env_steps} if given.total_env_steps else {}
    lines = []
    for name, fields in ROWS[given.game].items():
        if not name.startswith(given.rows):
            continue
        found = [figure(given.game, fields, seed, **run) for seed in range(given.seeds)]
        figures, seconds = zip(*found, strict=True)
        shown = ", ".join(f"{one:.3f}" for one in figures)
        lines.append([name, f"{np.mean(figures):.3f}", shown, f"{np.mean(seconds):.0f}"])
        print(*lines[-1], sep="; ", flush=True)
    print(table([GOALS[given.game].exam, "mean", "each seed", "seconds"], lines))


if __name__ == "__main__":
    main()

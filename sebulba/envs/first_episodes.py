"""What the first episodes of an environment show that nothing else would say of a run."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from sebulba.types import PyTree

WATCHED_ENDS = 1000
"""Ends of episodes after which a vector environment that kept its promises is trusted."""
WATCHED_ROWS = 256
"""Observations of one environment that are looked at."""
WATCHED_COMPONENTS = 64
"""Of each array of an observation."""
LARGE = 1000.0
"""The mean of a component from which on its changes may be lost beside it."""
SMALL_SHARE = 1e-4
"""Changes within this share of the mean are."""


class BrokenPromiseWarning(UserWarning):
    """A vector environment does not do what it says."""


class VectorPromises:
    """Watches a ready-made vector environment, and warns once of what it does not keep."""

    def __init__(self, name: str, *, watches: bool) -> None:
        """Watch the environment ``name``, or trust it from the beginning."""
        self._name = name
        self._ends_left = WATCHED_ENDS if watches else 0

    def step(self, begins: np.ndarray, ends: np.ndarray, reward: np.ndarray) -> None:
        """Look at a step of next-step autoreset, ``[B]`` each; rows of ``begins`` only reset."""
        if not self._ends_left or not begins.any():
            return
        self._ends_left = max(0, self._ends_left - int(begins.sum()))
        wrong = begins & (ends | (reward != 0))
        if wrong.any():
            row = int(np.argmax(wrong))
            self._tell(
                "says metadata['autoreset_mode'] NEXT_STEP, where the step after an end only "
                f"resets, and this step of environment {row} had reward {reward[row]:g}"
                f"{' and an end' if ends[row] else ''}; say SAME_STEP if the step that ends an "
                "episode resets"
            )

    def partial_reset(self, mask: np.ndarray, before: PyTree, after: PyTree) -> None:
        """Look at a reset of the rows of ``mask``; observations are ``[B, ...]``."""
        if not self._ends_left:
            return
        self._ends_left = max(0, self._ends_left - int(mask.sum()))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            if not np.array_equal(old[~mask], new[~mask], equal_nan=old.dtype.kind == "f"):
                self._tell(
                    "returned other observations for environments that options['reset_mask'] "
                    "leaves alone; reset must restart the rows of the mask and no others, and "
                    "return the observations of the others as they are"
                )
                return

    def final_obs(self, obs: Any, final: Any) -> None:
        """Look at what ``step`` returned and at ``info["final_obs"]``, both as they came."""
        if not self._ends_left:
            return
        self._ends_left -= 1
        now, last = (
            [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, np.ndarray)]
            for tree in (obs, final)
        )
        if any(np.may_share_memory(one, other) for one in now for other in last):
            self._tell(
                "gives info['final_obs'] in the array of the observations, which hold the next "
                "episode already; give a copy that was made before the reset"
            )

    def _tell(self, what: str) -> None:
        self._ends_left = 0
        warnings.warn(
            f"vector environment {self._name!r} {what}; returns and learning may be wrong; run "
            "`sebulba check-env`",
            BrokenPromiseWarning,
            stacklevel=2,
        )


class Offsets:
    """Watches the first observations, and warns once of changes that are lost beside an offset."""

    def __init__(self, name: str, *, watches: bool, is_single: bool = False) -> None:
        """Watch the environment ``name``, or do not look; a run can subtract those of a single."""
        self._name = name
        self._is_single = is_single
        self._rows: list[np.ndarray] = []
        self.is_looking = watches
        """It wants more observations."""
        self.told = ""
        """What it warned of, and what helps."""

    def look(self, obs: Any) -> None:
        """Look at an observation as the environment gives it, before anything casts it."""
        if not self.is_looking:
            return
        try:
            leaves = [np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(obs)]
            self._rows.append(np.concatenate([leaf[:WATCHED_COMPONENTS] for leaf in leaves]))
            self.is_looking = len(self._rows) < WATCHED_ROWS
            if not self.is_looking:
                self._tell(np.stack(self._rows))
        except (TypeError, ValueError):  # text, or parts that come and go
            self.is_looking = False
        if not self.is_looking:
            self._rows = []

    def _tell(self, rows: np.ndarray) -> None:
        """Warn of the first column of ``[N, K]`` whose changes are small beside its mean."""
        mean, spread = np.abs(rows.mean(axis=0)), np.ptp(rows, axis=0)
        lost = (spread > 0) & (mean >= LARGE) & (spread < SMALL_SHARE * mean)
        if not lost.any():
            return
        values = rows[:, int(np.argmax(lost))]
        number, seen = (len(np.unique(values.astype(dtype))) for dtype in (np.float64, np.float32))
        text = (
            f"environment {self._name!r}: number {int(np.argmax(lost))} of an observation is near "
            f"{values[0]:.10g} and changes by {np.ptp(values):g}"
        )
        if seen < number:
            text += f", and policies see float32, which tells {seen} of its {number} values apart"
        else:
            text += ", which a network hardly sees"
        can_normalize = seen == number or self._is_single
        self.told = (
            f"{text}; {'use --agent.normalize-observations, or ' if can_normalize else ''}"
            "let it observe differences, such as the time since the episode began"
        )
        warnings.warn(self.told, stacklevel=2)

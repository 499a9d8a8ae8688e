"""What a ready-made vector environment promises, and whether its first episodes keep it."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from sebulba.types import PyTree

WATCHED_ENDS = 1000
"""Ends of episodes after which an environment that kept its promises is trusted."""
_SEE = "returns and what is learned are wrong; `sebulba check-env` tells more"


class BrokenPromiseWarning(UserWarning):
    """A vector environment does not do what it says."""


class VectorPromises:
    """Warns once of each promise that it sees broken."""

    def __init__(self, name: str, *, watches: bool) -> None:
        """Watch the environment ``name``, or trust it from the beginning."""
        self._name = name
        self._ends_left = WATCHED_ENDS if watches else 0
        self._told: set[str] = set()

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
            same = np.array_equal(old[~mask], new[~mask], equal_nan=old.dtype.kind == "f")
            if not same:
                self._tell(
                    "changed the observations of environments that options['reset_mask'] leaves "
                    "alone; reset must restart the rows of the mask and no others"
                )

    def final_obs(self, obs: Any, final: Any) -> None:
        """Look at what ``step`` returned and at ``info["final_obs"]``, both as they came."""
        if not self._ends_left:
            return
        arrays = [
            [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, np.ndarray)]
            for tree in (obs, final)
        ]
        self._ends_left -= 1
        if any(np.may_share_memory(one, other) for one in arrays[0] for other in arrays[1]):
            self._tell(
                "gives info['final_obs'] in the array of the observations, which hold the next "
                "episode already; give a copy that was made before the reset"
            )

    def _tell(self, what: str) -> None:
        if what.partition("environment")[0] in self._told:
            return
        self._told.add(what.partition("environment")[0])
        warnings.warn(
            f"vector environment {self._name!r} {what}; {_SEE}", BrokenPromiseWarning, stacklevel=2
        )

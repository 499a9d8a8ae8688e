"""The base class for an environment of many agents of one's own."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from sebulba.envs.tree import Population


class MultiAgentEnv(abc.ABC):
    """An environment of many agents, of whom any may act at a time.

    Agents are known by their names in ``tree``, with dots where populations are nested
    (``"red.0"``). Who is in the observations that ``reset`` or ``step`` returns acts next; all
    others wait. So agents take turns, die, join late and come back.
    """

    tree: Population
    """Who there can be, what each observes and does; an attribute of the class or of the object."""
    all_act: bool = False
    """True says that every agent acts in every step, which saves the bookkeeping of who waits."""
    np_random: np.random.Generator = np.random.default_rng(0)
    """Draw all chance from this; it is seeded anew whenever ``reset`` is given a seed."""

    @abc.abstractmethod
    def reset(self, *, seed: int | None = None) -> Mapping[str, Any]:
        """Begin an episode; return the observations of the agents that act first, by name.

        With ``common`` in the tree, what all observe is there under ``"common"``.
        """

    @abc.abstractmethod
    def step(
        self, actions: dict[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, float], Any, Any]:
        """Let the agents act that were observed last.

        Args:
          actions: By name; a dict by part where the action is a dict.

        Returns:
          * observations of the agents that act next, and the last ones of agents that end now;
          * rewards, of any agents; others get 0;
          * who has reached a terminal state: a dict of bools, or one for all;
          * whose episode is cut short, in the same way.

          The episode is over when all are told so, or when nobody is left to act.
        """

    def render(self) -> Any:
        """Return a picture for ``sebulba video``, ``[height, width, 3]`` uint8, or None."""
        return None

    def close(self) -> None:
        """Free what there is to free."""
        return

"""Members without actions: they add a loss over what all agents observe, and may add rewards."""

from __future__ import annotations

import abc
from typing import NamedTuple, TypeVar

import jax

from sebulba.agent import Learner
from sebulba.agents.configs.auxiliary import AuxiliaryConfig
from sebulba.types import EnvStep, MultiAgentSpec, PyTree, Trajectory

ConfigT = TypeVar("ConfigT", bound=AuxiliaryConfig)


class Seen(NamedTuple):
    """What a group observes, as its policies see it."""

    env_step: EnvStep
    """``[T+1, B * A, ...]``, the slots of an environment side by side; no part is eval_only."""
    acting: jax.Array
    """``[T+1, B * A]`` bool: who chooses an action there. Others' observations mean nothing."""


class Auxiliary(Learner[ConfigT]):
    """Learns beside the members of a ``MultiAgent``; pure functions, as those of an ``Agent``.

    Inside ``update_experience`` and ``reward`` too the axis ``"learner"`` is bound.
    """

    def __init__(self, spec: MultiAgentSpec, config: ConfigT) -> None:
        """Keep what agents there are, and the hyper-parameters."""
        self.spec = spec
        self.config = config

    @abc.abstractmethod
    def new_experience(self, key: jax.Array, networks: PyTree, seen: dict[str, Seen]) -> PyTree:
        """Return the initial experience, given an example of what groups see: zeros."""

    @abc.abstractmethod
    def update_experience(
        self, experience: PyTree, seen: dict[str, Seen], trajectory: Trajectory, networks: PyTree
    ) -> PyTree:
        """Take one trajectory in.

        Args:
          experience: Donated.
          seen: What every group observes.
          trajectory: All there is, ``{group: [T+1, B, A, ...]}``, eval_only parts included.
          networks: Read only.
        """

    def reward(
        self, networks: PyTree, experience: PyTree, group: str, rows: EnvStep
    ) -> jax.Array | None:
        """Return what rows add to the rewards that they have, ``[T+1, N]``; None adds nothing.

        Args:
          networks: Read only.
          experience: With the newest trajectory.
          group: Whose rows.
          rows: ``[T+1, N, ...]`` of the slots of one member. Where slots wait, their own rows are
            side by side already.
        """
        return None

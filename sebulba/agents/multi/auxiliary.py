"""Members without actions: they add a loss over what all agents observe, and may add rewards."""

from __future__ import annotations

import abc
import importlib
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from sebulba.agent import Loss
from sebulba.agents.configs.auxiliary import AuxiliaryConfig
from sebulba.errors import UsageError, shown
from sebulba.types import EnvStep, MultiAgentSpec, PyTree, Trajectory

ConfigT = TypeVar("ConfigT", bound=AuxiliaryConfig)


class Seen(NamedTuple):
    """What a group observes, as its policies see it."""

    env_step: EnvStep
    """``[T+1, B * A, ...]``, the slots of an environment side by side; no part is eval_only."""
    acting: jax.Array
    """``[T+1, B * A]`` bool: who chooses an action there. Others' observations mean nothing."""


class Auxiliary(abc.ABC, Generic[ConfigT]):
    """Learns beside the members of a ``MultiAgent``; pure functions, as those of an ``Agent``.

    Inside ``update_experience``, ``reward``, ``loss`` and ``optimize`` the axis ``"learner"`` is
    bound and arrays are this device's shard. ``Agent`` describes the methods that have no
    arguments of their own here.
    """

    def __init__(self, spec: MultiAgentSpec, config: ConfigT) -> None:
        """Keep what agents there are, and the hyper-parameters."""
        self.spec = spec
        self.config = config

    @abc.abstractmethod
    def new_networks(self, key: jax.Array) -> PyTree:
        """Return initial networks."""

    @abc.abstractmethod
    def new_opt(self, networks: PyTree) -> PyTree:
        """Return the initial optimizer state for ``networks``."""

    @abc.abstractmethod
    def new_experience(self, key: jax.Array, networks: PyTree, seen: dict[str, Seen]) -> PyTree:
        """Return the initial experience, given an example of what groups see: zeros."""

    @abc.abstractmethod
    def experience_spec(self) -> PyTree:
        """Return a prefix tree of ``PartitionSpec`` over ``"learner"`` for the experience."""

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

    @abc.abstractmethod
    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Loss:
        """Return ``(scalar loss, (experience, scalar metrics))`` of this device's shard."""

    @abc.abstractmethod
    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Return ``(networks, opt)`` after one update with the mean gradient."""

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        """Return how many updates are due after the ``cycle``-th (from 1) consumed trajectory."""
        return 1

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree | None:
        """Return ``new`` with everything of ``saved`` that is still valid at other sizes."""
        return None


def make_auxiliary(spec: MultiAgentSpec, config: Any) -> Auxiliary:
    """Return the auxiliary that ``config`` names.

    Raises:
      UsageError: It names none.
    """
    module, _, name = getattr(config, "auxiliary_class", "").partition(":")
    if not name:
        raise UsageError(
            f"config={shown(config)} belongs to no auxiliary; use a subclass of AuxiliaryConfig "
            "whose auxiliary_class is 'module:class', such as RandomNetworkDistillationConfig()"
        )
    return getattr(importlib.import_module(module), name)(spec, config)

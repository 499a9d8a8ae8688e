# SPDX-License-Identifier: GPL-2.0-or-later
"""Models that travel: each agent acts with the newest networks that have arrived at its node.

A program whose agents have a ``model`` (``AgentSpec``) tells with each row which version that is;
agents without one act with the newest.
The newest networks are published at the beginning of each cycle.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.saving.sealed import seal, unseal
from sebulba.errors import UsageError
from sebulba.inference.cycle import CyclePrograms
from sebulba.inference.stepped_cycle import SteppedCycle
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.trees import num_bytes
from sebulba.transport.item import Item
from sebulba.types import PyTree
from sebulba_ns3.program import ProgramAdapter
from sebulba_ns3.scenario import NUM_PUBLISHED

NUM_KEPT = 8
"""Versions that are kept. An agent whose model is older acts with the oldest of them."""


class ModelsAdapter(ProgramAdapter):
    """A vector of simulators in which models travel."""

    published = 0, 0
    """Version of the newest model, from 1 on, and its bytes; 0 where nothing is trained."""
    versions: np.ndarray
    """``[B, A]``, the version that has arrived at each agent."""

    def __init__(self, *arguments: Any) -> None:
        """Begin a worker process for each seed."""
        super().__init__(*arguments)
        shape = (self.num_envs, self._program.options.num_agents)
        self.base, self._arrived = np.zeros(shape[:1], np.int64), np.zeros(shape, np.int64)
        self._is_first = np.ones(shape[0], np.bool_)
        self.versions = self._arrived
        self._lags: list[float] = []
        self.num_clipped = 0

    def publish(self, version: int, size: int) -> None:
        """Take the newest model, of ``size`` bytes; an episode that begins now begins with it."""
        self.published = version, size
        self._begin_with_newest()

    def _begin_with_newest(self) -> None:
        self.base = np.where(self._is_first, self.published[0], self.base)
        arrived = np.where(self._arrived < 0, self.published[0], self._arrived)
        self.versions = np.where(arrived > 0, arrived, self.base[:, None])

    def note(self, num_clipped: int) -> None:
        """Take note of the versions with which all rows acted."""
        self._lags.append(float((self.published[0] - self.versions).mean()))
        self.num_clipped += num_clipped

    @staticmethod
    def metrics_of(adapters: Sequence[Any]) -> dict[str, float]:
        """Return the age, in publishes, of models that acted, how many were clipped, and infos."""
        lags = [lag for one in adapters for lag in one._lags]
        for one in adapters:
            one._lags = []
        clipped = float(sum(one.num_clipped for one in adapters))
        lag = float(np.mean(lags)) if lags else 0.0
        told = ProgramAdapter.metrics_of(adapters)
        return {**told, "model_lag_mean": lag, "models_clipped": clipped}

    def marks(self) -> list[np.ndarray]:
        """Return what is kept of versions beside the state."""
        return [self.base, self._arrived, self._is_first]

    def put_back_marks(self, marks: list[np.ndarray], published: tuple[int, int]) -> None:
        """Go on from ``marks``."""
        self.base, self._arrived, self._is_first = marks
        self.published = published
        self._begin_with_newest()

    def as_played(self) -> ProgramAdapter:
        """Return the adapter in which one policy is played, without new versions."""
        played = object.__new__(ProgramAdapter)
        played.__dict__.update(self.__dict__)
        return played

    def make_cycle(
        self, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> ModelsCycle:
        """Return the cycle in which rows act with the versions that have arrived."""
        return ModelsCycle(self, programs, device, timer)

    def _blank(self) -> np.ndarray:
        given = super()._blank()
        given[:, :, -NUM_PUBLISHED:] = self.published
        return given

    def _output(self, rows: Any) -> Any:
        num_agents = self._program.options.num_agents
        self._arrived = rows.obs.reshape(self.num_envs, num_agents, -1)[:, :, -1].astype(np.int64)
        self._is_first = rows.is_first.reshape(self.num_envs, -1).all(axis=1)
        self._begin_with_newest()
        return super()._output(rows)


class _ActsByVersion:
    """The programs of a cycle, but for ``act``, which chooses the networks of each row."""

    def __init__(self, programs: CyclePrograms, cycle: ModelsCycle) -> None:
        self._programs, self._cycle = programs, cycle
        self._act = jax.jit(self._act_by_version, donate_argnums=2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def act(self, networks: list, step_state: PyTree, row: list) -> tuple[Any, PyTree, PyTree]:
        """Act, as ``CyclePrograms.act``; the networks are those of the cycle."""
        return self._act(*self._cycle.ring_and_slots(), step_state, row)

    def _act_by_version(
        self, ring: list, slots: PyTree, step_state: PyTree, row: list
    ) -> tuple[Any, PyTree, PyTree]:
        """Act with all networks of the ring, ``[K, ...]``, and choose by slot."""
        every = jax.vmap(self._programs.act_once, (0, None, None))(ring, step_state, row)
        return jax.tree_util.tree_map_with_path(lambda path, x: _chosen(path, x, slots), every)


def _chosen(path: tuple, x: jax.Array, slots: PyTree) -> jax.Array:
    """Return ``[B, ...]`` of ``[K, B, ...]``; what is no row, such as a key, is alike in all K."""
    if isinstance(slots, dict):
        names = [key.key for key in path if getattr(key, "key", None) in slots]
        if not names:
            raise UsageError(
                "models that travel need a policy for each group of agents; leave out policies "
                "that some agents of a group share"
            )
        slots = slots[names[0]]
    if x.shape[1 : 1 + slots.ndim] == slots.shape:
        return x[(slots, *jnp.indices(slots.shape, sparse=True))]
    if x.shape[1:2] == (slots.size,):
        return x[slots.reshape(-1), jnp.arange(slots.size)]
    return x[-1]


@jax.jit
def _pushed(ring: list, newest: list) -> list:
    return [jnp.concatenate([old[1:], new[None]]) for old, new in zip(ring, newest, strict=True)]


class ModelsCycle(SteppedCycle):
    """Acts in each row with the version that has arrived there."""

    _env: ModelsAdapter
    staged_version = 0
    """Version of the networks that ``run`` gets."""
    policy_version = 0
    """The oldest one with which a row of the last cycle acted."""

    def __init__(
        self, env: ModelsAdapter, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> None:
        """Step ``env``."""
        super().__init__(env, programs, device, timer)
        self.use(programs)
        self._ring: list[jax.Array] = []
        self._versions = np.zeros(NUM_KEPT, np.int64)

    def use(self, programs: CyclePrograms) -> None:
        super().use(_ActsByVersion(programs, self))  # type: ignore[arg-type]

    def reset(self) -> None:
        self._ring = []  # of an earlier state, whose versions are counted anew
        super().reset()

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        leaves, version = jax.tree.leaves(networks), self.staged_version + 1
        if not self._ring:
            self._ring = [jnp.stack([leaf] * NUM_KEPT) for leaf in leaves]
            self._versions = np.full(NUM_KEPT, version)
        elif version > self._versions[-1]:
            self._ring = _pushed(self._ring, leaves)
            self._versions = np.append(self._versions[1:], version)
        self._env.publish(version, num_bytes(networks))
        self.policy_version = self.staged_version
        return super().run(networks, step_state, stop)

    def ring_and_slots(self) -> tuple[list[jax.Array], PyTree]:
        """Return the networks that are kept, ``[K, ...]``, and which of them each row acts with."""
        versions, oldest = self._env.versions, self._versions[0]
        slots = np.searchsorted(self._versions, versions, side="right") - 1
        self._env.note(int((versions < oldest).sum()))
        used = max(int(versions.min()), int(oldest)) - 1
        self.policy_version = min(self.policy_version, used)
        return self._ring, self._env.by_group(np.maximum(slots, 0).astype(np.int32))

    def position(self) -> bytes | str:
        inner = super().position()
        if isinstance(inner, str):
            return inner
        ring = [np.asarray(leaf) for leaf in self._ring]
        content = (inner, self._versions, ring, self._env.marks(), self._env.published)
        return seal(content, of="models that travel", num_envs=self._env.num_envs)

    def put_back(self, position: bytes) -> None:
        inner, self._versions, ring, marks, published = unseal(
            position, of="models that travel", num_envs=self._env.num_envs
        )
        super().put_back(inner)
        self._ring = [jax.device_put(leaf, self._device) for leaf in ring]
        self._env.put_back_marks(marks, published)

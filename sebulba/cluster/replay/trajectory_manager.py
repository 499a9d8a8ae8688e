"""The part of a replay that one manager holds: the replay of ``agents/replay``, on a CPU.

It needs no cluster: a ``ManagerServer`` answers with it in a process (``inferencer_process.py`` in
``cluster/inferencers/``) or in an actor (``ray_actors.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cloudpickle
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, is_spec
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.agents.replay.remote_sample import Drawn, drawn_of
from sebulba.agents.replay.store import Draw, Replay, ReplayLayout
from sebulba.cluster.inferencers.inferencer_server import failure_of
from sebulba.errors import UsageError
from sebulba.support.trees import host_copy, owned_copy
from sebulba.types import PyTree, RunSpec, Trajectory


class Part(NamedTuple):
    """Which part of a replay of M parts a manager holds: that of some neighbouring Inferencers."""

    number: int
    """Its number, from 0."""
    parts: int
    """M."""

    def run(self, run: RunSpec) -> RunSpec:
        """Return the sizes of this part of a run."""
        return dataclasses.replace(
            run, num_inferencers=run.num_inferencers // self.parts, num_update_devices=1
        )


class TrajectoryManager:
    """Holds a part of a replay, and draws from it what an update draws.

    The part has a share of 1 / M of the capacity and of every batch. One manager of one part draws
    what a replay on one update device would draw, with the same bits.
    """

    def __init__(self, agent: OffPolicyAgent, run: RunSpec, part: Part) -> None:
        """Make an empty part; call ``begin`` before ``sample``."""
        self._part = part
        self._run = part.run(run)
        self._offset = part.number * self._run.num_inferencers
        self._batch_size = agent.config.replay.batch_size // part.parts
        # Statistics of observations are of the whole, and counted by ``ShardedReplay``.
        self._layout: ReplayLayout = dataclasses.replace(
            agent.replay, capacity=agent.replay.capacity // part.parts, normalizer=None
        )
        self._agent = agent.with_replay(self._layout)
        mesh = Mesh(np.array([_cpu()]), (LEARNER_AXIS,))
        spec = self._layout.spec()
        self._shardings = jax.tree.map(
            lambda leaf: NamedSharding(mesh, leaf), spec, is_leaf=is_spec
        )

        def program(function: Callable, out: PyTree, **jit: Any) -> Callable:
            """Jit ``function`` of the replay and two other arguments."""
            given = {"mesh": mesh, "in_specs": (spec, P(), P()), "out_specs": out}
            return jax.jit(jax.shard_map(function, check_vma=False, **given), **jit)

        written = {"donate_argnums": 0, "out_shardings": self._shardings}
        self._insert = program(self._layout.insert, spec, **written)
        self._set_priority = program(self._layout.set_priority, spec, **written)
        self._draw = program(self._drawn, P())
        self._replay = self._empty()

    def _drawn(self, replay: Replay, key_data: jax.Array, updates: jax.Array) -> Drawn:
        # The same keys as in the update (``learning/update.py``), with the part in the place of
        # the device.
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl=self._impl), updates)
        key = self._agent.loss_keys(jax.random.fold_in(key, self._part.number))[0]
        discount = self._agent.config.discount
        return drawn_of(self._layout, replay, key, self._batch_size, discount)

    def _empty(self) -> Replay:
        agent, run = self._agent, self._run

        def new(key: jax.Array) -> Replay:
            return agent.new_experience(key, agent.new_networks(key), run)

        with jax.default_device(_cpu()):
            return owned_copy(jax.jit(new)(jax.random.key(0)), self._shardings)

    # What the learner asks for.

    def begin(self, key_data: np.ndarray, impl: str) -> None:
        """Take the key of the updates, from which those of draws are folded."""
        self._key_data, self._impl = key_data, impl

    def clear(self) -> None:
        """Forget everything."""
        self._replay = self._empty()

    def insert(self, trajectory: Trajectory, core: PyTree) -> None:
        """Take a trajectory in, over the oldest of the same Inferencer.

        Args:
          trajectory: ``[T+1, B, ...]`` on the host, of an Inferencer of this part.
          core: Recurrent state before row 0, ``[B, ...]``, or ``()``.
        """
        own = np.asarray(trajectory.inferencer - self._offset, np.int32)
        self._replay = self._insert(self._replay, trajectory._replace(inferencer=own), core)

    def sample(self, updates: int) -> Drawn:
        """Draw this part's share of the batch of the update number ``updates``, from 0.

        Returns:
          Arrays of the host.
        """
        return jax.device_get(self._draw(self._replay, self._key_data, np.uint32(updates)))

    def update_priority(self, draw: Draw, priority: np.ndarray) -> None:
        """Set the priorities ``[N]`` of what was drawn; what was overwritten since stays so."""
        self._replay = self._set_priority(self._replay, draw, priority)

    def state(self) -> Replay:
        """Return a copy of everything, on the host."""
        return host_copy(self._replay)

    def put_back(self, state: Replay) -> None:
        """Go on with what ``state`` returned; it is copied."""
        self._replay = owned_copy(state, self._shardings)


class ManagerServer:
    """Answers requests, which are ``make`` and the methods of ``TrajectoryManager``."""

    def __init__(self, given: bytes, config: Mapping[str, Any]) -> None:
        """Prepare JAX; ``given`` is the pickled agent, ``config`` settings of JAX."""
        for name, value in config.items():
            jax.config.update(name, value)
        self._given = given
        self._manager: TrajectoryManager

    def make(self, run: RunSpec, part: Part) -> None:
        """Make an empty part of a replay."""
        self._manager = TrajectoryManager(cloudpickle.loads(self._given), run, part)

    def answer(self, name: str, arguments: tuple) -> Any:
        """Return the answer to a request by the name of a method, or the ``Failure`` of it."""
        try:
            if name == "close":
                return None
            return getattr(self if name == "make" else self._manager, name)(*arguments)
        except BaseException as raised:
            return failure_of(raised)


def _cpu() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UsageError(
            f"cluster.trajectory_managers keeps the replay on a CPU, which JAX does not have in "
            f"this process ({error}); use cluster.address=processes, or leave the platform to JAX"
        ) from error

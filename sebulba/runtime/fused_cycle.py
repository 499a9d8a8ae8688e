"""The fused cycle, for environments with JAX code: policy and environment in one program."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.errors import ActionError
from sebulba.runtime.cycle import (
    CycleOutput,
    CyclePrograms,
    check_finite,
    copy_tree,
    env_step_of,
    info_columns,
    no_action,
)
from sebulba.runtime.episodes import EpisodeStatistics
from sebulba.runtime.timer import PhaseTimer
from sebulba.types import EnvAdapter, EnvStep, FusedEnv, PyTree, Trajectory

FIRST_CHUNK_ENV_STEPS = 16384
"""Environment steps in one chunk of the first fused cycle, before its speed is known."""
CHUNK_S = 1.0
"""A chunk of a fused cycle that ran longer than this is split in the next cycle."""


class Recording(NamedTuple):
    """A trajectory being written, on the inference device."""

    env_step: EnvStep
    """``[T+1, B, ...]``."""
    action: jax.Array
    """``[T, B, ...]``."""
    extras: PyTree
    """``[T, B, ...]``."""
    row: jax.Array
    """Scalar int32: the next row to write."""
    initial_step_state: PyTree
    """As ``KeyData``."""


class Position(NamedTuple):
    """Where an Inferencer stands between two steps."""

    step_state: PyTree
    """As ``KeyData``."""
    env_state: PyTree
    env_step: EnvStep
    """What the next action answers."""


class Chunk(NamedTuple):
    """What a chunk of a cycle leaves beside the recording."""

    columns: tuple[jax.Array, ...]
    """Of ``info_columns``, ``[t, B]``."""
    num_invalid: jax.Array
    """Scalar int32: actions that had to be clamped."""
    finite: jax.Array
    """Scalar bool: every observation and reward of the recording is; of the last chunk only."""


class FusedCycle:
    """One compiled scan over policy and environment, in equal chunks of about a second.

    A cycle of one chunk is one program: it begins the recording, runs all steps and finishes.
    """

    kind = "fused"

    def __init__(
        self,
        env: EnvAdapter,
        fused: FusedEnv,
        programs: CyclePrograms,
        device: jax.Device,
        timer: PhaseTimer,
    ) -> None:
        """Run ``fused``, the JAX code of ``env``, on ``device``."""
        self._env = env
        self._fused = fused
        self._device = device
        self._timer = timer
        self._env_state: PyTree = None
        self._env_step: EnvStep | None = None
        self._statistics = EpisodeStatistics(env.num_envs)
        self.use(programs)

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs from the next cycle on."""
        self._programs = programs
        self._num_chunks = equal_chunks(
            programs.run.steps_per_cycle, FIRST_CHUNK_ENV_STEPS / programs.run.num_envs
        )
        self._compiled: dict[tuple[bool, bool], Callable] = {}
        self._speed_is_known = False

    def reset(self) -> None:
        """Begin new episodes."""
        env_step = env_step_of(self._env.reset(), no_action(self._env))
        self._env_step = jax.device_put(jax.tree.map(np.copy, env_step), self._device)
        self._env_state = jax.device_put(
            jax.tree.map(lambda x: np.array(x, copy=True), self._fused.state), self._device
        )
        self._statistics = EpisodeStatistics(self._env.num_envs)

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[CycleOutput | None, PyTree]:
        """Run one cycle; see ``Cycle.run``."""
        keys = self._programs.keys
        assert self._env_step is not None, "reset comes first"
        position = Position(keys.unwrap(step_state), self._env_state, self._env_step)
        recording: Recording | None = None
        chunks: list[Chunk] = []
        slowest_s = 0.0
        with self._timer.phase("cycle"):
            leaves = jax.tree.leaves(networks)
            while len(chunks) < self._num_chunks and not stop.is_set():
                program = self._program(len(chunks), leaves, position, recording)
                began = time.perf_counter()
                position, recording, final, chunk = program(leaves, position, recording)
                chunks.append(jax.device_get(chunk))
                slowest_s = max(slowest_s, time.perf_counter() - began)
        self._env_state, self._env_step = position.env_state, position.env_step
        step_state = keys.wrap(position.step_state)
        if recording is None:
            return None, step_state
        with self._timer.phase("finish"):
            if num_invalid := sum(int(chunk.num_invalid) for chunk in chunks):
                action = np.asarray(recording.action)[: int(recording.row)]
                raise ActionError(_describe_invalid(self._env, action, num_invalid))
            columns = zip(*(chunk.columns for chunk in chunks), strict=True)
            step_infos = self._statistics.add(*map(np.concatenate, columns))
            if len(chunks) < self._num_chunks:
                return None, step_state
            if not chunks[-1].finite:
                check_finite(recording.env_step)
            self._split_if_slow(slowest_s)
            initial = keys.wrap(recording.initial_step_state)
        return CycleOutput(*recording[:3], initial, keys.wrap(final), step_infos), step_state

    def _program(self, number: int, *example: PyTree) -> Callable:
        """Return the program of a chunk, compiled ahead of its first call, to keep that fast."""
        is_first, is_last = number == 0, number == self._num_chunks - 1
        if (is_first, is_last) not in self._compiled:
            length = self._programs.run.steps_per_cycle // self._num_chunks
            chunk = functools.partial(_run_chunk, self._programs, self._fused.step, length, is_last)
            program = jax.jit(chunk, donate_argnums=(1, 2)).lower(*example).compile()
            self._compiled[is_first, is_last] = program
        return self._compiled[is_first, is_last]

    def _split_if_slow(self, chunk_s: float) -> None:
        """After the first cycle, choose the number of chunks for good."""
        if self._speed_is_known:
            return
        self._speed_is_known = True
        length = self._programs.run.steps_per_cycle // self._num_chunks
        num_chunks = equal_chunks(self._programs.run.steps_per_cycle, length * CHUNK_S / chunk_s)
        if num_chunks > self._num_chunks:
            self._num_chunks = num_chunks
            self._compiled = {}


def _run_chunk(
    programs: CyclePrograms,
    env_step_fn: Callable,
    length: int,
    is_last: bool,
    networks: list,
    position: Position,
    recording: Recording | None,
) -> tuple[Position, Recording, PyTree, Chunk]:
    """Run ``length`` steps of policy and environment.

    Args:
      programs: Whose ``act`` acts.
      env_step_fn: ``FusedEnv.step``.
      length: Steps.
      is_last: Write the bootstrap row.
      networks: Leaves of the acting networks.
      position: Where the chunk begins; donated.
      recording: Of the chunks before, None in the first; donated.

    Returns:
      The position and the recording at the end, a copy of the step state there if ``is_last``,
      and the rest.
    """
    begun = _begin(programs.shapes, position.step_state) if recording is None else recording

    def body(carry: PyTree, _: None) -> tuple[PyTree, PyTree]:
        (step_state, env_state, env_step), recording = carry
        action, extras, step_state = programs.act_once(
            networks, step_state, jax.tree.leaves(env_step)
        )
        recording = recording._replace(
            env_step=_write(recording.env_step, recording.row, env_step),
            action=_write(recording.action, recording.row, action),
            extras=_write(recording.extras, recording.row, extras),
            row=recording.row + 1,
        )
        env_state, output, num_invalid = env_step_fn(env_state, action)
        env_step = env_step_of(output, action)
        columns = info_columns(output.true_reward, output.episode_end, env_step)
        return (Position(step_state, env_state, env_step), recording), (columns, num_invalid)

    (end, written), (columns, num_invalid) = jax.lax.scan(
        body, (position, begun), None, length=length
    )
    final, finite = None, jnp.array(True)
    if is_last:
        env_step = _write(written.env_step, written.row, end.env_step)
        written = written._replace(env_step=env_step)
        final, finite = copy_tree(end.step_state), _is_finite(env_step)
    return end, written, final, Chunk(columns, num_invalid.sum(), finite)


def _begin(shapes: Trajectory, step_state: PyTree) -> Recording:
    """Return a recording of nothing."""
    env_step, action, extras = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:3])
    return Recording(env_step, action, extras, jnp.int32(0), copy_tree(step_state))


def _write(rows: PyTree, row: jax.Array, tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, jnp.asarray(x), row, 0),
        rows,
        tree,
    )


def _is_finite(env_step: EnvStep) -> jax.Array:
    """Tell whether every observation and reward is."""
    leaves = jax.tree.leaves((env_step.obs, env_step.reward))
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all()


def equal_chunks(length: int, most: float) -> int:
    """Return the smallest number of equal chunks of ``length`` that are no longer than ``most``."""
    return next(
        n for n in range(1, length + 1) if length % n == 0 and (length / n <= most or n == length)
    )


def _describe_invalid(env: EnvAdapter, action: np.ndarray, num_invalid: int) -> str:
    """Say which of the actions ``[t, B, ...]`` are outside the action space."""
    space = env.spec.action_space
    for row, actions in enumerate(action):
        for index, one in enumerate(actions):
            if not space.contains(one if one.ndim else one[()]):
                return (
                    f"{num_invalid} actions of this cycle are outside {space} (they were clamped "
                    f"before the environment saw them); the first: action {one} for environment "
                    f"{index} at row {row}. Agent.step must return actions inside the space"
                )
    return f"{num_invalid} actions of this cycle are outside {space}"

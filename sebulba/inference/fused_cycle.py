"""The fused cycle, for environments with JAX code: policy and environment in one program."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.saving.saved_arrays import fitted
from sebulba.envs.saving.sealed import seal, unseal
from sebulba.errors import ActionError, EnvError
from sebulba.inference.cycle import CyclePrograms, LocalCycle, check_finite, env_state, info_columns
from sebulba.inference.episodes import new_statistics
from sebulba.inference.packed_rows import Packed, RowPacking
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.trees import copy_tree, host_copy
from sebulba.transport.item import Item
from sebulba.types import EnvAdapter, EnvStep, FusedEnv, PyTree, Trajectory, empty_env_step

FIRST_CHUNK_ENV_STEPS = 16384
"""Most environment steps in a chunk of the first fused cycle, whose speed is not known yet."""
CHUNK_S = 1.0
"""If a chunk of the first cycle takes longer than this, later cycles have more chunks."""
MERGE_AFTER_S = 60.0
"""A run that lasts longer than this merges chunks that are short, for the price of one compile."""

_NO_POSITION = "a fused cycle cannot save the environment, which is not written in JAX alone"


class Row(NamedTuple):
    """What one step yields, ``[B, ...]``."""

    env_step: EnvStep
    """What the step led to; its ``prev_action`` is the action of the step."""
    extras: PyTree
    """What ``Agent.step`` returned beside the action."""
    unclipped_reward: jax.Array
    """The reward before any clipping."""
    episode_end: jax.Array
    """Whether the whole game ended."""


class Recording(NamedTuple):
    """A cycle while it is being recorded, on the inference device."""

    rows: Packed
    """``Row`` by ``Row``, ``[T+1, B, ...]``: the one before the first step, then one a step."""
    num_steps: jax.Array
    """Scalar int32: steps that have been recorded."""
    initial_step_state: PyTree
    """As ``KeyData.unwrap`` returns it."""


class Position(NamedTuple):
    """Where an Inferencer stands between two steps."""

    step_state: PyTree
    """As ``KeyData.unwrap`` returns it."""
    env_state: PyTree
    """The state that ``FusedEnv.step`` takes."""
    env_step: EnvStep
    """The row that ``Agent.step`` gets next."""


class Chunk(NamedTuple):
    """What the host reads after each chunk of a cycle."""

    columns: tuple[jax.Array, ...]
    """What ``info_columns`` returns for the chunk's t steps, ``[t, B]``."""
    num_invalid: jax.Array
    """Scalar int32: actions that had to be clamped."""


class Finished(NamedTuple):
    """What the last chunk makes of the recording."""

    env_step: EnvStep
    """``[T+1, B, ...]``."""
    action: jax.Array
    """``[T, B, ...]``."""
    extras: PyTree
    """``[T, B, ...]``."""
    final_step_state: PyTree
    """A copy, as ``KeyData.unwrap`` returns it."""
    finite: jax.Array
    """Scalar bool: all observations and rewards are finite."""


class FusedCycle(LocalCycle):
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
        *,
        adapts: bool = True,
    ) -> None:
        """Run ``fused``, the JAX code of ``env``, on ``device``.

        Without ``adapts`` the number of chunks does not depend on how long the first cycle took.
        """
        super().__init__(env, programs, timer)
        self._fused = fused
        self._device = device
        self._adapts = adapts
        self._env_state: PyTree = None
        self.use(programs)

    def use(self, programs: CyclePrograms) -> None:
        super().use(programs)
        self._num_chunks = equal_chunks(
            programs.run.steps_per_cycle, FIRST_CHUNK_ENV_STEPS / programs.run.num_envs
        )
        self._compiled: dict[tuple[bool, bool], Callable] = {}
        self._first_ended: float | None = None
        self._chunks_are_final = not self._adapts
        self._packing = RowPacking(_row_shapes(programs.shapes))

    def _begin_at(self, env_step: EnvStep) -> None:
        copies = jax.tree.map(lambda x: np.array(x, copy=True), (self._fused.state, env_step))
        self._env_state, self._row = jax.device_put(copies, self._device)

    def position(self) -> bytes | str:
        if self._fused.saved_by_adapter:
            return super().position()
        if not self._fused.is_pure:
            of_env = env_state(self._env)
            return of_env if isinstance(of_env, str) else f"{_NO_POSITION}; cycle='stepped' can"
        arrays = host_copy((self._env_state, self._row))
        content = (jax.tree.leaves(arrays), self._statistics.running())
        return seal(content, of=self._who(), num_envs=self._env.num_envs)

    def put_back(self, position: bytes) -> None:
        if self._fused.saved_by_adapter:
            super().put_back(position)
            return
        if not self._fused.is_pure:
            raise EnvError(f"{_NO_POSITION}; use cycle='stepped'")
        leaves, running = unseal(position, of=self._who(), num_envs=self._env.num_envs)
        env_step = empty_env_step(self._env.spec, self._env.num_envs)
        arrays = fitted(leaves, (self._fused.state, env_step), self._who())
        self._env_state, self._row = jax.device_put(arrays, self._device)
        self._statistics = new_statistics(self._env.spec, self._env.num_envs, running)

    def _who(self) -> str:
        return f"a fused cycle of {self._env.spec.name!r}"

    def compile(self, networks: PyTree, step_state: PyTree, stop: threading.Event) -> None:
        """Compile the first program of a cycle, unless stopped before or while it compiles."""
        position = Position(self._programs.keys.unwrap(step_state), self._env_state, self._row)
        self._program(0, stop, jax.tree.leaves(networks), position, None)

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        keys = self._programs.keys
        assert self._row is not None, "reset comes first"
        position = Position(keys.unwrap(step_state), self._env_state, self._row)
        recording: Recording | None = None
        finished: Finished | None = None
        chunks: list[Chunk] = []
        slowest_s = 0.0
        with self._timer.phase("cycle"):
            leaves = jax.tree.leaves(networks)
            while len(chunks) < self._num_chunks and not stop.is_set():
                program = self._program(len(chunks), stop, leaves, position, recording)
                if program is None:
                    break
                began = time.perf_counter()
                position, recording, finished, chunk = program(leaves, position, recording)
                if self._device.platform != "cpu":
                    for leaf in jax.tree.leaves((chunk, finished and finished.finite)):
                        leaf.copy_to_host_async()  # the host then waits once
                # np.asarray takes a quarter of the time of device_get for arrays in host memory.
                chunks.append(jax.tree.map(np.asarray, chunk))
                slowest_s = max(slowest_s, time.perf_counter() - began)
        self._env_state, self._row = position.env_state, position.env_step
        step_state = keys.wrap(position.step_state)
        if recording is None:
            return None, step_state
        with self._timer.phase("finish"):
            if num_invalid := sum(int(chunk.num_invalid) for chunk in chunks):
                env_step = self._packing.unpack(recording.rows).env_step
                steps = slice(1, 1 + int(recording.num_steps))
                action = jax.tree.map(lambda x: np.asarray(x)[steps], env_step.prev_action)
                raise ActionError(_describe_invalid(self._env, action, num_invalid))
            columns = jax.tree.map(lambda *x: np.concatenate(x), *(c.columns for c in chunks))
            step_infos = self._statistics.add(*columns)
            if finished is None:
                return None, step_state
            if not finished.finite:
                check_finite(finished.env_step, self._env.spec)
            self._choose_chunks(slowest_s)
            initial = keys.wrap(recording.initial_step_state)
            final = keys.wrap(finished.final_step_state)
        return Item(Trajectory(*finished[:3]), initial, final, step_infos), step_state

    def _program(self, number: int, stop: threading.Event, *example: PyTree) -> Callable | None:
        """Return the compiled program of a chunk, or None if stopped before or while it compiled.

        It is compiled apart from its first call, so that the time of that call can be taken.
        """
        is_first, is_last = number == 0, number == self._num_chunks - 1
        if (is_first, is_last) not in self._compiled:
            with self._programs.turn_to_compile(stop, self._timer):
                if stop.is_set():
                    return None
                with self._timer.phase("compile"):
                    program = self._compile_chunk(is_last, *example)
            self._compiled[is_first, is_last] = program
            if stop.is_set():
                return None
        return self._compiled[is_first, is_last]

    def _compile_chunk(self, is_last: bool, *example: PyTree) -> Callable:
        length = self._programs.run.steps_per_cycle // self._num_chunks
        chunk = functools.partial(
            _run_chunk, self._programs, self._packing, self._fused.step, length, is_last
        )
        lowered = jax.jit(chunk, donate_argnums=(1, 2)).lower(*example)
        with contextlib.nullcontext() if self._fused.is_pure else _without_saving():
            return lowered.compile()

    def _choose_chunks(self, chunk_s: float) -> None:
        """Split long chunks after the first cycle; merge short ones once if the run lasts."""
        if self._chunks_are_final:
            return
        now, is_first = time.perf_counter(), self._first_ended is None
        if self._first_ended is None:
            self._first_ended = now
        self._chunks_are_final = now - self._first_ended > MERGE_AFTER_S
        if not (is_first or self._chunks_are_final):
            return
        steps = self._programs.run.steps_per_cycle
        fitting = equal_chunks(steps, steps // self._num_chunks * CHUNK_S / chunk_s)
        if fitting > self._num_chunks if is_first else fitting < self._num_chunks:
            self._num_chunks = fitting
            self._compiled = {}


def _run_chunk(
    programs: CyclePrograms,
    packing: RowPacking,
    env_step_fn: Callable,
    length: int,
    is_last: bool,
    networks: list,
    position: Position,
    recording: Recording | None,
) -> tuple[Position, Recording, Finished | None, Chunk]:
    """Run ``length`` steps of policy and environment.

    Args:
      is_last: Whether this is the last chunk, which finishes the recording.
      networks: Leaves of the acting networks.
      position: Where the chunk begins; donated.
      recording: What the chunks before recorded, None in the first chunk; donated.

    Returns:
      The new position, the recording, the finished trajectory if ``is_last``, and the ``Chunk``.
    """
    # The row before the chunk has zeros for what a step would add.
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _row_shapes(programs.shapes))
    first = packing.pack(empty._replace(env_step=position.env_step))
    if recording is None:
        num_rows = programs.run.steps_per_cycle + 1
        recording = _begin(first, num_rows, position.step_state)

    def body(carry: PyTree, _: None) -> tuple[PyTree, jax.Array]:
        step_state, env_state, row, rows, num_steps = carry
        action, extras, step_state = programs.act_once(
            networks, step_state, jax.tree.leaves(packing.unpack(row).env_step)
        )
        env_state, output, num_invalid = env_step_fn(env_state, action)
        env_step = programs.env_step_of(output, action)
        row = packing.pack(Row(env_step, extras, output.unclipped_reward, output.episode_end))
        num_steps = num_steps + 1
        return (step_state, env_state, row, _write(rows, num_steps, row), num_steps), num_invalid

    carry = (position.step_state, position.env_state, first, recording.rows, recording.num_steps)
    (step_state, env_state, row, rows, num_steps), num_invalid = jax.lax.scan(
        body, carry, None, length=length
    )
    end = Position(step_state, env_state, packing.unpack(row).env_step)
    recording = Recording(rows, num_steps, recording.initial_step_state)

    def newest(tree: PyTree, begin: jax.Array) -> PyTree:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, begin, length), tree)

    done = packing.unpack(newest(rows, num_steps - length + 1))
    acting: PyTree = ()
    if done.env_step.acting:
        acting = packing.unpack(newest(rows, num_steps - length)).env_step.acting
    columns = info_columns(done.unclipped_reward, done.episode_end, done.env_step, acting)
    finished = _finish(packing.unpack(rows), step_state) if is_last else None
    return end, recording, finished, Chunk(columns, num_invalid.sum())


def _without_saving() -> contextlib.AbstractContextManager[None]:
    """Let JAX save no compiled program of this thread in its folder.

    The address of native environments is part of theirs, so that no other process would find it.
    """
    from jax._src import config

    return config.persistent_cache_min_compile_time_secs(math.inf)


def _row_shapes(shapes: Trajectory) -> Row:
    """Return the shapes of a row, ``[B, ...]``, given those of a trajectory."""
    env_step, extras = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (shapes.env_step, shapes.extras)
    )
    num_envs = jax.tree.leaves(env_step.reward)[0].shape[0]
    episode_end = jax.ShapeDtypeStruct((num_envs,), jnp.bool_)
    return Row(env_step, extras, env_step.reward, episode_end)  # type: ignore[arg-type]


def _begin(first: Packed, num_rows: int, step_state: PyTree) -> Recording:
    """Return a recording that has only the row before the first step."""
    rows = jax.tree.map(lambda x: jnp.zeros((num_rows, *x.shape), x.dtype), first)
    return Recording(_write(rows, jnp.int32(0), first), jnp.int32(0), copy_tree(step_state))


def _write(rows: PyTree, row: jax.Array, tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, x, row, 0), rows, tree
    )


def _finish(rows: Row, step_state: PyTree) -> Finished:
    """Return the trajectory that ``[T+1, B, ...]`` rows make."""
    action, extras = jax.tree.map(lambda x: x[1:], (rows.env_step.prev_action, rows.extras))
    final = copy_tree(step_state)
    return Finished(rows.env_step, action, extras, final, _is_finite(rows.env_step))


def _is_finite(env_step: EnvStep) -> jax.Array:
    """Tell whether all observations and rewards are finite."""
    leaves = jax.tree.leaves((env_step.obs, env_step.reward, env_step.final))
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all()


def equal_chunks(length: int, most: float) -> int:
    """Return the smallest divisor of ``length`` that makes chunks of at most ``most`` (or of 1)."""
    return next(
        n for n in range(1, length + 1) if length % n == 0 and (length / n <= most or n == length)
    )


def _describe_invalid(env: EnvAdapter, action: PyTree, num_invalid: int) -> str:
    """Count the actions outside the action space, and name the first of ``[t, B, ...]``."""
    space = env.spec.action_space
    if isinstance(action, dict):
        return (
            f"{num_invalid} actions of this cycle are outside {space} or not legal (the "
            "environment was given others); Agent.step must return legal actions inside the space"
        )
    for row, actions in enumerate(action):
        for index, one in enumerate(actions):
            if not space.contains(one if one.ndim else one[()]):
                return (
                    f"{num_invalid} actions of this cycle are outside {space} (they were clamped "
                    f"before the environment saw them); the first: action {one} for environment "
                    f"{index} at row {row}. Agent.step must return actions inside the space"
                )
    return f"{num_invalid} actions of this cycle are outside {space}"

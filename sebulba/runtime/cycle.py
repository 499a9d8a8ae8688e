"""One inference cycle, in its two ways: stepped for any environment, fused where it has JAX code.

Both run the same two pieces, ``Agent.step`` and a write into a recording on the inference device,
and return the same trajectories; they differ in who calls the environment.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import Agent
from sebulba.errors import ActionError, EnvError, UsageError
from sebulba.runtime.episodes import EpisodeStatistics
from sebulba.runtime.timer import PhaseTimer
from sebulba.types import (
    EnvAdapter,
    EnvOutput,
    EnvStep,
    FusedEnv,
    PyTree,
    RunSpec,
    StepInfos,
    empty_env_step,
)

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


class CycleOutput(NamedTuple):
    """What a cycle makes, all on the inference device but for ``step_infos``."""

    env_step: EnvStep
    action: jax.Array
    extras: PyTree
    initial_step_state: PyTree
    final_step_state: PyTree
    step_infos: StepInfos


class CyclePrograms:
    """The compiled pieces of a cycle, shared by all Inferencers of a run."""

    def __init__(self, agent: Agent, acting_networks: PyTree, run: RunSpec) -> None:
        """Prepare, but not yet compile, the programs.

        Args:
          agent: Whose ``step`` runs.
          acting_networks: Their shapes.
          run: The sizes.
        """
        self.agent = agent
        self.run = run
        empty = jax.eval_shape(lambda acting: agent.empty_trajectory(acting, run), acting_networks)
        row = jax.ShapeDtypeStruct((), jnp.int32)
        self._shapes: PyTree = Recording(empty.env_step, empty.action, empty.extras, row)  # type: ignore[arg-type]
        self.begin = jax.jit(self._begin)
        self.act = jax.jit(self.record_step, donate_argnums=(1, 2))
        self.finish = jax.jit(self._finish, donate_argnums=(0,))

    def _begin(self, step_state: PyTree, zero: jax.Array) -> tuple[PyTree, Recording]:
        """Return a copy of the step state, and a recording of nothing."""
        recording = jax.tree.map(
            lambda x: jnp.broadcast_to(zero.astype(x.dtype), x.shape), self._shapes
        )
        return _copy(step_state), recording

    def record_step(
        self, networks: PyTree, step_state: PyTree, recording: Recording, env_step: EnvStep
    ) -> tuple[jax.Array, PyTree, Recording]:
        """Act on ``env_step`` and write it with the action into the recording.

        Args:
          networks: Acting networks; not donated, other Inferencers read them too.
          step_state: Donated.
          recording: Donated.
          env_step: ``[B, ...]``; not donated, since JAX may alias the host arrays in it.

        Returns:
          Actions ``[B, ...]``, the next step state, and the recording one row further.
        """
        output, step_state = self.agent.step(networks, step_state, env_step, explore=True)
        row = recording.row
        recording = Recording(
            env_step=_write(recording.env_step, row, env_step),
            action=_write(recording.action, row, output.action),
            extras=_write(recording.extras, row, output.extras),
            row=row + 1,
        )
        return output.action, step_state, recording

    def _finish(
        self, recording: Recording, env_step: EnvStep, step_state: PyTree
    ) -> tuple[tuple[EnvStep, jax.Array, PyTree], PyTree, jax.Array]:
        """Write the bootstrap row; return the trajectory, a copy of the step state, and health.

        The last is a scalar bool: every observation and reward is finite.
        """
        env_steps = _write(recording.env_step, recording.row, env_step)
        floats = [
            leaf
            for leaf in jax.tree.leaves((env_steps.obs, env_steps.reward))
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        finite = jnp.array([jnp.isfinite(leaf).all() for leaf in floats]).all()
        return (env_steps, recording.action, recording.extras), _copy(step_state), finite


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def _write(rows: PyTree, row: jax.Array, tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, jnp.asarray(x), row, 0),
        rows,
        tree,
    )


class Cycle(Protocol):
    """One Inferencer's environment and where it stands, between and during cycles."""

    kind: str
    """``"stepped"`` or ``"fused"``."""

    def reset(self) -> None:
        """Begin new episodes."""
        ...

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[CycleOutput | None, PyTree]:
        """Run one cycle.

        Args:
          networks: Acting networks on the inference device.
          step_state: Donated.
          stop: Ends the cycle early, between two environment steps or two chunks.

        Returns:
          The output, None if stopped; and the step state that goes with the environment's
          present position.
        """
        ...

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs (another ``steps_per_cycle``) from the next cycle on."""
        ...


class SteppedCycle:
    """Acts by one program a step and calls the environment between."""

    kind = "stepped"

    def __init__(
        self, env: EnvAdapter, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> None:
        self._env = env
        self._programs = programs
        self._device = device
        self._timer = timer
        self._env_step: EnvStep | None = None
        self._statistics = EpisodeStatistics(env.num_envs)

    def use(self, programs: CyclePrograms) -> None:
        self._programs = programs

    def reset(self) -> None:
        output = self._env.reset()
        prev_action = jax.device_put(no_action(self._env), self._device)
        self._env_step = env_step_of(output, prev_action)
        self._statistics = EpisodeStatistics(self._env.num_envs)

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[CycleOutput | None, PyTree]:
        programs, timer, env = self._programs, self._timer, self._env
        act, env_step = programs.act, self._env_step
        assert env_step is not None, "reset comes first"
        with timer.phase("act"):
            initial, recording = programs.begin(step_state, _zero(self._device))
        rows: list[EnvOutput] = []
        for _ in range(programs.run.steps_per_cycle):
            if stop.is_set():
                break
            with timer.phase("act"):
                action, step_state, recording = act(networks, step_state, recording, env_step)
                host_action = np.asarray(action)
            with timer.phase("env_step"):
                try:
                    output = env.step(host_action)
                except ActionError as error:
                    if where := _find_not_finite(env_step):
                        raise EnvError(f"an environment returned {where}") from error
                    raise
            # The device's own action goes back as prev_action, so nothing is uploaded for it.
            self._env_step = env_step = env_step_of(output, action)
            rows.append(output)
        with timer.phase("finish"):
            if rows:
                columns = zip(*map(info_columns, rows), strict=True)
                step_infos = self._statistics.add(*map(np.stack, columns))
            if len(rows) < programs.run.steps_per_cycle:
                return None, step_state
            trajectory, final, finite = programs.finish(recording, env_step, step_state)
            _check_finite(bool(finite), trajectory[0])
        env_steps, actions, extras = trajectory
        return CycleOutput(env_steps, actions, extras, initial, final, step_infos), step_state


class FusedCycle:
    """Policy and environment as one compiled scan, in equal chunks of about a second."""

    kind = "fused"

    def __init__(
        self,
        env: EnvAdapter,
        fused: FusedEnv,
        programs: CyclePrograms,
        device: jax.Device,
        timer: PhaseTimer,
    ) -> None:
        self._env = env
        self._fused = fused
        self._device = device
        self._timer = timer
        self._env_state: PyTree = None
        self._env_step: EnvStep | None = None
        self._statistics = EpisodeStatistics(env.num_envs)
        self.use(programs)

    def use(self, programs: CyclePrograms) -> None:
        self._programs = programs
        self._num_chunks = equal_chunks(
            programs.run.steps_per_cycle, FIRST_CHUNK_ENV_STEPS / programs.run.num_envs
        )
        self._chunk: Callable | None = None
        self._speed_is_known = False

    def reset(self) -> None:
        env_step = env_step_of(self._env.reset(), no_action(self._env))
        self._env_step = jax.device_put(jax.tree.map(np.copy, env_step), self._device)
        self._env_state = jax.device_put(
            jax.tree.map(lambda x: np.array(x, copy=True), self._fused.state), self._device
        )
        self._statistics = EpisodeStatistics(self._env.num_envs)

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[CycleOutput | None, PyTree]:
        programs = self._programs
        infos: list[tuple[np.ndarray, ...]] = []
        num_invalid = 0
        slowest_s = 0.0
        with self._timer.phase("cycle"):
            initial, recording = programs.begin(step_state, _zero(self._device))
            carry = step_state, recording, self._env_state, self._env_step
            chunk = self._chunk = self._chunk or self._compile(networks, carry)
            while len(infos) < self._num_chunks and not stop.is_set():
                began = time.perf_counter()
                carry, (rows, invalid) = chunk(networks, carry)
                infos.append(jax.device_get(rows))
                num_invalid += int(np.sum(invalid))
                slowest_s = max(slowest_s, time.perf_counter() - began)
            step_state, recording, self._env_state, self._env_step = carry
        with self._timer.phase("finish"):
            if num_invalid:
                action = np.asarray(recording.action)[: int(recording.row)]
                raise ActionError(_describe_invalid(self._env, action, num_invalid))
            if infos:
                columns = (np.concatenate(x) for x in zip(*infos, strict=True))
                step_infos = self._statistics.add(*columns)
            if len(infos) < self._num_chunks:
                return None, step_state
            trajectory, final, finite = programs.finish(recording, self._env_step, step_state)
            _check_finite(bool(finite), trajectory[0])
            self._split_if_slow(slowest_s)
        env_steps, actions, extras = trajectory
        return CycleOutput(env_steps, actions, extras, initial, final, step_infos), step_state

    def _compile(self, networks: PyTree, carry: PyTree) -> Callable:
        """Compile ahead of the first call, so that the first cycle's time is its own."""
        chunk = functools.partial(
            _run_chunk,
            self._programs.record_step,
            self._fused.step,
            self._programs.run.steps_per_cycle // self._num_chunks,
        )
        return jax.jit(chunk, donate_argnums=(1,)).lower(networks, carry).compile()

    def _split_if_slow(self, chunk_s: float) -> None:
        """After the first cycle, choose the number of chunks for good."""
        if self._speed_is_known:
            return
        self._speed_is_known = True
        length = self._programs.run.steps_per_cycle // self._num_chunks
        num_chunks = equal_chunks(self._programs.run.steps_per_cycle, length * CHUNK_S / chunk_s)
        if num_chunks > self._num_chunks:
            self._num_chunks = num_chunks
            self._chunk = None


def _run_chunk(
    record_step: Callable, env_step_fn: Callable, length: int, networks: PyTree, carry: PyTree
) -> tuple[PyTree, PyTree]:
    """Run ``length`` steps of policy and environment; ``carry`` is donated.

    Returns:
      The carry, and for every step the columns of ``StepInfos`` and the number of invalid actions.
    """

    def body(carry: PyTree, _: None) -> tuple[PyTree, PyTree]:
        step_state, recording, env_state, env_step = carry
        action, step_state, recording = record_step(networks, step_state, recording, env_step)
        env_state, output, num_invalid = env_step_fn(env_state, action)
        carry = step_state, recording, env_state, env_step_of(output, action)
        return carry, (info_columns(output), num_invalid)

    return jax.lax.scan(body, carry, None, length=length)


CycleKind = Literal["auto", "stepped", "fused"]
MakeCycle = Callable[[EnvAdapter, CyclePrograms, jax.Device, PhaseTimer], Cycle]


def make_cycle(
    kind: CycleKind | MakeCycle,
    env: EnvAdapter,
    programs: CyclePrograms,
    device: jax.Device,
    timer: PhaseTimer,
) -> tuple[Cycle, str]:
    """Choose the way a cycle runs, by rule: fused where it can be and inference is on a CPU.

    Returns:
      The cycle, and the reason for its kind.

    Raises:
      UsageError: ``kind="fused"`` and the environment or the device does not allow it.
    """
    if callable(kind):
        return kind(env, programs, device, timer), "given"
    if kind == "stepped":
        return SteppedCycle(env, programs, device, timer), "asked for"
    fused = env.fused()
    if not isinstance(fused, str) and device.platform != "cpu":
        fused = f"inference is on a {device.platform}, and a fused cycle runs on a CPU"
    if isinstance(fused, str):
        if kind == "fused":
            raise UsageError(f"cycle='fused' is not possible: {fused}; use cycle='auto'")
        return SteppedCycle(env, programs, device, timer), fused
    why = "asked for" if kind == "fused" else "the environment has an XLA handle, inference a CPU"
    return FusedCycle(env, fused, programs, device, timer), why


def equal_chunks(length: int, most: float) -> int:
    """Return the smallest number of equal chunks of ``length`` that are no longer than ``most``."""
    return next(
        n for n in range(1, length + 1) if length % n == 0 and (length / n <= most or n == length)
    )


def env_step_of(output: EnvOutput, prev_action: PyTree) -> EnvStep:
    return EnvStep(
        output.obs,
        prev_action,
        output.reward,
        output.terminated,
        output.truncated,
        output.is_first,
    )


def no_action(env: EnvAdapter) -> np.ndarray:
    return np.asarray(empty_env_step(env.spec, env.num_envs).prev_action)


def _zero(device: jax.Device) -> jax.Array:
    return jax.device_put(np.int32(0), device)


def info_columns(output: EnvOutput) -> tuple:
    """Return (true_reward, episode_end, inserted, masked_truncation), ``[B]`` each."""
    return (
        output.true_reward,
        output.episode_end,
        output.is_first & ~(output.terminated | output.truncated),
        output.is_first & output.truncated & ~output.terminated,
    )


def _check_finite(finite: bool, env_step: EnvStep) -> None:
    """Raise EnvError that names the first value that is not finite, if there is one."""
    if finite:
        return
    where = _find_not_finite(env_step)
    raise EnvError(f"an environment returned a value that is not finite: {where}")


def _find_not_finite(env_step: EnvStep) -> str | None:
    """Say where observations or rewards ``[..., B, ...]`` are first NaN or infinite."""
    time_major = np.ndim(env_step.reward) == 2
    named = {"obs": env_step.obs, "reward": env_step.reward}
    for path, leaf in jax.tree_util.tree_leaves_with_path(named):
        array = np.asarray(leaf)
        bad = np.argwhere(~np.isfinite(array)) if array.dtype.kind == "f" else np.empty(0)
        if len(bad):
            row, *rest = bad[0] if time_major else (0, *bad[0])
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            at = f" at row {row} of the cycle" if time_major else ""
            index = tuple(int(i) for i in rest[1:])
            return (
                f"environment {rest[0]}{at}, {name}{list(index) if index else ''} = "
                f"{array[tuple(bad[0])]}; expected finite numbers"
            )
    return None


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

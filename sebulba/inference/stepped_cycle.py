"""The stepped cycle, for any environment: a program acts, then Python calls ``env.step``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sebulba.errors import ActionError, EnvError
from sebulba.inference.cycle import (
    CyclePrograms,
    LocalCycle,
    check_finite,
    env_step_of,
    info_columns,
)
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.trees import named_leaves
from sebulba.transport.item import Item
from sebulba.types import EnvAdapter, EnvOutput, EnvStep, PyTree, Trajectory

ALIGNMENT = 64
"""Bytes. On a CPU, JAX uses an array without a copy if its address is a multiple of this."""


class SteppedCycle(LocalCycle):
    """Calls one program a step to act.

    On a CPU, what the environment returns stays on the host until the cycle ends. An accelerator
    gets each row once: the row that was uploaded to act is kept there, and stacked there. Rows that
    the environment has on a device never come to the host; actions go to it as they are.

    While Python works in a step, other Inferencers wait for the interpreter's lock, so rows are
    stacked only once a cycle. Until then they are kept in flat lists of arrays: a tuple or list
    kept for each step would make Python's garbage collector run.
    """

    kind = "stepped"

    def __init__(
        self, env: EnvAdapter, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> None:
        """Step ``env``; ``programs`` run on the device that holds the networks."""
        super().__init__(env, programs, timer)
        self._given: tuple[list[np.ndarray], PyTree] | None = None
        self._device = device
        self._stays = False
        """The environment returns JAX arrays, and takes them."""
        self._accelerator = None if device.platform == "cpu" else device
        """Where rows are kept; None keeps them on the host."""
        self._uploaded: list[jax.Array] | None = None
        """The row that the next cycle begins with, on the accelerator."""

    def _begin_at(self, env_step: EnvStep) -> None:
        self._given = self._uploaded = None
        if isinstance(jax.tree.leaves(env_step.obs)[0], jax.Array):
            self._stays, self._accelerator = True, self._device
        self._check_structure(env_step)
        self._row = jax.tree.leaves(env_step)

    def last_transition(self) -> dict[str, np.ndarray]:
        """Return the latest observation and the action given in it, ``[B, ...]`` by name.

        If a row was not finite, those before the first such row; empty right after ``reset``.
        """
        if self._given is None:
            return {}
        leaves, action = self._given
        env_step = jax.tree.unflatten(self._programs.env_step_structure, leaves)
        names, arrays = named_leaves({"obs": env_step.obs, "action": action})
        return dict(zip(names, arrays, strict=True))

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        programs, act, step = self._programs, self._programs.act, self._env.step
        sees_final = programs.agent.sees_final_obs
        act_phase, env_phase = self._timer.phase("act"), self._timer.phase("env_step")
        leaves = self._row
        assert leaves is not None, "reset comes first"
        rows = [*leaves]
        accelerator = self._accelerator
        row: Any = leaves if accelerator is None else self._uploaded or _upload(leaves, accelerator)
        uploaded = [*row]
        unclipped_reward: list[PyTree] = []
        episode_end: list[np.ndarray] = []
        extras: list[PyTree] = []
        with act_phase:
            initial = programs.copy(step_state)
            step_state = programs.keys.unwrap(step_state)
            network_leaves = jax.tree.leaves(networks)
        for _ in range(programs.run.steps_per_cycle):
            if stop.is_set():
                break
            with act_phase:
                action, extra, step_state = act(network_leaves, step_state, row)
                host_action = action if self._stays else _on_host(action)
            self._given = leaves, host_action
            with env_phase:
                try:
                    output = step(host_action)
                except ActionError as error:
                    self._raise_if_not_finite(rows, error)
                    raise
            if not extras:
                self._check_structure(programs.env_step_of(output, host_action))
            leaves = _leaves_of(output, host_action)
            if sees_final:
                leaves += jax.tree.leaves(output.final)
            rows += leaves
            row = leaves
            if accelerator is not None:
                row = _upload(leaves, accelerator)
                uploaded += row
            unclipped_reward.append(output.unclipped_reward)
            episode_end.append(output.episode_end)
            extras.append(extra)
        self._row, self._uploaded = leaves, None if accelerator is None else row
        with self._timer.phase("finish"):
            step_state = programs.keys.wrap(step_state)
            if not extras:
                return None, step_state
            if self._stays:
                infos = programs.stack([*zip(unclipped_reward, episode_end, strict=True)])
                stacked = self._stack_on_device(uploaded)
                env_step, (rewards, ends) = jax.device_get((programs.brief(stacked), infos))
            else:
                how = _stack_aligned if accelerator is None else _stack_what_is_read
                env_step = self._stack(rows, how)
                rewards = jax.tree.map(lambda *x: np.stack(x), *unclipped_reward)
                ends = np.stack(episode_end)
            after_first = jax.tree.map(lambda x: x[1:], env_step)
            acting = jax.tree.map(lambda x: x[:-1], env_step.acting)
            step_infos = self._statistics.add(*info_columns(rewards, ends, after_first, acting))
            if len(extras) < programs.run.steps_per_cycle:
                return None, step_state
            self._check_finite(env_step, rows)
            if accelerator is None:
                action = jax.tree.map(np.copy, after_first.prev_action)
            else:
                env_step = stacked if self._stays else self._stack_on_device(uploaded)
                action = jax.tree.map(lambda x: x[1:], env_step.prev_action)
            final = programs.copy(step_state)
            trajectory = Trajectory(env_step, action, programs.stack(extras))
        return Item(trajectory, initial, final, step_infos), step_state

    def _check_finite(self, env_step: EnvStep, all_rows: list[np.ndarray]) -> None:
        """Raise EnvError that names the first value that is not finite, if there is one."""
        with contextlib.suppress(EnvError):
            check_finite(env_step, self._env.spec)
            return
        env_step = self._stack(all_rows)
        leaves = jax.tree.leaves((env_step.obs, env_step.reward, env_step.final))
        floats = [leaf for leaf in leaves if leaf.dtype.kind == "f"]
        rows = [np.isfinite(x).all(tuple(range(1, x.ndim))) for x in floats]
        row = int(np.argmin(np.logical_and.reduce(rows)))
        before = jax.tree.leaves(jax.tree.map(lambda x: x[max(row - 1, 0)], env_step))
        self._given = before, jax.tree.map(lambda x: np.asarray(x)[row], env_step.prev_action)
        check_finite(env_step, self._env.spec)

    def _check_structure(self, env_step: EnvStep) -> None:
        """Raise EnvError unless the leaves of ``env_step`` are where the agent expects them."""
        expected, got = self._programs.env_step_structure, jax.tree.structure(env_step)
        if got != expected:  # type: ignore[operator]
            raise EnvError(f"an environment returned {got}; expected {expected}")

    def _stack(
        self, rows: list[np.ndarray], stack: Callable[[list[np.ndarray]], np.ndarray] = np.stack
    ) -> EnvStep:
        """Stack a flat list of the leaves ``[B, ...]`` of T+1 rows into ``[T+1, B, ...]``."""
        structure = self._programs.env_step_structure
        num_leaves = structure.num_leaves  # type: ignore[attr-defined]
        columns = [rows[i::num_leaves] for i in range(num_leaves)]
        return jax.tree.unflatten(structure, list(map(stack, columns)))

    def _stack_on_device(self, rows: list[jax.Array]) -> EnvStep:
        structure = self._programs.env_step_structure
        num_leaves = structure.num_leaves  # type: ignore[attr-defined]
        trees = [rows[i : i + num_leaves] for i in range(0, len(rows), num_leaves)]
        return jax.tree.unflatten(structure, self._programs.stack(trees))

    def _raise_if_not_finite(self, rows: list[np.ndarray], cause: ActionError) -> None:
        """Raise EnvError if a NaN or infinity from the environment explains an invalid action."""
        try:
            check_finite(self._stack(rows), self._env.spec)
        except EnvError as error:
            raise error from cause


def _upload(leaves: list[np.ndarray], device: jax.Device) -> list[jax.Array]:
    """Begin to copy a row to the device, all leaves in one call."""
    return jax.device_put(leaves, device)


def _on_host(action: PyTree) -> PyTree:
    """Return actions as NumPy arrays."""
    return jax.tree.map(np.asarray, action) if isinstance(action, dict) else np.asarray(action)


def _leaves_of(output: EnvOutput, prev_action: PyTree) -> list[np.ndarray]:
    """Return leaves of ``env_step_of(...)`` without ``final``, six times as fast as flattening."""
    if isinstance(prev_action, dict):
        return jax.tree.leaves(env_step_of(output, prev_action))
    obs = output.obs
    of_obs = [obs] if isinstance(obs, np.ndarray) else jax.tree.leaves(obs)
    flags = (output.terminated, output.truncated, output.is_first)
    return [*of_obs, prev_action, output.reward, *flags]


def _stack_what_is_read(rows: list[np.ndarray]) -> np.ndarray:
    """Stack flags and floats, which the host reads; other leaves repeat the first, uncopied."""
    first = rows[0]
    if first.dtype.kind in "bf":
        return np.stack(rows)
    return np.broadcast_to(first, (len(rows), *first.shape))


def _stack_aligned(rows: list[np.ndarray]) -> np.ndarray:
    """Stack ``rows`` ``[B, ...]`` into ``[T, B, ...]``, in memory that JAX uses without a copy."""
    first = rows[0]
    memory = np.empty(len(rows) * first.nbytes + ALIGNMENT, np.uint8)
    begin = -memory.__array_interface__["data"][0] % ALIGNMENT
    stacked = memory[begin : begin + len(rows) * first.nbytes].view(first.dtype)
    stacked = stacked.reshape(len(rows), *first.shape)
    # Twice as fast as np.stack, which makes a view of every row first.
    np.concatenate(rows, out=stacked.reshape(-1, *first.shape[1:]), casting="no")
    return stacked

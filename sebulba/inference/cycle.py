"""The inference cycle: its protocol, and what its two implementations share.

``SteppedCycle`` serves any environment, ``FusedCycle`` those that have JAX code. Both return the
same trajectories. Python calls the environment in the first, the compiled program in the second.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import Agent
from sebulba.envs.saving.saved_arrays import fitted
from sebulba.envs.saving.sealed import seal, unseal
from sebulba.errors import EnvError
from sebulba.inference.episodes import new_statistics
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.machine import num_cores
from sebulba.support.trees import KeyData, copy_tree
from sebulba.transport.item import Item
from sebulba.transport.permits import WAKE_S
from sebulba.types import (
    EnvAdapter,
    EnvOutput,
    EnvSpec,
    EnvStep,
    FinalObs,
    MultiAgentSpec,
    PyTree,
    RunSpec,
    empty_env_step,
)

ROWS_A_STACK = 64
"""Rows that one call of the stacking program takes."""
CORES_A_COMPILE = 2
"""Cores that XLA can use while it compiles one program of a cycle."""
LONGEST_WAIT_TO_COMPILE_S = 10.0
"""After this wait for its turn, an Inferencer compiles without one."""


class Cycle(Protocol):
    """Runs the cycles of one Inferencer and keeps its environment's position between them.

    One that has an attribute ``staging`` gets the ``Staging`` of its device there (async), may act
    with newer networks within a cycle, and says in ``policy_version`` which were the oldest. In
    ``staged_version`` it is told the version of the networks that ``run`` gets.
    """

    kind: str
    """``"stepped"`` or ``"fused"``."""

    def reset(self) -> None:
        """Begin new episodes."""
        ...

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        """Run one cycle.

        Args:
          networks: Acting networks on the inference device.
          step_state: The Inferencer's step state; donated.
          stop: Ends the cycle early, between two environment steps or two chunks.

        Returns:
          What it made, in arrays on the inference device or the host that are not written again
          and a trajectory without numbers, or None if stopped; and the step state for the next
          step.
        """
        ...

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs (another ``steps_per_cycle``) from the next cycle on."""
        ...

    def position(self) -> bytes | str:
        """Return the saved state of the environment, or the reason why it cannot be saved.

        Call it between two cycles. The position also has the row that the next cycle begins with
        and the running statistics of episodes, but not the step state.
        """
        ...

    def put_back(self, position: bytes) -> None:
        """Go on from ``position``; the environment was newly made in the same way as the saved one.

        Raises:
          EnvError: The position does not fit, or is damaged; call ``reset`` before the next cycle.
        """
        ...


class CyclePrograms:
    """The compiled pieces of a cycle, shared by all Inferencers of a run.

    A fused cycle compiles programs of its own in addition, since its environment is part of them.
    Networks and environment steps are passed as lists of leaves, step states as ``KeyData`` makes
    them: JAX flattens the arguments at every call, and a program is called once a step.
    """

    def __init__(
        self, agent: Agent, acting_networks: PyTree, step_state: PyTree, run: RunSpec
    ) -> None:
        """Prepare the programs; each is compiled when it is first called.

        Args:
          acting_networks: Arrays or shapes.
          step_state: That of any Inferencer, as an example.
        """
        self.agent = agent
        self.run = run
        self.keys = KeyData(step_state)
        self.shapes = jax.eval_shape(
            lambda acting: agent.empty_trajectory(acting, run), acting_networks
        )
        """Shapes of a trajectory."""
        self._networks_structure = jax.tree.structure(acting_networks)
        self.env_step_structure = jax.tree.structure(agent.empty_env_step(run.num_envs))
        self.act = jax.jit(self.act_once, donate_argnums=1)
        self.brief = jax.jit(_brief)
        self._stack = jax.jit(lambda rows: jax.tree.map(lambda *x: jnp.stack(x), *rows))
        self._concatenate = jax.jit(lambda rows: jax.tree.map(lambda *x: jnp.concatenate(x), *rows))
        self.copy = jax.jit(copy_tree)
        self._compiling = threading.BoundedSemaphore(max(1, num_cores() // CORES_A_COMPILE))

    @contextlib.contextmanager
    def turn_to_compile(self, stop: threading.Event, timer: PhaseTimer) -> Iterator[None]:
        """Wait for a turn to compile, for ``LONGEST_WAIT_TO_COMPILE_S`` or until stopped.

        If all Inferencers compile at once, all are ready late. In turns, the first trajectory, and
        with it the first update, comes while the next Inferencer still compiles. This matters for
        speed only: an Inferencer whose turn does not come (another may hang) compiles without one.
        """
        deadline = time.monotonic() + LONGEST_WAIT_TO_COMPILE_S
        with timer.phase("take"):  # a phase in which waiting is not taken for a hang
            while not (is_mine := self._compiling.acquire(timeout=WAKE_S)):
                if stop.is_set() or time.monotonic() > deadline:
                    break
        try:
            yield
        finally:
            if is_mine:
                self._compiling.release()

    def env_step_of(self, output: EnvOutput, prev_action: PyTree) -> EnvStep:
        """Return what the agent sees; last observations only if it uses them."""
        if not self.agent.sees_final_obs:
            output = output._replace(final=())
        return env_step_of(output, prev_action)

    def act_once(
        self, networks: list, step_state: PyTree, env_step: list
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Call ``Agent.act`` once, with exploration.

        Args:
          networks: Leaves of the acting networks; not donated, other Inferencers read them too.
          step_state: As ``KeyData.unwrap`` returns it; ``act`` donates it.
          env_step: Leaves ``[B, ...]``; not donated, since JAX may alias the host arrays in them.

        Returns:
          Action ``[B, ...]``, extras ``[B, ...]``, and the next step state, unwrapped.
        """
        output, step_state = self.agent.act(
            jax.tree.unflatten(self._networks_structure, networks),
            self.keys.wrap(step_state),
            jax.tree.unflatten(self.env_step_structure, env_step),
            explore=True,
        )
        return output.action, output.extras, self.keys.unwrap(step_state)

    def stack(self, rows: list[PyTree]) -> PyTree:
        """Stack T trees of ``[B, ...]`` on the device into one of ``[T, B, ...]``.

        They are stacked in groups, since compile time grows faster than the number of arguments.
        """
        groups = [
            self._stack(rows[i : i + ROWS_A_STACK]) for i in range(0, len(rows), ROWS_A_STACK)
        ]
        return groups[0] if len(groups) == 1 else self._concatenate(groups)


def _brief(env_step: EnvStep) -> EnvStep:
    """Return what the host reads of rows ``[T+1, B, ...]`` on a device.

    Of observations and actions that is ``[T+1, B]``: NaN where a number is not finite, else 0.
    """

    def one(x: jax.Array) -> jax.Array:
        is_finite = jnp.isfinite(x).all(axis=tuple(range(2, x.ndim)))
        return jnp.where(is_finite, 0.0, jnp.nan)

    obs, action = jax.tree.map(one, (env_step.obs, env_step.prev_action))
    final = env_step.final
    if isinstance(final, FinalObs):
        final = final._replace(obs=jax.tree.map(one, final.obs))
    return env_step._replace(obs=obs, prev_action=action, final=final)


def env_step_of(output: EnvOutput, prev_action: PyTree) -> EnvStep:
    """Return ``output`` without what agents do not see, with the action before it."""
    flags = output.terminated, output.truncated, output.is_first
    return EnvStep(output.obs, prev_action, output.reward, *flags, output.final, output.acting)


def env_state(env: EnvAdapter) -> bytes | str:
    """Return the saved state of an environment, or why it cannot be saved."""
    if not (hasattr(env, "state") and hasattr(env, "put_back")):
        return f"{type(env).__name__} has no methods state() and put_back(state)"
    return env.state()


def _owner(env: EnvAdapter) -> str:
    return f"a stepped cycle of {env.spec.name!r}"  # of a fused one, too: each reads the other's


class LocalCycle:
    """What stepped and fused cycles share: an environment of this process, and where it stands."""

    def __init__(self, env: EnvAdapter, programs: CyclePrograms, timer: PhaseTimer) -> None:
        """Step ``env``; ``programs`` act."""
        self._env = env
        self._programs = programs
        self._timer = timer
        self._row: Any = None
        """What the next cycle begins with, leaves ``[B, ...]``; None before a reset."""
        self._statistics = new_statistics(env.spec, env.num_envs)

    def use(self, programs: CyclePrograms) -> None:
        self._programs = programs

    def reset(self) -> None:
        self._begin(self._programs.env_step_of(self._env.reset(), no_action(self._env)))

    def position(self) -> bytes | str:
        assert self._row is not None, "reset comes first"
        state = env_state(self._env)
        if isinstance(state, str):
            return state
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._row)]
        content = (state, leaves, self._statistics.running())
        return seal(content, of=_owner(self._env), num_envs=self._env.num_envs)

    def put_back(self, position: bytes) -> None:
        self._row = None
        env, like = self._env, self._programs.agent.empty_env_step(self._env.num_envs)
        state, leaves, running = unseal(position, of=_owner(env), num_envs=env.num_envs)
        env_step = fitted(leaves, like, _owner(env))
        env.put_back(state)
        self._begin(env_step, running)

    def _begin(self, env_step: EnvStep, running: tuple = ()) -> None:
        """Have the next cycle begin at a row, with the statistics of episodes in progress."""
        self._begin_at(env_step)
        self._statistics = new_statistics(self._env.spec, self._env.num_envs, running)

    def _begin_at(self, env_step: EnvStep) -> None:
        """Set ``_row``."""
        raise NotImplementedError


def no_action(env: EnvAdapter) -> PyTree:
    """Return zeros, ``[B, ...]``, which stand for the previous action after a reset."""
    return empty_env_step(env.spec, env.num_envs).prev_action


def info_columns(
    unclipped_reward: PyTree, episode_end: PyTree, env_step: EnvStep, acting: PyTree
) -> tuple:
    """Return what ``EpisodeStatistics.add`` takes of ``[..., B]`` steps.

    Args:
      episode_end: Whether the whole game ended in it.
      acting: ``EnvStep.acting`` of the rows before.
    """
    if not isinstance(env_step.is_first, Mapping):
        return unclipped_reward, episode_end, env_step.inserted, env_step.masked_truncation
    # Only where all begin at once is it the environment's reset: an agent may join alone.
    all_first = [slots.all(axis=-1) for slots in env_step.is_first.values()]
    inserted = functools.reduce(operator.and_, all_first)
    return unclipped_reward, episode_end, inserted, inserted & ~inserted, acting


def check_finite(env_step: EnvStep, spec: EnvSpec | MultiAgentSpec) -> None:
    """Raise EnvError that names the first observation or reward ``[T+1, B, ...]`` not finite.

    With many agents the slot is named, too.
    """
    named = {"obs": env_step.obs, "reward": env_step.reward, "final": env_step.final}
    for path, leaf in jax.tree_util.tree_leaves_with_path(named):
        array = np.asarray(leaf)
        if array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        row, env, *rest = np.argwhere(~np.isfinite(array))[0]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        index = [int(i) for i in rest]
        raise EnvError(
            "an environment returned a value that is not finite: "
            f"environment {env} at row {row} of the cycle, {name}{index if index else ''} = "
            f"{array[(row, env, *rest)]}{_of_agent(spec, path, index)}; expected finite numbers"
        )


def _of_agent(spec: EnvSpec | MultiAgentSpec, path: tuple, index: list[int]) -> str:
    """Return whose value it is, given where it stands in the tree and in its row."""
    groups = spec.groups if isinstance(spec, MultiAgentSpec) else {}
    group = groups.get(getattr(path[1], "key", "")) if len(path) > 1 else None
    return f" of agent {group.slots[index[0]]!r}" if group is not None and index else ""

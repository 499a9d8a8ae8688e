"""The same training as somebody would write it without this library.

Several Python threads act, store and step an envpool each; one thread updates. Only the agent's
pure functions are Sebulba's. Loops and adapters are measured against this, so nothing here imports
them. Nothing is checked, counted, recovered or stopped in time.
"""

from __future__ import annotations

import concurrent.futures
import functools
import queue
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, Agent, AgentState
from sebulba.support.trees import is_key
from sebulba.types import EnvStep, PyTree, RunSpec, Trajectory

QUEUE_SIZE = 2


class Prototype:
    """Acts, stores and updates, one update a trajectory, on the default device."""

    def __init__(
        self, env_id: str, agent: Agent, run: RunSpec, seeds: Sequence[Any], **options: Any
    ) -> None:
        """Make one envpool for each thread.

        Args:
          env_id: An id of envpool's.
          agent: The agent, of which the pure functions are used.
          run: The sizes; ``num_inferencers`` is the number of acting threads.
          seeds: For each acting thread, one int32 for each environment.
          options: Options of ``envpool.make``.
        """
        self._agent = agent
        self._length = run.steps_per_cycle
        self.env_steps_per_cycle = run.steps_per_cycle * run.num_envs
        state: AgentState = jax.jit(lambda key: agent.new_state(key, run))(jax.random.key(0))
        self.networks, self._opt, self._experience = state[:3]
        self._updates = 0
        self._actors = [
            _Actor(make_pool(env_id, num_envs=run.num_envs, seed=seed, **options), agent, step)
            for seed, step in zip(seeds, state.step, strict=True)
        ]
        self._act = jax.jit(functools.partial(_act, agent), donate_argnums=1)
        self._update = make_update(agent)

    def train(self, num_trajectories: int) -> list[tuple[float, float]]:
        """Learn from this many trajectories, rounded up to whole rounds of all threads.

        Returns:
          For each trajectory, the ``time.perf_counter()`` when its update began, and its loss.
        """
        trajectories: queue.Queue = queue.Queue(QUEUE_SIZE)
        num_each = -(-num_trajectories // len(self._actors))
        seen: list[tuple[float, jax.Array]] = []
        with concurrent.futures.ThreadPoolExecutor(len(self._actors)) as threads:
            futures = [
                threads.submit(self._act_and_store, actor, num_each, trajectories)
                for actor in self._actors
            ]
            for _ in range(num_each * len(self._actors)):
                item = self._next(trajectories, futures)
                began_s = time.perf_counter()
                self.networks, self._opt, self._experience, loss = self._update(
                    self.networks, self._opt, self._experience, *item, np.uint32(self._updates)
                )
                jax.block_until_ready(self.networks)
                self._updates += 1
                seen.append((began_s, loss))
            for future in futures:
                future.result()
        return [(began_s, float(loss)) for began_s, loss in seen]

    @staticmethod
    def _next(trajectories: queue.Queue, futures: Sequence[concurrent.futures.Future]) -> Any:
        while True:
            try:
                return trajectories.get(timeout=1.0)
            except queue.Empty:
                for future in futures:
                    if future.done():
                        future.result()  # raises what its thread raised

    def _act_and_store(self, actor: _Actor, num_cycles: int, trajectories: queue.Queue) -> None:
        for _ in range(num_cycles):
            trajectories.put(actor.cycle(self._act, self.networks, self._length))

    def close(self) -> None:
        """Free the environments."""
        for actor in self._actors:
            actor.pool.close()


def make_pool(env_id: str, **options: Any) -> Any:
    """Return an envpool, whose spaces do not warn of lost precision when they are used."""
    import envpool

    with warnings.catch_warnings(action="ignore"):
        pool = envpool.make(env_id, env_type="gymnasium", **options)
        assert pool.observation_space and pool.action_space  # they warn when first read
    return pool


class _Actor:
    """One thread's environments and their state."""

    def __init__(self, pool: Any, agent: Agent, step_state: PyTree) -> None:
        self.pool = pool
        # Calls with typed keys are slower than with plain arrays, which jax.random.PRNGKey makes.
        self._step_state = unwrap_keys(step_state)
        self._obs_dtype = agent.spec.observation_space.dtype
        *_, action_array = pool.spec.action_array_spec.values()
        self._action_dtype = action_array.dtype
        obs, _ = pool.reset()
        self._ends = np.zeros(len(obs), np.bool_)
        zero = np.zeros((len(obs), *(agent.spec.action_space.shape or ())))
        self._env_step = EnvStep(
            np.asarray(obs, self._obs_dtype),
            zero.astype(agent.spec.action_space.dtype),
            np.zeros(len(obs), np.float32),
            self._ends,
            self._ends,
            ~self._ends,
        )

    def cycle(
        self, act: Callable, networks: PyTree, length: int
    ) -> tuple[Trajectory, PyTree, PyTree]:
        """Return a trajectory, and the step states before and after it."""
        initial = jax.tree.map(np.array, self._step_state)
        rows, actions, extras = [self._env_step], [], []
        for _ in range(length):
            output, self._step_state = act(networks, self._step_state, self._env_step)
            action = np.asarray(output.action)
            obs, reward, terminated, truncated, _ = self.pool.step(
                action.astype(self._action_dtype, copy=False)
            )
            self._env_step = EnvStep(
                np.asarray(obs, self._obs_dtype),
                action,
                np.asarray(reward, np.float32),
                terminated,
                truncated,
                self._ends,
            )
            self._ends = terminated | truncated
            rows.append(self._env_step)
            actions.append(action)
            extras.append(output.extras)
        zero = np.int32(0)
        trajectory = Trajectory(_stack(rows), np.stack(actions), _stack(extras), zero, zero, zero)  # type: ignore[arg-type]
        return trajectory, initial, jax.tree.map(np.array, self._step_state)


def _stack(rows: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def _act(agent: Agent, networks: PyTree, step_state: PyTree, env_step: EnvStep) -> PyTree:
    """Act with a step state whose keys are plain arrays."""
    like = jax.eval_shape(lambda: _step_state_like(agent, env_step))
    output, step_state = agent.step(networks, wrap_keys(step_state, like), env_step)
    return output, unwrap_keys(step_state)


def _step_state_like(agent: Agent, env_step: EnvStep) -> PyTree:
    return agent.new_step_state(jax.random.key(0), RunSpec(env_step.reward.shape[-1], 1, 1, 1), 0)


def unwrap_keys(tree: PyTree) -> PyTree:
    """Return ``tree`` with plain arrays for typed keys."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def wrap_keys(tree: PyTree, like: PyTree) -> PyTree:
    """Return ``tree`` with typed keys where ``like`` has them."""
    return jax.tree.map(lambda x, y: jax.random.wrap_key_data(x) if is_key(y) else x, tree, like)


def make_update(agent: Agent) -> Callable:
    """Return one program that takes a trajectory in, differentiates the loss and optimizes.

    Its arguments are ``(networks, opt, experience, trajectory, initial, final, updates)``, and it
    returns the new first three and the loss. It donates ``opt``, but not the networks, which the
    acting threads hold until they read the new ones from a variable.
    """

    def update(
        networks: PyTree,
        opt: PyTree,
        experience: PyTree,
        trajectory: Trajectory,
        initial: PyTree,
        final: PyTree,
        updates: jax.Array,
    ) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
        like = jax.eval_shape(lambda: _step_state_like(agent, trajectory.env_step))
        initial, final = wrap_keys(initial, like), wrap_keys(final, like)
        experience = agent.update_experience(experience, initial, final, trajectory, networks)
        key = jax.random.fold_in(jax.random.key(0), updates)
        (loss, (experience, _)), grads = jax.value_and_grad(agent.loss, has_aux=True)(
            networks, opt, experience, key
        )
        networks, opt = agent.optimize(networks, opt, grads)
        return networks, opt, experience, loss

    # The agent's functions use the axis "learner", which a mesh of one device binds.
    mesh = Mesh(np.array(jax.devices()[:1]), (LEARNER_AXIS,), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=1)

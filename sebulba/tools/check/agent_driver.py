"""Feeds the update of an agent: streams of trajectories, on some CPU devices, without threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import Agent, AgentState, is_spec, spec_of_each_leaf
from sebulba.learning.update import Updater
from sebulba.support.trees import named_leaves
from sebulba.transport.hand_off import HandOffToMesh
from sebulba.transport.item import Item
from sebulba.transport.mesh import UpdateMesh
from sebulba.types import EnvStep, PyTree, RunSpec, Trajectory, empty_env_step

T, B = 6, 8
NUM_INFERENCERS = 2

Made = tuple[Trajectory, PyTree, PyTree]
"""A trajectory, and the step states before its first and its last row."""


def run_spec(
    devices: int = 1, num_inferencers: int = NUM_INFERENCERS, num_steps: int = T
) -> RunSpec:
    """Return the sizes of a run of B environments."""
    return RunSpec(B, num_inferencers, num_steps, devices)


class Streams:
    """Makes what Inferencers would: random environments with next-step resets.

    Environment 0 ends often and the last ones never, so that devices hold unequal numbers of
    masked cells.
    """

    def __init__(self, agent: Agent, state: Any, seed: int = 0, num_steps: int = T) -> None:
        """Begin with the step states of ``state``; ``num_steps`` is T."""
        self._agent = agent
        self._num_steps = num_steps
        self._rng = np.random.default_rng(seed)
        self._step = jax.jit(agent.act)
        self._step_state = list(state.step)
        self._row = [self.first_row(j) for j in range(len(state.step))]
        self._cycle = [0 for _ in state.step]

    def first_row(self, inferencer: int) -> EnvStep:
        """Return the row after a reset."""
        return self._new_row(None, empty_env_step(self._agent.spec, B).prev_action)

    def next_row(self, inferencer: int, row: EnvStep, action: jax.Array) -> EnvStep:
        """Return what follows ``action`` in ``row``."""
        return self._new_row(row, np.asarray(action))

    def _new_row(self, last: EnvStep | None, action: Any) -> EnvStep:
        rng, ended = self._rng, np.zeros(B, bool)
        if last is not None:
            ended = np.asarray(last.terminated | last.truncated)
        rate = np.array([0.5, 0.4, 0.3, 0.1, 0.1, 0.05, 0.0, 0.0]) if last is not None else 0.0
        end = (rng.random(B) < rate) & ~ended
        terminates = rng.random(B) < 0.5
        return EnvStep(
            obs=self._obs(self._agent.spec.observation_space),
            prev_action=action,
            reward=np.where(ended, 0, rng.normal(size=B)).astype(np.float32),
            terminated=end & terminates,
            truncated=end & ~terminates,
            is_first=ended if last is not None else np.ones(B, bool),
        )

    def _obs(self, space: gymnasium.Space) -> PyTree:
        if isinstance(space, gymnasium.spaces.Dict):
            return {name: self._obs(space[name]) for name in sorted(space.spaces)}
        size, dtype = (B, *(space.shape or ())), space.dtype
        match space:
            case gymnasium.spaces.Box() if np.issubdtype(dtype, np.floating):
                return self._rng.normal(size=size).astype(dtype)
            case gymnasium.spaces.Box():
                low, high = space.low.astype(np.int64), space.high.astype(np.int64)
                return self._rng.integers(low, high, size, endpoint=True).astype(dtype)
            case gymnasium.spaces.Discrete():
                return (space.start + self._rng.integers(space.n, size=size)).astype(dtype)
            case gymnasium.spaces.MultiDiscrete():
                return (space.start + self._rng.integers(space.nvec, size=size)).astype(dtype)
        return self._rng.integers(2, size=size).astype(dtype)

    def next(self, networks: Any, inferencer: int = 0) -> Made:
        """Return (trajectory, initial step state, final step state) of the next cycle."""
        initial = self._step_state[inferencer]
        step_state, row, rows, outputs = initial, self._row[inferencer], [], []
        for _ in range(self._num_steps):
            rows.append(row)
            output, step_state = self._step(networks, step_state, row)
            outputs.append(jax.device_get(output))
            row = self.next_row(inferencer, row, output.action)
        rows.append(row)
        self._step_state[inferencer], self._row[inferencer] = step_state, row
        stack = lambda *x: jnp.asarray(np.stack(x))  # noqa: E731
        output = jax.tree.map(stack, *outputs)
        number = np.array(self._cycle[inferencer], np.int32)
        self._cycle[inferencer] += 1
        env_step = jax.tree.map(stack, *rows)
        version, index = np.array(0, np.int32), np.array(inferencer, np.int32)
        trajectory = Trajectory(env_step, output.action, output.extras, version, index, number)
        return trajectory, initial, step_state


class Driver:
    """Feeds an agent's update on some CPU devices, without environments and threads."""

    def __init__(
        self,
        agent: Agent,
        devices: int = 1,
        num_inferencers: int = NUM_INFERENCERS,
        make_streams: Callable[[Agent, Any], Streams] = Streams,
        state: Any = None,
        num_steps: int = T,
    ) -> None:
        """Begin with ``state``; None makes one."""
        mesh = UpdateMesh(jax.devices()[:devices])
        run = run_spec(devices, num_inferencers, num_steps)
        self.agent = agent = agent.for_run(run)
        state = state or self.new_state(run)
        self.streams = make_streams(agent, state)
        self._hand_off = HandOffToMesh(agent, mesh)
        self.updater = Updater(agent, mesh, jax.random.key(1))
        self.updater.begin(run)
        self.first_state = state
        # The same behaviour whatever the networks become: these act for ever.
        self._acting = agent.acting_networks(state.networks, state.experience)
        self.begin_anew()

    def new_state(self, run: RunSpec) -> AgentState:
        """Return the state to begin with."""
        return jax.jit(lambda key: self.agent.new_state(key, run))(jax.random.key(1))

    def begin_anew(self) -> None:
        """Go back to the first state; streams go on."""
        self.updater.place(self.first_state)
        self.consumed = self.updates = 0

    @property
    def state(self) -> Any:
        """The state without step states, on the host."""
        return jax.device_get(self.updater.state(())._replace(step=()))

    def made(self, inferencer: int = 0) -> Made:
        """Return what an Inferencer makes next."""
        return self.streams.next(self._acting, inferencer)

    def cycle(self, inferencer: int = 0) -> dict[str, float]:
        """Consume a trajectory, with the updates that are due, and return their metrics."""
        return self.consume(self.made(inferencer))

    def consume(self, made: Made) -> dict[str, float]:
        """Consume this one, which stays valid."""
        due = self.agent.num_off_policy_optims_per_cycle(self.consumed + 1)
        self.insert(made, due)
        self.updates += due
        return self.updater.take_metrics()

    def insert(self, made: Made, due: int = 0) -> None:
        """Give this one, which stays valid, to the agent, and take ``due`` updates."""
        self.consumed += 1
        made = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, made)
        item = Item(*made, step_infos=())  # type: ignore[arg-type]
        self.updater.consume(self._hand_off(item), updates=self.updates, due=due)


# What an update may not depend on.


def with_other_rewards(made: Made) -> Made:
    """Return what was made with other rewards in the transitions that are not valid."""
    trajectory, *states = made
    env_step = trajectory.env_step
    reward = jnp.asarray(env_step.reward).at[1:].add(~env_step.valid[1:] * 1e5)
    wild = trajectory._replace(env_step=env_step._replace(reward=reward))
    return wild, states[0], states[1]


def with_other_actions(made: Made) -> Made:
    """Return what was made with the actions and extras of another environment in the transitions
    that are not valid."""
    trajectory, *states = made
    env_step = trajectory.env_step
    masked = ~jnp.asarray(env_step.valid[1:])

    def other(x: jax.Array) -> jax.Array:
        where = masked.reshape(masked.shape + (1,) * (x.ndim - 2))
        return jnp.where(where, jnp.roll(x, 1, axis=1), x)

    action, extras = jax.tree.map(other, (trajectory.action, trajectory.extras))
    prev_action = jnp.asarray(env_step.prev_action).at[1:].set(action)
    env_step = env_step._replace(prev_action=prev_action)
    wild = trajectory._replace(env_step=env_step, action=action, extras=extras)
    return wild, states[0], states[1]


def named_specs(specs: PyTree, tree: PyTree) -> list[tuple[str, Any]]:
    """Return names and PartitionSpecs of the leaves of ``tree``."""
    flat = jax.tree.leaves(spec_of_each_leaf(specs, tree), is_leaf=is_spec)
    return list(zip(named_leaves(tree)[0], flat, strict=True))


def replicated_leaves(driver: Driver) -> dict[str, jax.Array]:
    """Return what must be equal on all devices, by name."""
    state = driver.updater.state(())
    same: dict[str, Any] = {"networks": state.networks, "opt": state.opt}
    specs = named_specs(driver.agent.experience_spec(), state.experience)
    for (name, spec), leaf in zip(specs, jax.tree.leaves(state.experience), strict=True):
        if not any(spec):
            same[f"experience/{name}"] = leaf
    return dict(zip(*named_leaves(same), strict=True))


def differs_by_device(leaf: jax.Array) -> bool:
    """Tell whether the copies of a replicated array differ."""
    first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
    return any(not np.array_equal(first, other, equal_nan=True) for other in others)

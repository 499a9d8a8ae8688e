"""Feeds the update of an agent: streams of trajectories, on some CPU devices, without threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agent import Agent, AgentState
from sebulba.inference.cycle import env_step_of
from sebulba.learning.update import Updater
from sebulba.loops.devices import learner_mesh
from sebulba.transport.hand_off import HandOffToMesh
from sebulba.types import EnvAdapter, EnvSpec, EnvStep, RunSpec, Trajectory

spaces = gymnasium.spaces
SPEC = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(5, start=2, dtype=np.int32))
BOX_SPEC = EnvSpec(SPEC.observation_space, spaces.Box(-1, 1, (2,)))
T, B = 6, 8


def run_spec(devices: int = 1, num_inferencers: int = 2) -> RunSpec:
    return RunSpec(B, num_inferencers, T, devices)


class Streams:
    """Makes what Inferencers would: random environments with next-step resets.

    Environment 0 ends often and the last ones never, so that devices hold unequal numbers of
    masked cells.
    """

    def __init__(self, agent: Agent, state: Any, seed: int = 0) -> None:
        self._agent = agent
        self._rng = np.random.default_rng(seed)
        self._step = jax.jit(agent.step)
        self._step_state = list(state.step)
        self._row = [self.first_row(j) for j in range(len(state.step))]
        self._cycle = [0 for _ in state.step]

    def first_row(self, inferencer: int) -> EnvStep:
        return self._new_row(None)

    def next_row(self, inferencer: int, row: EnvStep, action: jax.Array) -> EnvStep:
        return self._new_row(row)

    def _new_row(self, last: EnvStep | None) -> EnvStep:
        rng, ended = self._rng, np.zeros(B, bool)
        if last is not None:
            ended = last.terminated | last.truncated
        rate = np.array([0.5, 0.4, 0.3, 0.1, 0.1, 0.05, 0.0, 0.0]) if last is not None else 0.0
        end = (rng.random(B) < rate) & ~ended
        terminates = rng.random(B) < 0.5
        space = self._agent.spec.action_space
        return EnvStep(
            obs=rng.normal(size=(B, 3)).astype(np.float32),
            prev_action=np.zeros((B, *space.shape), space.dtype),
            reward=np.where(ended, 0, rng.normal(size=B)).astype(np.float32),
            terminated=end & terminates,
            truncated=end & ~terminates,
            is_first=ended if last is not None else np.ones(B, bool),
        )

    def next(self, networks: Any, inferencer: int = 0) -> tuple[Trajectory, Any, Any]:
        """Return (trajectory, initial step state, final step state) of the next cycle."""
        initial = self._step_state[inferencer]
        step_state, row, rows, outputs = initial, self._row[inferencer], [], []
        for _ in range(T):
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


class EnvStreams(Streams):
    """Makes trajectories of environments of B, one of them an Inferencer's."""

    def __init__(self, agent: Agent, state: Any, envs: list[EnvAdapter]) -> None:
        self._envs = envs
        super().__init__(agent, state)

    def first_row(self, inferencer: int) -> EnvStep:
        space = self._agent.spec.action_space
        no_action = np.zeros((B, *(space.shape or ())), space.dtype)
        return env_step_of(self._envs[inferencer].reset(), no_action)

    def next_row(self, inferencer: int, row: EnvStep, action: jax.Array) -> EnvStep:
        action_array = np.asarray(action)
        return env_step_of(self._envs[inferencer].step(action_array), action_array)


def quick_state(agent: Agent, run: RunSpec) -> AgentState:
    """Return a new state, quickly: to compile orthogonal initialisers takes a second.

    Kernels are normal, with the inverse of the number of their inputs as the variance.
    """
    agent.check_run(run)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(agent.new_networks, jax.random.key(0))
    normal = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)

    @jax.jit
    def new(normal: Any, key: jax.Array) -> AgentState:
        def one(made: jax.Array, normal: jax.Array) -> jax.Array:
            return made if made.ndim < 2 else normal * made.shape[0] ** -0.5

        keys = jax.random.split(key)
        networks = jax.tree.map(one, agent.new_networks(key), normal)
        step = tuple(agent.new_step_state(keys[j], run, j) for j in range(run.num_inferencers))
        experience = agent.new_experience(key, networks, run)
        return AgentState(networks, agent.new_opt(networks), experience, step)

    return new(normal, jax.random.key(1))


class Driver:
    """Feeds an agent's update on some CPU devices, without environments and threads."""

    def __init__(
        self,
        agent: Agent,
        devices: int = 1,
        num_inferencers: int = 2,
        make_streams: Callable[[Agent, Any], Streams] = Streams,
        state: Any = None,
    ) -> None:
        """Begin with ``state``; None makes one with ``quick_state``."""
        if len(jax.devices()) < devices:
            pytest.skip(f"needs {devices} devices")
        mesh = learner_mesh(jax.devices()[:devices])
        run = run_spec(devices, num_inferencers)
        state = state or quick_state(agent, run)
        self.agent = agent
        self.streams = make_streams(agent, state)
        self._hand_off = HandOffToMesh(agent, mesh)
        self.updater = Updater(agent, mesh, jax.random.key(1))
        self.first_state = state
        # The same behaviour whatever the networks become: these act for ever.
        self._acting = agent.acting_networks(state.networks, state.experience)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Go back to the first state; streams go on."""
        self.updater.place(self.first_state)
        self.consumed = self.updates = 0

    @property
    def state(self) -> Any:
        return jax.device_get(self.updater.state(())._replace(step=()))

    def cycle(self, inferencer: int = 0) -> dict[str, float]:
        """Consume a trajectory, with the updates that are due, and return their metrics."""
        return self.consume(self.streams.next(self._acting, inferencer))

    def consume(self, made: tuple[Trajectory, Any, Any]) -> dict[str, float]:
        """Consume this one, which stays valid."""
        due = self.agent.num_off_policy_optims_per_cycle(self.consumed + 1)
        self.insert(made, due)
        self.updates += due
        return self.updater.take_metrics()

    def insert(self, made: tuple[Trajectory, Any, Any], due: int = 0) -> None:
        """Give this one, which stays valid, to the agent, and take ``due`` updates."""
        self.consumed += 1
        made = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, made)
        self.updater.consume(*self._hand_off(*made), updates=self.updates, due=due)

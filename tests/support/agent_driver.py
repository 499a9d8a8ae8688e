"""What tests of agents share: spaces, states that compile fast, and streams of environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import numpy as np

from sebulba.agent import Agent, AgentState
from sebulba.inference.cycle import env_step_of
from sebulba.tools.check import agent_driver
from sebulba.tools.check.agent_driver import B, Streams
from sebulba.types import EnvAdapter, EnvSpec, EnvStep, RunSpec

spaces = gymnasium.spaces
SPEC = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(5, start=2, dtype=np.int32))
BOX_SPEC = EnvSpec(SPEC.observation_space, spaces.Box(-1, 1, (2,)))


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


class Driver(agent_driver.Driver):
    """A driver that begins with ``quick_state``."""

    def new_state(self, run: RunSpec) -> AgentState:
        return quick_state(self.agent, run)


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

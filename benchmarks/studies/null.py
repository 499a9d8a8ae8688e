"""An environment and an agent that do nothing, so that all a run costs is the loop's own work."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from sebulba.agent import Agent
from sebulba.types import ActionOutput, EnvStep, PyTree, RunSpec, Trajectory

OBSERVATION_SHAPE, NUM_ACTIONS = (4,), 2
"""The same as in CartPole."""


class NullVectorEnv(VectorEnv):
    """A ready-made vector environment whose rows never change."""

    def __init__(self, num_envs: int, seeds: Sequence[int]) -> None:
        """Make the one row that every step returns; ``seeds`` have no effect."""
        del seeds
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-1, 1, OBSERVATION_SHAPE, np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)
        self._row = (
            np.zeros((num_envs, *OBSERVATION_SHAPE), np.float32),
            np.zeros(num_envs, np.float32),
            np.zeros(num_envs, np.bool_),
            np.zeros(num_envs, np.bool_),
            {"env_id": np.arange(num_envs, dtype=np.int32)},
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        """Return the observation."""
        return self._row[0], self._row[4]

    def step(self, actions: Any) -> tuple:
        """Return the row."""
        return self._row


class NullPool(NullVectorEnv):
    """The same, with all that the adapter for envpool asks of a pool."""

    def __init__(self, num_envs: int, seeds: Sequence[int]) -> None:
        """Make what looks like an envpool in synchronous mode."""
        super().__init__(num_envs, seeds)
        self.observation_space = self.single_observation_space
        self.action_space = self.single_action_space
        self.all_env_ids = self._row[4]["env_id"]
        self.config = {"num_envs": num_envs, "batch_size": num_envs, "max_num_players": 1}
        action = types.SimpleNamespace(dtype=np.dtype(np.int32))
        self.spec = types.SimpleNamespace(action_array_spec={"action": action})  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class NullConfig:
    """No hyper-parameters."""


class NullAgent(Agent[NullConfig]):
    """Compares a number with a threshold, and learns nothing."""

    def new_networks(self, key: jax.Array) -> PyTree:
        return {"threshold": jnp.float32(0)}

    def new_opt(self, networks: PyTree) -> PyTree:
        return ()

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        return ()

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        """Return a count of steps, ``[B]``."""
        return jnp.zeros((run.num_envs,), jnp.int32)

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        """Return whether the first number of each observation is above the threshold."""
        action = (jnp.asarray(env_step.obs)[:, 0] > networks["threshold"]).astype(jnp.int32)
        return ActionOutput(action), step_state + 1

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        return experience

    def loss(
        self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, jax.Array]]]:
        return networks["threshold"] ** 2, (experience, {})

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        return networks, opt

    def experience_spec(self) -> PyTree:
        return ()

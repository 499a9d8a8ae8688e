"""Environments of bsuite for ``benchmarks.studies.bsuite_scores``, which records their training.

    sebulba train ppo --env.id benchmarks.studies.bsuite_env:BsuiteEnv \
        --env.options bsuite_id catch/0

trains without a record. It needs ``pip install 'sebulba[bsuite]'``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

ORDERS = "SEBULBA_BSUITE"
"""Environment variable of a training process, in JSON: the ``folder`` of the record, the most
``seconds`` of training or null, and ``parent``, the process that waits for it."""


class FromDmEnv(gymnasium.Env):
    """A dm_env environment with one array and discrete actions; an end with a discount is a cut."""

    def __init__(self, env: Any) -> None:
        self.env = env
        spec = env.observation_spec()
        low, high = getattr(spec, "minimum", -np.inf), getattr(spec, "maximum", np.inf)
        low, high = (np.broadcast_to(np.float32(bound), spec.shape) for bound in (low, high))
        self.observation_space = gymnasium.spaces.Box(low, high, spec.shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(env.action_spec().num_values)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the environment draws by a seed of its own."""
        super().reset(seed=seed)
        return np.asarray(self.env.reset().observation, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act."""
        now = self.env.step(int(action))
        terminated = bool(now.last() and not now.discount)
        obs, reward = np.asarray(now.observation, np.float32), float(now.reward or 0.0)
        return obs, reward, terminated, bool(now.last() and not terminated), {}


class BsuiteEnv(FromDmEnv):
    """An environment of bsuite; the first of a training process that is stepped is recorded."""

    recorded: BsuiteEnv | None = None
    """The one that this process records."""

    def __init__(self, bsuite_id: str) -> None:
        import bsuite

        super().__init__(bsuite.load_from_id(bsuite_id))
        self.bsuite_id, self.episodes = bsuite_id, 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act, and count episodes."""
        if ORDERS in os.environ and BsuiteEnv.recorded is None:
            from bsuite.logging import csv_logging

            BsuiteEnv.recorded, folder = self, json.loads(os.environ[ORDERS])["folder"]
            self.env = csv_logging.wrap_environment(self.env, self.bsuite_id, folder, True)
        obs, reward, terminated, truncated, info = super().step(action)
        self.episodes += terminated or truncated
        if self.episodes == self.env.bsuite_num_episodes and BsuiteEnv.recorded is self:
            self.env = getattr(self.env, "raw_env", self.env)  # the run ends a little later
        return obs, reward, terminated, truncated, info


def is_over(record: Mapping[str, Any]) -> str | None:
    """End the run after bsuite's episodes, or its time, or where nobody waits for it any more."""
    env, orders = BsuiteEnv.recorded, json.loads(os.environ[ORDERS])
    if env is not None and env.episodes >= env.env.bsuite_num_episodes:
        return f"the {env.env.bsuite_num_episodes} episodes of {env.bsuite_id} are over"
    if orders["seconds"] is not None and record["seconds"] >= orders["seconds"]:
        return f"{orders['seconds']:g} s are over"
    return None if os.getppid() == orders["parent"] else "the study was ended"

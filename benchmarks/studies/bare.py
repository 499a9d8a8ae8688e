"""The least that acting can cost: one jitted, donated program and the environment's own step.

Loop and adapters are measured against this, so nothing here imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sebulba.types import EnvStep, PyTree


def bare_loop(
    step: Callable, networks: PyTree, step_state: PyTree, env: Any, num_steps: int
) -> PyTree:
    """Act and step, without storing, checking or statistics.

    Args:
      step: ``jax.jit(agent.act, donate_argnums=1)``.
      networks: Acting networks.
      step_state: Step state, which is donated.
      env: A vector environment with Gymnasium's interface.
      num_steps: Number of vector steps.

    Returns:
      The last step state.
    """
    obs, _ = env.reset()
    num_envs = len(obs)
    ends = np.zeros(num_envs, np.bool_)
    action = np.zeros(num_envs, np.int32)
    env_step = EnvStep(obs, action, np.zeros(num_envs, np.float32), ends, ends, ~ends)
    for _ in range(num_steps):
        output, step_state = step(networks, step_state, env_step)
        action = np.asarray(output.action)
        obs, reward, terminated, truncated, _ = env.step(action)
        env_step = EnvStep(obs, action, reward, terminated, truncated, ends)
        ends = terminated | truncated
    return step_state

"""The value of a task with reward 1 and five steps an episode: 10 if it is cut, 4.1 if it ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agents.kernels.returns import lambda_returns, transitions
from sebulba.types import Trajectory
from tests.support.oracle import rollout

DISCOUNT = 0.9
STEPS = 24


def first_value(env: Any) -> float:
    """Return the value of the first row of an episode, as bootstrapping finds it.

    Args:
      env: An adapter, whose episodes are of five steps; it is stepped with its smallest actions.
    """
    space = env.spec.action_space
    lowest = np.asarray(getattr(space, "low", getattr(space, "start", 0)), space.dtype)
    action = np.broadcast_to(lowest, (STEPS, env.num_envs, *(space.shape or ())))
    env_step = rollout(env, np.ascontiguousarray(action))
    assert env_step.is_first[0].all() and env_step.is_first[6].all()
    scalar = np.int32(0)
    steps = transitions(Trajectory(env_step, action, (), scalar, scalar, scalar), DISCOUNT)

    @jax.jit
    def improved(value: jax.Array) -> jax.Array:
        rows = jnp.full((STEPS + 1, env.num_envs), value)
        returns = jax.vmap(lambda v, s: lambda_returns(v, s, 1.0), 1, 1)(rows, steps)
        return returns[0].mean()

    value = jnp.float32(0.0)
    for _ in range(60):
        value = improved(value)
    return float(value)

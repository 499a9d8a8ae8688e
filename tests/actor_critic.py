"""Linear actors and critics on a batch that is given, for losses computed by hand."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agents.replay import Transition
from sebulba.types import EnvSpec

spaces = gymnasium.spaces

UNBOUNDED = EnvSpec(spaces.Box(-9, 9, (1,)), spaces.Box(-np.inf, np.inf, (1,)))
"""One number observed and one done, which is not squashed."""


def column(*x: float) -> jax.Array:
    return jnp.asarray(x, jnp.float32)[:, None]


TRANSITIONS = Transition(
    obs=column(1, 2),
    action=column(0.5, -1),
    extras=(),
    reward=jnp.asarray([1.0, 2.0]),
    discount=jnp.asarray([0.9, 0.0]),
    next_obs=column(2, 3),
)


class GivenReplay:
    """Always gives TRANSITIONS, with these importance weights; stands in for parts of an agent."""

    def __init__(self, agent: Any, weight: Any) -> None:
        """Put it into ``agent``, whose loss then returns priorities as the experience."""
        agent.replay = self
        agent.draw = lambda experience, key: ((), jnp.asarray(weight))
        agent.set_priority = lambda experience, draw, priority: priority
        agent.replay_metrics = lambda experience, opt: {}

    def transitions(self, experience: Any, draw: Any, gamma: float) -> Transition:
        return TRANSITIONS


def linear(*kernel: Any, bias: float = 0.0) -> dict[str, Any]:
    """Return parameters of a network without hidden layers: rows of the kernel are inputs."""
    kernel = jnp.asarray(kernel, jnp.float32).reshape(len(kernel), -1)
    return {"head": {"kernel": kernel, "bias": jnp.full(kernel.shape[1], bias)}}

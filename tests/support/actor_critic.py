"""What tests of agents with actor and critics share: losses by hand, and probes."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

import sebulba
from sebulba.agents.configs import make_agent
from sebulba.agents.replay.transitions_and_sequences import Transition
from sebulba.types import EnvSpec
from tests.support import probes

spaces = gymnasium.spaces

UNBOUNDED = EnvSpec(spaces.Box(-9, 9, (1,)), spaces.Box(-np.inf, np.inf, (1,)))
"""One number observed and one done."""


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

    def gathered(self, experience: Any, draw: Any, discount: float) -> Transition:
        return TRANSITIONS


def linear(*kernel: Any, bias: float = 0.0) -> dict[str, Any]:
    """Return parameters of a network without hidden layers: rows of the kernel are inputs."""
    kernel = jnp.asarray(kernel, jnp.float32).reshape(len(kernel), -1)
    return {"head": {"kernel": kernel, "bias": jnp.full(kernel.shape[1], bias)}}


class ContinuousDiscounting(probes.Discounting):
    """Discounting, with an action that has no effect."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)


class Trained:
    """An agent after some cycles of 4 x 5 env steps on a probe that observes +1 or -1."""

    def __init__(self, probe: Any, config: Any, num_cycles: int) -> None:
        """Train in this thread."""
        self.agent: Any = make_agent(sebulba.env_spec(probe), config)
        with sebulba.GymnasiumLoop(
            probe, self.agent, 4, num_inferencers_per_device=0,
            inference_devices=[0], update_devices=[0],
        ) as loop:  # fmt: skip
            result = loop.run(loop.new_state(0, 5), num_cycles, 5)
        self.metrics = result.metrics
        self.networks = jax.device_get(result.state.networks)

    def action(self, *signs: float) -> np.ndarray:
        """Return what the evaluation policy does at each observation."""
        step_state = self.agent.new_step_state(
            jax.random.key(0), sebulba.RunSpec(len(signs), 1, 5, 1), 0
        )
        env_step = sebulba.types.empty_env_step(self.agent.spec, len(signs))
        env_step = env_step._replace(obs=column(*signs))
        output, _ = self.agent.step(self.networks["actor"], step_state, env_step, explore=False)
        return np.asarray(output.action[:, 0])

    def values(self, *signs: float) -> np.ndarray:
        """Return what the critics say of each observation and action 0, ``[critics, N]``."""
        obs = self.agent.encode(column(*signs), num_leading=1)
        action = jnp.zeros((len(signs), 1))
        return np.asarray(self.agent.values(self.networks["critics"], obs, action))

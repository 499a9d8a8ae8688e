"""The smallest agent that uses every part of the contract, for tests of the loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import TRAJECTORY_SPEC, Agent
from sebulba.types import ActionOutput, EnvStep, RunSpec, Trajectory


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    """Hyper-parameters of TinyAgent."""

    learning_rate: float = 0.1
    updates_per_cycle: int = 1


class TinyAgent(Agent[TinyConfig]):
    """A linear softmax policy with a score-function gradient and plain SGD.

    ``extras["checksum"]`` is the sum of the networks that acted, per environment.
    """

    def new_networks(self, key: jax.Array) -> Any:
        spec: Any = self.spec
        size, actions = int(np.prod(spec.observation_space.shape)), spec.action_space.n
        return {
            "w": 0.1 * jax.random.normal(key, (size, actions)),
            "b": jnp.zeros((actions,)),
        }

    def new_opt(self, networks: Any) -> Any:
        return {"updates": jnp.int32(0)}

    def new_experience(self, key: jax.Array, networks: Any, run: RunSpec) -> Any:
        return self.empty_trajectory(networks, run)

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> Any:
        return {"key": key, "steps": jnp.zeros((run.num_envs,), jnp.int32)}

    def logits(self, networks: Any, obs: jax.Array) -> jax.Array:
        space: Any = self.spec.observation_space
        flat = obs.reshape((*obs.shape[: obs.ndim - len(space.shape)], -1))
        return flat.astype(jnp.float32) @ networks["w"] + jnp.broadcast_to(
            networks["b"], (*flat.shape[:-1], networks["b"].shape[0])
        )

    def step(
        self, networks: Any, step_state: Any, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, Any]:
        key, action_key = jax.random.split(step_state["key"])
        logits = self.logits(networks, jnp.asarray(env_step.obs))
        greedy = jnp.argmax(logits, axis=-1)
        action = jax.random.categorical(action_key, logits) if explore else greedy
        checksum = sum(x.sum() for x in jax.tree.leaves(networks))
        extras = {
            "checksum": jnp.full(action.shape, checksum),
            "steps": step_state["steps"],
            "noise": jnp.full(action.shape, jax.random.uniform(action_key)),
        }
        start = int(getattr(self.spec.action_space, "start", 0))
        action = (action + start).astype(jnp.int32)
        return ActionOutput(action, extras), {"key": key, "steps": step_state["steps"] + 1}

    def update_experience(
        self, experience: Any, initial: Any, final: Any, trajectory: Trajectory, networks: Any
    ) -> Any:
        return trajectory

    def loss(self, networks: Any, opt: Any, experience: Any, key: jax.Array) -> Any:
        env_step = experience.env_step
        valid = env_step.valid[1:]
        logits = self.logits(networks, env_step.obs[:-1])
        start = int(getattr(self.spec.action_space, "start", 0))
        log_prob = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_prob, (experience.action - start)[..., None], -1)[..., 0]
        count = jax.lax.pmean(valid.sum().astype(jnp.float32), "learner")
        # Where all environments reset at once, a trajectory of one step has no valid row.
        loss = -(chosen * env_step.reward[1:] * valid).sum() / jnp.maximum(count, 1.0)
        return loss, (experience, {"valid_count": count})

    def optimize(self, networks: Any, opt: Any, grads: Any) -> tuple[Any, Any]:
        rate = self.config.learning_rate
        networks = jax.tree.map(lambda x, g: x - rate * g, networks, grads)
        return networks, {"updates": opt["updates"] + 1}

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return self.config.updates_per_cycle

    def experience_spec(self) -> Any:
        return TRAJECTORY_SPEC


class CountingEnv(gymnasium.Env):
    """Observes (episode, t); ends after ``length`` steps; can be told to misbehave."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(
        self, length: int = 7, fail_at: int | None = None, make_error: Any = RuntimeError
    ) -> None:
        self._length = length
        self._fail_at = fail_at
        self._make_error = make_error
        self._episode = -1
        self._t = 0
        self._steps = 0

    def _obs(self) -> np.ndarray:
        return np.array([self._episode, self._t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode += 1
        self._t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._fail_at is not None and self._steps >= self._fail_at:
            raise self._make_error()
        self._t += 1
        return self._obs(), 1.0, self._t >= self._length, False, {}

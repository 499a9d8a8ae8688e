"""An agent, networks, an environment, wrappers and experiments of a user's own, in one file."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces

import sebulba
from examples.custom_agent import A2C
from sebulba.agents.configs import AgentConfig, ImpalaConfig, TorsoConfig
from sebulba.agents.ppo import PPO
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import Preset


@dataclasses.dataclass(frozen=True)
class MyConfig:
    """Hyper-parameters of MyAgent, which know nothing of Sebulba."""

    learning_rate: float = 1e-2
    """Step size of plain gradient descent."""
    discount: float = 0.9
    """How much the next reward counts."""
    sizes: tuple[int, ...] = (8,)
    undescribed: bool = False


class MyAgent(A2C):
    def __init__(self, spec: sebulba.EnvSpec, config: MyConfig) -> None:
        super().__init__(spec, config)  # type: ignore[arg-type]
        layers = [layer for size in config.sizes for layer in (nn.Dense(size), nn.tanh)]
        self.network = nn.Sequential([*layers, nn.Dense(int(spec.action_space.n) + 1)])  # type: ignore[attr-defined]
        self.optimizer = optax.sgd(config.learning_rate)


class BarePPO(PPO):
    """Has the hyper-parameters of PPO."""


class NoConfig(sebulba.Agent[None]):
    """Has no hyper-parameters."""

    new_networks = new_opt = new_experience = new_step_state = step = None  # type: ignore[assignment]
    update_experience = loss = optimize = None  # type: ignore[assignment]


class NoDefault(MyAgent):
    def __init__(self, spec: sebulba.EnvSpec, config: NeedsSize) -> None: ...


@dataclasses.dataclass(frozen=True)
class NeedsSize:
    size: int


class MyEnv(gymnasium.Env):
    """An episode is 5 guesses; each observation shows what is right."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (3,))
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def render(self):
        picture = np.zeros((6, 11, 3), np.uint8)
        picture[:, : 2 * self.t + 1] = 255
        return picture

    def step(self, action):
        reward = float(action == self.right)
        self.t += 1
        return self.observe(), reward, False, self.t == 5, {}

    def observe(self):
        self.right = int(self.np_random.integers(2))
        return np.array([self.right, 1 - self.right, 0.5], np.float32)


class MyWrapper(gymnasium.RewardWrapper):
    def __init__(self, env: gymnasium.Env, factor: float = 2.0) -> None:
        super().__init__(env)
        self.factor = factor

    def reward(self, reward: Any) -> float:
        return self.factor * float(reward)


def no_env(env: gymnasium.Env) -> int:
    return 3


def fails(env: gymnasium.Env) -> gymnasium.Env:
    raise AssertionError("it does not fit")


class MyTorso(nn.Module):
    features: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.relu(nn.Dense(self.features, name="mine")(x))


class OfParts(nn.Module):
    """Takes vectors and images."""

    @nn.compact
    def __call__(self, encoded: Any) -> jax.Array:
        (image,) = encoded.images
        return jnp.concatenate([encoded.vector, image.mean((1, 2))], axis=-1)


class Flat(nn.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x.sum(axis=-1)


class NeedsFeatures(nn.Module):
    features: int


@dataclasses.dataclass(frozen=True)
class Named(AgentConfig):
    """Hyper-parameters that name their agent."""

    agent_class = "tests.support.own:NamedAgent"


class NamedAgent(MyAgent):
    pass


QUICK = ExperimentConfig(
    env=EnvConfig("tests.support.own:MyEnv"),
    agent=ImpalaConfig(torso=TorsoConfig("tests.support.own:MyTorso")),
    total_env_steps=160,
    num_envs=4,
    steps_per_cycle=5,
    num_inferencers_per_device=1,
)


def slow() -> ExperimentConfig:
    return dataclasses.replace(QUICK, total_env_steps=1600)


READY = Preset("Mine", slow)

"""The agents of the shared suite; a new one joins by a line in ``AGENTS``.

A line says which agent, on which actions, whether it must remember, and a tiny configuration in
which it answers the questions of ``sebulba.tools.check.probe_envs`` within ``num_cycles``
trajectories. For the tests that count cells and devices the same configuration learns with plain
gradient descent.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs import (
    DDPGConfig,
    DQNConfig,
    ImpalaConfig,
    OptimizerConfig,
    PPOConfig,
    R2D2Config,
    ReplayConfig,
    SACConfig,
    SimplePolicyGradientConfig,
    TargetConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.replay import store as replay_store
from sebulba.envs.envpool_adapter import EnvpoolAdapter
from sebulba.tools.check import probe_envs
from sebulba.tools.check.agent_driver import B, T
from tests.support import oracle
from tests.support.agent_driver import Driver, EnvStreams

spaces = gymnasium.spaces
REWARD_SCALE = 1e-5
"""Rewards of the oracle reach 246,000."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One agent in the suite."""

    config: Any
    """Hyper-parameters with which it learns."""
    actions: str = "discrete"
    """Or ``"continuous"``."""
    remembers: bool = False
    """It is recurrent, and is asked what it has seen before."""
    cannot: tuple[str, ...] = ()
    """Questions that its algorithm has no answer to."""
    num_cycles: int = 60
    """Trajectories of 5 steps of 16 environments after which it must answer."""
    even: Any = dataclasses.field(default_factory=dict)
    """Fields under which an update learns from the whole of what it is given, so that it does not
    depend on the order of draws."""

    @property
    def first_states(self) -> list[str]:
        """What it is asked; nothing stands for the continuous questions."""
        if self.actions == "continuous":
            return []
        asked = [*probe_envs.ANSWERS, *(probe_envs.MEMORY if self.remembers else ())]
        return [name for name in asked if name not in self.cannot]

    def to_learn(self) -> tuple[Any, probe_envs.Questions]:
        """Return the agent that is to answer, and its environments."""
        env = probe_envs.Questions(self.first_states)
        return make_agent(sebulba.env_spec(env), self.config), env

    def to_count(self, **more: Any) -> Any:
        """Return the agent on the oracle, with plain gradient descent."""
        plain = {"optimizer": OptimizerConfig("sgd", max_grad_norm=0.5), "learning_rate": 0.1}
        names = {field.name for field in dataclasses.fields(self.config)}
        fields = {**plain, "reward_scale": REWARD_SCALE, **self.even, **more}
        chosen = {name: value for name, value in fields.items() if name in names}
        spec = self.oracles([0])[0].spec
        return make_agent(spec, dataclasses.replace(self.config, **chosen))

    def oracles(self, firsts: list[int]) -> list[EnvpoolAdapter]:
        """Return environments whose B seeds begin at each of ``firsts``."""
        pool = oracle.OraclePool if self.actions == "discrete" else ContinuousOraclePool
        seeds = [list(range(first, first + B)) for first in firsts]
        return [EnvpoolAdapter(pool(s), name="oracle") for s in seeds]

    def driver(self, devices: int, state: Any = None, **more: Any) -> Driver:
        """Return a driver of ``to_count`` whose trajectories come from oracles."""
        agent = self.to_count(**more)
        return Driver(
            agent,
            devices,
            make_streams=lambda agent, state: EnvStreams(agent, state, self.oracles([0, B])),
            state=state,
        )


_SMALL = TorsoConfig(hidden_sizes=(16,))
_RELU = TorsoConfig(hidden_sizes=(32,), activation="relu")
_ON_POLICY: Any = {
    "learning_rate": 1e-2,
    "discount": probe_envs.DISCOUNT,
    "entropy_coefficient": 0.01,
    "torso": TorsoConfig(hidden_sizes=(32,)),
    "optimizer": OptimizerConfig(max_grad_norm=10.0),
}
_PPO: Any = _ON_POLICY | {"epochs": 2, "minibatches": 2}
_REPLAY = ReplayConfig(
    capacity=4000, batch_size=64, updates_per_cycle=2, warm_up_cycles=4, prioritized=True
)
_OFF_POLICY: Any = {"learning_rate": 1e-2, "discount": probe_envs.DISCOUNT, "replay": _REPLAY}
_ACTOR_CRITIC: Any = _OFF_POLICY | {
    "critic_learning_rate": 1e-2,
    "torso": _RELU,
    "target": TargetConfig(rate=0.1),
}

AGENTS: dict[str, Case] = {
    "reinforce": Case(SimplePolicyGradientConfig(**_ON_POLICY), cannot=("cut",)),
    "impala-lstm": Case(ImpalaConfig(lstm_size=8, **_ON_POLICY), remembers=True),
    "impala-box": Case(
        ImpalaConfig(
            separate_value_torso=True,
            epochs=2,
            ratio_clip=0.2,
            normalize_advantages=True,
            **_ON_POLICY,
        ),
        "continuous",
        num_cycles=120,
    ),
    "ppo": Case(
        PPOConfig(normalize_observations=True, normalize_rewards=True, **_PPO),
        even={"minibatches": 1},
    ),
    "ppo-popart": Case(
        PPOConfig(popart=True, **_PPO), even={"minibatches": 1, "reward_scale": 1.0}
    ),
    "impala-popart": Case(
        ImpalaConfig(popart=True, central_critic=True, **_ON_POLICY), even={"reward_scale": 1.0}
    ),
    "dqn": Case(
        DQNConfig(
            initial_epsilon=0.5,
            final_epsilon=0.5,
            most_held_steps=2,
            dueling=True,
            num_steps=2,
            normalize_observations=True,
            torso=_RELU,
            target=TargetConfig(period=10),
            **_OFF_POLICY,
        )
    ),
    "dqn-atoms": Case(
        DQNConfig(
            initial_epsilon=0.5,
            final_epsilon=0.5,
            dueling=True,
            atoms=21,
            value_min=-3.0,
            value_max=3.0,
            torso=_RELU,
            target=TargetConfig(period=10),
            **_OFF_POLICY,
        )
    ),
    "dqn-noisy": Case(
        DQNConfig(
            noisy=True,
            dueling=True,
            quantiles=11,
            head_hidden_sizes=(16,),
            torso=_RELU,
            target=TargetConfig(period=10),
            **_OFF_POLICY,
        )
    ),
    "r2d2": Case(
        R2D2Config(
            lstm_size=8,
            num_steps=1,
            burn_in=0,
            sequence_length=5,
            epsilon=0.5,
            epsilon_exponent=0.0,
            torso=_SMALL,
            head_hidden_sizes=(16,),
            target=TargetConfig(period=10),
            learning_rate=1e-2,
            discount=probe_envs.DISCOUNT,
            replay=dataclasses.replace(_REPLAY, batch_size=16),
        ),
        remembers=True,
        even={"sequence_length": T},
    ),
    "sac": Case(
        SACConfig(
            temperature_learning_rate=1e-2,
            initial_temperature=0.1,
            normalize_observations=True,
            **_ACTOR_CRITIC,
        ),
        "continuous",
        num_cycles=120,
    ),
    "sac-crossq": Case(
        SACConfig(
            crossq=True,
            temperature_learning_rate=1e-2,
            initial_temperature=0.1,
            critic_learning_rate=1e-2,
            torso=_RELU,
            **_OFF_POLICY,
        ),
        "continuous",
        num_cycles=120,
    ),
    "sac-discrete": Case(
        SACConfig(
            temperature_learning_rate=1e-2,
            initial_temperature=0.1,
            target_entropy=0.3,
            **_ACTOR_CRITIC,
        ),
    ),
    "ddpg": Case(
        DDPGConfig(noise_scale=0.5, num_steps=2, **(_ACTOR_CRITIC | {"learning_rate": 3e-3})),
        "continuous",
        num_cycles=120,
    ),
}


# The oracle with continuous actions.


def oracle_action(action: Any) -> Any:
    """Return the oracle's action of any action: a Box of [-1, 1] is cut into four."""
    if np.issubdtype(np.asarray(action).dtype, np.integer):
        return action
    fourth = np.floor((np.asarray(action)[..., 0] + 1.0) * 2.0)
    return np.clip(fourth, 0, oracle.NUM_ACTIONS - 1).astype(np.int32)


class ContinuousOraclePool(oracle.OraclePool):
    """The oracle with one continuous action."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, seeds: list[int]) -> None:
        super().__init__(seeds)
        self.spec.action_array_spec = {"action": SimpleNamespace(dtype=np.float32)}

    def step(self, action: np.ndarray) -> tuple:
        return super().step(oracle_action(action))


# Draws that are given.


@contextlib.contextmanager
def given_draws() -> Iterator[None]:
    """Make all randomness of an update a function of what it is given, alike on any devices.

    A replay's draw takes the oldest starts of every environment, whatever the priorities, with the
    probability that they have among those of all devices. Noise is the same number everywhere.
    Inside, programs must be compiled anew.
    """

    def draw(key: jax.Array, weight: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
        devices = jax.lax.axis_size(LEARNER_AXIS)
        envs = B // devices
        can_start = weight.reshape(-1, envs).T > 0
        _, start = jax.lax.top_k(can_start.astype(jnp.float32), num // envs)
        index = start * envs + jnp.arange(envs)[:, None]
        total = jax.lax.psum(weight.sum(), LEARNER_AXIS) / devices
        return index.reshape(-1).astype(jnp.int32), total

    def normal(key: jax.Array, shape: Any = (), dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full(shape, 0.3, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_store, "draw_in_proportion", draw)
        patch.setattr(jax.random, "normal", normal)
        yield


# What an experience holds.


def kept_transitions(agent: Any, experience: Any) -> tuple[Any, ...]:
    """Return (obs, action, reward) of transitions in an experience, ``[N, ...]`` each.

    Rewards are scaled as the agent does. It must have discount 0; a replay gives what it draws.
    """
    if hasattr(experience, "trajectory"):
        return _valid(agent, experience.trajectory)
    if hasattr(experience, "batch"):
        batch = experience.batch
        action = agent.distribution.action(batch.raw)
        kept = batch.obs, action, batch.value + batch.advantage
        return tuple(np.asarray(x)[np.asarray(batch.valid)] for x in kept)
    one = jax.tree.map(lambda x: jnp.asarray(x)[None], experience)

    def draw(replay: Any) -> Any:
        drawn = agent.replay.draw(replay, jax.random.key(0), 2 * B)
        return agent.replay.gathered(replay, drawn, 0.0)

    drawn = jax.tree.map(lambda x: x[0], jax.jit(jax.vmap(draw, axis_name=LEARNER_AXIS))(one))
    if hasattr(drawn, "env_step"):
        return _valid(agent, drawn)
    return drawn.obs, drawn.action, agent.config.reward_scale * drawn.reward


def _valid(agent: Any, rows: Any) -> tuple[Any, ...]:
    """Return the valid transitions of a trajectory."""
    env_step = rows.env_step
    valid = np.asarray(env_step.valid[1:])
    kept = env_step.obs[:-1], rows.action, agent.config.reward_scale * env_step.reward[1:]
    return tuple(np.asarray(x)[valid] for x in kept)

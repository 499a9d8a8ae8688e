"""Prints a hash of everything that lockstep training leaves behind, for every agent.

    python -m benchmarks.studies.lockstep_hashes [CASE ...] > hashes.json

A change that is meant to keep behaviour prints the same on the commit before it and on itself, on
the same machine and versions (another processor may round in another way). Each case is trained
stepped and fused, with 1 and with 4 update devices. ``--address processes`` has each Inferencer in
a process, ``--address local`` in an actor of Ray; both print what threads do.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import jax
import numpy as np

import sebulba
from sebulba.agents.configs import (
    DDPGConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    ReplayConfig,
    SACConfig,
    SimplePolicyGradientConfig,
    TorsoConfig,
)
from sebulba.agents.configs.agent_config import make_agent
from sebulba.agents.ddpg import DDPG
from sebulba.agents.dqn import DQN
from sebulba.agents.impala import Impala
from sebulba.agents.ppo import PPO
from sebulba.agents.r2d2 import R2D2
from sebulba.agents.sac import SAC
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.options import ClusterOptions

NUM_ENVS, STEPS, CYCLES = 8, 6, 12
SMALL = TorsoConfig(hidden_sizes=(16,))
REPLAY = ReplayConfig(capacity=2000, batch_size=16, warm_up_cycles=4, prioritized=True)
SEQUENCES: Any = {"burn_in": 6, "sequence_length": 12, "num_steps": 2}
FULL_SEQUENCES = dataclasses.replace(REPLAY, warm_up_cycles=8)
SMALL_R2D2 = R2D2Config(
    lstm_size=8, torso=SMALL, head_hidden_sizes=(16,), replay=FULL_SEQUENCES, **SEQUENCES
)


class DictEnv(gymnasium.Env):
    """Observes a vector, a choice and a small picture; ends at random or after nine steps."""

    observation_space = gymnasium.spaces.Dict(
        {
            "picture": gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8),
            "place": gymnasium.spaces.Box(-1, 1, (3,)),
            "choice": gymnasium.spaces.Discrete(4),
        }
    )
    action_space = gymnasium.spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple:
        self.t += 1
        ended = bool(self.np_random.random() < 0.1)
        return self.observe(), float(action[0] - action[1]), ended, self.t == 9, {}

    def observe(self) -> dict:
        rng = self.np_random
        return {
            "picture": rng.integers(0, 256, (12, 12, 3), np.uint8),
            "place": rng.uniform(-1, 1, 3).astype(np.float32),
            "choice": int(rng.integers(4)),
        }


NORMALIZED: Any = {"normalize_observations": True, "normalize_rewards": True}
CASES: dict[str, tuple[Any, Any, Any]] = {
    "reinforce": ("CartPole-v1", SimplePolicyGradient, SimplePolicyGradientConfig(torso=SMALL)),
    "impala": ("CartPole-v1", Impala, ImpalaConfig(torso=SMALL, **NORMALIZED)),
    "impala-lstm": ("CartPole-v1", Impala, ImpalaConfig(torso=SMALL, lstm_size=8)),
    "impala-box": ("Pendulum-v1", Impala, ImpalaConfig(torso=SMALL, separate_value_torso=True)),
    "impala-dict": (DictEnv, Impala, ImpalaConfig()),
    "ppo": ("CartPole-v1", PPO, PPOConfig(torso=SMALL, epochs=2, minibatches=2, **NORMALIZED)),
    "ppo-lstm": ("CartPole-v1", PPO, PPOConfig(torso=SMALL, lstm_size=8, minibatches=2)),
    "dqn": (
        "CartPole-v1",
        DQN,
        DQNConfig(torso=SMALL, dueling=True, num_steps=3, epsilon_exponent=2.0, replay=REPLAY),
    ),
    "dqn-normalized": (
        "CartPole-v1",
        DQN,
        DQNConfig(torso=SMALL, replay=REPLAY, normalize_observations=True),
    ),
    "dqn-frames": ("Pong-v5", DQN, DQNConfig(replay=REPLAY)),
    "r2d2": ("CartPole-v1", R2D2, SMALL_R2D2),
    "sac": ("Pendulum-v1", SAC, SACConfig(torso=SMALL, replay=REPLAY, random_env_steps=100)),
    "ddpg": ("Pendulum-v1", DDPG, DDPGConfig(torso=SMALL, num_critics=2, replay=REPLAY)),
}
"""Environment, agent and hyper-parameters by name."""
MANY_AGENTS: dict[str, tuple[Any, Any, Any]] = {
    "kuhn": ("KuhnPoker-v1", make_agent, PPOConfig(torso=SMALL, minibatches=2)),
}
"""The same where there are many agents, with what makes the agent that plays all of them."""


def bytes_of(leaf: Any) -> bytes:
    """Return the bits of an array, a PRNG key included."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def train_and_hash(
    env: Any,
    agent_class: Any,
    config: Any,
    cycle: Any,
    devices: int,
    *,
    address: str = "threads",
) -> str:
    """Return the hash of the agent state and the acting networks after twelve cycles."""
    factory = sebulba.make_env_factory(env)
    agent = agent_class(sebulba.env_spec(factory), config)
    with sebulba.GymnasiumLoop(
        factory,
        agent,
        NUM_ENVS,
        seed=3,
        schedule="lockstep",
        cycle=cycle,
        inference_devices=[0],
        update_devices=range(devices),
        cluster=ClusterOptions(address=address),
    ) as loop:
        result = loop.run(loop.new_state(7, STEPS), CYCLES, STEPS)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((result.state, result.acting_networks)):
        digest.update(bytes_of(leaf))
    return digest.hexdigest()[:16]


def hashes(chosen: list[str], address: str) -> Iterator[tuple[str, str]]:
    """Yield the name of a case, cycle and number of devices, and its hash."""
    cases = CASES | MANY_AGENTS
    for name in chosen or cases:
        env, agent_class, config = cases[name]
        for cycle in ("stepped", "fused"):
            if cycle == "fused" and not isinstance(env, str):
                continue  # an environment of one's own cannot be fused
            for devices in (1, 4):
                key = f"{name} {cycle} {devices}"
                yield key, train_and_hash(env, agent_class, config, cycle, devices, address=address)


if __name__ == "__main__":
    # It sizes JAX's thread pool, which collectives of more devices than cores would exhaust.
    os.environ["NPROC"] = str(max(8, int(os.environ.get("NPROC", "0") or 0)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--address", default="threads")
    given = parser.parse_args()
    found = {}
    for key, value in hashes(given.cases, given.address):
        found[key] = value
        print(f"{key:<28} {value}", file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))

"""Ready experiments on networks. Free of JAX."""

from __future__ import annotations

import dataclasses

from sebulba.agents.configs import PPOConfig, ReplayConfig, TorsoConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import Preset, for_task
from sebulba.configs.presets import NEUTRAL
from sebulba_networks import CONGESTION_CONTROL, SHARED_BOTTLENECK


def congestion_impala() -> ExperimentConfig:
    """Return Impala on congestion control in the ranges of RayNet's paper.

    The neutral preset without a bonus for entropy: every deviation of the window costs reward.
    """
    agent = {"entropy_coefficient": 0.0, "initial_std": 0.5}
    return for_task(NEUTRAL["impala"].make(), CONGESTION_CONTROL, agent, total_env_steps=1_000_000)


def congestion_ppo() -> ExperimentConfig:
    """Return PPO on congestion control in the ranges of RayNet's paper.

    Discount, lambda, clip, learning rate, epochs and networks are those of ``halfcheetah-ppo``;
    observations are normalised, since the window is in packets. Rewards are at most 1 a step.
    """
    return ExperimentConfig(
        env=EnvConfig(CONGESTION_CONTROL),
        agent=PPOConfig(
            learning_rate=3e-4,
            discount=0.99,
            trace_decay=0.95,
            epochs=10,
            minibatches=16,
            ratio_clip=0.2,
            value_clip=0.2,
            normalize_observations=True,
            normalize_rewards=True,
            initial_std=0.5,
            torso=TorsoConfig(hidden_sizes=(64, 64)),
            separate_value_torso=True,
        ),
        total_env_steps=1_000_000,
        anneal_learning_rate=True,
        num_envs=16,
        num_inferencers_per_device=1,
        steps_per_cycle=128,
        schedule="lockstep",
    )


def shared_bottleneck() -> ExperimentConfig:
    """Return PPO for two flows that share a bottleneck, and their policy.

    The numbers of ``congestion-ppo``. In a row about half of the agents act, as their steps end at
    unequal times, so trajectories are twice as long.
    """
    start = congestion_ppo()
    env = EnvConfig(SHARED_BOTTLENECK)
    return dataclasses.replace(start, env=env, steps_per_cycle=256)


def congestion_sac() -> ExperimentConfig:
    """Return SAC on congestion control in the ranges of RayNet's paper.

    The neutral preset with an update every 16 env steps and layers half as wide. Observations are
    not normalised here, so they are the relative features, in which the window is a logarithm.
    """
    agent = {
        "torso": TorsoConfig(hidden_sizes=(128, 128), activation="relu"),
        "replay": ReplayConfig(
            capacity=1_000_000, batch_size=256, updates_per_cycle=8, warm_up_cycles=40
        ),
    }
    env = EnvConfig(CONGESTION_CONTROL, options={"features": "relative"})
    start = for_task(NEUTRAL["sac"].make(), env.id, agent, num_envs=16, steps_per_cycle=8)
    return dataclasses.replace(start, env=env)


def congestion_ddpg() -> ExperimentConfig:
    """Return DDPG in its Ape-X form on congestion control in the ranges of RayNet's paper.

    Prioritized replay, targets of 3 steps and a ladder of exploration as in ``pendulum-ddpg-apex``,
    the other numbers those of the neutral preset, and an update every 16 env steps. Layers and
    features are those of ``congestion-sac``.
    """
    agent = {
        "torso": TorsoConfig(hidden_sizes=(128, 128), activation="relu"),
        "num_steps": 3,
        "noise_scale": 0.5,
        "noise_exponent": 3.0,
        "replay": ReplayConfig(
            capacity=1_000_000,
            batch_size=256,
            updates_per_cycle=4,
            warm_up_cycles=80,
            prioritized=True,
        ),
    }
    env = EnvConfig(CONGESTION_CONTROL, options={"features": "relative"})
    start = for_task(
        NEUTRAL["ddpg"].make(),
        env.id,
        agent,
        num_envs=8,
        steps_per_cycle=8,
        num_inferencers_per_device=2,
    )
    return dataclasses.replace(start, env=env)


PRESETS: dict[str, Preset] = {
    "congestion-impala": Preset("Impala, Gaussian policy, congestion control", congestion_impala),
    "congestion-ppo": Preset("PPO, Gaussian policy, congestion control", congestion_ppo, goal=371),
    "shared-bottleneck-ppo": Preset(
        "PPO, Gaussian policy, flows that share a bottleneck", shared_bottleneck
    ),
    "congestion-sac": Preset("SAC, MLP, congestion control", congestion_sac),
    "congestion-ddpg": Preset("DDPG in its Ape-X form, MLP, congestion control", congestion_ddpg),
}
"""By the name that the command line knows."""

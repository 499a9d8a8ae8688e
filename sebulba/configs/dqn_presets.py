"""Ready experiments with DQN."""

from __future__ import annotations

import dataclasses

from sebulba.agents.configs import (
    DQNConfig,
    OptimizerConfig,
    ReplayConfig,
    TargetConfig,
    TorsoConfig,
)
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import ATARI as ATARI_ENV
from sebulba.configs.preset import Presets, for_task

PRESETS = Presets()


@PRESETS.add("dqn", "DQN for any task with discrete actions")
def neutral() -> ExperimentConfig:
    """Return DQN for any task with discrete actions.

    Targets of three steps, a dueling head and double values: Hessel et al. 2018 (arXiv
    1710.02298). Discount: Mnih et al. 2015 (doi 10.1038/nature14236). There is an update for each
    env step, as in what the Stable-Baselines3 zoo has for small tasks (docs/measurements compares).
    Exploration falls over the first 10,000 env steps, and the target follows slowly (Lillicrap et
    al. 2015, arXiv 1509.02971).
    """
    return ExperimentConfig(
        env=EnvConfig("CartPole-v1"),
        agent=DQNConfig(
            num_steps=3,
            dueling=True,
            torso=TorsoConfig(hidden_sizes=(128, 128), activation="relu"),
            replay=ReplayConfig(batch_size=128, updates_per_env_step=1.0, warm_up_env_steps=960),
            target=TargetConfig(rate=0.005),
        ),
        total_env_steps=100_000,
        anneal_learning_rate=True,
        num_envs=8,
        steps_per_cycle=8,
    )


@PRESETS.add("cartpole-dqn", "DQN, MLP, envpool CartPole-v1", goal=475)
def cartpole() -> ExperimentConfig:
    """Return DQN with all its refinements and a small MLP on envpool's CartPole-v1.

    Of the Stable-Baselines3 zoo (github.com/DLR-RM/rl-baselines3-zoo, hyperparams/dqn.yml) are the
    replay, the warm-up and the exploration. Its one step, plain network and target that is copied
    reached 475 and lost it again. Three steps (Hessel et al. 2018, arXiv 1710.02298, table 1), a
    dueling head, whose advantages are not drowned by values near 100, priorities (Schaul et al.
    2016, arXiv 1511.05952, table 3) and a target that follows slowly made the end stable.
    """
    start = neutral()
    replay: ReplayConfig = start.agent.replay  # type: ignore[attr-defined]
    agent = {
        "learning_rate": 1e-3,
        "final_epsilon": 0.04,
        "exploration_env_steps": 16_000,
        "torso": TorsoConfig(hidden_sizes=(64, 64), activation="relu"),
        "replay": dataclasses.replace(replay, updates_per_env_step=0.25, prioritized=True),
        "target": TargetConfig(rate=0.01),
    }
    return for_task(start, "CartPole-v1", agent, eval_every_env_steps=10_000)


@PRESETS.add("atari-dqn", "DQN, Nature CNN, any Atari game")
def atari() -> ExperimentConfig:
    """Return DQN on Pong, or with ``--env.id`` on any other game of Atari.

    Environment, lives that end episodes (methods there), discount, replay of a million frames,
    warm-up of 50 000, exploration that falls to 0.1 over a million, batch of 32 every 4 env steps,
    a target that follows after 10 000 updates: Mnih et al. 2015 (doi 10.1038/nature14236), extended
    data table 1. Double: van Hasselt et al. 2016 (arXiv 1509.06461). Adam instead of RMSProp, with
    its learning rate and epsilon: Hessel et al. 2018 (arXiv 1710.02298), table 1.
    """
    return ExperimentConfig(
        env=ATARI_ENV,
        agent=DQNConfig(
            learning_rate=6.25e-5,
            final_epsilon=0.1,
            exploration_env_steps=1_000_000,
            torso=TorsoConfig(kind="nature_cnn"),
            optimizer=OptimizerConfig(epsilon=1.5e-4, max_grad_norm=0.0),
            replay=ReplayConfig(1_000_000, 32, updates_per_env_step=0.25, warm_up_env_steps=49_920),
            target=TargetConfig(period=10_000),
        ),
        total_env_steps=50_000_000,
        num_envs=32,
        steps_per_cycle=8,
    )

"""Ready experiments with R2D2."""

from __future__ import annotations

import dataclasses

from sebulba.agents.configs import OptimizerConfig, R2D2Config, TargetConfig, TorsoConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import Presets, for_task

PRESETS = Presets()

_REPLAY = R2D2Config.replay
"""Batches of 64 and the exponents of table 2."""


@PRESETS.add("r2d2", "R2D2 for any task that needs memory, discrete actions")
def neutral() -> ExperimentConfig:
    """Return R2D2 for any task with discrete actions, above all where memory is needed.

    Priorities, exploration, dueling, double and rescaled values are those of Kapturowski et al.
    2019 (openreview.net/forum?id=r1lyTjAqYX), table 2. Network, batch and sequences are small, and
    an update is due for every 32 env steps, for one machine instead of 256 actors: tasks are to be
    learned in less than a million env steps. A target of three rewards, not five, that follows
    slowly takes the place of one that is copied every 2500 updates.
    """
    return ExperimentConfig(
        env=EnvConfig("sebulba.envs.memory_tasks:cartpole_without_velocities"),
        agent=R2D2Config(
            learning_rate=1e-3,
            discount=0.99,
            num_steps=3,
            sequence_length=32,
            burn_in=16,
            lstm_size=64,
            head_hidden_sizes=(64,),
            torso=TorsoConfig(hidden_sizes=(64,), activation="relu"),
            optimizer=OptimizerConfig(max_grad_norm=10.0),
            replay=dataclasses.replace(
                _REPLAY, capacity=250_000, updates_per_env_step=1 / 32, warm_up_env_steps=9728
            ),
            target=TargetConfig(rate=0.005),
        ),
        total_env_steps=1_000_000,
        anneal_learning_rate=True,
        num_envs=32,
        steps_per_cycle=16,
    )


@PRESETS.add("cartpole-r2d2", "R2D2, LSTM, CartPole-v1 without velocities", goal=450)
def cartpole() -> ExperimentConfig:
    """Return R2D2 on envpool's CartPole-v1, of which only position and angle are observed.

    The neutral preset, for as long as it takes. Half of a sequence of 32 overlaps with the next,
    after a burn-in of 16.
    """
    run = {"total_env_steps": 600_000, "eval_every_env_steps": 50_000}
    return for_task(neutral(), neutral().env, {}, **run)


@PRESETS.add("repeat-r2d2", "R2D2, LSTM, repeat the observation of 8 steps ago", goal=53.2)
def repeat_observation() -> ExperimentConfig:
    """Return R2D2 on a task whose reward is for the observation of 8 steps ago.

    Sequences of 16 rows without burn-in: for the first half of them only the stored state knows
    what is asked. The best return is 56, that of guessing 28. With ``--agent.no-stored-state`` the
    same run ends near 43.
    """
    agent = {
        "discount": 0.5,
        "num_steps": 1,
        "sequence_length": 16,
        "burn_in": 0,
        "rescale_values": False,
        "head_hidden_sizes": (),
        "torso": TorsoConfig(hidden_sizes=(32,), activation="relu"),
        "replay": dataclasses.replace(
            _REPLAY, updates_per_env_step=1 / 128, warm_up_env_steps=3584
        ),
        "target": TargetConfig(period=100),
    }
    env = "sebulba.envs.memory_tasks:RepeatObservation"
    run = {"total_env_steps": 300_000, "eval_every_env_steps": 50_000}
    return for_task(neutral(), env, agent, **run)


@PRESETS.add("atari-r2d2", "R2D2, Nature CNN and LSTM, any Atari game")
def atari() -> ExperimentConfig:
    """Return R2D2 on Pong, or with ``--env.id`` on any other game of Atari.

    Kapturowski et al. 2019 (openreview.net/forum?id=r1lyTjAqYX), table 2 and section 3: sequences
    of 80 after a burn-in of 40, one beginning every 40 steps, batches of 64, n of 5, discount
    0.997, exponents 0.9 and 0.6, 0.4 to the power of 1 to 8 as exploration, an LSTM of 512, no
    clipped rewards and no episodes of a life. The replay of 4 million env steps is 1 million here.
    Instead of 256 actors, whose rows are learned from 0.75 times, there are two updates for a
    trajectory of 32 x 40: each sequence is drawn 4 times, as in Acme's R2D2, whose Adam with 1e-3
    and 1e-8 it has (google-deepmind/acme, agents/jax/r2d2). With the paper's 1e-4 and 1e-3 steps
    were less than a tenth of the rate, as gradients are small. The target is copied every 7,680 env
    steps, about as Rainbow's (Hessel et al. 2018, arXiv 1710.02298, table 1: 32,000 frames), not
    every 2,500 updates. docs/measurements/dqn-and-r2d2.md has the curves on a small Pong.
    """
    return ExperimentConfig(
        env=EnvConfig("Pong-v5", noop_max=30, frame_skip=4, stack_num=4),
        agent=R2D2Config(
            learning_rate=1e-3,
            torso=TorsoConfig(kind="nature_cnn"),
            optimizer=OptimizerConfig(epsilon=1e-8, max_grad_norm=40.0),
            replay=dataclasses.replace(
                _REPLAY,
                capacity=1_000_000,
                updates_per_env_step=1 / 640,
                warm_up_env_steps=49_920,
            ),
            target=TargetConfig(period=12),
        ),
        total_env_steps=50_000_000,
        num_envs=32,
        steps_per_cycle=40,
    )

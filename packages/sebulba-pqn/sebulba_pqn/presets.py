"""Ready experiments with PQN. Free of JAX."""

from __future__ import annotations

from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import ATARI as ATARI_ENV
from sebulba.configs.preset import Presets, for_task
from sebulba_pqn.config import PQNConfig

PRESETS = Presets()

_NOT_NORMALIZED = {"normalize_observations": False, "normalize_rewards": False}


@PRESETS.add("pqn", "PQN for any task with discrete actions")
def neutral() -> ExperimentConfig:
    """Return PQN for any task with discrete actions.

    Gallici et al. 2025 (arXiv 2407.04811), settings for Atari (github.com/mttga/purejaxql,
    pqn_atari.yaml): 128 environments x 32 steps, 2 epochs of 32 minibatches, learning rate 2.5e-4,
    lambda 0.65, discount 0.99, gradient norm 10, exploration that falls over a tenth of the run.
    Observations and rewards are normalised, as in the other neutral presets.
    """
    return ExperimentConfig(
        env=EnvConfig("CartPole-v1"),
        agent=PQNConfig(
            minibatches=32,
            exploration_env_steps=100_000,
            normalize_observations=True,
            normalize_rewards=True,
        ),
        total_env_steps=1_000_000,
        num_envs=128,
        num_inferencers_per_device=1,
        steps_per_cycle=32,
        schedule="lockstep",
    )


@PRESETS.add("cartpole-pqn", "PQN, MLP, envpool CartPole-v1", goal=475)
def cartpole() -> ExperimentConfig:
    """Return PQN with an MLP on envpool's CartPole-v1.

    Gallici et al. 2025 (github.com/mttga/purejaxql, pqn_cartpole.yaml): 32 environments x 64 steps,
    4 epochs of 16 minibatches, learning rate 1e-4 that falls to 0, lambda 0.95, rewards times 0.1,
    exploration that falls to 0.2 over a fifth of 500,000 env steps.
    """
    agent = {
        "learning_rate": 1e-4,
        "trace_decay": 0.95,
        "epochs": 4,
        "minibatches": 16,
        "final_epsilon": 0.2,
        "reward_scale": 0.1,
    }
    run = {"total_env_steps": 500_000, "num_envs": 32, "steps_per_cycle": 64}
    run |= {"anneal_learning_rate": True, "eval_every_env_steps": 50_000}
    return for_task(neutral(), "CartPole-v1", agent | _NOT_NORMALIZED, **run)


@PRESETS.add("atari-pqn", "PQN, Nature CNN, any Atari game")
def atari() -> ExperimentConfig:
    """Return PQN on Pong, or with ``--env.id`` on any other game of Atari.

    Gallici et al. 2025 (github.com/mttga/purejaxql, pqn_atari.yaml): the neutral preset, with
    exploration that falls to 0.001 over a million env steps of ten.
    """
    agent = {"final_epsilon": 0.001, "exploration_env_steps": 1_000_000}
    return for_task(neutral(), ATARI_ENV, agent | _NOT_NORMALIZED, total_env_steps=10_000_000)


@PRESETS.add("breakout-minatar-pqn", "PQN, small CNN, gymnax Breakout-MinAtar")
def breakout_minatar() -> ExperimentConfig:
    """Return PQN on gymnax's MinAtar Breakout, which needs the extra ``gymnax``.

    Gallici et al. 2025 (github.com/mttga/purejaxql, pqn_minatar.yaml): as for Atari, with a
    learning rate of 5e-4 that falls to 0 and exploration that falls to 0.05.
    """
    agent = {"learning_rate": 5e-4, "final_epsilon": 0.05}
    env = "gymnax:Breakout-MinAtar"
    return for_task(atari(), env, agent, anneal_learning_rate=True)

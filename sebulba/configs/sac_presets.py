"""Ready experiments with SAC."""

from __future__ import annotations

from sebulba.agents.configs import SACConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import PENDULUM_REPLAY, REPLAY, Presets, for_task

PRESETS = Presets()


@PRESETS.add("sac", "SAC for any task with continuous or discrete actions")
def neutral() -> ExperimentConfig:
    """Return SAC for any task with continuous or discrete actions.

    Haarnoja et al. 2018 (arXiv 1812.05905), table 1, with the learning rates and the warm-up of
    CleanRL (github.com/vwxyzjn/cleanrl, sac_continuous_action.py), and one update an env step.
    """
    return ExperimentConfig(
        env=EnvConfig("Pendulum-v1"),
        agent=SACConfig(
            random_env_steps=5_000,
            replay=REPLAY,
        ),
        total_env_steps=1_000_000,
        num_envs=4,
        num_inferencers_per_device=1,
        steps_per_cycle=4,
    )


@PRESETS.add("pendulum-sac", "SAC, MLP, envpool Pendulum-v1", goal=-200)
def pendulum() -> ExperimentConfig:
    """Return SAC on envpool's Pendulum-v1.

    Learning rate, networks, batch, warm-up and one update an env step are those of the
    Stable-Baselines3 zoo (github.com/DLR-RM/rl-baselines3-zoo, hyperparams/sac.yml); the target
    rate and the target entropy, Haarnoja et al. 2018 (arXiv 1812.05905), table 1.
    """
    agent = {
        "learning_rate": 1e-3,
        "random_env_steps": 1_000,
        "replay": PENDULUM_REPLAY,
    }
    return for_task(
        neutral(), "Pendulum-v1", agent, total_env_steps=20_000, eval_every_env_steps=2_500
    )


@PRESETS.add("halfcheetah-sac", "SAC, MLP, envpool HalfCheetah-v4", goal=5000)
def halfcheetah() -> ExperimentConfig:
    """Return SAC on MuJoCo's HalfCheetah-v4: the neutral preset, evaluated as it trains."""
    return for_task(neutral(), "HalfCheetah-v4", {}, eval_every_env_steps=50_000)

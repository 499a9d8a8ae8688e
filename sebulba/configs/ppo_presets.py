"""Ready experiments with PPO."""

from __future__ import annotations

from sebulba.agents.configs import PPOConfig, TorsoConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import Preset


def cartpole() -> ExperimentConfig:
    """Return PPO with a small MLP on envpool's CartPole-v1."""
    return ExperimentConfig(
        env=EnvConfig("CartPole-v1"),
        agent=PPOConfig(
            learning_rate=1e-3,
            discount=0.98,
            trace_decay=0.8,
            epochs=10,
            minibatches=2,
            torso=TorsoConfig(hidden_sizes=(64, 64)),
            separate_value_torso=True,
        ),
        total_env_steps=100_000,
        anneal_learning_rate=True,
        num_envs=16,
        steps_per_cycle=32,
    )


PRESETS: dict[str, Preset] = {
    "cartpole-ppo": Preset("PPO, small MLP, envpool CartPole-v1", cartpole),
}
"""By the name that the command line knows."""

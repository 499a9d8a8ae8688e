"""Ready experiments with agents that learn from a data set. Free of JAX."""

from __future__ import annotations

import dataclasses
from typing import Any

from sebulba.agents.configs import AgentConfig, ReplayConfig, TorsoConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import Presets
from sebulba_offline.configs import BCConfig, IQLConfig, SACWithDataConfig, TD3BCConfig

PRESETS = Presets()

REPLAY = ReplayConfig(capacity=2_000_000, batch_size=256, updates_per_cycle=8)
"""Eight updates for 2,048 rows: one for as many rows as a batch has."""
SIZES: dict[str, Any] = {
    "num_envs": 8,
    "steps_per_cycle": 256,
    "num_inferencers_per_device": 1,
    "schedule": "lockstep",
}
"""The data are read in lockstep, so a resumed run has the bits of one that was not stopped."""


@PRESETS.add("bc", "behaviour cloning of a data set")
def cloning() -> ExperimentConfig:
    """Return behaviour cloning of a data set.

    Networks, batch and learning rate are those of TD3+BC's actor (Fujimoto and Gu 2021, arXiv
    2106.06860, table 3).
    """
    return ExperimentConfig(
        env=EnvConfig("CartPole-v1"),
        agent=BCConfig(
            learning_rate=3e-4,
            torso=TorsoConfig(hidden_sizes=(256, 256), activation="relu"),
            replay=REPLAY,
        ),
        total_env_steps=2_560_000,
        eval_every_env_steps=256_000,
        **SIZES,
    )


@PRESETS.add("iql", "IQL of a data set, for continuous actions")
def iql() -> ExperimentConfig:
    """Return IQL: Kostrikov et al. 2022 (arXiv 2110.06169), appendix B, for locomotion."""
    config = IQLConfig(learning_rate=3e-4, critic_learning_rate=3e-4, replay=REPLAY)
    return _continuous(config)


@PRESETS.add("td3-bc", "TD3+BC of a data set, for continuous actions")
def td3_bc() -> ExperimentConfig:
    """Return TD3+BC: Fujimoto and Gu 2021 (arXiv 2106.06860), table 3."""
    config = TD3BCConfig(
        learning_rate=3e-4,
        critic_learning_rate=3e-4,
        normalize_observations=True,
        replay=REPLAY,
    )
    return _continuous(config)


@PRESETS.add("rebrac", "ReBRAC of a data set, for continuous actions")
def rebrac() -> ExperimentConfig:
    """Return TD3+BC with a penalty of the critic: Tarasov et al. 2023 (arXiv 2305.09836), table 7.

    Learning rates and the number of hidden layers are the paper's; its batches are four times as
    large, and its critics normalise their layers.
    """
    config = TD3BCConfig(
        learning_rate=1e-3,
        critic_learning_rate=1e-3,
        actor_penalty=0.05,
        critic_penalty=0.05,
        torso=TorsoConfig(hidden_sizes=(256, 256, 256), activation="relu"),
        replay=REPLAY,
    )
    return _continuous(config)


@PRESETS.add("sac-data", "SAC that begins with a data set, for continuous actions")
def sac_with_data() -> ExperimentConfig:
    """Return SAC that reads a data set once, then steps the environment.

    Half of each batch is data (Ball et al. 2023, arXiv 2302.02948). One update an env step, as in
    the preset ``sac``.
    """
    replay = dataclasses.replace(REPLAY, capacity=1_000_000, updates_per_cycle=16)
    config = SACWithDataConfig(replay=replay)
    sizes = SIZES | {"num_envs": 4, "steps_per_cycle": 4}
    return dataclasses.replace(_continuous(config), **sizes)  # type: ignore[arg-type]


def _continuous(agent: AgentConfig) -> ExperimentConfig:
    return ExperimentConfig(
        env=EnvConfig("Pendulum-v1"),
        agent=agent,
        total_env_steps=25_600_000,
        eval_every_env_steps=1_280_000,
        eval_episodes=20,
        **SIZES,
    )

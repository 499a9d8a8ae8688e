"""Tasks that have a preset by name: an agent's neutral preset, with what the task changes in it.

That is the length of the run, and here and there hyper-parameters. The name of a task is the id of
its environment in lower case, without the version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.preset import Preset, for_task


class Task(NamedTuple):
    """A task of some agents."""

    env_id: str
    """Its environment, of envpool."""
    env_steps: Mapping[str, int | None]
    """Environment steps to train for, by agent; None for those of the agent's neutral preset."""
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Hyper-parameters, and numbers of the run, that differ from the neutral preset's, by agent."""


_FAR_SIGHTED = {"discount": 0.9999}
"""Franceschetti et al. 2022 (arXiv 2208.07587) name a discount of 0.99 as why Swimmer fails."""

_ZOO_LANDER = {
    "discount": 0.999,
    "trace_decay": 0.98,
    "entropy_coefficient": 0.01,
    "epochs": 4,
    "minibatches": 256,
    "steps_per_cycle": 1024,
}
"""Of the Stable-Baselines3 zoo for LunarLanderContinuous-v2 (hyperparams/ppo.yml)."""

TASKS: tuple[Task, ...] = (
    Task("Acrobot-v1", {"impala": None, "ppo": None, "dqn": None}),
    Task("MountainCar-v0", {"impala": None, "ppo": None, "dqn": 120_000}),
    Task(
        "MountainCarContinuous-v0",
        {"ppo": None, "sac": 30_000},
        {"ppo": _FAR_SIGHTED, "sac": {"noise_correlation": 0.9}},
    ),
    Task("LunarLander-v3", {"impala": None, "ppo": None, "dqn": None}),
    Task(
        "LunarLanderContinuous-v3",
        {"impala": None, "ppo": None, "sac": 500_000},
        {"ppo": _ZOO_LANDER},
    ),
    Task("BipedalWalker-v3", {"impala": 15_000_000, "ppo": 5_000_000, "sac": 500_000}),
    Task("BipedalWalkerHardcore-v3", {"ppo": 100_000_000, "sac": 10_000_000}),
    Task("CarRacing-v3", {"ppo": 4_000_000}),
    Task("Hopper-v4", {"impala": None, "ppo": None, "sac": None}),
    Task("Walker2d-v4", {"impala": None, "ppo": None, "sac": None}),
    Task("Ant-v4", {"ppo": None, "sac": None}),
    Task("Swimmer-v4", {"ppo": None, "sac": None}, {"ppo": _FAR_SIGHTED, "sac": _FAR_SIGHTED}),
    Task("InvertedPendulum-v4", {"ppo": None, "sac": None}),
    Task("InvertedDoublePendulum-v4", {"impala": None, "ppo": None, "sac": None, "ddpg": None}),
    Task("Reacher-v4", {"ppo": None, "sac": None}),
    Task("Pusher-v4", {"ppo": None, "sac": None}),
    Task("Humanoid-v4", {"ppo": 10_000_000, "sac": 2_000_000}),
    Task("HumanoidStandup-v4", {"ppo": 10_000_000, "sac": None}),
)
"""With the steps of the Stable-Baselines3 zoo (github.com/DLR-RM/rl-baselines3-zoo, hyperparams/)
where the neutral preset has others, and three times as many for Impala as for PPO."""

GAMES = (
    *("Asterix-v5", "Asteroids-v5", "BeamRider-v5", "Breakout-v5", "Enduro-v5", "Freeway-v5"),
    *("MsPacman-v5", "Pong-v5", "Qbert-v5", "RoadRunner-v5", "Seaquest-v5", "SpaceInvaders-v5"),
)
"""Ids of the games that have presets: the ten of the same zoo, Asterix and Freeway."""


def name_of(env_id: str) -> str:
    """Return the name that a task has in names of presets."""
    return env_id.rpartition("-v")[0].lower()


def task_presets(neutral: Mapping[str, Preset]) -> dict[str, Preset]:
    """Return the presets of ``TASKS`` by name, TASK-AGENT.

    Args:
      neutral: The neutral presets, by agent.
    """
    return {
        f"{name_of(task.env_id)}-{agent}": _in_env(
            neutral[agent], task.env_id, task.changes.get(agent, {}), env_steps
        )
        for task in TASKS
        for agent, env_steps in task.env_steps.items()
    }


def game_presets(atari: Mapping[str, Preset]) -> dict[str, Preset]:
    """Return the presets of ``GAMES`` by name, GAME-AGENT.

    Args:
      atari: The presets for any game, by agent.
    """
    return {
        f"{name_of(env_id)}-{agent}": _in_env(preset, env_id, {})
        for env_id in GAMES
        for agent, preset in atari.items()
    }


def _in_env(
    preset: Preset, env_id: str, changes: Mapping[str, Any], env_steps: int | None = None
) -> Preset:
    """Return a preset in another environment; it is made when it is asked for."""

    def make() -> ExperimentConfig:
        """Return the configuration of the agent's own preset in this environment."""
        config = preset.make()
        run = {"total_env_steps": env_steps or config.total_env_steps}
        run |= {name: changes[name] for name in changes if hasattr(config, name)}
        agent = {name: changes[name] for name in changes if name not in run}
        return for_task(config, dataclasses.replace(config.env, id=env_id), agent, **run)

    changed = "".join(f", {name} {value}" for name, value in changes.items())
    return Preset(f"{preset.summary}, here envpool {env_id}{changed}", make)

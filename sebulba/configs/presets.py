"""Ready experiments, by name."""

from __future__ import annotations

from sebulba.configs import (
    ddpg_presets,
    dqn_presets,
    impala_presets,
    jax_many_agents_presets,
    ppo_presets,
    r2d2_presets,
    sac_presets,
)
from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.preset import Preset

NEUTRAL: dict[str, Preset] = {
    "impala": impala_presets.NEUTRAL,
    "ppo": ppo_presets.NEUTRAL,
    "dqn": dqn_presets.NEUTRAL,
    "r2d2": r2d2_presets.NEUTRAL,
    "sac": sac_presets.NEUTRAL,
    "ddpg": ddpg_presets.NEUTRAL,
}
"""For any task that an agent can take, by the name that the command line knows."""

PRESETS: dict[str, Preset] = {
    **NEUTRAL,
    **impala_presets.PRESETS,
    **ppo_presets.PRESETS,
    **dqn_presets.PRESETS,
    **r2d2_presets.PRESETS,
    **sac_presets.PRESETS,
    **ddpg_presets.PRESETS,
    **jax_many_agents_presets.PRESETS,
}
"""All, by the name that the command line knows."""


def goal_of(preset: str, config: ExperimentConfig) -> float | None:
    """Return the goal of a preset; None if it has none, or ``config`` has another environment."""
    if preset not in PRESETS:
        return None
    env, names = PRESETS[preset].make().env, ("id", "max_episode_steps", "options")
    same = all(getattr(env, name) == getattr(config.env, name) for name in names)
    return PRESETS[preset].goal if same else None

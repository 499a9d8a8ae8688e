"""Ready experiments, by name."""

from __future__ import annotations

from sebulba.configs import (
    ddpg_presets,
    dqn_presets,
    impala_presets,
    ppo_presets,
    r2d2_presets,
    sac_presets,
)
from sebulba.configs.preset import Preset

PRESETS: dict[str, Preset] = {
    **impala_presets.PRESETS,
    **ppo_presets.PRESETS,
    **dqn_presets.PRESETS,
    **r2d2_presets.PRESETS,
    **sac_presets.PRESETS,
    **ddpg_presets.PRESETS,
}
"""By the name that the command line knows."""

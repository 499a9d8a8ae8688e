"""Ready experiments, by name."""

from __future__ import annotations

from sebulba.configs import dqn_presets, impala_presets
from sebulba.configs.preset import Preset

PRESETS: dict[str, Preset] = {**impala_presets.PRESETS, **dqn_presets.PRESETS}
"""By the name that the command line knows."""

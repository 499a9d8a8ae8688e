"""Ready leagues. Free of JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.preset import Preset
from sebulba.configs.presets import OWN_NUMBERS
from sebulba_league.changes import league


def _league(
    name: str,
    learner: Mapping[str, Any] | None = None,
    env_steps: int | None = None,
    **fields: Any,
) -> Preset:
    """Return self-play in a league, which ``fields`` describe; ``learner`` changes who learns."""
    ours = OWN_NUMBERS[name]

    def make() -> ExperimentConfig:
        """Return the self-play of the same name with the trainer league around it."""
        config = ours.make()
        agent: Any = dataclasses.replace(config.agent, **(learner or {}))  # type: ignore[arg-type]
        config = league(dataclasses.replace(config, agent=agent))
        steps = env_steps or config.total_env_steps
        agent = dataclasses.replace(config.agent, **fields)
        return dataclasses.replace(config, agent=agent, total_env_steps=steps)

    return Preset(ours.summary.replace("self-play", "a league"), make)


_KUHN: Any = {"opponents": 1, "mirrors": 3, "history": 200, "snapshot_every": 32_768}
"""Mostly against itself, where mirror descent nears an equilibrium: the mixture of a history that
was mostly met was two to five times as far from it (docs/measurements)."""
_MIRRORED: Any = {"opponents": 1, "mirrors": 7}
"""On boards, too: a learner that mostly met its history learned less from as many env steps."""
_QUICK = {"entropy_coefficient": 0.2, "magnet_rate": 0.004}
"""The mixture of a history may go in circles that the last policy must not."""
PRESETS: Mapping[str, Preset] = {
    "kuhn-league": _league("kuhn", _QUICK, **_KUHN),
    "leduc-league": _league("leduc", **_KUHN | _MIRRORED),
    "tic-tac-toe-league": _league("tic-tac-toe", env_steps=1_500_000, **_MIRRORED),
    "connect-four-league": _league("connect-four", **_MIRRORED),
}
"""Those of Sebulba's self-play, against a history."""

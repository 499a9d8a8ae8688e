"""Ready leagues. Free of JAX."""

from __future__ import annotations

from collections.abc import Mapping

from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.preset import Preset
from sebulba.configs.presets import OWN_NUMBERS
from sebulba_league.changes import league


def _league(name: str) -> Preset:
    ours = OWN_NUMBERS[name]

    def make() -> ExperimentConfig:
        """Return the self-play of the same name with the trainer league around it."""
        return league(ours.make())

    return Preset(ours.summary.replace("self-play", "a league"), make)


PRESETS: Mapping[str, Preset] = {
    f"{name}-league": _league(name) for name in ("kuhn", "leduc", "tic-tac-toe", "connect-four")
}
"""Those of Sebulba's self-play, against a history."""

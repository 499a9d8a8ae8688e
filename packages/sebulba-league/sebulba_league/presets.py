"""Ready leagues. Free of JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sebulba.agents.configs import MultiAgentConfig
from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.preset import Preset
from sebulba.configs.presets import OWN_NUMBERS
from sebulba_league.config import LeagueConfig


def in_league(config: ExperimentConfig, **fields: Any) -> ExperimentConfig:
    """Return an experiment with self-play whose learner meets snapshots of itself.

    Args:
      config: Of a game of envpool, whose seats share a policy.
      **fields: Of ``LeagueConfig``.
    """
    agent = config.agent
    agents = agent.agents if isinstance(agent, MultiAgentConfig) else {"player": agent}
    return dataclasses.replace(config, agent=LeagueConfig(agents, **fields))


def _league(name: str, **fields: Any) -> Preset:
    ours = OWN_NUMBERS[name]

    def make() -> ExperimentConfig:
        """Return the self-play of the same name, whose learner meets snapshots of itself."""
        return in_league(ours.make(), **fields)

    return Preset(ours.summary.replace("self-play", "a league"), make)


PRESETS: Mapping[str, Preset] = {
    f"{name}-league": _league(name) for name in ("kuhn", "leduc", "tic-tac-toe", "connect-four")
}
"""Those of Sebulba's self-play, against a history."""

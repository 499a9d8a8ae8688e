"""Self-play and leagues: a learner plays against snapshots of itself and fixed opponents."""

from __future__ import annotations

from typing import Any

__all__ = [
    "PSRO",
    "Curriculum",
    "League",
    "LeagueConfig",
    "LeaguePopulationConfig",
    "Population",
    "PopulationConfig",
    "Rollout",
    "SelfPlay",
    "Trained",
    "Trainer",
]
_CONFIGS = {
    "LeagueConfig": "config",
    "LeaguePopulationConfig": "population_config",
    "PopulationConfig": "population_config",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: trainers import JAX, and commands do without."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _CONFIGS.get(name, "trainers")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)

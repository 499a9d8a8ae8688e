"""Self-play and leagues: a learner plays against snapshots of itself and fixed opponents."""

from __future__ import annotations

from typing import Any

_TRAINERS = ("League", "Rollout", "SelfPlay", "Trained", "Trainer")
__all__ = ["League", "LeagueConfig", "Rollout", "SelfPlay", "Trained", "Trainer"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: trainers import JAX, and commands do without."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "trainers" if name in _TRAINERS else "config"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)

"""PQN: Q-learning of the newest trajectory, without a replay or a target network."""

from __future__ import annotations

from typing import Any

__all__ = ["PQN", "PQNConfig"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the agent imports JAX, and a command line does without."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "agent" if name == "PQN" else "config"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)

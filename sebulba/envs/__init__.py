"""Environments: envpool's, Gymnasium's and a user's own, behind one adapter protocol.

The names below are imported when they are first used, because worker processes of asynchronous
vector environments import this package and need neither JAX nor envpool.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sebulba.envs.factory import EnvSource, env_source, env_spec, make_env_factory
    from sebulba.envs.seeds import seed_block

__all__ = ["EnvSource", "env_source", "env_spec", "make_env_factory", "seed_block"]

_ROOM_OF = {
    "EnvSource": "sebulba.envs.factory",
    "env_source": "sebulba.envs.factory",
    "env_spec": "sebulba.envs.factory",
    "make_env_factory": "sebulba.envs.factory",
    "seed_block": "sebulba.envs.seeds",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'sebulba.envs' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOM_OF[name]), name)

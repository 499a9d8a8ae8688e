"""Environments: envpool's, Gymnasium's and a user's own, behind one adapter protocol.

The names below are imported when they are first used, because worker processes of asynchronous
vector environments import this package and need neither JAX nor envpool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sebulba.support.lazy import lazy_names

if TYPE_CHECKING:
    from sebulba.envs.factory import EnvSource as EnvSource
    from sebulba.envs.factory import env_source as env_source
    from sebulba.envs.factory import env_spec as env_spec
    from sebulba.envs.factory import make_env_factory as make_env_factory
    from sebulba.envs.seeds import seed_block as seed_block

_MODULES = {
    "sebulba.envs.factory": "EnvSource env_source env_spec make_env_factory",
    "sebulba.envs.seeds": "seed_block",
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)

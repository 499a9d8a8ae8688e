"""What the entry point ``sebulba`` of ``sebulba.environments`` names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from sebulba.envs.packages import VectorKind, VectorParts
from sebulba_networks import IDS, default_num_threads


def _parts(
    env_id: str, options: Mapping[str, Any], num_threads: int | None, step_timeout_s: float
) -> VectorParts:
    """Return what makes the vectors of an environment.

    Raises:
      UsageError: An option is unknown, or its value breaks a rule.
    """
    from sebulba_networks.adapter import NetworkAdapter, network_spec
    from sebulba_networks.options import read_options

    read = read_options(dict(options), env_id)
    num_threads = num_threads or default_num_threads()
    return VectorParts(
        lambda num_envs, seeds: NetworkAdapter(
            read, seeds, num_threads=num_threads, step_timeout_s=step_timeout_s
        ),
        lambda: network_spec(read),
        num_threads,
    )


ENVIRONMENTS = {
    env_id.partition("/")[2]: VectorKind(functools.partial(_parts, env_id)) for env_id in IDS
}
"""By the part of their ids after ``sebulba/``."""

"""Networks at the level of packets as environments; ``docs/networks.md`` explains them.

Importing this package registers the one of a single agent in Gymnasium, which has no entry points
for that:
``gymnasium.make("sebulba.envs.networks:sebulba/CongestionControl-v0")`` imports it by itself.
"""

from __future__ import annotations

import gymnasium

from sebulba.support.machine import num_cores

CONGESTION_CONTROL = "sebulba/CongestionControl-v0"
SHARED_BOTTLENECK = "sebulba/SharedBottleneck-v0"
CART_POLE = "sebulba/CartPole-v0"

IDS = (CONGESTION_CONTROL, SHARED_BOTTLENECK, CART_POLE)
"""Environments of this package."""

if CONGESTION_CONTROL not in gymnasium.registry:
    gymnasium.register(
        CONGESTION_CONTROL,
        entry_point="sebulba.envs.networks.gymnasium_env:CongestionControlEnv",
    )


def default_num_threads() -> int:
    """Return half of the cores, as for two Inferencers."""
    return max(1, num_cores() // 2)

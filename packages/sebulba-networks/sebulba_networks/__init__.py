"""Networks at the level of packets as environments of Sebulba, Gymnasium and PettingZoo.

Importing this package registers the environment of a single agent in Gymnasium, so both
``import sebulba_networks`` with ``gymnasium.make("sebulba/CongestionControl-v0")`` and
``gymnasium.make("sebulba_networks:sebulba/CongestionControl-v0")`` make it. Sebulba finds all
environments by entry points.
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
        entry_point="sebulba_networks.gymnasium_env:CongestionControlEnv",
    )


def default_num_threads() -> int:
    """Return half of the cores, as for two Inferencers."""
    return max(1, num_cores() // 2)

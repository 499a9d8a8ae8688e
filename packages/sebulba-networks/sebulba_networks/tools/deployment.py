"""``sebulba networks deploy``: a policy on a real network, beside what the simulator predicted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from rich.table import Table

from sebulba.policies.policy import Policy
from sebulba_networks.engines import NATIVE
from sebulba_networks.native import PACKET_BYTES, PAYLOAD_BYTES
from sebulba_networks.options import CongestionControlOptions, LoopbackOptions
from sebulba_networks.tools.playing import (
    POLICY,
    RULES,
    Figures,
    Learned,
    Mover,
    Seen,
    columns,
    ignored,
    play,
)

SIMULATED, REAL = "simulated", "loopback"
Episodes = dict[str, dict[str, list[Seen]]]
"""What a flow saw, by who moved its window and then by ``SIMULATED`` and ``REAL``."""


def deploy(options: CongestionControlOptions, policy: Policy, seed: int) -> Episodes:
    """Play the same network in the simulator and then in real time.

    Args:
      options: The network, of one agent.
      policy: What was trained. AIMD, CUBIC and the BBR-like flow are played, too.
      seed: Of the network.

    Raises:
      UsageError: The network is more than one flow over one link.
    """
    names = [field.name for field in dataclasses.fields(CongestionControlOptions)]
    values = {name: getattr(options, name) for name in names}
    movers: dict[str, Any] = {POLICY: ("agent", functools.partial(Learned, policy))}
    movers |= {name: (rule, _make_ignored) for name, rule in RULES.items()}
    episodes: Episodes = {}
    for name, (control, make) in movers.items():
        own = values | {"control": control}
        # The simulator comes first, so the policy is compiled when packets begin to travel.
        real = LoopbackOptions(**own | {"engine": NATIVE})
        kinds = {SIMULATED: CongestionControlOptions(**own), REAL: real}
        mover = functools.partial(_mover, make)
        episodes[name] = {where: play(kind, mover, [seed])[0] for where, kind in kinds.items()}
    return episodes


def _mover(make: Callable[[], Mover], slot: int) -> Mover:
    return make()


def _make_ignored() -> Mover:
    return ignored


def summary(episodes: Episodes) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of each episode, with goodput in Mbit/s and mean RTT in ms."""
    return {
        name: {where: _figures(seen) for where, seen in both.items()}
        for name, both in episodes.items()
    }


def _figures(seen: list[Seen]) -> dict[str, float]:
    figures = Figures.of(seen)
    info = columns(seen[:1])
    capacity = info["bandwidth_bps"][0] * PAYLOAD_BYTES / PACKET_BYTES / 1e6
    rtt = info["base_rtt_ns"][0] / 1e6 + figures.queueing_delay_ms
    return dataclasses.asdict(figures) | {
        "goodput_mbps": figures.throughput * capacity,
        "rtt_ms": rtt,
    }


def table(figures: dict[str, dict[str, dict[str, float]]]) -> Table:
    """Return goodput, RTT, loss and return, the simulator's above those of the real network."""
    shown = Table("window moved by", "network")
    for name in ("goodput", "mean RTT", "loss", "window", "return"):
        shown.add_column(name, justify="right")
    for who, both in figures.items():
        for where, one in both.items():
            shown.add_row(
                who if where == SIMULATED else "",
                where,
                f"{one['goodput_mbps']:.1f} Mbit/s",
                f"{one['rtt_ms']:.2f} ms",
                f"{one['loss']:.2%}",
                f"{one['window']:.0f}",
                f"{one['episode_return_mean']:.1f}",
                style="bold" if who == POLICY else "",
            )
    return shown

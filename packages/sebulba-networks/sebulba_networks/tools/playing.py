"""Episodes of flows whose windows are moved by a trained policy, or by what it is compared with."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sebulba.policies.policy import Policy, PolicyState
from sebulba_networks import default_num_threads
from sebulba_networks.adapter import LARGEST_EXPONENT
from sebulba_networks.native import INFO, PACKET_BYTES, Rows
from sebulba_networks.options import CongestionControlOptions
from sebulba_networks.pools import make_pool

POLICY, FIXED, ORACLE = "policy", "fixed window", "oracle"
RULES: dict[str, Any] = {"AIMD": "aimd", "CUBIC": "cubic", "BBR-like": "bbr"}
"""What a policy is compared with, by the value of the option ``control``."""
ORACLE_SHARES = (0.8, 0.85, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05)
"""Fixed windows of which the oracle takes the best for each network, as shares of its product of
bandwidth and delay."""


class Seen(NamedTuple):
    """What a step of one agent shows."""

    obs: np.ndarray
    """``[F]``."""
    reward: float
    """Of its last action."""
    info: dict[str, float]
    """By the names in ``native.INFO``."""


class Mover(Protocol):
    """Moves the window of one flow."""

    def __call__(self, seen: Seen) -> float:
        """Return the power of two by which the window is multiplied."""
        ...


class Learned:
    """Moves a window as a trained policy does."""

    def __init__(self, policy: Policy) -> None:
        """Begin an episode of ``policy``."""
        self._policy = policy
        self._state: PolicyState | None = None

    def __call__(self, seen: Seen) -> float:
        """Return the policy's action."""
        action, self._state = self._policy(seen.obs, self._state, reward=seen.reward)
        return float(action[0])


class FixedWindow:
    """Brings the window to a size and keeps it there."""

    def __init__(self, size: Callable[[dict[str, float]], float]) -> None:
        """Take the size as a function of what is known of the network, in packets."""
        self._size = size

    def __call__(self, seen: Seen) -> float:
        """Return what makes the window that large, as far as an action reaches."""
        wanted = max(1.0, self._size(seen.info))
        exponent = math.log2(wanted / seen.info["window"])
        return min(LARGEST_EXPONENT, max(-LARGEST_EXPONENT, exponent))


def ignored(seen: Seen) -> float:
    """Return the action where the option ``control`` moves the window."""
    return 0.0


def product(info: dict[str, float]) -> float:
    """Return the product of bandwidth and delay of a network, in packets."""
    return packets(info["bandwidth_bps"], info["base_rtt_ns"] / 1e9)


def packets(bandwidth_bps: float, rtt_s: float) -> float:
    """Return how many packets are in flight on a link that is just full."""
    return bandwidth_bps * rtt_s / (8 * PACKET_BYTES)


def play(
    options: CongestionControlOptions, mover: Callable[[int], Mover], seeds: Sequence[int]
) -> list[list[Seen]]:
    """Play an episode for each seed.

    Args:
      options: The network, of A agents.
      mover: Returns what moves the window of slot i; those of an environment are side by side.
      seeds: ``[B]`` integers.

    Returns:
      What each of the ``B * A`` slots saw; the first of it is before its first action.
    """
    pool = make_pool(options, seeds, num_threads=default_num_threads())
    num_slots = len(seeds) * options.num_agents
    movers = [mover(slot) for slot in range(num_slots)]
    seen: list[list[Seen]] = [[] for _ in range(num_slots)]
    actions = np.zeros(num_slots, np.float32)
    is_live = np.ones(len(seeds), np.bool_)
    rows = pool.reset(with_info=True)
    while is_live.any():
        _take(rows, np.repeat(is_live, options.num_agents), seen)
        is_live &= ~rows.episode_end
        for slot in np.flatnonzero(rows.acting.ravel() & np.repeat(is_live, options.num_agents)):
            actions[slot] = movers[slot](seen[slot][-1])
        rows = pool.step(actions, with_info=True)
    pool.close()
    return seen


def _take(rows: Rows, is_live: np.ndarray, seen: list[list[Seen]]) -> None:
    """Add what rows show to what the slots have seen."""
    assert rows.info is not None
    is_shown = rows.acting | rows.terminated | rows.truncated
    obs = rows.obs.reshape(len(seen), -1)
    info = rows.info.reshape(len(seen), -1)
    for slot in np.flatnonzero(is_shown.ravel() & is_live):
        of_step = dict(zip(INFO, info[slot].tolist(), strict=True))
        seen[slot].append(Seen(obs[slot], float(rows.reward.flat[slot]), of_step))


def columns(seen: list[Seen]) -> dict[str, np.ndarray]:
    """Return what an agent saw as arrays ``[N]``, by the names in ``native.INFO``."""
    return {name: np.array([step.info[name] for step in seen]) for name in INFO}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What an episode came to, after its slow start."""

    episode_return_mean: float
    """Sum of the rewards."""
    throughput: float
    """Share of the payload that the bottleneck can carry."""
    queueing_delay_ms: float
    """Mean over the packets."""
    loss: float
    """Packets lost over packets sent."""
    window: float
    """Mean over the steps, in packets."""

    @classmethod
    def of(cls, seen: list[Seen]) -> Figures:
        """Return those of an episode."""
        steps = seen[1:]
        info = columns(steps)
        num_acked, seconds = info["acked"].sum(), info["interval_ns"].sum() / 1e9
        waited = info["acked"] * np.maximum(0, info["mean_rtt_ns"] - info["base_rtt_ns"])
        carried = num_acked * 8 * PACKET_BYTES / max(seconds, 1e-9)
        return cls(
            sum(step.reward for step in steps),
            carried / info["bandwidth_bps"][0],
            waited.sum() / max(num_acked, 1) / 1e6,
            info["lost"].sum() / max(info["sent"].sum(), 1),
            info["window"].mean(),
        )

    @classmethod
    def mean(cls, figures: Sequence[Figures]) -> Figures:
        """Return the mean of each."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(float(np.mean([getattr(one, name) for one in figures])) for name in names))


Comparison = dict[str, list[Figures]]
"""Figures of an episode for each seed, by who moved the window."""


def compare(
    options: CongestionControlOptions, policy: Policy, fixed_window: float, seeds: Sequence[int]
) -> Comparison:
    """Play the same networks with the policy and with all that it is compared with.

    Args:
      options: The network, of one agent.
      policy: What was trained.
      fixed_window: The window that knows nothing of the network, in packets.
      seeds: ``[N]``, of the networks.
    """
    movers: dict[str, tuple[Any, Any]] = {
        POLICY: ("agent", functools.partial(Learned, policy)),
        FIXED: ("agent", functools.partial(FixedWindow, lambda info: fixed_window)),
        **{name: (rule, lambda: ignored) for name, rule in RULES.items()},
    }
    played = {}
    for name, (control, make) in movers.items():
        network = dataclasses.replace(options, control=control)
        episodes = play(network, lambda slot, make=make: make(), seeds)  # type: ignore[misc]
        played[name] = [Figures.of(seen) for seen in episodes]
    return played | {ORACLE: _oracle(options, seeds)}


def _oracle(options: CongestionControlOptions, seeds: Sequence[int]) -> list[Figures]:
    """Return the best fixed window for each network, by its return."""

    def mover(slot: int) -> Mover:
        share = ORACLE_SHARES[slot % len(ORACLE_SHARES)]
        return FixedWindow(lambda info: share * product(info))

    each = [seed for seed in seeds for _ in ORACLE_SHARES]
    figures = [Figures.of(seen) for seen in play(options, mover, each)]
    size = len(ORACLE_SHARES)
    by_network = (figures[i : i + size] for i in range(0, len(figures), size))
    return [max(tried, key=lambda one: one.episode_return_mean) for tried in by_network]

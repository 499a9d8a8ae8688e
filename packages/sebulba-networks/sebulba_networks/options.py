"""What a network is made of: typed options with ranges, checked before native code sees them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from sebulba.envs.option_checks import check_option_names
from sebulba.errors import UsageError, shown
from sebulba.support.checks import check_types, require, require_size
from sebulba_networks import CART_POLE, SHARED_BOTTLENECK
from sebulba_networks.engines import NATIVE, find_engine

Range = float | tuple[float, float] | str
"""A number, or the two ends of a range from which each episode draws: ``(64, 128)``, ``"64-128"``.
"""

_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"


class _Bounds(NamedTuple):
    low: float
    """Least value."""
    high: float
    """Largest value."""
    is_whole: bool = False
    """Both ends of the range are whole numbers."""


_BOUNDS = {
    "bandwidth_mbps": _Bounds(0.1, 10_000),
    "rtt_ms": _Bounds(0.1, 5_000),
    "buffer_packets": _Bounds(1, 1_000_000, is_whole=True),
    "random_loss": _Bounds(0, 0.5),
    "cross_traffic_mbps": _Bounds(0, 10_000),
    "competitor_start_s": _Bounds(0, 1_000),
    "join_s": _Bounds(0, 1_000),
    "stay_s": _Bounds(0, 100_000),
    "cross_traffic_on_ms": _Bounds(0.001, 1e6),
    "cross_traffic_off_ms": _Bounds(0, 1e6),
    "num_agents": _Bounds(1, 64),
    "num_aimd": _Bounds(0, 64),
    "num_cubic": _Bounds(0, 64),
    "num_bbr": _Bounds(0, 64),
    "num_hops": _Bounds(1, 16),
    "flow_packets": _Bounds(0, 2**40),
    "slow_start_packets": _Bounds(2, 1_000_000),
    "max_window_packets": _Bounds(10, 1_000_000),
    "max_episode_steps": _Bounds(1, 1_000_000_000),
    "max_silent_steps": _Bounds(1, 1_000_000_000),
}
_RANGES = tuple(_BOUNDS)[:8]
_AT_ONCE: Any = (0.0, 0.0)


class PoolOptions(Protocol):
    """What a pool needs to know of its environments."""

    @property
    def engine(self) -> str:
        """What simulates, for messages."""

    @property
    def num_agents(self) -> int:
        """Agents of an environment."""

    @property
    def num_features(self) -> int:
        """Numbers in an observation."""

    @property
    def num_actions(self) -> int:
        """Numbers in an action."""

    def as_json(self) -> str:
        """Return what the engine reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CongestionControlOptions:
    """The network of ``sebulba/CongestionControl-v0``.

    A range is a number, a pair, or text such as "64-128"; each episode draws from it anew.

    Raises:
      UsageError: A value breaks a rule.
    """

    engine: str = "native"
    """What simulates: native, or the name of an engine of another distribution, such as ns3."""
    transport: Literal["udp", "tcp"] = "udp"
    """What carries the packets of flows that have a window. udp: our own transport. tcp: that of
    ns-3, where ``num_aimd``, ``num_cubic``, ``num_bbr`` and ``control`` are its NewReno, Cubic and
    BBR; a step that is too much work for it is cut short, and the episode truncated."""
    bandwidth_mbps: Range = (64.0, 128.0)
    """Rate of each link, in Mbit/s. A range."""
    rtt_ms: Range = (16.0, 64.0)
    """Propagation there and back over the whole path. A range."""
    buffer_packets: Range = (80.0, 800.0)
    """Packets that wait before a link; further ones are dropped. A range of whole numbers."""
    random_loss: Range = 0.0
    """Probability with which a link loses a packet that it has transmitted. A range."""
    cross_traffic_mbps: Range = 0.0
    """Rate on the wire of a source beside the agent on each link, while it is on. A range."""
    competitor_start_s: Range = (0.0, 1.0)
    """When the competing flows begin. A range."""
    cross_traffic_on_ms: float = 100.0
    """Mean of the exponential times for which the cross traffic is on, if it is ever off."""
    cross_traffic_off_ms: float = 0.0
    """Mean of the times for which it is off; 0 is a constant bit rate."""
    num_aimd: int = 0
    """Competing flows on each link whose window adds 1 a round trip, and halves at a loss."""
    num_cubic: int = 0
    """Competing flows on each link with CUBIC."""
    num_bbr: int = 0
    """Competing flows on each link with the rules of BBR."""
    control: Literal["agent", "aimd", "cubic", "bbr"] = "agent"
    """What moves the window. agent: the actions; otherwise these are ignored, and the flow is one
    to compare with."""
    num_hops: int = 1
    """Links one after the other that the agent's flow crosses (a parking lot); cross traffic and
    competitors cross one each."""
    flow_packets: int = 0
    """Packets after whose delivery the episode is terminated; 0 is a flow without end."""
    slow_start_packets: int = 1_000_000
    """Window at which slow start ends, if no loss ended it before."""
    max_window_packets: int = 10_000
    """Largest window."""
    max_episode_steps: int = 400
    """Steps after which the episode is truncated."""
    max_silent_steps: int = 20
    """Steps without an acknowledgement after which it is terminated."""
    features: Literal["paper", "relative"] = "paper"
    """paper: throughput over the largest so far, normalised delay, loss, window. relative: the
    window as a logarithm, and the logarithms of delay over its minimum and of the window over the
    product of bandwidth and delay."""
    reward: Literal["paper", "capacity"] = "paper"
    """What a flow is paid for. paper: its throughput over the largest that it has seen, which a
    window that stays tiny reaches. capacity: its throughput over the rate of a link."""
    trace: bool = False
    """Keep every packet event of the current episode (``NativePool.trace``)."""

    # Without annotations these are constants and not options. The last are options of many agents.
    kind = "congestion_control"
    """What the engine makes of it."""
    num_agents = 1
    """Flows with an agent each."""
    num_actions = 1
    """Numbers in an action."""
    join_s = stay_s = _AT_ONCE
    """When the agents after the first begin, and how long they stay."""

    def __post_init__(self) -> None:
        """Check every field; ranges become pairs."""
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        ranges = tuple(name for name in _RANGES if name in fields)
        for name in ranges:
            pair = _pair(name, getattr(self, name), fields[name])
            object.__setattr__(self, name, pair)
        check_types(self, "", open_fields=ranges)
        for name in (name for name in _BOUNDS if name in fields):
            self._check_bounds(name, _BOUNDS[name], fields[name])
        if self.engine != NATIVE:
            find_engine(self.engine)
        self._check_transport()
        cross: Any = self.cross_traffic_mbps
        require(
            max(cross) == 0 or min(cross) >= 0.001,
            "cross_traffic_mbps",
            _text(cross),
            "must be 0, or from 0.001 on",
            "leave it out for none",
        )

    def _check_transport(self) -> None:
        if self.transport == "udp":
            return
        has_tcp = self.engine != NATIVE
        remedy = "use engine='ns3', or leave it out"
        require(has_tcp, "transport", self.transport, "is not in the native engine", remedy)
        rule = "follows the packets of our own transport only"
        require(not self.trace, "trace", True, rule, "leave transport='tcp' out")

    def _check_bounds(self, name: str, bounds: _Bounds, default: Any) -> None:
        value = getattr(self, name)
        for number in value if name in _RANGES else (value,):
            require(
                bounds.low <= number <= bounds.high
                and not (bounds.is_whole and number != int(number)),
                name,
                value if name not in _RANGES else _text(value),
                f"must be {_words(name, bounds)}",
                f"the default is {_default(default)}",
            )

    @property
    def num_features(self) -> int:
        """Numbers in an observation."""
        return 6 if self.features == "relative" else 4

    @property
    def obs_bounds(self) -> tuple[list[float], list[float]]:
        """Least and largest observation of an agent."""
        most = self.max_window_packets
        if self.features == "relative":
            high = [1.0, 1.0, 1.0, math.log2(most), math.inf, math.inf]
            return [0.0, 0.0, 0.0, 0.0, 0.0, -math.inf], high
        return [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, float(most)]

    def as_json(self) -> str:
        """Return what the engine reads."""
        names = (*_BOUNDS, "control", "features")
        if self.engine != NATIVE:  # so that the native states of older versions still fit
            names = ("engine", "transport", *names)
        if self.reward != "paper":  # so that states of older versions still fit
            names = (*names, "reward")
        values = {name: getattr(self, name) for name in names} | {"trace": int(self.trace)}
        return json.dumps({"kind": self.kind, **values}, sort_keys=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopbackOptions(CongestionControlOptions):
    """The same in real time: UDP over the loopback interface, through an emulated link.

    Raises:
      UsageError: A value breaks a rule, or asks for more than one flow over one link.
    """

    kind = "loopback"

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        alone = {"engine": NATIVE, "num_hops": 1, "num_aimd": 0, "num_cubic": 0, "num_bbr": 0}
        for name, only in {**alone, "cross_traffic_mbps": (0.0, 0.0)}.items():
            value = getattr(self, name)
            rule = "a real network here has one flow over one link"
            require(value == only, name, value, rule, "leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBottleneckOptions(CongestionControlOptions):
    """The network of ``sebulba/SharedBottleneck-v0``.

    Raises:
      UsageError: A value breaks a rule.
    """

    num_agents: int = 2
    """Flows with an agent each."""
    join_s: Range = (0.0, 10.0)
    """When the flows of the agents after the first begin; each draws its own. A range."""
    stay_s: Range = (10.0, 30.0)
    """Seconds after which each of them leaves, at the end of its step; 0 is never. A range."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartPoleOptions:
    """``sebulba/CartPole-v0``.

    Raises:
      UsageError: A value breaks a rule.
    """

    max_episode_steps: int = 500
    """Steps after which the episode is truncated."""

    engine = NATIVE
    num_agents = num_actions = 1
    num_features = 4

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self)
        require_size("max_episode_steps", self.max_episode_steps, 1, "use 500")

    def as_json(self) -> str:
        """Return what the engine reads."""
        return json.dumps({"kind": "cart_pole", **dataclasses.asdict(self)})


NetworkOptions = CongestionControlOptions | CartPoleOptions
"""Of what the engine simulates."""


def read_options(options: Mapping[str, Any], env: str) -> NetworkOptions:
    """Return options by name, as the command line and ``gymnasium.make`` give them.

    Raises:
      UsageError: An option is unknown, or a value breaks a rule.
    """
    kinds: dict[str, Any] = {SHARED_BOTTLENECK: SharedBottleneckOptions, CART_POLE: CartPoleOptions}
    kind = kinds.get(env, CongestionControlOptions)
    check_option_names(options, {field.name for field in dataclasses.fields(kind)}, env)
    return kind(**options)


def _pair(name: str, value: Any, default: Any) -> tuple[float, float]:
    pair = value
    if isinstance(value, str):
        match = re.fullmatch(f"{_NUMBER}(?:-{_NUMBER})?", value)
        pair = (match[1], match[2] or match[1]) if match else None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        pair = (value, value)
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_number, pair)):
        raise UsageError(
            f"{name}={shown(value)} must be a number, a pair of numbers or text such as "
            f"'64-128'; the default is {_default(default)}"
        )
    low, high = float(pair[0]), float(pair[1])
    if low > high:
        raise UsageError(f"{name}={shown(value)} must have its smaller end first; swap the two")
    return low, high


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    try:
        return math.isfinite(float(value))
    except (ValueError, OverflowError):  # no number, or an int that no float can hold
        return False


def _text(pair: Any) -> Any:
    low, high = pair
    return low if low == high else pair


def _words(name: str, bounds: _Bounds) -> str:
    kind = "whole numbers" if bounds.is_whole else "numbers"
    if name not in _RANGES:
        return f"from {bounds.low:g} to {bounds.high:g}"
    return f"one or two {kind} from {bounds.low:g} to {bounds.high:g}"


def _default(value: Any) -> str:
    return f"'{value[0]:g}-{value[1]:g}'" if isinstance(value, tuple) else f"{value:g}"

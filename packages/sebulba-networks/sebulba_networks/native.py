"""The native engine, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sebulba.errors import EnvError
from sebulba.support.checks import require
from sebulba_networks.build import library
from sebulba_networks.options import (
    LoopbackOptions,
    NetworkOptions,
    PoolOptions,
    SharedBottleneckOptions,
)

if TYPE_CHECKING:
    from sebulba_networks.jax_call import JaxCall

INFO = (
    *("time_ns", "interval_ns", "sent", "acked", "lost"),
    *("srtt_ns", "least_srtt_ns", "most_srtt_ns", "mean_rtt_ns", "least_rtt_ns"),
    *("throughput_bps", "most_throughput_bps", "window", "inflight", "queue_length", "num_drops"),
    *("bandwidth_bps", "base_rtt_ns", "buffer_packets", "random_loss", "cross_traffic_bps"),
    "is_cut",
)
"""What a step tells besides, in the order of ``Info`` in ``engine/congestion_control.h``."""
HAPPENINGS = ("sent", "dropped", "acknowledged", "lost", "timeout")
"""What a trace tells of packets: that ``number`` was sent, dropped or acknowledged, that so many
were found lost, or that ``number`` was given up."""
_WITH_SUM = b"net2"
PACKET_BYTES, PAYLOAD_BYTES, ACK_BYTES = 1495, 1448, 47


class Rows(NamedTuple):
    """What the engine shows of B environments after a reset or a step.

    ``[B, ...]`` is ``[B, A, ...]`` in networks of A agents, but for ``episode_end``. Those whose
    step has not ended have no reward and an observation without meaning.
    """

    obs: np.ndarray
    """``[B, F]`` float32."""
    reward: np.ndarray
    """``[B]`` float32."""
    terminated: np.ndarray
    """``[B]`` bool."""
    truncated: np.ndarray
    """``[B]`` bool."""
    is_first: np.ndarray
    """``[B]`` bool: the row begins an episode, and its action was ignored."""
    acting: np.ndarray
    """``[B]`` bool: the agent acts next, because a step of it has ended or its first one begins."""
    episode_end: np.ndarray
    """``[B]`` bool: all agents have left."""
    info: np.ndarray | None
    """``[B, len(INFO)]`` float64, where it was asked for; 0 for those whose step has not ended, and
    of CartPole."""


class Layout:
    """Where the rows of B environments are in what the engine writes."""

    def __init__(self, options: PoolOptions, num_envs: int) -> None:
        """Take the number of agents and of features from the options."""
        self.num_envs = num_envs
        is_shared = options.num_agents > 1 or isinstance(options, SharedBottleneckOptions)
        self.shape = (num_envs, options.num_agents) if is_shared else (num_envs,)
        self.num_slots = num_envs * options.num_agents
        self.num_features = options.num_features
        self.num_action_numbers = self.num_slots * options.num_actions
        # Observations and rewards, four flags of each slot and one of each environment.
        self.num_bytes = self.num_slots * (4 * (self.num_features + 1) + 4) + num_envs

    def rows(self, buffer: np.ndarray, info: np.ndarray | None) -> Rows:
        """Return the rows in ``buffer``, ``[num_bytes]`` uint8, as views."""
        count, features = self.num_slots, self.num_features
        numbers = buffer[: 4 * count * (features + 1)].view(np.float32)
        flags = buffer[4 * count * (features + 1) :].view(np.bool_)
        terminated, truncated, is_first, acting = flags[: 4 * count].reshape(4, *self.shape)
        return Rows(
            numbers[: count * features].reshape(*self.shape, features),
            numbers[count * features :].reshape(self.shape),
            terminated,
            truncated,
            is_first,
            acting,
            flags[4 * count :],
            None if info is None else info.reshape(*self.shape, len(INFO)),
        )


class NativePool:
    """A vector of simulated networks. One thread at a time may use it."""

    def __init__(self, options: NetworkOptions, seeds: Sequence[int], num_threads: int = 1) -> None:
        """Make an environment for each seed.

        Args:
          options: The network.
          seeds: ``[B]`` integers.
          num_threads: Threads that share the rows; each has at least 8.

        Raises:
          UsageError: Several environments in real time, which would wait for each other.
        """
        self._lib = _load()
        self._handle = None
        self._jax_call: JaxCall | None = None
        self.num_envs = len(seeds)
        if isinstance(options, LoopbackOptions):
            one = "is not 1: environments in real time cannot take turns"
            require(self.num_envs == 1, "num_envs", self.num_envs, one, "use 1")
        self.layout = Layout(options, self.num_envs)
        numbers = np.array(seeds, np.int64)
        self._handle = self._lib.net_create(
            options.as_json().encode(), self.num_envs, numbers.ctypes.data, num_threads
        )
        if not self._handle:
            raise EnvError(f"the network engine: {self._lib.net_error().decode(errors='replace')}")

    def reset(self, *, with_info: bool = False) -> Rows:
        """Begin the next episode of every environment."""
        buffer, info = self._arrays(with_info)
        self._checked(self._lib.net_reset(self._handle, buffer.ctypes.data, _address(info)))
        return self.layout.rows(buffer, info)

    def step(self, actions: np.ndarray, *, with_info: bool = False) -> Rows:
        """Act; an environment whose episode has ended begins the next one instead.

        Args:
          actions: ``[B]`` or ``[B, A]`` float32, contiguous; those of agents that do not act are
            ignored.
          with_info: Return ``info``, too.
        """
        assert actions.dtype == np.float32 and actions.size == self.layout.num_slots
        buffer, info = self._arrays(with_info)
        self._checked(
            self._lib.net_step(
                self._handle, actions.ctypes.data, buffer.ctypes.data, _address(info)
            )
        )
        return self.layout.rows(buffer, info)

    def state(self) -> bytes:
        """Return everything that the environments go on from."""
        state = ctypes.create_string_buffer(self._checked(self._lib.net_state(self._handle, None)))
        self._checked(self._lib.net_state(self._handle, state))
        return _WITH_SUM + zlib.crc32(state.raw).to_bytes(4, "little") + state.raw

    def put_back(self, state: bytes) -> None:
        """Go on from ``state`` of a pool with the same options and number of environments.

        Raises:
          EnvError: It is that of another, or damaged.
        """
        if state.startswith(_WITH_SUM):  # states of version 1.0 have no checksum
            begin = len(_WITH_SUM) + 4
            checksum, state = state[len(_WITH_SUM) : begin], state[begin:]
            if zlib.crc32(state).to_bytes(4, "little") != checksum:
                raise EnvError("the saved state of the network engine is damaged; use another")
        self._checked(self._lib.net_put_back(self._handle, state, len(state)))

    def trace(self, row: int = 0) -> np.ndarray:
        """Return ``[N, 4]`` int64: time in ns, index into ``HAPPENINGS``, flow and number.

        These are the events of the current episode, where ``options.trace`` is set.
        """
        count = self._checked(self._lib.net_trace(self._handle, row, None, 0))
        events = np.empty((count, 4), np.int64)
        self._checked(self._lib.net_trace(self._handle, row, events.ctypes.data, count))
        return events

    def jax_call(self) -> JaxCall:
        """Return what compiled JAX programs step these environments by, until they are closed.

        Raises:
          UsageError: It cannot be compiled.
        """
        from sebulba_networks.jax_call import JaxCall  # JAX is needed for nothing else here

        self._check_open()
        if self._jax_call is None:
            self._jax_call = JaxCall(self._lib, self._handle, self.layout)
        return self._jax_call

    def close(self) -> None:
        """Free the environments and their threads; may be called twice."""
        handle, self._handle = self._handle, None
        if self._jax_call is not None:
            self._jax_call.close()
        if handle:
            self._lib.net_close(handle)

    def __del__(self) -> None:
        """Free what was not closed."""
        if getattr(self, "_handle", None):
            self.close()

    def _check_open(self) -> None:
        if not self._handle:
            raise EnvError("this network is closed; make a new one")

    def _arrays(self, with_info: bool) -> tuple[np.ndarray, np.ndarray | None]:
        self._check_open()
        buffer = np.empty(self.layout.num_bytes, np.uint8)
        return buffer, np.empty((*self.layout.shape, len(INFO))) if with_info else None

    def _checked(self, result: int) -> int:
        if result < 0:
            raise EnvError(f"the network engine: {self._lib.net_error().decode(errors='replace')}")
        return result


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


@functools.cache
def _load() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(library()))
    pointer, number, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, result, arguments in (
        ("net_error", ctypes.c_char_p, []),
        ("net_info_size", number, []),
        ("net_create", pointer, [ctypes.c_char_p, count, pointer, count]),
        ("net_reset", number, [pointer, pointer, pointer]),
        ("net_step", number, [pointer, pointer, pointer, pointer]),
        ("net_state", number, [pointer, pointer]),
        ("net_put_back", number, [pointer, ctypes.c_char_p, number]),
        ("net_trace", number, [pointer, count, pointer, number]),
        ("net_close", None, [pointer]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    assert lib.net_info_size() == len(INFO)
    return lib

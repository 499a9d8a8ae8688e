"""Congestion control as a Gymnasium environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from sebulba.envs.seeds import check_seed
from sebulba.errors import ActionError, UsageError, shown
from sebulba.types import EnvSpec
from sebulba_networks import CONGESTION_CONTROL
from sebulba_networks.adapter import network_spec
from sebulba_networks.native import INFO, Rows
from sebulba_networks.options import read_options
from sebulba_networks.pools import Pool, make_pool


class CongestionControlEnv(gymnasium.Env):
    """The sender of a flow chooses by how much its window changes, once in two round trips.

    The action ``a`` in -2 to 2 multiplies the window by ``2 ** a``. ``info`` has the goodput in
    Mbit/s, the smoothed RTT and the mean queueing delay in ms, the share of packets lost, and the
    window ``cwnd`` in packets. ``is_cut`` says that the episode was truncated because its step was
    too much work for ns-3's TCP. ``network`` has everything that the engine tells.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        """Make it with the fields of ``CongestionControlOptions``.

        Raises:
          UsageError: An option is unknown or its value breaks a rule, or there is a render mode.
        """
        if render_mode is not None:
            raise UsageError(f"render_mode={render_mode!r} is none of this environment; drop it")
        self._options = read_options(options, CONGESTION_CONTROL)
        spec = network_spec(self._options)
        assert isinstance(spec, EnvSpec)
        self.observation_space, self.action_space = spec.observation_space, spec.action_space
        self._pool: Pool | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin the next episode; ``seed`` decides it and all that follow."""
        super().reset(seed=seed)
        if seed is not None or self._pool is None:
            drawn = self.np_random.integers(2**31) if seed is None else check_seed(seed)
            self.close()
            self._pool = make_pool(self._options, [int(drawn)])
        rows = self._pool.reset(with_info=True)
        return rows.obs[0], info_of(rows)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Multiply the window, and let two minimal round trips pass.

        Raises:
          ActionError: The action is not in the action space.
        """
        assert self._pool is not None, "call reset first"
        given = np.asarray(action, np.float32).reshape(-1)
        if given not in self.action_space:
            raise ActionError(f"action={shown(action)} must be one number from -2 to 2")
        rows = self._pool.step(given, with_info=True)
        ends = bool(rows.terminated[0]), bool(rows.truncated[0])
        return rows.obs[0], float(rows.reward[0]), *ends, info_of(rows)

    def get_state(self) -> bytes | None:
        """Return what ``set_state`` goes on from."""
        return None if self._pool is None else self._pool.state()

    def set_state(self, state: bytes | None) -> None:
        """Go on from ``state``."""
        if state is not None:
            self._pool = self._pool or make_pool(self._options, [0])
            self._pool.put_back(state)

    def close(self) -> None:
        """Free the engine."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def info_of(rows: Rows, index: int = 0) -> dict[str, Any]:
    """Return the ``info`` of an agent of the first environment, by the index of the agent."""
    assert rows.info is not None
    numbers = rows.info.reshape(-1, len(INFO))[index].tolist()
    network = dict(zip(INFO, numbers, strict=True))
    queueing = network["mean_rtt_ns"] - network["base_rtt_ns"]
    return {
        "goodput_mbps": network["throughput_bps"] / 1e6,
        "srtt_ms": network["srtt_ns"] / 1e6,
        "queueing_delay_ms": queueing / 1e6 if network["acked"] else None,
        "loss": min(1.0, network["lost"] / max(network["sent"], 1)),
        "cwnd": network["window"],
        "is_cut": bool(network["is_cut"]),
        "network": network,
    }

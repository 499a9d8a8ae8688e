"""Networks behind the EnvAdapter protocol."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import numpy as np

from sebulba.envs.networks import CONGESTION_CONTROL
from sebulba.envs.networks.native import NativePool, Rows
from sebulba.envs.networks.options import CongestionControlOptions
from sebulba.envs.sealed import seal, unseal
from sebulba.envs.seeds import check_seeds
from sebulba.envs.spaces import make_action_check
from sebulba.errors import EnvError
from sebulba.types import EnvOutput, EnvSpec, FusedEnv

LARGEST_EXPONENT = 2.0
"""An action multiplies the window by 2 to the power of at most this, and at least minus this."""


class NetworkAdapter:
    """Congestion control on the native engine, with next-step autoreset."""

    def __init__(
        self, options: CongestionControlOptions, seeds: Sequence[int], *, num_threads: int = 1
    ) -> None:
        """Make a network for each seed.

        Raises:
          UsageError: A seed is none, or the engine cannot be compiled.
        """
        self.num_envs = len(seeds)
        self.spec = network_spec(options)
        self._json = options.as_json()
        self._pool = NativePool(options, check_seeds(seeds, len(seeds)), num_threads)
        self._check_action = make_action_check(self.spec.action_space, self.num_envs)

    def reset(self) -> EnvOutput:
        """Begin new episodes in all environments."""
        return EnvOutput.first(self._pool.reset().obs, self.num_envs)

    def step(self, action: np.ndarray) -> EnvOutput:
        """Act; raise ActionError before an invalid action reaches native code."""
        self._check_action(action)
        return _output(self._pool.step(np.ascontiguousarray(action)))

    def fused(self) -> FusedEnv | str:
        """Return the reason why there is no fused cycle."""
        return "the network engine is not JAX functions"

    def state(self) -> bytes:
        """Return the state of the engine."""
        return seal(self._pool.state(), of=self._who(), num_envs=self.num_envs)

    def put_back(self, state: bytes) -> None:
        """Go on from ``state``, which includes the seeds.

        Raises:
          EnvError: It is the state of another network, or damaged.
        """
        content = unseal(state, of=self._who(), num_envs=self.num_envs)
        if not isinstance(content, bytes):
            raise EnvError(f"the saved state of {self._who()} is damaged; use another")
        self._pool.put_back(content)

    def close(self) -> None:
        """Free the engine and its threads; may be called twice."""
        self._pool.close()

    def _who(self) -> str:
        return f"environment {self.spec.name!r} with {self._json}"


def network_spec(options: CongestionControlOptions) -> EnvSpec:
    """Return the spec of one environment."""
    most = options.max_window_packets
    low, high = [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, float(most)]
    if options.features == "relative":
        low, high = (
            [0.0, 0.0, 0.0, 0.0, 0.0, -np.inf],
            [1.0, 1.0, 1.0, np.log2(most), *[np.inf] * 2],
        )
    return EnvSpec(
        gymnasium.spaces.Box(np.array(low, np.float32), np.array(high, np.float32)),
        gymnasium.spaces.Box(-LARGEST_EXPONENT, LARGEST_EXPONENT, (1,), np.float32),
        name=CONGESTION_CONTROL,
    )


def _output(rows: Rows) -> EnvOutput:
    ends = rows.terminated | rows.truncated
    return EnvOutput(
        obs=rows.obs,
        reward=rows.reward,
        terminated=rows.terminated,
        truncated=rows.truncated,
        is_first=rows.is_first,
        true_reward=rows.reward,
        episode_end=ends,
    )

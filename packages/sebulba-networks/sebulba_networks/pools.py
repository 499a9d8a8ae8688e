"""Makes a vector of simulated networks, on the engine that the options name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sebulba.envs.saving.sealed import seal, unseal
from sebulba.errors import EnvError
from sebulba.types import EnvSpec, MultiAgentSpec
from sebulba_networks.engines import NATIVE, find_engine
from sebulba_networks.native import NativePool
from sebulba_networks.options import CongestionControlOptions, NetworkOptions, PoolOptions
from sebulba_networks.process_pool import STEP_TIMEOUT_S, ProcessPool

Pool = NativePool | ProcessPool


def make_pool(
    options: NetworkOptions,
    seeds: Sequence[int],
    *,
    num_threads: int = 1,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> Pool:
    """Make an environment for each seed.

    Args:
      options: The network.
      seeds: ``[B]`` integers.
      num_threads: Threads of the native engine that share the rows; each has at least 8.
      step_timeout_s: Longest time that a process of another engine may take for a step.

    Raises:
      UsageError: The engine cannot be compiled, or lacks something that it needs.
      EnvError: A simulator cannot be made.
    """
    if not isinstance(options, CongestionControlOptions) or options.engine == NATIVE:
        return NativePool(options, seeds, num_threads)
    low, high = (np.array(bounds, np.float32) for bounds in options.obs_bounds)
    if options.transport == "tcp":  # whose own controls move the window without our bounds
        low[3], high[3] = -np.inf, np.inf
    library = find_engine(options.engine)()
    return ProcessPool(library, options, seeds, step_timeout_s, (low, high))


class PoolAdapter:
    """The adapter of a pool, but for its steps: how it is saved and closed."""

    def __init__(self, pool: Pool, spec: EnvSpec | MultiAgentSpec, options: PoolOptions) -> None:
        """Take over the pool; ``options`` are those that it was made with."""
        self.num_envs, self.spec = pool.num_envs, spec
        self._pool = pool
        self._who = f"environment {spec.name!r} with {options.as_json()}"

    def state(self) -> bytes:
        """Return the state of the simulators."""
        return seal(self._pool.state(), of=self._who, num_envs=self.num_envs)

    def put_back(self, state: bytes) -> None:
        """Go on from ``state``, which includes the seeds.

        Raises:
          EnvError: It is the state of something else, or damaged.
        """
        content = unseal(state, of=self._who, num_envs=self.num_envs)
        if not isinstance(content, bytes):
            raise EnvError(f"the saved state of {self._who} is damaged; use another")
        self._pool.put_back(content)

    def close(self) -> None:
        """Free simulators, threads and processes; may be called twice."""
        self._pool.close()

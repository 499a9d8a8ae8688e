"""Makes a vector of simulated networks, on the engine that the options name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sebulba_networks.engines import NATIVE, find_engine
from sebulba_networks.native import NativePool
from sebulba_networks.options import CongestionControlOptions, NetworkOptions
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

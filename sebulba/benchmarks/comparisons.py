"""What ``bench train`` can set a run against: the other way of a cycle, a bare prototype."""

from __future__ import annotations

import math
from typing import Literal

from sebulba.agent import Agent
from sebulba.benchmarks.prototype import QUEUE_SIZE, Prototype
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import seed_block
from sebulba.envs.envpool_adapter import default_num_threads, envpool_id
from sebulba.errors import UsageError
from sebulba.types import RunSpec

Comparison = Literal["stepped", "fused", "prototype"]
COMPARISONS: tuple[Comparison, ...] = ("stepped", "fused", "prototype")


def check_comparisons(compare: tuple[str, ...]) -> None:
    """Raise UsageError for a word that is not in ``COMPARISONS``."""
    for name in compare:
        if name not in COMPARISONS:
            raise UsageError(f"compare={name!r} is unknown; use {', '.join(COMPARISONS)}")


class PrototypeCase:
    """The prototype of a run, timed as the run is: between two of its trajectories."""

    def __init__(self, config: ExperimentConfig, agent: Agent) -> None:
        """Make it with the run's number of threads, environments and envpool threads.

        Raises:
          UsageError: The environment is not one of envpool's.
        """
        env_id = envpool_id(config.env.id) if config.env.backend != "gymnasium" else None
        if env_id is None:
            raise UsageError(
                f"env={config.env.id!r} is not made by envpool, which the prototype needs; leave "
                "prototype out"
            )
        num_threads = max(1, config.num_inferencers_per_device)
        run = RunSpec(config.num_envs, num_threads, config.steps_per_cycle, 1)
        options = config.env.factory_arguments()
        for of_ours in ("backend", "vectorization"):
            options.pop(of_ours, None)
        options.setdefault("num_threads", min(config.num_envs, default_num_threads(env_id)))
        seeds = [
            seed_block(
                config.seed, inferencer=i, num_inferencers=num_threads, num_envs=run.num_envs
            )
            for i in range(num_threads)
        ]
        self._prototype = Prototype(env_id, agent, run, seeds, **options)
        # As in TrainingCase: until the queue is as full as it stays, and as long at the end.
        self._in_flight = QUEUE_SIZE + 2 * num_threads
        self._num_trajectories = self._in_flight

    def warm_up(self, seconds: float) -> None:
        """Compile, and find the number of trajectories that take about ``seconds``."""
        self.measure()  # compiles
        while True:
            wanted = math.ceil(seconds * self.measure() / self._prototype.env_steps_per_cycle)
            if wanted <= 4 * self._num_trajectories:
                break
            self._num_trajectories *= 4
        self._num_trajectories = wanted

    def measure(self) -> float:
        """Return environment steps per second."""
        seen = self._prototype.train(self._num_trajectories + 2 * self._in_flight)
        counted = [began_s for began_s, _ in seen][self._in_flight - 1 : -self._in_flight]
        env_steps = (len(counted) - 1) * self._prototype.env_steps_per_cycle
        return env_steps / (counted[-1] - counted[0])

    def close(self) -> None:
        """Free the environments."""
        self._prototype.close()

"""The prototype as ``python -m benchmarks train --compare prototype`` measures it."""

from __future__ import annotations

import time

from benchmarks.studies.jax_prototype import JaxPrototype
from benchmarks.studies.prototype import QUEUE_SIZE, Prototype
from sebulba.agent import Agent
from sebulba.agents.configs import PPOConfig
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import seed_block
from sebulba.envs.envpool_adapter import default_num_threads, envpool_id
from sebulba.envs.jax_libraries import library_of
from sebulba.errors import UsageError
from sebulba.loops.devices import FEW_INFERENCERS
from sebulba.tools.bench import harness
from sebulba.types import RunSpec


def make_prototype_case(config: ExperimentConfig, agent: Agent) -> JaxPrototypeCase | PrototypeCase:
    """Return the prototype that does what the run does.

    Raises:
      UsageError: There is none: it takes envpool's environments, and PPO on gymnax's.
    """
    if library_of(config.env.id) == "gymnax" and isinstance(config.agent, PPOConfig):
        return JaxPrototypeCase(config)
    return PrototypeCase(config, agent)


class JaxPrototypeCase:
    """PPO on a gymnax environment, all in one scan, timed over whole scans."""

    def __init__(self, config: ExperimentConfig) -> None:
        """Make it with the sizes and the hyper-parameters of the run."""
        sizes = config.num_envs, config.steps_per_cycle, config.annealed_cycles
        env_id = config.env.id.partition(":")[2]
        self._prototype = JaxPrototype(env_id, config.agent, *sizes)  # type: ignore[arg-type]
        self._num_cycles = 1

    def warm_up(self, seconds: float) -> None:
        """Compile, and find the number of trajectories that take about ``seconds``."""
        self._cycles_per_s(1)
        self._num_cycles = max(1, round(seconds * self._cycles_per_s(1)))
        self._cycles_per_s(self._num_cycles)

    def measure(self) -> float:
        """Return environment steps per second."""
        return self._cycles_per_s(self._num_cycles) * self._prototype.env_steps_per_cycle

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def _cycles_per_s(self, num_cycles: int) -> float:
        began_s = time.perf_counter()
        self._prototype.train(num_cycles)
        return num_cycles / (time.perf_counter() - began_s)


class PrototypeCase:
    """The prototype of a run, timed as the run is: between two of its trajectories."""

    def __init__(self, config: ExperimentConfig, agent: Agent) -> None:
        """Make it with as many threads, environments and envpool threads as the run has.

        Raises:
          UsageError: The environment is not one of envpool's.
        """
        env_id = envpool_id(config.env.id) if config.env.backend != "gymnasium" else None
        if env_id is None:
            raise UsageError(
                f"env={config.env.id!r} is not made by envpool, which the prototype needs (or "
                "gymnax, for PPO); leave prototype out"
            )
        num_threads = config.num_inferencers_per_device
        num_threads = FEW_INFERENCERS if num_threads is None else max(1, num_threads)
        run = RunSpec(config.num_envs, num_threads, config.steps_per_cycle, 1)
        options = config.env.factory_arguments()
        for not_envpools in ("backend", "vectorization"):
            options.pop(not_envpools, None)
        options.setdefault("num_threads", min(config.num_envs, default_num_threads(env_id)))
        seeds = [
            seed_block(
                config.seed, inferencer=i, num_inferencers=num_threads, num_envs=run.num_envs
            )
            for i in range(num_threads)
        ]
        self._prototype = Prototype(env_id, agent, run, seeds, **options)
        self.close = self._prototype.close
        # As in TrainingCase: neither the trajectories that fill the queue nor the last count.
        self._in_flight = QUEUE_SIZE + 2 * num_threads
        self._num_trajectories = self._in_flight

    def warm_up(self, seconds: float) -> None:
        """Compile, and find the number of trajectories that take about ``seconds``."""
        self._trajectories_per_s(self._in_flight)
        self._num_trajectories = harness.count_for(
            seconds, self._trajectories_per_s, self._in_flight
        )

    def measure(self) -> float:
        """Return environment steps per second."""
        speed = self._trajectories_per_s(self._num_trajectories)
        return speed * self._prototype.env_steps_per_cycle

    def _trajectories_per_s(self, num_trajectories: int) -> float:
        seen = self._prototype.train(num_trajectories + 2 * self._in_flight)
        counted = [began_s for began_s, _ in seen][self._in_flight - 1 : -self._in_flight]
        return (len(counted) - 1) / (counted[-1] - counted[0])

"""What Inferencers lose to sharing one Python interpreter.

The same stepped cycles run in as many threads of one process as there are Inferencers, and in as
many processes of one thread each. Cores, programs, environments and sizes are the same, no update
runs, and an interpreter of its own is all that a process has more than a thread; what the threads
are slower by is therefore what they lose to the interpreter's lock (and to whatever else a process
has only one of). In training the update loop takes the lock as well, so that more is lost there.
"""

from __future__ import annotations

import dataclasses

from sebulba.benchmarks.stages import Stages
from sebulba.benchmarks.worker import START_TIMEOUT_S, Worker
from sebulba.commands.experiment import build_agent, configure_jax
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import env_spec, make_env_factory


class CycleProcesses:
    """One process for every Inferencer, each with the cycles of one."""

    def __init__(self, config: ExperimentConfig, num_processes: int, seconds: float) -> None:
        """Start them, and wait until they have compiled.

        Args:
          config: Of the run; each process has one Inferencer of it.
          num_processes: How many.
          seconds: How long one measurement takes.

        Raises:
          WorkerError: One cannot run.
        """
        one = dataclasses.replace(config, num_inferencers_per_device=1, inference_devices=(0,))
        self._timeout_s = START_TIMEOUT_S + seconds
        self._workers = [Worker(_CycleMeter, one, seconds) for _ in range(num_processes)]
        try:
            for worker in self._workers:
                worker.answer(self._timeout_s)
        except BaseException:
            self.close()
            raise

    def measure(self) -> float:
        """Return the environment steps per second of all processes together."""
        for worker in self._workers:
            worker.ask()
        return sum(worker.answer(self._timeout_s) for worker in self._workers)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()


class _CycleMeter:
    """The cycles of one Inferencer, without an update."""

    def __init__(self, config: ExperimentConfig, seconds: float) -> None:
        configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
        factory = make_env_factory(config.env.id, **config.env.factory_arguments())
        agent = build_agent(config, env_spec(factory))
        self._stages = Stages(config, factory, agent, seconds)
        self._stages.use_new_state()

    def warm_up(self) -> float:
        return self.measure()

    def measure(self) -> float:
        """Return environment steps per second."""
        return 1e6 / self._stages.measure_cycle().wall_us


def gil_share(threads_per_s: float, processes_per_s: float) -> float:
    """Return the share of Inferencers' time that is lost, 0 where threads are no slower.

    Args:
      threads_per_s: Environment steps per second of all threads of one process.
      processes_per_s: Of as many processes of one thread each.
    """
    return max(0.0, 1.0 - threads_per_s / processes_per_s)

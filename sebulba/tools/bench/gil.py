"""What Inferencers lose to sharing one Python interpreter.

The same stepped cycles run in as many threads of one process as there are Inferencers, and in as
many processes with one thread each. Cores, programs, environments and sizes are the same, and no
update runs. All that a process has more than a thread is an interpreter of its own, so the time
that the threads lose is lost to the interpreter's lock (and to whatever else exists only once in a
process). A training run loses more, because its update loop takes the lock as well.
"""

from __future__ import annotations

import dataclasses

from sebulba.configs.experiment import ExperimentConfig
from sebulba.runs.jax_setup import set_up_jax
from sebulba.tools.bench import harness
from sebulba.tools.bench.stages import Stages
from sebulba.tools.bench.worker import START_TIMEOUT_S, Worker


class CycleProcesses:
    """Processes that each run the cycles of one Inferencer."""

    def __init__(self, config: ExperimentConfig, num_processes: int, seconds: float) -> None:
        """Start the processes, and wait until they have compiled.

        Args:
          config: The run's configuration; each process has one Inferencer of it.
          num_processes: Number of processes.
          seconds: Duration of one measurement.

        Raises:
          WorkerError: A process cannot run.
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
    """Measures the cycles of one Inferencer, without updates."""

    def __init__(self, config: ExperimentConfig, seconds: float) -> None:
        config = set_up_jax(config)
        self._stages = Stages(config, *harness.env_and_agent(config), seconds)
        self._stages.use_new_state()

    def measure(self) -> float:
        """Return environment steps per second."""
        return 1e6 / self._stages.measure_cycle().wall_us

    warm_up = measure


def gil_share(threads_per_s: float, processes_per_s: float) -> float:
    """Return the share of their time that Inferencers lose, 0 if threads are no slower.

    Args:
      threads_per_s: Environment steps per second of all threads of one process together.
      processes_per_s: The same of as many processes with one thread each.
    """
    return max(0.0, 1.0 - threads_per_s / processes_per_s)

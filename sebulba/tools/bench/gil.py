"""What Inferencers lose to sharing one Python interpreter.

The same stepped cycles run in as many threads of one process as there are Inferencers, and in as
many processes with one thread each. Cores, programs, environments and sizes are the same, and no
update runs. All that a process has more than a thread is an interpreter of its own, so the time
that the threads lose is lost to the interpreter's lock (and to whatever else exists only once in a
process). A training run loses more, because its update loop takes the lock as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from sebulba.configs.experiment import ExperimentConfig
from sebulba.runs.jax_setup import set_up_jax
from sebulba.tools.bench import harness
from sebulba.tools.bench.stages import Stages
from sebulba.tools.bench.worker import START_TIMEOUT_S, Worker


@contextlib.contextmanager
def cycle_processes(
    config: ExperimentConfig, num_processes: int, seconds: float
) -> Iterator[Callable[[], float]]:
    """Yield what measures processes that each run the cycles of one Inferencer, in env steps/s of
    all together.

    Raises:
      WorkerError: A process cannot run.
    """
    one = dataclasses.replace(config, num_inferencers_per_device=1, inference_devices=(0,))
    timeout_s = START_TIMEOUT_S + seconds
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(_CycleMeter, one, seconds, timeout_s=timeout_s))
            for _ in range(num_processes)
        ]
        for worker in workers:
            worker.ready()

        def measure() -> float:
            for worker in workers:
                worker.ask()
            return sum(worker.answer() for worker in workers)

        yield measure


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
    """Return the share of their time that Inferencers lose, 0 if threads are no slower."""
    return max(0.0, 1.0 - threads_per_s / processes_per_s)

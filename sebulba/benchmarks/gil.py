"""What Inferencers lose to sharing one Python interpreter.

The same stepped cycles run in as many threads of one process as there are Inferencers, and in as
many processes of one thread each. Cores, programs, environments and sizes are the same, no update
runs, and an interpreter of its own is all that a process has more than a thread; what the threads
are slower by is therefore what they lose to the interpreter's lock (and to whatever else a process
has only one of). In training the update loop takes the lock as well, so that more is lost there.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from multiprocessing.connection import Connection

from sebulba.configs.experiment import ExperimentConfig

START_S = 120.0
"""How long a process may take to answer: it imports, builds and compiles first."""


class CycleProcesses:
    """One process for every Inferencer, each with the cycles of one."""

    def __init__(self, config: ExperimentConfig, num_processes: int, seconds: float) -> None:
        """Start them, and wait until they have compiled.

        Args:
          config: Of the run; each process has one Inferencer of it.
          num_processes: How many.
          seconds: How long one measurement takes.
        """
        context = multiprocessing.get_context("spawn")
        one = dataclasses.replace(config, num_inferencers_per_device=1, inference_devices=(0,))
        self._processes = []
        self._connections: list[Connection] = []
        for _ in range(num_processes):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(one, seconds, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        for connection in self._connections:
            self._receive(connection, START_S)

    def measure(self) -> float:
        """Return the environment steps per second of all processes together."""
        for connection in self._connections:
            connection.send("measure")
        return sum(self._receive(each, START_S) for each in self._connections)

    @staticmethod
    def _receive(connection: Connection, timeout_s: float) -> float:
        if not connection.poll(timeout_s):
            raise RuntimeError(f"a process that measures cycles did not answer in {timeout_s} s")
        return connection.recv()

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.terminate()


def _serve(config: ExperimentConfig, seconds: float, connection: Connection) -> None:
    """Measure one Inferencer's cycles whenever asked: the target of a process."""
    from sebulba.benchmarks.stages import Stages
    from sebulba.envs import env_spec, make_env_factory
    from sebulba.experiment import build_agent, configure_jax

    configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
    factory = make_env_factory(config.env.id, **config.env.factory_arguments())
    stages = Stages(config, factory, build_agent(config, env_spec(factory)), seconds)
    try:
        stages.use_new_state()
        stages.measure_cycle()
        connection.send(0.0)
        while connection.recv() == "measure":
            connection.send(1e6 / stages.measure_cycle().wall_us)
    except EOFError:
        pass  # the other end is closed
    finally:
        stages.close()


def gil_share(threads_per_s: float, processes_per_s: float) -> float:
    """Return the share of Inferencers' time that is lost, 0 where threads are no slower.

    Args:
      threads_per_s: Environment steps per second of all threads of one process.
      processes_per_s: Of as many processes of one thread each.
    """
    return max(0.0, 1.0 - threads_per_s / processes_per_s)

"""One configuration, trained in a process of its own, a short while at a time.

A process each gives clean memory figures and any number of devices.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping
from typing import Any, TypeVar

import jax

from sebulba.benchmarks.memory_use import peak_device_mb, peak_rss_mb
from sebulba.benchmarks.worker import START_TIMEOUT_S, Worker, WorkerError
from sebulba.commands import experiment
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
from sebulba.loops.gymnasium_loop import GymnasiumLoop

MEASURE_TIMEOUT_S = 120.0
"""On top of the seconds asked for: the cycles in flight, and a cycle that is long."""
WINDOWS = 4
"""Of metrics, at least, in a measurement."""
ENDLESS_CYCLES = 1_000_000

K = TypeVar("K")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Some seconds of training, compile and start-up excluded."""

    env_steps_per_s: float
    rss_mb: float
    """Peak resident memory of the process since it began, 10^6 bytes."""
    device_mb: float
    """Device memory, 10^6 bytes: the peak of the fullest device where the backend counts it, else
    (on CPU, where it is a part of the resident memory) of all arrays alive at the end."""
    policy_lag_mean: float


class Trial:
    """A configuration in its own process; a context manager that ends it."""

    def __init__(
        self, config: ExperimentConfig, seconds: float, *, memory_limit_mb: float | None = None
    ) -> None:
        """Start the process; it compiles and warms up while others do.

        Args:
          config: What ``sebulba train`` would train.
          seconds: Length of a measurement, stretched to two cycles of each Inferencer.
          memory_limit_mb: End the process when it takes more, on the host or on a device.
        """
        self.parameters = 0
        """Of its networks, once it is ready."""
        self._seconds = seconds
        self._limit_mb = memory_limit_mb
        self._worker = Worker(_Meter, config, seconds)

    def ready(self) -> None:
        """Wait until it can be measured.

        Raises:
          WorkerError: It cannot run, takes too much memory or too long.
        """
        self.parameters = self._answer(START_TIMEOUT_S)

    def measure(self) -> Measurement:
        """Train on for a while.

        Raises:
          WorkerError: It failed, takes too much memory or too long.
        """
        self._worker.ask()
        measurement: Measurement = self._answer(self._seconds + MEASURE_TIMEOUT_S)
        self._check_memory(measurement.device_mb)
        return measurement

    def _answer(self, timeout_s: float) -> Any:
        return self._worker.answer(
            timeout_s, lambda: self._check_memory(peak_rss_mb(self._worker.pid))
        )

    def _check_memory(self, used_mb: float) -> None:
        if self._limit_mb is not None and used_mb > self._limit_mb:
            self.close()
            raise WorkerError(f"{used_mb:,.0f} MB are above the limit of {self._limit_mb:,.0f} MB")

    def close(self) -> None:
        """End the process, whatever it does; may be called twice."""
        self._worker.close()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def ready_trials(trials: Mapping[K, Trial], failed: dict[K, str]) -> dict[K, Trial]:
    """Wait for trials that start side by side; why some cannot goes into ``failed``."""
    ready = {}
    for name, trial in trials.items():
        try:
            trial.ready()
            ready[name] = trial
        except WorkerError as error:
            failed[name] = str(error)
    return ready


def measure_in_turn(
    trials: Mapping[K, Trial], repeats: int, failed: dict[K, str]
) -> dict[K, list[Measurement]]:
    """Measure trials that are ready, A B C A B C ..., after a round that does not count.

    Args:
      trials: By name.
      repeats: Rounds that count.
      failed: Takes up why a trial failed; it has no part in the result.

    Returns:
      By name, one measurement a round.
    """
    measurements: dict[K, list[Measurement]] = {name: [] for name in trials}
    for number in range(repeats + 1):
        for name in list(measurements):
            try:
                measurement = trials[name].measure()
            except WorkerError as error:
                failed[name] = str(error)
                del measurements[name]
                continue
            if number:
                measurements[name].append(measurement)
    return measurements


class _Meter:
    """The experiment as ``sebulba train`` builds it, and the writer of metrics that times it.

    Speed is taken from the end of the first window of a run to the end of the last whole one, so
    that starting and joining threads does not count.
    """

    def __init__(self, config: ExperimentConfig, seconds: float) -> None:
        experiment.configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
        self._seconds = seconds
        interval_s = min(config.metrics_interval_s, seconds / WINDOWS)
        config = dataclasses.replace(config, metrics_interval_s=interval_s)
        factory = make_env_factory(config.env.id, **config.env.factory_arguments())
        agent = experiment.build_agent(config, env_spec(factory))
        self._loop: GymnasiumLoop = experiment.build_loop(config, factory, agent, self)
        self._steps_per_cycle = config.steps_per_cycle
        self._state = self._loop.new_state(config.seed, config.steps_per_cycle)

    def warm_up(self) -> int:
        """Compile, and return the number of parameters of the networks."""
        # The update compiles in the first cycle, shorter chunks of a fused cycle in the second.
        self._run(3 * self._loop.num_inferencers)
        return sum(int(leaf.size) for leaf in jax.tree.leaves(self._state.networks))

    def measure(self) -> Measurement:
        """Train on until ``write`` stops the loop."""
        self._run(ENDLESS_CYCLES * self._loop.num_inferencers)
        first, last = self._records[0], self._records[-1]
        lags = [record["policy_lag_mean"] for record in self._records[1:]]
        return Measurement(
            (last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"]),
            peak_rss_mb(os.getpid()),
            self._device_mb,
            statistics.fmean(lag for lag in lags if lag is not None),
        )

    def _run(self, num_cycles: int) -> None:
        self._records: list[Mapping[str, Any]] = []
        self._ended = False
        self._state = self._loop.run(self._state, num_cycles, self._steps_per_cycle).state

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Take a window's record; stop the loop when there is enough."""
        if self._ended:
            return  # the window that the stop cut short
        self._records.append(metrics)
        first = self._records[0]
        self._ended = (
            metrics["seconds"] - first["seconds"] >= self._seconds
            and metrics["cycles"] - first["cycles"] >= 2 * self._loop.num_inferencers
        )
        if self._ended:
            self._device_mb = peak_device_mb()  # while trajectories are in flight
            self._loop.stop()

    def close(self) -> None:
        """Do nothing: a writer has this."""

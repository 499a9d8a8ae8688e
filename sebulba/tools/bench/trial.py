"""A configuration that is trained in a process of its own, a short while at a time.

In a process of its own the memory figures are clean, and there can be any number of devices.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax

from sebulba.configs.experiment import ExperimentConfig
from sebulba.loops.gymnasium_loop import GymnasiumLoop
from sebulba.runs.jax_setup import set_up_jax
from sebulba.tools.bench import harness
from sebulba.tools.bench.memory_use import peak_device_mb, peak_rss_mb
from sebulba.tools.bench.worker import Worker

MEASURE_TIMEOUT_S = 120.0
"""Added to the seconds asked for, for the cycles in flight and for cycles that are long."""
WINDOWS = 4
"""Least number of windows of metrics in a measurement."""
ENDLESS_CYCLES = 1_000_000
"""More cycles than a measurement takes; the loop is stopped."""

K = TypeVar("K")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Some seconds of training, compile and start-up excluded."""

    env_steps_per_s: float
    """Speed."""
    rss_mb: float
    """Peak resident memory of the process since it began, 10^6 bytes."""
    device_mb: float
    """Device memory, 10^6 bytes: the peak of the fullest device where the backend counts it, else
    (on CPU, where it is a part of the resident memory) of all arrays alive at the end."""
    policy_lag_mean: float
    """Mean policy lag."""
    cpu_ms_per_env_step: float = math.nan
    """CPU time of all threads of the process."""
    parameters: int = 0
    """Number of parameters of the networks."""


@dataclasses.dataclass(frozen=True)
class Series:
    """The measurements of one configuration, one a round."""

    measurements: Sequence[Measurement]
    """At least one, in the order of the rounds."""

    @property
    def speeds(self) -> list[float]:
        """Environment steps per second of each round."""
        return [one.env_steps_per_s for one in self.measurements]

    @property
    def speed(self) -> float:
        """Environment steps per second, the median."""
        return statistics.median(self.speeds)

    @property
    def rss_mb(self) -> float:
        """Peak resident memory."""
        return max(one.rss_mb for one in self.measurements)

    @property
    def device_mb(self) -> float:
        """Peak device memory."""
        return max(one.device_mb for one in self.measurements)

    @property
    def policy_lag_mean(self) -> float:
        """Mean policy lag."""
        return statistics.fmean(one.policy_lag_mean for one in self.measurements)

    @property
    def us_per_env_step(self) -> float:
        """Microseconds, the median."""
        return 1e6 / self.speed

    @property
    def parameters(self) -> int:
        """Number of parameters of the networks."""
        return self.measurements[0].parameters

    def gain_over(self, other: Series) -> float:
        """Return the median of the ratios of speed to ``other``, each taken within a round."""
        return harness.ratio({"new": self.speeds, "old": other.speeds}, "new", "old")


class Trial(Worker):
    """A configuration in a process of its own."""

    def __init__(
        self, config: ExperimentConfig, seconds: float, *, memory_limit_mb: float | None = None
    ) -> None:
        """Start the process. A measurement takes ``seconds``, stretched to two cycles of each
        Inferencer; the limit of memory is on the host and on a device."""
        timeout_s = seconds + MEASURE_TIMEOUT_S
        super().__init__(
            _Meter, config, seconds, timeout_s=timeout_s, memory_limit_mb=memory_limit_mb
        )

    def measure(self) -> Measurement:
        """Train on for a while."""
        measurement: Measurement = super().measure()
        self._check_memory(measurement.device_mb)
        return measurement


def measure_in_turn(
    trials: Mapping[K, Trial], repeats: int, failed: dict[K, str]
) -> dict[K, Series]:
    """Return ``harness.interleave`` of trials that are ready."""
    cases = {name: trial.measure for name, trial in trials.items()}
    figures = harness.interleave(cases, repeats, failed)
    return {name: Series(measurements) for name, measurements in figures.items()}


class _Meter:
    """The experiment as ``sebulba train`` builds it, with itself as the writer of metrics.

    The speed is that from the end of the first window of metrics to the end of the last whole one,
    so that starting and joining threads does not count.
    """

    def __init__(self, config: ExperimentConfig, seconds: float) -> None:
        config = set_up_jax(config)
        self._seconds = seconds
        interval_s = min(config.metrics_interval_s, seconds / WINDOWS)
        config = dataclasses.replace(config, metrics_interval_s=interval_s)
        factory, agent = harness.env_and_agent(config)
        self._loop = GymnasiumLoop(
            factory, agent, config.num_envs, options=config, metric_writer=self
        )
        self._steps_per_cycle = config.steps_per_cycle
        self._state = self._loop.new_state(config.seed, config.steps_per_cycle)

    def warm_up(self) -> None:
        """Compile."""
        # The first cycle compiles the update, the second the shorter chunks of a fused cycle.
        self._run(3 * self._loop.num_inferencers)

    def measure(self) -> Measurement:
        """Train on until ``write`` stops the loop."""
        self._run(ENDLESS_CYCLES * self._loop.num_inferencers)
        first, last = self._records[0], self._records[-1]
        lags = [record["policy_lag_mean"] for record in self._records[1:]]
        env_steps = last["env_steps"] - first["env_steps"]
        return Measurement(
            env_steps / (last["seconds"] - first["seconds"]),
            peak_rss_mb(os.getpid()),
            self._device_mb,
            statistics.fmean(lag for lag in lags if lag is not None),
            1e3 * (self._cpu_s[-1] - self._cpu_s[0]) / env_steps,
            sum(int(leaf.size) for leaf in jax.tree.leaves(self._state.networks)),
        )

    def _run(self, num_cycles: int) -> None:
        self._records: list[Mapping[str, Any]] = []
        self._cpu_s: list[float] = []
        self._ended = False
        self._state = self._loop.run(self._state, num_cycles, self._steps_per_cycle).state

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Keep a window's record; stop the loop when there are enough."""
        if self._ended:
            return  # the stop cut this window short
        self._records.append(metrics)
        self._cpu_s.append(time.process_time())
        first = self._records[0]
        self._ended = (
            metrics["seconds"] - first["seconds"] >= self._seconds
            and metrics["cycles"] - first["cycles"] >= 2 * self._loop.num_inferencers
        )
        if self._ended:
            self._device_mb = peak_device_mb()  # while trajectories are in flight
            self._loop.stop()

    def close(self) -> None:
        """Do nothing; a writer of metrics has this method."""

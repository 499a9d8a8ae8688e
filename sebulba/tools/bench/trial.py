"""A configuration that is trained in a process of its own, a short while at a time.

In a process of its own the memory figures are clean, and there can be any number of devices.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax

from sebulba.configs.experiment import ExperimentConfig
from sebulba.runs.jax_setup import set_up_jax
from sebulba.tools.bench import harness
from sebulba.tools.bench.memory_use import peak_device_mb, peak_rss_mb
from sebulba.tools.bench.train import TrainingCase
from sebulba.tools.bench.worker import Worker

MEASURE_TIMEOUT_S = 120.0
"""Added to the seconds asked for, for the cycles in flight and for cycles that are long."""

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
        """Start the process. A measurement takes about ``seconds``, or the trajectories that are in
        flight; the limit of memory is on the host and on a device."""
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
    """The experiment as ``sebulba train`` builds it."""

    def __init__(self, config: ExperimentConfig, seconds: float) -> None:
        config = set_up_jax(config)
        self._case, self._seconds = TrainingCase(config, *harness.env_and_agent(config)), seconds

    def warm_up(self) -> None:
        """Compile, and find out how many cycles a measurement has."""
        self._case.warm_up(self._seconds)

    def measure(self) -> Measurement:
        """Train on for so many cycles."""
        made = self._case.measure()
        lags = made.policy_lags
        return Measurement(
            made.env_steps_per_s,
            peak_rss_mb(os.getpid()),
            peak_device_mb(),
            sum(lag * number for lag, number in lags.items()) / sum(lags.values()),
            1e-3 * made.cpu_us,
            sum(int(leaf.size) for leaf in jax.tree.leaves(self._case.state.networks)),
        )

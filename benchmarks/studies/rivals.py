"""``benchmarks rivals``: SAC and DQN beside those of stable-baselines3 (torch) and sbx (JAX).

Networks, batch, replay, environment (Gymnasium's) and updates per environment step are the same,
and all collect as many environment steps between updates. Each library runs in a process of its
own, by the Python of an environment of its own if one is given; the processes train in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.studies import rival
from sebulba.agents.configs import DQNConfig, ReplayConfig, SACConfig, TargetConfig, TorsoConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.errors import UsageError
from sebulba.tools.bench import harness
from sebulba.tools.bench.trial import Trial

LIBRARIES = {"sb3": "stable_baselines3", "sbx": "sbx"}
"""Modules by the name that tables and options have for them."""
LEAST_STEPS = 128
"""Environment steps before the first update, for all."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What all train."""

    algorithm: str
    """Name of the class in the other libraries."""
    env_id: str
    """Gymnasium's id."""
    num_envs: int
    """Environments."""
    steps: int
    """Steps of each between two rounds of updates."""
    updates: int
    """Updates after these."""
    hidden_sizes: tuple[int, ...]
    """Units of the layers of each network."""
    batch_size: int
    """Transitions of an update."""
    capacity: int
    """Environment steps in the replay."""
    more: Mapping[str, Any]
    """Further options of the other libraries."""

    @property
    def updates_per_env_step(self) -> float:
        """Ratio of updates to environment steps."""
        return self.updates / (self.num_envs * self.steps)

    def experiment(self) -> ExperimentConfig:
        """Return it as ``sebulba train`` would train it."""
        common: dict[str, Any] = {
            "torso": TorsoConfig(hidden_sizes=self.hidden_sizes, activation="relu"),
            "replay": ReplayConfig(
                capacity=self.capacity,
                batch_size=self.batch_size,
                updates_per_cycle=self.updates,
                warm_up_cycles=LEAST_STEPS // (self.num_envs * self.steps),
            ),
        }
        agent = (
            SACConfig(**common)
            if self.algorithm == "SAC"
            else DQNConfig(**common, double=False, target=TargetConfig(period=100))
        )
        return ExperimentConfig(
            env=EnvConfig(self.env_id, backend="gymnasium"),
            agent=agent,
            total_env_steps=10**9,
            num_envs=self.num_envs,
            num_inferencers_per_device=1,
            steps_per_cycle=self.steps,
        )

    def of_library(self, library: str) -> dict[str, Any]:
        """Return it as ``rival.py`` takes it."""
        options = {
            "learning_starts": LEAST_STEPS,
            "buffer_size": self.capacity,
            "batch_size": self.batch_size,
            "train_freq": self.steps,
            "gradient_steps": self.updates,
            "policy_kwargs": {"net_arch": list(self.hidden_sizes)},
            "device": "cpu",
            **self.more,
        }
        about = {"algorithm": self.algorithm, "env_id": self.env_id, "num_envs": self.num_envs}
        return {"library": LIBRARIES[library], **about, "options": options}


TASKS = {
    "sac": Task("SAC", "HalfCheetah-v5", 4, 4, 16, (256, 256), 256, 1_000_000, {}),
    "dqn": Task(
        "DQN", "CartPole-v1", 8, 8, 16, (64, 64), 128, 100_000, {"target_update_interval": 400}
    ),
}
"""By the name of the agent."""


class Rival:
    """A process of another library; a context manager, which ends the process."""

    def __init__(
        self,
        python: str,
        library: str,
        given: Mapping[str, Any],
        seconds: float,
        file: str = rival.__file__,
    ) -> None:
        """Start the process, which compiles and warms up in its first measurement.

        Args:
          python: Python that has the library.
          library: Its name in options.
          given: What it trains, as ``file`` takes it.
          seconds: Seconds of a measurement.
          file: Program that trains it, which answers as ``rival.py`` does.

        Raises:
          UsageError: ``python`` does not have the library.
        """
        self._seconds = seconds
        try:
            self._process = subprocess.Popen(
                [python, file, json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise UsageError(f"--{library}-python {python} does not run: {error}") from error
        self.version = self._answer(library, python).removeprefix("ready ")

    def _answer(self, library: str, python: str) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline().strip():
            return line
        lines = self._process.communicate()[1].strip().splitlines() or ["it said nothing"]
        extra = "pip install 'sebulba[rivals]', or " if library in LIBRARIES else ""
        raise UsageError(
            f"{LIBRARIES.get(library, library)} does not run by {python} ({lines[-1][:200]}); "
            f"{extra}give --{library}-python the Python of an environment of its own that has it"
        )

    def measure(self) -> dict[str, float]:
        """Train for a while; return what ``rival.measure`` does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{self._seconds}\n")
        self._process.stdin.flush()
        measured: dict[str, float] = json.loads(self._process.stdout.readline())
        return measured

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()


def run(
    *,
    repeats: int = 5,
    agents: Sequence[str] = (),
    seconds: float = 5.0,
    sb3_python: str = sys.executable,
    sbx_python: str = sys.executable,
    json_file: str | None = None,
) -> dict:
    """Measure, print tables, write JSON.

    Args:
      repeats: Interleaved rounds.
      agents: Names in ``TASKS``; none means all.
      seconds: Seconds of training of each in a round.
      sb3_python: Python that has stable-baselines3.
      sbx_python: Python that has sbx.
      json_file: JSON to write.

    Raises:
      UsageError: A library is missing.
    """
    pythons = {"sb3": sb3_python, "sbx": sbx_python}
    keys: dict[str, float] = {}
    figures: dict[str, list[float]] = {}
    versions: dict[str, str] = {}
    for agent in agents or TASKS:
        speeds, cpu_ms, used = measure_task(TASKS[agent], pythons, seconds, repeats)
        keys |= keys_of(agent, speeds, cpu_ms)
        figures |= {f"{agent}, {name}, env steps/s": values for name, values in speeds.items()}
        figures |= {f"{agent}, {name}, CPU ms/update": values for name, values in cpu_ms.items()}
        versions |= used
        ratio = TASKS[agent].updates_per_env_step
        harness.print_table(f"{agent}: {ratio:g} updates an env step", "env steps/s", speeds)
        harness.print_table(f"{agent}, CPU time of all threads", "ms/update", cpu_ms)
    harness.print_notes(f"{name}: {value:.2f}" for name, value in keys.items())
    tasks = {agent: dataclasses.asdict(TASKS[agent]) for agent in agents or TASKS}
    result = harness.record(keys, figures, {"tasks": tasks, "rivals": versions})
    harness.write_json(json_file, result)
    return result


def measure_task(
    task: Task, pythons: Mapping[str, str], seconds: float, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, str]]:
    """Return env steps/s and CPU ms an update of each, one a round, and the rivals' versions."""
    with contextlib.ExitStack() as stack:
        rivals = {
            name: stack.enter_context(Rival(python, name, task.of_library(name), seconds))
            for name, python in pythons.items()
        }
        ours = stack.enter_context(Trial(task.experiment(), seconds))
        ours.ready()

        def of_ours() -> tuple[float, float]:
            measured = ours.measure()
            cpu_ms = measured.cpu_ms_per_env_step / task.updates_per_env_step
            return measured.env_steps_per_s, cpu_ms

        def of_rival(one: Rival) -> tuple[float, float]:
            measured = one.measure()
            speed = measured["env_steps"] / measured["wall_s"]
            return speed, 1e3 * measured["cpu_s"] / max(measured["updates"], 1)

        cases = {"sebulba": of_ours} | {
            name: lambda one=one: of_rival(one) for name, one in rivals.items()
        }
        measured = harness.interleave(cases, repeats)
        speeds = {name: [speed for speed, _ in pairs] for name, pairs in measured.items()}
        cpu_ms = {name: [cpu for _, cpu in pairs] for name, pairs in measured.items()}
        return speeds, cpu_ms, {LIBRARIES[name]: one.version for name, one in rivals.items()}


def keys_of(
    agent: str, speeds: Mapping[str, list[float]], cpu_ms: Mapping[str, list[float]]
) -> dict[str, float]:
    """Return how much faster this package is than each rival, and than the faster in each round."""
    keys = {f"{agent}_over_{name}": harness.ratio(speeds, "sebulba", name) for name in LIBRARIES}
    fastest = [max(pair) for pair in zip(*(speeds[name] for name in LIBRARIES), strict=True)]
    pairs = zip(speeds["sebulba"], fastest, strict=True)
    keys[f"{agent}_over_faster"] = statistics.median(a / b for a, b in pairs)
    for name in LIBRARIES:
        keys[f"{agent}_cpu_of_{name}_over_ours"] = harness.ratio(cpu_ms, name, "sebulba")
    return keys

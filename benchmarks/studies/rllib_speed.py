"""How fast RLlib trains beside this package.

``python -m benchmarks.studies.rllib_speed --rllib-python PYTHON`` measures it. RLlib pins its own
Gymnasium, so it has an environment of its own: ``pip install 'ray[rllib]==2.60' torch pettingzoo
pygame``. Algorithm, networks, environments at a time and batch are those of the preset.
Environments are those that either library has: CartPole of envpool and of Gymnasium, games of
envpool and by PettingZoo's AEC API. Both train in turn on the same cores, and RLlib with one and
with two processes that step environments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.studies import beside
from benchmarks.studies.rivals import Rival
from sebulba.agents.configs import TorsoConfig
from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.presets import PRESETS
from sebulba.loops.devices import FEW_INFERENCERS
from sebulba.tools.bench import harness
from sebulba.tools.bench.trial import Trial

TRAINER = Path(__file__).with_name("rllib_trainer.py")
SECONDS = 8.0
"""Of each in a round: several of RLlib's iterations, each of which lasts at least a second."""
RUNNERS = (1, 2)


def config_of(preset: str) -> ExperimentConfig:
    """Return a preset with an MLP, which RLlib has, too."""
    config: Any = PRESETS[preset].make()
    if config.agent.torso.kind != "board_cnn":
        return config
    mlp = {"torso": TorsoConfig("mlp", (256, 256)), "separate_value_torso": True}
    return dataclasses.replace(config, agent=dataclasses.replace(config.agent, **mlp))


def given_to_rllib(preset: str, algorithm: str, runners: int) -> dict[str, Any]:
    """Return a preset as ``rllib_trainer.py`` takes it."""
    config = config_of(preset)
    agent: Any = config.agent
    batch = config.num_envs * config.steps_per_cycle
    num_envs = config.num_envs * (config.num_inferencers_per_device or FEW_INFERENCERS)
    options: dict[str, Any] = {"train_batch_size_per_learner": batch, "gamma": agent.discount}
    of_runners: dict[str, Any] = {"num_envs_per_env_runner": num_envs // runners}
    if algorithm == "PPO":
        of_runners["rollout_fragment_length"] = "auto"
        options |= {"num_epochs": agent.epochs, "minibatch_size": batch // agent.minibatches}
    else:
        of_runners["rollout_fragment_length"] = config.steps_per_cycle
    return {
        "algorithm": algorithm,
        "env": preset if algorithm == "PPO" else config.env.id,
        "runners": runners,
        "of_runners": of_runners,
        "options": options | {"lr": agent.learning_rate},
        "hidden_sizes": list(agent.torso.hidden_sizes),
        "separate_value_torso": agent.separate_value_torso,
    }


def measure_task(
    preset: str, algorithms: tuple[str, ...], python: str, rounds: int
) -> dict[str, list[float]]:
    """Return environment steps a second of each, one a round."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Trial(config_of(preset), SECONDS))
        ours.ready()

        def of_rival(one: Rival) -> float:
            measured = one.measure()
            return measured["env_steps"] / measured["wall_s"]

        cases: dict[str, Callable[[], float]] = {"sebulba": lambda: ours.measure().env_steps_per_s}
        for algorithm in algorithms:
            for runners in RUNNERS:
                given = given_to_rllib(preset, algorithm, runners)
                one = stack.enter_context(Rival(python, "rllib", given, SECONDS, str(TRAINER)))
                cases[f"RLlib {algorithm}, {runners}"] = functools.partial(of_rival, one)
        return harness.interleave(cases, rounds)


TASKS = {"cartpole": ("IMPALA", "APPO"), "kuhn": ("PPO",), "connect-four": ("PPO",)}
"""Algorithms of RLlib by our preset."""


def main() -> None:
    """Measure, print tables and the ratios, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rllib-python", required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    beside.add_options(parser)
    given = parser.parse_args()

    def measure(task: str) -> beside.Speeds:
        return measure_task(task, TASKS[task], given.rllib_python, given.rounds)

    beside.tell(given.tasks, measure, given.json)


if __name__ == "__main__":
    main()

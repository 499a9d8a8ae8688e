"""An algorithm of RLlib, trained a short while whenever a line comes in.

``python -m benchmarks.studies.rllib_speed`` runs this file by the Python of an environment that has
RLlib, so it imports nothing of this package. Its argument is JSON: ``algorithm``, ``env``,
``runners`` (how many processes step environments) and what they are given (``of_runners``),
``options`` of the training, ``hidden_sizes`` and ``separate_value_torso``. It prints ``ready`` and
the library's version; then each line that it reads, a number of seconds, is answered by a line of
JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import ray
from gymnasium import spaces
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.examples.rl_modules.classes.action_masking_rlm import ActionMaskingTorchRLModule

WARM_UP_S = 5.0
POLICY = "player"
"""Plays all seats."""


class Turns(MultiAgentEnv):
    """A game of PettingZoo's AEC API, as RLlib's masking of actions wants it: flat, with masks."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._env = make()
        self.agents = self.possible_agents = list(self._env.possible_agents)
        space = self._env.observation_space(self.agents[0])["observation"]
        number = int(self._env.action_space(self.agents[0]).n)
        seen = spaces.Dict(
            {
                "observations": spaces.Box(0, 1, (int(np.prod(space.shape)),), np.float32),
                "action_mask": spaces.Box(0, 1, (number,), np.float32),
            }
        )
        self.observation_spaces = dict.fromkeys(self.agents, seen)
        self.action_spaces = dict.fromkeys(self.agents, self._env.action_space(self.agents[0]))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Begin a game."""
        self._env.reset(seed=seed)
        return {self._env.agent_selection: self._seen_by(self._env.agent_selection)}, {}

    def step(self, action: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        """Make a move."""
        self._env.step(int(action[self._env.agent_selection]))
        rewards = dict(self._env.rewards)
        over = all(self._env.terminations.values())
        who = self.possible_agents if over else [self._env.agent_selection]
        ends = {"__all__": over} | (dict.fromkeys(self.possible_agents, True) if over else {})
        return {one: self._seen_by(one) for one in who}, rewards, ends, {"__all__": False}, {}

    def _seen_by(self, agent: str) -> dict[str, np.ndarray]:
        seen = self._env.observe(agent)
        mask = np.asarray(seen["action_mask"], np.float32)
        return {
            "observations": np.asarray(seen["observation"], np.float32).ravel(),
            "action_mask": mask if mask.any() else np.ones_like(mask),
        }


def _kuhn(config: Any) -> Turns:
    return Turns(importlib.import_module("kuhn_aec").Kuhn)


def _connect_four(config: Any) -> Turns:
    return Turns(importlib.import_module("pettingzoo.classic.connect_four_v3").raw_env)


GAMES: dict[str, Callable[[Any], Turns]] = {"kuhn": _kuhn, "connect-four": _connect_four}


def build(given: dict[str, Any]) -> Any:
    """Return the algorithm."""
    module = importlib.import_module(f"ray.rllib.algorithms.{given['algorithm'].lower()}")
    config = getattr(module, f"{given['algorithm']}Config")()
    model = DefaultModelConfig(
        fcnet_hiddens=given["hidden_sizes"],
        fcnet_activation="tanh",
        vf_share_layers=not given["separate_value_torso"],
    )
    game = GAMES.get(given["env"])
    if game is None:
        gymnasium.make(given["env"]).close()
        config.environment(given["env"]).rl_module(model_config=model)
    else:
        module_spec = RLModuleSpec(module_class=ActionMaskingTorchRLModule, model_config=model)
        importlib.import_module("ray.tune.registry").register_env(given["env"], game)
        config.environment(given["env"]).rl_module(rl_module_spec=module_spec)
        config.multi_agent(policies={POLICY}, policy_mapping_fn=lambda *_, **__: POLICY)
    config.env_runners(num_env_runners=given["runners"], **given["of_runners"])
    config.learners(num_learners=0).training(**given["options"])
    config.reporting(min_time_s_per_iteration=1, min_sample_timesteps_per_iteration=0)
    return config.build_algo()


def measure(algorithm: Any, seconds: float) -> dict[str, float]:
    """Train for some seconds; return environment steps and wall seconds."""
    sampled(algorithm)  # what was on the way when this process paused
    before, began = sampled(algorithm), time.perf_counter()
    while time.perf_counter() - began < seconds:
        after = sampled(algorithm)
    return {"env_steps": after - before, "wall_s": time.perf_counter() - began}


def sampled(algorithm: Any) -> float:
    """Train until a result counts environment steps, and return them."""
    while True:
        counted = algorithm.train()["env_runners"].get("num_env_steps_sampled_lifetime")
        if counted is not None:
            return float(counted)


def main() -> None:
    """Make the algorithm, and train as lines come in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # RLlib prints
    ray.init(log_to_driver=False, include_dashboard=False, num_cpus=4, logging_level="error")
    algorithm = build(json.loads(sys.argv[1]))
    measure(algorithm, WARM_UP_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody reads it from now on
    print("ready", ray.__version__, file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(algorithm, float(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""How fast a loop over PettingZoo's AEC API plays, beside trainings.

``python -m benchmarks.studies.aec_loop`` measures it. The loop is the one of PettingZoo's
documentation: one environment, one agent at a time, each action from a compiled network of the
preset's sizes. It only plays, while ours trains. Both take turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from pettingzoo import AECEnv
from pettingzoo.classic import connect_four_v3

from benchmarks.studies import beside
from sebulba.configs.presets import PRESETS
from sebulba.tools.bench import harness
from sebulba.tools.bench.trial import Trial
from tests.support.kuhn_aec import Kuhn

SECONDS = 4.0
"""Of each in a round."""


class Loop:
    """An AEC environment that is played by a network, or at random."""

    def __init__(self, env: AECEnv, sizes: Sequence[int] | None) -> None:
        """Make the network; without sizes legal actions are drawn at random."""
        self._env, self._seed = env, 0
        self._act: Callable[[Any], int] = self._at_random
        if sizes is not None:
            self._act = _policy(env, sizes)
        self.speed(0.5)

    def speed(self, seconds: float) -> float:
        """Play for some seconds; return environment steps (moves) a second."""
        moves, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            self._seed += 1
            self._env.reset(seed=self._seed)
            for _ in self._env.agent_iter():
                observation, _, is_terminated, is_truncated, _ = self._env.last()
                is_over = is_terminated or is_truncated
                self._env.step(None if is_over else self._act(observation))
                moves += not is_over
        return moves / (time.perf_counter() - began)

    def _at_random(self, observation: dict[str, np.ndarray]) -> int:
        return int(random.choice(np.flatnonzero(observation["action_mask"])))


def _policy(env: AECEnv, sizes: Sequence[int]) -> Callable[[Any], int]:
    """Return a function from an observation to a legal action, drawn by a network."""
    agent = env.possible_agents[0]
    size = int(np.prod(env.observation_space(agent)["observation"].shape))  # type: ignore[index]
    num_actions = int(env.action_space(agent).n)  # type: ignore[attr-defined]
    layers = [one for width in sizes for one in (nn.Dense(width), nn.tanh)]
    network = nn.Sequential([*layers, nn.Dense(num_actions)])
    params = network.init(jax.random.key(0), jnp.zeros(size))
    key = jax.random.key(1)

    @jax.jit
    def draw(key: jax.Array, row: jax.Array, legal: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, own = jax.random.split(key)
        logits = jnp.where(legal, jnp.asarray(network.apply(params, row)), -jnp.inf)
        return key, jax.random.categorical(own, logits)

    def act(observation: dict[str, np.ndarray]) -> int:
        nonlocal key
        row = observation["observation"].astype(np.float32).ravel()
        key, action = draw(key, row, observation["action_mask"] != 0)
        return int(action)

    return act


def cases(ours: Trial, loop: Loop, at_random: Loop) -> dict[str, Callable[[], float]]:
    """Return what takes turns: each call returns environment steps a second."""
    return {
        "sebulba trains": lambda: ours.measure().env_steps_per_s,
        "AEC loop plays": lambda: loop.speed(SECONDS),
        "AEC loop, random moves": lambda: at_random.speed(SECONDS),
    }


def main() -> None:
    """Measure, print tables and the ratios, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    beside.add_options(parser)
    given = parser.parse_args()
    games = {"kuhn": Kuhn(), "connect-four": connect_four_v3.env()}

    def measure(name: str) -> beside.Speeds:
        config = PRESETS[name].make()
        sizes = config.agent.torso.hidden_sizes  # type: ignore[attr-defined]
        with Trial(config, SECONDS) as ours:
            ours.ready()
            loops = Loop(games[name], sizes), Loop(games[name], None)
            return harness.interleave(cases(ours, *loops), given.rounds)

    beside.tell(games, measure, given.json)


if __name__ == "__main__":
    main()

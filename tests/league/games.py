"""Games whose results are known, and loops with leagues in them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from sebulba_league.config import LeagueConfig

import sebulba
from sebulba import Act, AgentNode, Obs, Population
from sebulba.agents.configs import PPOConfig, TorsoConfig, make_agent

NUM_ACTIONS = 3
SEATS = ("seat_0", "seat_1")
PPO = PPOConfig(torso=TorsoConfig(hidden_sizes=(8,)), epochs=1, minibatches=2, learning_rate=1e-3)
SMALL: dict[str, Any] = {"opponents": 3, "mirrors": 1, "history": 6}
CYCLE = {"num_inferencers_per_device": 1, "inference_devices": [0], "update_devices": [0]}


class Turns(sebulba.MultiAgentEnv):
    """Two seats take turns for 2 to 7 decisions; seat 0 wins, or with ``cut`` nobody, cut short."""

    tree = Population(
        {seat: AgentNode(Obs(spaces.Discrete(8)), Act(spaces.Discrete(3))) for seat in SEATS},
        payoff="zero_sum",
        symmetric=True,
    )

    def __init__(self, cut: bool = False) -> None:
        self.cut = cut

    def reset(self, *, seed: int | None = None) -> Any:
        self.t, self.length = 0, int(self.np_random.integers(2, 8))
        return {"seat_0": 0}

    def step(self, actions: dict) -> Any:
        self.t += 1
        over = self.t == self.length
        reward = {"seat_0": float(over), "seat_1": -float(over)}
        seen = {} if over else {SEATS[self.t % 2]: self.t}
        if over and self.cut:
            seen = dict.fromkeys(SEATS, self.t)
        return seen, reward, over and not self.cut, over and self.cut


class Throws(sebulba.MultiAgentEnv):
    """Rock-paper-scissors: both seats act at once, and a game has one to three throws."""

    all_act = True
    tree = Turns.tree

    def reset(self, *, seed: int | None = None) -> Any:
        self.left = int(self.np_random.integers(1, 4))
        return dict.fromkeys(SEATS, self.left)

    def step(self, actions: dict) -> Any:
        won = (0.0, 1.0, -1.0)[(actions["seat_0"] - actions["seat_1"]) % 3]
        self.left -= 1
        reward = {"seat_0": won, "seat_1": -won}
        return dict.fromkeys(SEATS, self.left), reward, self.left == 0, False


def league_of(env: Any, agent: Any = PPO, **fields: Any) -> Any:
    """Return the agent of a league in a game."""
    return make_agent(sebulba.env_spec(env), LeagueConfig({"*": agent}, **SMALL | fields))


def loop_of(env: Any, agent: Any, num_envs: int = 16, **options: Any) -> sebulba.GymnasiumLoop:
    options = CYCLE | {"schedule": "lockstep", "seed": 1} | options
    return sebulba.GymnasiumLoop(env, agent, num_envs, **options)


def planted(state: Any) -> Any:
    """Return a state whose history is full, and whose snapshot in row r always takes r mod 3."""
    experience = state.experience
    (name,) = experience.history
    size = len(experience.generation)
    biases = 1e3 * np.eye(NUM_ACTIONS, dtype=np.float32)[np.arange(size) % NUM_ACTIONS]
    history = jax.tree.map(lambda rows: np.repeat(np.array(rows[:1]), size, 0), experience.history)
    history[name]["policy"]["bias"] = biases
    generation = np.arange(size, dtype=np.int32)
    experience = experience._replace(history=history, generation=generation, made=np.int32(size))
    return state._replace(experience=jax.tree.map(jax.numpy.array, experience))


class JaxTurns:
    """``Turns`` in JAX: the length of a game is drawn when it begins."""

    tree = Turns.tree

    def reset(self, key: jax.Array) -> Any:
        length = jax.random.randint(key, (), 2, 8)
        return self._obs(0), (jnp.int32(0), length)

    def _obs(self, t: Any) -> Any:
        return {"seat": jnp.full(2, t, jnp.int32)}

    def step(self, key: jax.Array, state: Any, actions: Any) -> Any:
        t, length = state[0] + 1, state[1]
        over = t == length
        reward = {"seat": over * jnp.array([1.0, -1.0])}
        return self._obs(t), (t, length), reward, over, False

    def acting(self, state: Any) -> Any:
        return {"seat": jnp.arange(2) == state[0] % 2}

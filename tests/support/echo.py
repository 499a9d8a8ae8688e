"""Environments of many agents that write into every observation and reward where it belongs.

An observation encodes environment, agent, episode, time and the agent's action in the step before,
a reward the same in one number; who acts, dies, joins and is told of an end are functions of these.
So ``misplaced_cells`` finds one cell out of place: another environment's, another seat's, another
turn's. The same worlds exist as a ``MultiAgentEnv`` (whose tree has everything that a tree can
have), as PettingZoo's AEC and Parallel, and as a pool of envpool's games. Everything is a function
of small integers, exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from gymnasium import spaces

import sebulba
from sebulba import Act, AgentNode, Obs, Population, Repeat
from sebulba.envs.multi.envpool_games import GameAdapter
from sebulba.types import COMMON

NUM_ACTIONS = 4
PLACE = spaces.Box(0, 2**24, (6,), np.float32)
LEGAL = Obs(spaces.MultiBinary(NUM_ACTIONS), legal_actions=True)


# Functions of integers or integer arrays: seed s, episode e, time t, number of the agent n.


def length_of(s: Any, e: Any) -> Any:
    """Return the number of steps of an episode, 3 to 12."""
    return 3 + (s % 1021 + 5 * e + e * e) % 10


def is_cut(s: Any, e: Any) -> Any:
    """Tell whether an episode is cut short."""
    return (s % 1021 + 3 * e) % 5 >= 3


def place_of(s: Any, e: Any, t: Any, n: Any, code: Any) -> Any:
    """Return what an agent observes; ``code`` is 0 where it did not act in the step before."""
    parts = np.broadcast_arrays(s >> 16, s & 0xFFFF, e, t, n, code)
    return np.stack(parts, axis=-1).astype(np.float32)


def reward_of(s: Any, e: Any, t: Any, n: Any, code: Any) -> Any:
    """Return what an agent is paid in the step that led to time t."""
    return (((((s % 61) * 16 + e % 16) * 16 + t) * 8 + n + 1) * 16 + code) * 1.0


def legal_of(s: Any, t: Any) -> Any:
    """Return which actions are legal, ``[..., 4]``."""
    return ((np.arange(NUM_ACTIONS) + (s + t)[..., None]) % 3 != 0).astype(np.int8)


def hidden_of(e: Any, t: Any) -> Any:
    """Return what only the learner sees, ``[..., 1]``."""
    return (7 * t + e)[..., None].astype(np.float32)


class World:
    """Who is where and does what, as functions of (s, e, t), and where it stands in the rows."""

    slots: tuple[tuple[tuple[str, int], ...], ...]
    """The slots of each agent, as (group, index)."""
    counts_episodes = True
    """Episodes are counted; otherwise each has a seed of its own, and e is 0."""

    def acts(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who acts at time t."""
        raise NotImplementedError

    def lives(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who is told of an end at time t."""
        return t <= length_of(s, e)

    def dies(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who reaches a terminal state at time t, in mid-episode."""
        return (t < 0) & (s < 0)

    def joins(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who comes back at time t."""
        return (t < 0) & (s < 0)

    def sees_end(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who observes time t, the end."""
        return self.lives(n, s, e, t)

    def is_told(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who is told of the end at time t that cuts the episode short."""
        return self.sees_end(n, s, e, t)

    def is_paid_waiting(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who is paid for a step in which it did not act."""
        return (t < 0) & (s < 0)

    def code(self, n: int, actions: list[Any]) -> Any:
        """Return the action of an agent as a number from 1 on, given those of its slots."""
        return 1 + actions[0] if len(actions) == 1 else 1 + NUM_ACTIONS * actions[0] + actions[1]

    def acted(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who acted in the step that led to time t."""
        return (t > 0) & self.acts(n, s, e, t - 1)

    def observes(self, n: int, s: Any, e: Any, t: Any) -> Any:
        """Tell who observes time t."""
        ends = t == length_of(s, e)
        return self.acts(n, s, e, t) | self.dies(n, s, e, t) | (ends & self.sees_end(n, s, e, t))

    def reward(self, n: int, s: Any, e: Any, t: Any, code: Any) -> Any:
        """Return what an agent is paid in the step that led to time t."""
        paid = self.acted(n, s, e, t) | ((t > 0) & self.is_paid_waiting(n, s, e, t))
        return np.where(paid, reward_of(s, e, t, n, code), 0)


class Tree(World):
    """The tree: a guide, three of a crew who come and go, and a pilot of two hands."""

    slots = (
        (("guide", 0),),
        (("crew", 0),),
        (("crew", 1),),
        (("crew", 2),),
        (("pilot.left", 0), ("pilot.right", 0)),
    )

    def acts(self, n, s, e, t):
        there = [
            t >= 0,
            (s + e + t) % 2 == 0,
            (t >= 2) & ((s + t) % 3 != 0),  # joins late
            (t < self.death(s, e)) | (t >= 6),
            t % 2 == 0,
        ]
        return there[n] & (t < length_of(s, e))

    def death(self, s, e):
        return 1 + (s + e) % 2

    def dies(self, n, s, e, t):
        return (t == self.death(s, e)) & (n == 3)

    def joins(self, n, s, e, t):
        return (t == 6) & (t < length_of(s, e)) & (n == 3)

    def lives(self, n, s, e, t):
        return (n != 3) | (t <= self.death(s, e)) | (t > 6)

    def sees_end(self, n, s, e, t):
        return is_cut(s, e) & self.acted(n, s, e, t)

    def is_paid_waiting(self, n, s, e, t):
        return (t >= 0) & (n == 1)


class Together(World):
    """PettingZoo's Parallel: two scouts, of whom one joins late and one dies, and an anchor."""

    slots = ((("scout", 0),), (("scout", 1),), (("anchor", 0),))
    counts_episodes = False

    def acts(self, n, s, e, t):
        there = [t >= 2, t < self.death(s, e), t >= 0]
        return there[n] & (t < length_of(s, e))

    def death(self, s, e):
        return 1 + s % 2

    def dies(self, n, s, e, t):
        return (t == self.death(s, e)) & (n == 1)

    def lives(self, n, s, e, t):
        return (n != 1) | (t <= self.death(s, e))


class InTurn(Together):
    """PettingZoo's AEC: the same, one after the other in an order that chance decides."""

    def mover(self, s, e, t):
        """Return who moves at time t."""
        drawn = (s // 7 + t * t) % 3
        return np.where((drawn == 1) & (t >= self.death(s, e)), 2, drawn)

    def acts(self, n, s, e, t):
        return (self.mover(s, e, t) == n) & (t < length_of(s, e))

    def is_paid_waiting(self, n, s, e, t):
        return (t >= 0) & (n == 2)


class Game(World):
    """A game of envpool's for two."""

    slots = ((("player", 0),), (("player", 1),))

    def mover(self, s, e, t):
        """Return who moves at time t."""
        return (s + e + t * t) % 2

    def acts(self, n, s, e, t):
        return (self.mover(s, e, t) == n) & (t < length_of(s, e))

    def observes(self, n, s, e, t):
        return t >= 0

    def is_paid_waiting(self, n, s, e, t):
        return t >= 0


TREE, TOGETHER, IN_TURN, GAME = Tree(), Together(), InTurn(), Game()


# The worlds as environments.


class Echo(sebulba.MultiAgentEnv):
    """A tree with everything: Repeat, common, eval_only, legal and non-atomic parts."""

    tree = Population(
        {
            "guide": AgentNode({"place": Obs(PLACE), "legal": LEGAL}, Act(spaces.Discrete(4))),
            "crew": Population(
                Repeat(
                    AgentNode(
                        {
                            "place": Obs(PLACE),
                            "hidden": Obs(spaces.Box(0, 2**24, (1,)), eval_only=True),
                        },
                        Act(spaces.Discrete(NUM_ACTIONS)),
                    ),
                    most=3,
                )
            ),
            "pilot": AgentNode(
                {"nav": {"place": Obs(PLACE)}},
                Act({"left": spaces.Discrete(3), "right": spaces.Discrete(4)}, non_atomic=True),
            ),
        },
        common=Obs(spaces.Box(0, 2**24, (4,), np.float32)),
    )
    names = ("guide", "crew.0", "crew.1", "crew.2", "pilot")

    def __init__(self) -> None:
        self.e = -1

    def reset(self, *, seed: int | None = None) -> Any:
        if seed is not None:
            self.s, self.e = seed, -1
        self.e, self.t = self.e + 1, 0
        return self.observe({})

    def at(self) -> tuple[Any, Any, Any]:
        return np.int64(self.s), np.int64(self.e), np.int64(self.t)

    def observe(self, codes: dict[str, int]) -> dict:
        seen: dict = {COMMON: np.array([self.s >> 16, self.s & 0xFFFF, self.e, self.t], np.float32)}
        for n, name in enumerate(self.names):
            if TREE.observes(n, *self.at()):
                place = place_of(*self.at(), n, codes.get(name, 0))
                legal, hidden = legal_of(self.at()[0], self.at()[2]), hidden_of(*self.at()[1:])
                more = {"guide": {"legal": legal}, "pilot": {"nav": {"place": place}}}
                crew = {"hidden": hidden}
                seen[name] = {"place": place, **more.get(name, crew)}
        return seen

    def step(self, actions: dict) -> Any:
        assert set(actions) == {m for n, m in enumerate(self.names) if TREE.acts(n, *self.at())}
        codes = {
            name: TREE.code(0, [*action.values()] if isinstance(action, dict) else [action])
            for name, action in actions.items()
        }
        self.t += 1
        rewards = {
            name: float(TREE.reward(n, *self.at(), codes.get(name, 0)))
            for n, name in enumerate(self.names)
        }
        over = self.t == length_of(self.s, self.e)
        cut = over and bool(is_cut(self.s, self.e))
        died = {m: True for n, m in enumerate(self.names) if TREE.dies(n, *self.at())}
        return self.observe(codes), rewards, (over and not cut) or died, cut


class GamePool:
    """The game with envpool's interface: rows in any order, next-step reset."""

    observation_space = PLACE
    config: dict[str, Any]

    def __init__(self, seeds: list[int]) -> None:
        num_envs = len(seeds)
        self.config = {"num_envs": num_envs, "batch_size": num_envs, "max_num_players": 2}
        legal = SimpleNamespace(shape=(NUM_ACTIONS,))
        self.spec = SimpleNamespace(
            config=SimpleNamespace(max_num_players=2),
            gymnasium_observation_space=PLACE,
            state_array_spec={"info:legal_action_mask": legal, "info:current_player": None},
        )
        self._s = np.asarray(seeds, np.int64)
        self._e = np.full(num_envs, -1, np.int64)
        self._order = np.random.default_rng(0)

    def reset(self) -> tuple:
        self._e, self._t = self._e + 1, np.zeros_like(self._e)
        obs, *_, info = self._rows(np.zeros_like(self._e))
        return obs, info

    def step(self, action: np.ndarray) -> tuple:
        assert action.dtype == np.int32 and action.shape == self._s.shape
        is_reset = self._t == length_of(self._s, self._e)
        self._e = self._e + is_reset
        self._t = np.where(is_reset, 0, self._t + 1)
        return self._rows(np.where(is_reset, 0, 1 + action))

    def _rows(self, code: np.ndarray) -> tuple:
        s, e, t = self._s, self._e, self._t
        order = self._order.permutation(len(s)).astype(np.int32)
        acted = [GAME.acted(n, s, e, t) for n in range(2)]
        codes = [np.where(acted[n], code, 0) for n in range(2)]
        obs = np.stack([place_of(s, e, t, n, codes[n]) for n in range(2)], axis=1)
        reward = np.stack([GAME.reward(n, s, e, t, codes[n]) for n in range(2)], axis=1)
        ends, cut = t == length_of(s, e), is_cut(s, e)
        players = np.tile(np.arange(2, dtype=np.int32), len(s))
        by_player = {"env_id": np.repeat(order, 2), "id": players}
        info = {
            "env_id": order,
            "players": by_player,
            "current_player": GAME.mover(s, e, t)[order].astype(np.int32),
            "legal_action_mask": legal_of(s, t)[order].astype(bool),
        }
        flat = obs[order].reshape(-1, 6), reward[order].reshape(-1).astype(np.float32)
        return *flat, (ends & ~cut)[order], (ends & cut)[order], info

    def close(self) -> None:
        pass


def game_adapter(num_envs: int, seeds: list[int]) -> GameAdapter:
    """Return the game behind the adapter of envpool's games."""
    return GameAdapter(GamePool(seeds[:num_envs]), "echo game")


# Checking.


def misplaced_cells(world: World, env_step: Any, action: Any) -> int:
    """Count cells that are not where they belong.

    Args:
      world: The world that was played.
      env_step: ``[T+1, B, ...]`` by group, from anywhere in a run; row 0 may be in mid-episode.
      action: ``[T, B, ...]`` by group.
    """
    env_step, action = jax.tree.map(np.asarray, (env_step, action))
    s, e, t = _where(env_step.obs)
    wrong = _wrong_places(world, s, e, t)
    for group, chosen in action.items():
        wrong += int((env_step.prev_action[group][1:] != chosen).sum())
    for n, slots in enumerate(world.slots):
        chosen = [env_step.prev_action[group][:, :, index] for group, index in slots]
        code = np.where(world.acted(n, s, e, t), world.code(n, chosen), 0)
        for group, index in slots:
            wrong += _wrong_rows(world, n, env_step, (group, index), (s, e, t), code)
    return wrong


def _where(obs: Any) -> tuple[np.ndarray, ...]:
    """Return seed, episode and time of each row, which all who observe it agree on."""
    if COMMON in obs:
        fields = obs[COMMON].astype(np.int64)
    else:
        places = [_part(group, "place") for group in obs.values()]
        fields = np.concatenate(places, axis=2).max(axis=2).astype(np.int64)
    return (fields[..., 0] << 16) | fields[..., 1], fields[..., 2], fields[..., 3]


def _part(obs: Any, name: str) -> Any:
    if not isinstance(obs, dict):
        return obs
    found = [key for key in obs if key.rpartition(".")[2] == name]
    return obs[found[0]] if found else obs["observation"] if name == "place" else None


def _wrong_places(world: World, s: Any, e: Any, t: Any) -> int:
    ended = (t == length_of(s, e))[:-1]
    wrong = int((t[1:] != np.where(ended, 0, t[:-1] + 1)).sum())
    wrong += s.shape[1] - len(np.unique(s[0]))
    if not world.counts_episodes:
        return wrong + int(((s[1:] == s[:-1]) == ended).sum()) + int((e != 0).sum())
    return wrong + int((s != s[:1]).sum()) + int((e[1:] != e[:-1] + ended).sum())


def _wrong_rows(
    world: World, n: int, env_step: Any, slot: tuple[str, int], at: tuple, code: Any
) -> int:
    group, index = slot
    s, e, t = at
    ends, cut = t == length_of(s, e), is_cut(s, e)
    lives, dies = world.lives(n, *at), world.dies(n, *at)
    sees = world.observes(n, *at)
    expected: dict[str, Any] = {
        "acting": world.acts(n, *at),
        "reward": world.reward(n, *at, code),
        "terminated": (ends & ~cut & lives) | dies,
        "truncated": ends & cut & world.is_told(n, *at) & ~dies,
        "is_first": (t == 0) | world.joins(n, *at),
    }
    wrong = 0
    for name, values in expected.items():
        wrong += int((getattr(env_step, name)[group][:, :, index] != values).sum())
    seen = sees[..., None]
    masked = seen & (world.acts(n, *at)[..., None] if isinstance(world, Game) else seen)
    parts: dict[str, Any] = {
        "place": np.where(seen, place_of(*at, n, code), 0),
        "hidden": np.where(seen, hidden_of(e, t), 0),
        "legal": np.where(masked, legal_of(s, t), 0),
        "action_mask": np.where(masked, legal_of(s, t), 0),
    }
    for name, values in parts.items():
        found = _part(env_step.obs[group], name)
        if found is not None and (name == "place" or isinstance(env_step.obs[group], dict)):
            wrong += int((found[:, :, index] != values).sum())
    return wrong


# Planted faults.


def shuffled(field: str, axis: int, by: int = 1) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a function that moves all cells of a field along time 0, environments 1 or seats 2."""

    def rolled(tree: Any) -> Any:
        return jax.tree.map(lambda x: np.roll(x, by, axis) if x.ndim > axis else x, tree)

    def plant(env_step: Any, action: Any) -> tuple[Any, Any]:
        if field == "action":
            return env_step, rolled(action)
        return env_step._replace(**{field: rolled(getattr(env_step, field))}), action

    return plant

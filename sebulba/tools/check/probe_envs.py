"""Probe environments that ask every question at once, so that an agent is trained only once.

Each question isolates one capability and is answered by what the evaluation policy does, whatever
the agent's networks are; a wrong answer points at what is broken.

Source: andyljones.com/posts/rl-debugging (probe environments).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces

from sebulba.envs.envpool_adapter import EnvpoolAdapter

DISCOUNT = 0.5
"""That the answers are right for."""


STATES: dict[str, tuple[str, tuple[float, str], tuple[float, str]]] = {
    "action": ("action", (-1.0, "*"), (1.0, "*")),
    "other": ("other", (1.0, "*"), (-1.0, "*")),
    "later": ("later", (0.3, "*"), (0.0, "rich")),
    "sooner": ("sooner", (0.9, "*"), (0.0, "poor")),
    "cut": ("cut", (0.3, "*"), (0.0, "~rich")),
    "over": ("over", (0.3, "*"), (0.0, "*rich")),
    "rich": ("rich", (1.5, "*"), (1.5, "*")),
    "poor": ("poor", (1.0, "*"), (1.0, "*")),
    "asked 0": ("asked 0", (0.0, "recall 0"), (0.0, "recall 0")),
    "asked 1": ("asked 1", (0.0, "recall 1"), (0.0, "recall 1")),
    "recall 0": ("recall", (1.0, "*"), (-1.0, "*")),
    "recall 1": ("recall", (-1.0, "*"), (1.0, "*")),
}
"""By name: what is observed, and the reward and the next state of both actions. After a star the
episode is terminated, after a tilde truncated, and that state is seen at its end."""

ANSWERS = {
    "action": 1,  # the action matters
    "other": 0,  # and what is observed
    "later": 1,  # what comes later counts: 0.5 * 1.5 > 0.3
    "sooner": 0,  # but less: 0.5 * 1.0 < 0.9
    "cut": 1,  # bootstraps through truncation
    "over": 0,  # and not through termination
}
"""Right actions where the first observation is of this state."""

MEMORY = {"asked 0": 0, "asked 1": 1}
"""Right actions one step later, where what is observed is the same."""


class DiscretePool:
    """Some questions with envpool's interface and next-step resets: NumPy, a few us a step."""

    action_space: spaces.Space = spaces.Discrete(2)
    action_dtype: Any = np.int32

    def __init__(self, seeds: list[int], first_states: list[str]) -> None:
        self.config = {"num_envs": len(seeds), "batch_size": len(seeds), "max_num_players": 1}
        self.spec = SimpleNamespace(
            state_array_spec={"obs": SimpleNamespace(dtype=np.float32)},
            action_array_spec={"action": SimpleNamespace(dtype=self.action_dtype)},
        )
        self._seed = seeds[0]
        self._num_envs = len(seeds)
        self._prepare(first_states)

    def _prepare(self, first_states: list[str]) -> None:
        names = [*STATES, ""]  # the last is the end
        outcomes = [*(both for _, *both in STATES.values()), [(0.0, "*")] * 2]
        follows = np.array([[state for _, state in both] for both in outcomes])
        self._first = np.array([names.index(name) for name in first_states])
        self._reward = np.array([[reward for reward, _ in both] for both in outcomes], np.float32)
        self._terminated = np.char.startswith(follows, "*")
        self._truncated = np.char.startswith(follows, "~")
        self._next = np.vectorize(names.index)(np.char.lstrip(follows, "*~"))
        self._seen = np.concatenate([observations(), np.zeros((1, NUM_SEEN), np.float32)])

    @property
    def observation_space(self) -> spaces.Box:
        return spaces.Box(-1, 1, (NUM_SEEN,), np.float32)

    def reset(self) -> tuple:
        self._rng = np.random.default_rng(self._seed)  # so that it can all happen again
        self._state = self._rng.choice(self._first, self._num_envs)
        self._ended = np.zeros(self._num_envs, bool)
        return self._seen[self._state], self._info()

    def _info(self) -> dict:
        return {"env_id": np.arange(self._num_envs, dtype=np.int32)}

    def step(self, action: np.ndarray) -> tuple:
        state, anew = self._state, self._ended
        at = (state, action)
        reward = np.where(anew, 0, self._reward[at]).astype(np.float32)
        terminated, truncated = self._terminated[at] & ~anew, self._truncated[at] & ~anew
        first = self._rng.choice(self._first, self._num_envs)
        self._state = np.where(anew, first, self._next[at])
        self._ended = terminated | truncated
        return self._seen[self._state], reward, terminated, truncated, self._info()

    def close(self) -> None:
        pass


_SEEN = list(dict.fromkeys(seen for seen, *_ in STATES.values()))
NUM_SEEN = len(_SEEN)


def observations() -> np.ndarray:
    """Return what is observed in each state, ``[S, NUM_SEEN]``."""
    index = [_SEEN.index(seen) for seen, *_ in STATES.values()]
    return np.eye(NUM_SEEN, dtype=np.float32)[index]


TARGETS = np.array([-0.5, 0.5, -0.5, 0.5], np.float32)
"""Right actions of the continuous questions: two paid at once, two paid one step later."""


class ContinuousPool(DiscretePool):
    """An action must be the observation's; in half of the questions that is paid a step later."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)
    action_dtype = np.float32

    def _prepare(self, first_states: list[str]) -> None:
        del first_states

    @property
    def observation_space(self) -> spaces.Box:
        return spaces.Box(-1, 1, (6,), np.float32)

    def reset(self) -> tuple:
        self._rng = np.random.default_rng(self._seed)
        self._ended = np.ones(self._num_envs, bool)
        self._question = np.zeros(self._num_envs, int)
        self._paid_next = self._ended
        self._action = np.zeros(self._num_envs, np.float32)
        self._begin(self._ended)
        self._ended = ~self._ended
        return self._obs(), self._info()

    def _begin(self, which: np.ndarray) -> None:
        asked = self._rng.integers(4, size=self._num_envs)
        self._question = np.where(which, asked, self._question)
        self._paid_next = np.where(which, False, self._paid_next)
        self._action = np.where(which, 0.0, self._action).astype(np.float32)

    def _obs(self) -> np.ndarray:
        seen = np.eye(4, dtype=np.float32)[self._question]
        return np.column_stack([seen, self._paid_next, self._action]).astype(np.float32)

    def step(self, action: np.ndarray) -> tuple:
        anew, now = self._ended, self._question < 2
        given = np.where(self._paid_next, self._action, action[:, 0])
        pays = (now | self._paid_next) & ~anew
        error = np.abs(given - TARGETS[self._question])
        scale = np.where(now, 1.0, 1.0 / DISCOUNT)
        reward = np.where(pays, -scale * error, 0.0).astype(np.float32)
        self._action = given.astype(np.float32)
        self._paid_next = ~pays & ~anew
        self._begin(anew)
        self._ended = pays
        return self._obs(), reward, pays, np.zeros_like(pays), self._info()


class Questions:
    """A factory of vector environments that ask some of the questions."""

    def __init__(self, first_states: list[str]) -> None:
        """Ask these; none is continuous actions."""
        self.first_states = first_states

    def __call__(self, num_envs: int, seeds: list[int]) -> EnvpoolAdapter:
        pool = DiscretePool if self.first_states else ContinuousPool
        return EnvpoolAdapter(pool(seeds[:num_envs], self.first_states), name="questions")


LEAST_DISCOUNT, MOST_DISCOUNT = 0.4, 0.65
"""From the first on what comes later is clearly worth it; up to the second less is clearly less."""


def questions_for(
    actions: str, discount: float | None = None, remembers: bool = False
) -> Questions:
    """Return the questions whose answers are right for an agent with this discount, if it is known;
    one that ``remembers`` is also asked what it saw before."""
    if actions == "continuous":
        return Questions([])
    asked = ["action", "other", "over"]
    if discount is not None and discount >= LEAST_DISCOUNT:
        asked += ["later", "cut"]
        asked += ["sooner"] if discount <= MOST_DISCOUNT else []
    return Questions([*asked, *(MEMORY if remembers else ())])


def wrong_answers(policy: Any, first_states: list[str]) -> list[str]:
    """Return the questions to which ``policy`` has the wrong answer."""
    if not first_states:
        obs = np.pad(np.eye(4, dtype=np.float32), ((0, 0), (0, 2)))
        action = policy(obs)[0][:, 0]
        near = np.abs(action - TARGETS) < 0.2
        return [f"target {i}: {action[i]:.2f}" for i in range(4) if not near[i]]
    names = list(STATES)
    rows = [names.index(name) for name in first_states]
    action, state = policy(observations()[rows])
    answers = dict(zip(first_states, action.tolist(), strict=True))
    wrong = [n for n, right in ANSWERS.items() if n in answers and answers[n] != right]
    asked = [name for name in first_states if name in MEMORY]
    if asked:
        recall = observations()[[names.index("recall 0")] * len(rows)]
        answers = dict(zip(first_states, policy(recall, state)[0].tolist(), strict=True))
        wrong += [n for n in asked if answers[n] != MEMORY[n]]
    return wrong

"""One environment that is another of a set in each episode. Worker processes import this."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.factory import has_gymnasium_id, make_env_factory
from sebulba.envs.packages import is_package_id
from sebulba.errors import UsageError, shown

ENV, LONE = "sets_env", "sets_observation"
"""Parts of the observation: number of the environment, and the observation that has no parts."""
WEIGHTS = "weights"
"""Name in the options of a reset: the probability of each environment, ``[n]``."""


def maker_of(env: Any) -> Callable[[], gymnasium.Env]:
    """Return what makes a single environment.

    Args:
      env: What ``sebulba.make_env_factory`` takes, or a pair of that and its options.

    Raises:
      UsageError: It is unknown, or comes as vectors only.
    """
    options: Any = {}
    if isinstance(env, tuple | list):
        if len(env) != 2 or not isinstance(env[1], Mapping):
            raise UsageError(
                f"{shown(env)} must be an environment, or one and its options: "
                "('my_envs:Maze', {'level': 3})"
            )
        env, options = env
    if isinstance(env, str) and ":" not in env and not is_package_id(env) and has_gymnasium_id(env):
        options = {"backend": "gymnasium", **options}
    factory: Any = make_env_factory(env, **options)
    if factory.make_one is None:
        raise UsageError(
            f"env={shown(env)} comes as vectors only, and a set draws single environments of "
            "Gymnasium; use such an id, or 'module:attribute'"
        )
    return functools.partial(_made, env, dict(options))


def _made(env: Any, options: dict[str, Any]) -> gymnasium.Env:
    factory: Any = make_env_factory(env, **options)
    return factory.make_one()


class SetEnv(gymnasium.Env):
    """Draws an environment at each reset, from the seed and the number of the episode alone.

    An environment is made when it is first drawn, so one of probability 0 never is.
    """

    def __init__(self, names: Sequence[str], makers: Sequence[Callable[[], gymnasium.Env]]) -> None:
        """Make the first, whose spaces the others must have."""
        self._names, self._makers = names, makers
        self._made: dict[int, gymnasium.Env] = {}
        self._seed: int | None = None
        self._episode = 0
        self._number = 0
        self._weights: list[float] | None = None
        first = self._env(0)
        self.metadata, self.render_mode = first.metadata, first.render_mode
        space, self.action_space = first.observation_space, first.action_space
        self._is_dict = isinstance(space, spaces.Dict)
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {LONE: space}
        self.observation_space = spaces.Dict({**parts, ENV: spaces.Discrete(len(names))})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Draw an environment by ``options["weights"]``, or as before; begin an episode of it."""
        self._weights = (options or {}).get(WEIGHTS, self._weights)
        if seed is not None or self._seed is None:
            self._seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed
            self._episode = 0
        rng = np.random.default_rng([self._seed, self._episode])
        self._episode += 1
        self._number = int(rng.choice(len(self._names), p=self._weights))
        obs, info = self._env(self._number).reset(seed=int(rng.integers(2**31)))
        return self._seen(obs), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict]:
        """Act in the environment of this episode."""
        obs, *rest = self._made[self._number].step(action)
        return self._seen(obs), *rest  # type: ignore[return-value]

    def render(self) -> Any:
        return self._env(self._number).render()

    def close(self) -> None:
        for env in self._made.values():
            env.close()

    def _seen(self, obs: Any) -> dict[str, Any]:
        parts = obs if self._is_dict else {LONE: obs}
        return {**parts, ENV: self._number}

    def _env(self, number: int) -> gymnasium.Env:
        if number not in self._made:
            env = self._made[number] = self._makers[number]()
            first = self._made[min(self._made)]
            for name in ("observation_space", "action_space"):
                own, expected = getattr(env, name), getattr(first, name)
                if own != expected:
                    raise UsageError(
                        f"{name}={own} of {self._names[number]!r} is not {expected} of "
                        f"{self._names[min(self._made)]!r}; environments of a set have equal "
                        "spaces: pad them, or leave one out"
                    )
        return self._made[number]

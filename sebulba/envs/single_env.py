"""One environment of any backend as a ``gymnasium.Env``, for a loop of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import jax
import numpy as np

from sebulba.envs.policy_view import as_played
from sebulba.errors import UsageError, shown
from sebulba.types import EnvAdapter, EnvFactory, EnvOutput, FinalObs, MultiAgentSpec, PyTree

MOST_SEED = 2**31 - 1
"""Greatest seed that every backend takes."""


class SingleEnv(gymnasium.Env):
    """What training sees of an environment, one episode after the other.

    Rewards are those before any clipping, and an episode is a whole game: it does not end with a
    life.
    """

    metadata = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        factory: EnvFactory,
        *,
        render_mode: str | None = None,
        screen: Any = None,
    ) -> None:
        """Make the environment.

        Args:
          factory: Makes adapters of one environment; adapters that draw for a ``render_mode``.
          render_mode: None, ``"rgb_array"`` or ``"human"``.
          screen: Shows the picture of each step in the mode ``"human"``; ``close`` closes it. See
            ``sebulba.video.screens``.

        Raises:
          UsageError: The environment has many agents, or cannot draw.
        """
        self._factory = factory
        self._screen = screen
        self.render_mode = render_mode
        self._adapter: Any = self._made(int(self.np_random.integers(MOST_SEED)))
        try:
            self._check()
        except UsageError:
            self.close()
            raise
        spec = self._adapter.spec
        self.observation_space = spec.observation_space
        self.action_space = spec.action_space
        self._plays = False
        """An episode has begun and not ended."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[PyTree, dict[str, Any]]:
        """Begin an episode.

        Args:
          seed: From 0 to 2**31 - 1: the environment is made again with it. None goes on.
          options: Must be None or empty: vector environments take none.

        Returns:
          The observation, and no infos.

        Raises:
          UsageError: The seed is out of range, or there are options.
        """
        if options:
            raise UsageError(
                f"options={shown(options)} cannot be given to reset; give them when the "
                "environment is made, or leave them out"
            )
        if seed is not None and not 0 <= seed <= MOST_SEED:
            raise UsageError(f"seed={seed} must be from 0 to {MOST_SEED}; use 0")
        super().reset(seed=seed)
        if seed is not None:
            self._close_adapter()
            self._adapter = self._made(seed)
        output = self._open().reset()
        self._plays = True
        self._draw()
        return _first_row(output.obs), {}

    def step(self, action: Any) -> tuple[PyTree, float, bool, bool, dict[str, Any]]:
        """Act.

        Args:
          action: Of ``action_space``.

        Returns:
          Observation, reward before clipping, whether the episode ended in a terminal state,
          whether it ended by a limit, and no infos.

        Raises:
          UsageError: No episode has begun, or it has ended.
          ActionError: The action is not of the space.
          EnvError: The environment failed.
        """
        adapter = self._open()
        if not self._plays:
            raise UsageError("no episode runs: call reset() before the first step of each episode")
        output: EnvOutput = adapter.step(np.asarray(action, self.action_space.dtype)[None])
        is_over = bool(output.episode_end[0])
        terminated = is_over and bool(output.terminated[0])
        self._plays = not is_over
        self._draw()
        reward = float(output.unclipped_reward[0])
        return _last_obs(output), reward, terminated, is_over and not terminated, {}

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        """Return the picture, ``[height, width, 3]`` uint8; None but in the mode ``rgb_array``."""
        return self._open().pictures()[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Close the environment and its screen."""
        self._close_adapter()
        self._close_screen()

    def _check(self) -> None:
        """Raise UsageError if this is no environment of one agent, or cannot draw and should."""
        name = self._adapter.spec.name
        if isinstance(self._adapter.spec, MultiAgentSpec):
            raise UsageError(
                f"{name!r} has many agents, and a gymnasium.Env has one; play it by "
                "sebulba.evaluate"
            )
        if self.render_mode is not None and not hasattr(self._adapter, "pictures"):
            raise UsageError(
                f"{name!r} cannot draw itself, so render_mode={self.render_mode!r} is not for it; "
                "leave it out"
            )

    def _close_adapter(self) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.close()

    def _close_screen(self) -> None:
        screen, self._screen = self._screen, None
        if screen is not None:
            screen.__exit__(None, None, None)

    def _made(self, seed: int) -> EnvAdapter:
        return as_played(self._factory(1, [seed]))

    def _open(self) -> Any:
        if self._adapter is None:
            raise UsageError("the environment is closed; reset(seed=...) makes it again")
        return self._adapter

    def _draw(self) -> None:
        if self._screen is None:
            return
        if not self._screen.show(self._open().pictures()[0], self._open().spec.name):
            self._close_screen()  # somebody closed the window: nobody watches any more


def _first_row(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.asarray(x)[0], tree)


def _last_obs(output: EnvOutput) -> PyTree:
    """Return the observation of this episode, though the next may have begun in the same row."""
    final = output.final
    if isinstance(final, FinalObs) and bool(final.given[0]):
        return _first_row(final.obs)
    return _first_row(output.obs)

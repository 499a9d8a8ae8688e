"""The environment that is checked, and ways to play it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from sebulba.envs.factory import make_env_factory
from sebulba.envs.seeds import seed_block
from sebulba.errors import UsageError
from sebulba.tools.check.env_players import Fingerprint, Player, SinglePlayer, close_quietly, play
from sebulba.tools.check.env_walk import Walk
from sebulba.types import EnvAdapter, EnvFactory

WALK_SHARE = 0.2
"""Share of a check's deadline that one walk may take; a check plays up to three times."""


class Subject:
    """An environment, the way to make it, and how it is played."""

    def __init__(
        self,
        env: Any,
        *,
        num_envs: int,
        num_steps: int,
        seed: int,
        timeout_s: float,
        options: dict[str, Any],
    ) -> None:
        """Make the environment's factory.

        The arguments are those of ``check_env``; ``options`` are its options.

        Raises:
          UsageError: ``make_env_factory`` refuses its arguments, or a number is too small.
        """
        for name, value in (("num_envs", num_envs), ("num_steps", num_steps)):
            if value < 1:
                raise UsageError(f"{name}={value} must be at least 1; use 4 and 500, for example")
        self._env, self._options = env, options
        self.factory: EnvFactory = make_env_factory(env, **options)
        self.make_one: Callable[[], Any] | None = getattr(self.factory, "make_one", None)
        """Makes a single environment; None if only a vector can be made."""
        self.num_envs = num_envs
        self.num_steps = num_steps
        self._seed = seed
        self.longest_s = WALK_SHARE * timeout_s
        """Longest time of a walk, in seconds."""

    @functools.cached_property
    def plays_one(self) -> bool:
        """A player is a single environment; otherwise, and with many agents, it is a vector."""
        if self.make_one is None:
            return False
        player = SinglePlayer(self.make_one, self._seeds(0)[0])
        close_quietly(player)
        return not player.is_population

    @property
    def action_mask(self) -> str | None:
        """Where the mask of legal actions is that is heeded; None for nowhere."""
        return self._options.get("action_mask")

    @property
    def num_played(self) -> int:
        """Number of environments of a player."""
        return 1 if self.plays_one else self.num_envs

    def make_vector(self, shift: int = 0) -> EnvAdapter:
        """Make a vector environment; another ``shift`` gives it other seeds."""
        return self.factory(self.num_envs, self._seeds(shift))

    def make_player(self, shift: int = 0) -> Player:
        """Make a single environment if that is possible, else a vector."""
        if self.plays_one and self.make_one:
            return SinglePlayer(self.make_one, self._seeds(shift)[0])
        return self.make_vector(shift)

    def _seeds(self, shift: int) -> list[int]:
        return seed_block(
            self._seed, inferencer=shift, num_inferencers=shift + 1, num_envs=self.num_envs
        )

    @contextlib.contextmanager
    def playing(self, shift: int = 0) -> Iterator[Player]:
        """Make a player, and close it quietly afterwards."""
        player = self.make_player(shift)
        try:
            yield player
        finally:
            close_quietly(player)

    def async_factory(self) -> EnvFactory:
        """Return the factory of the same environment in worker processes."""
        return make_env_factory(self._env, **{**self._options, "vectorization": "async"})

    @functools.cached_property
    def walk(self) -> Walk:
        """The record of one walk through the environment."""
        with self.playing() as player:
            return Walk(player, self.num_played).run(self.num_steps, self._seed, self.longest_s)

    @property
    def num_compared(self) -> int:
        """Steps of a comparison, as many as there is time for at the speed of the walk."""
        most = self.longest_s / max(self.walk.step_s, 1e-6)
        return max(1, min(self.num_steps, int(most)))

    def play(self, shift: int = 0, *, company: bool = False) -> list[Fingerprint]:
        """Play for a comparison, in company with another player if asked; see ``play``."""
        with contextlib.ExitStack() as stack:
            player = stack.enter_context(self.playing(shift))
            other = stack.enter_context(self.playing(shift + 1)) if company else None
            return play(player, other, self.num_played, self.num_compared)

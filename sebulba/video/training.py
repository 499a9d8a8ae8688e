"""Films made while a run trains, of the networks that were just evaluated."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

from sebulba.agent import Agent
from sebulba.errors import text_of
from sebulba.policies.policy import Policy
from sebulba.types import EnvFactory, PyTree
from sebulba.video.film import check_film_file, make_film
from sebulba.video.rendering import Stage, Stopped

DIGITS = 12
"""Of the environment steps in the name of a film, so that names sort."""


class TrainingFilms:
    """Films an episode whenever training has passed a multiple of some environment steps.

    A film that cannot be made warns, since nothing else depends on it. ``close()`` frees the
    environment.
    """

    def __init__(
        self,
        agent: Agent,
        factory: EnvFactory,
        folder: Path,
        every_env_steps: int,
        *,
        seed: int,
        max_episode_steps: int,
    ) -> None:
        """Make the environment, by a ``drawing_factory``, and see that it draws, so that a run does
        not begin in vain. ``folder`` is made with its first film, ``ENV_STEPS.mp4``.

        Raises:
          UsageError: The environment cannot draw, or ffmpeg is missing.
        """
        check_film_file(Path("film.mp4"))
        self._policy = Policy(agent, None, seed=seed)
        self._stage = Stage(factory, 1, seed)
        self._folder = folder
        self._every_env_steps = every_env_steps
        self._max_episode_steps = max_episode_steps
        self._filmed_at = max(map(_env_steps, folder.glob("*.mp4")), default=0)

    def __call__(self, networks: PyTree, env_steps: int, stop: threading.Event) -> None:
        """Film these acting networks, if a film is due, until ``stop`` is set."""
        every = self._every_env_steps
        if env_steps // every <= self._filmed_at // every or stop.is_set():
            return
        self._filmed_at = env_steps
        self._policy.acting_networks = networks
        file = self._folder / f"{env_steps:0{DIGITS}}.mp4"
        try:
            self._folder.mkdir(exist_ok=True)
            most = self._max_episode_steps
            make_film(self._policy, self._stage, file, max_episode_steps=most, stop=stop)
        except Stopped:
            return
        except Exception as error:  # an environment that draws may raise anything
            warnings.warn(f"no film at {env_steps:,} env steps: {text_of(error)}", stacklevel=2)

    def close(self) -> None:
        """Free the environment."""
        self._stage.adapter.close()


def _env_steps(file: Path) -> int:
    return int(file.stem) if file.stem.isdecimal() else 0

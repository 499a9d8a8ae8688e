"""Trained policies that come with the package. Free of JAX.

``pretrained:NAME`` stands for the folder of one wherever a run is read. Such a folder is that of a
run with what is needed to play: ``config.json``, ``policy/`` and ``evaluation.json``, what the
policy returned. None is signed, so none can name code but that of Sebulba (``support/trust.py``).
``python -m benchmarks.studies.make_pretrained`` trains them again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from sebulba.errors import UsageError, shown
from sebulba.support.files import read_json_object

PREFIX = "pretrained:"
FOLDER = Path(__file__).parent / "trained"
EVALUATION_FILE = "evaluation.json"


class Pretrained(NamedTuple):
    """What is known of a policy that comes with the package."""

    name: str
    """It is loaded as ``pretrained:NAME``."""
    env_id: str
    """Environment."""
    agent: str
    """Class of the agent, such as PPO."""
    episode_return_mean: float
    """Of the evaluation policy."""
    episode_return_std: float
    """Standard deviation of the returns of its episodes."""
    num_episodes: int
    """How many episodes were played."""
    env_steps: int
    """Environment steps that it was trained for."""
    versions: dict[str, str]
    """Of what trained it, such as sebulba, jax and envpool."""
    command: tuple[str, ...]
    """The words that trained it."""


def names() -> list[str]:
    """Return the names of the policies that come with the package."""
    return sorted(path.name for path in FOLDER.iterdir() if (path / EVALUATION_FILE).is_file())


def is_pretrained(run: str | Path) -> bool:
    """Tell whether this stands for a policy that comes with the package, and for no folder."""
    return os.fspath(run).startswith(PREFIX)


def folder_of(run: str | Path) -> Path:
    """Return the folder that is meant: that of ``pretrained:NAME``, or ``run`` itself.

    Raises:
      UsageError: There is no policy of that name.
    """
    if not is_pretrained(run):
        return Path(run)
    name = os.fspath(run).removeprefix(PREFIX)
    if name not in (known := names()):
        raise UsageError(f"{PREFIX}{shown(name)} is unknown; use {PREFIX} and {', '.join(known)}")
    return FOLDER / name


def beside(run: str | Path, name: str) -> Path:
    """Return where a file of a run goes: into its folder, or here for what comes along."""
    folder = folder_of(run)
    return Path(f"{folder.name}-{name}") if is_pretrained(run) else folder / name


def about(name: str) -> Pretrained:
    """Return what is known of a policy that comes with the package.

    Raises:
      UsageError: There is no policy of that name.
    """
    folder = folder_of(f"{PREFIX}{name}")
    run, evaluation = (read_json_object(folder / file) for file in ("config.json", EVALUATION_FILE))
    return Pretrained(
        name=name,
        env_id=run["env"]["id"],
        agent=run["agent_config"].removesuffix("Config"),
        episode_return_mean=evaluation["episode_return_mean"],
        episode_return_std=evaluation["episode_return_std"],
        num_episodes=evaluation["num_episodes"],
        env_steps=evaluation["env_steps"],
        versions=evaluation["versions"],
        command=tuple(run["command"]),
    )

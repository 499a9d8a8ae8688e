"""The environment of a run, for a loop of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sebulba.envs import make_env_factory
from sebulba.envs.single_env import SingleEnv
from sebulba.errors import UsageError, shown
from sebulba.policies.pretrained import folder_of
from sebulba.runs.folder import RunFolder

RenderMode = Literal["human", "rgb_array"]


def load_env(
    run: str | Path, *, render_mode: RenderMode | None = None, trust: bool = False
) -> SingleEnv:
    """Make one environment as a run was trained in: its id, options, wrappers and backend.

    ``sebulba.load_policy`` of the same run acts in it.

    Args:
      run: Folder of the run, or ``pretrained:NAME``.
      render_mode: ``"rgb_array"`` lets ``render()`` return pictures, ``"human"`` shows each step in
        a window.
      trust: Import the environment that it names whoever wrote it; see ``load_policy``.

    Returns:
      A ``gymnasium.Env``.

    Raises:
      UsageError: The folder is not that of a run, is not to be trusted, or the environment has many
        agents, cannot be made, or cannot draw.
    """
    if render_mode not in (None, "human", "rgb_array"):
        raise UsageError(
            f"render_mode={shown(render_mode)} must be None, 'human' or 'rgb_array'; use "
            "'rgb_array'"
        )
    folder = RunFolder(folder_of(run))
    record = folder.record()
    env = folder.read_env_config(folder.trust(trust, record), record)
    if render_mode is None:
        return SingleEnv(make_env_factory(env.id, **env.factory_arguments()))
    from sebulba.video.rendering import drawing_factory
    from sebulba.video.screens import open_screen

    screen = open_screen("window") if render_mode == "human" else None
    return SingleEnv(drawing_factory(env), render_mode=render_mode, screen=screen)

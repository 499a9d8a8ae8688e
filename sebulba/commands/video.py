"""``sebulba video`` and ``sebulba watch``: their options."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba.commands.episode_progress import EpisodeProgress
from sebulba.commands.playing import check_playing, open_played_run, playing_parser
from sebulba.errors import UsageError
from sebulba.policies.pretrained import beside

if TYPE_CHECKING:
    from sebulba.policies.policy import Policy
    from sebulba.video.rendering import Stage
    from sebulba.video.screens import Screen

MOST_EPISODES = 64
"""Most episodes that are filmed side by side."""


def video(argv: list[str]) -> int:
    """Film the policy of a run; returns the exit code."""
    parser = _parser(
        "sebulba video",
        "Film the trained policy of a run: the best of several episodes, or all in a grid.",
        episodes=4,
    )
    parser.add_argument(
        "--out", metavar="FILE", help="film to write, .mp4 or .gif; default: RUN/video.mp4"
    )
    parser.add_argument("--grid", action="store_true", help="show all episodes in a grid")
    arguments = parser.parse_args(argv)
    _check(arguments)
    from sebulba.video.film import check_film_file, film_best, film_grid

    file = Path(arguments.out or beside(arguments.run, "video.mp4"))
    with (
        _policy_on_stage(arguments, arguments.episodes, lambda: check_film_file(file)) as (
            policy,
            stage,
        ),
        # Where software draws, 1000 steps take a minute or more.
        EpisodeProgress(arguments.episodes, sys.stderr) as progress,
    ):
        film = (film_grid if arguments.grid else film_best)(
            policy,
            stage,
            file,
            max_episode_steps=arguments.max_episode_steps,
            per_second=arguments.fps,
            progress=progress,
        )
    returns = ", ".join(f"{one:.2f}" for one in film.returns)
    kept = "" if arguments.grid or len(film.returns) == 1 else f", best {max(film.returns):.2f}"
    cut = f"; {film.num_cut} cut at {arguments.max_episode_steps:,} steps" if film.num_cut else ""
    print(
        f"written: {film.file} ({film.file.stat().st_size / 1000:,.0f} kB, {film.num_pictures:,} "
        f"pictures, {film.num_pictures / film.per_second:.1f} s)\nreturns {returns}{kept}{cut}"
    )
    return 0


def watch(argv: list[str]) -> int:
    """Show the policy of a run as it plays; returns the exit code.

    The arguments are those of ``video``.
    """
    parser = _parser(
        "sebulba watch",
        "Watch the trained policy of a run in a window or, without a display, in the terminal. "
        "Ctrl-C ends it.",
        episodes=3,
    )
    parser.add_argument(
        "--on", choices=("window", "terminal"), help="default: the window, if there is a display"
    )
    arguments = parser.parse_args(argv)
    _check(arguments)
    from sebulba.video.screens import open_screen

    returns: list[float] = []
    with (
        _policy_on_stage(arguments, 1) as (policy, stage),
        open_screen(arguments.on) as screen,
        contextlib.suppress(KeyboardInterrupt),  # the usual end
    ):
        _watch(policy, stage, screen, arguments, returns)
    if returns:
        print("returns " + ", ".join(f"{one:.2f}" for one in returns))
    return 0


def _watch(
    policy: Policy,
    stage: Stage,
    screen: Screen,
    arguments: argparse.Namespace,
    returns: list[float],
) -> None:
    """Show episode after episode, and note what each returned."""
    from sebulba.video.screens import Pace

    pace = Pace(arguments.fps or stage.per_second)
    for episode in range(arguments.episodes):
        for seen in stage.play(policy, arguments.max_episode_steps):
            caption = (
                f"episode {episode + 1} of {arguments.episodes}, step {seen.lengths[0]:,}, return "
                f"{seen.returns[0]:.2f}"
            )
            if not screen.show(seen.pictures[0], caption):
                return
            pace.wait()
        returns.append(float(seen.returns[0]))


def _parser(prog: str, description: str, episodes: int) -> argparse.ArgumentParser:
    parser = playing_parser(prog, description, episodes)
    parser.add_argument(
        "--fps", type=float, metavar="X", help="frames per second; default: the environment's"
    )
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for numbers that are out of range."""
    if not 1 <= arguments.episodes <= MOST_EPISODES:
        raise UsageError(f"episodes={arguments.episodes} must be from 1 to {MOST_EPISODES}; use 4")
    check_playing(arguments)
    if arguments.fps is not None and not 0.1 <= arguments.fps <= 1000:
        raise UsageError(f"fps={arguments.fps} must be from 0.1 to 1000; use 30")


@contextlib.contextmanager
def _policy_on_stage(
    arguments: argparse.Namespace,
    num_envs: int,
    check: Callable[[], object] = lambda: None,
) -> Any:
    """Load the policy of the run, and make environments that draw; ``check`` comes before."""
    folder, env = open_played_run(arguments, check)
    from sebulba.runs.build import load_policy_of
    from sebulba.video.rendering import Stage, drawing_factory

    policy = load_policy_of(
        folder,
        explore=arguments.explore,
        best=arguments.best,
        seed=arguments.seed,
        trust=arguments.trust,
        platform=arguments.platform,
    )
    with Stage(drawing_factory(env), num_envs, arguments.seed) as stage:
        yield policy, stage

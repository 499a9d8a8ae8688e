"""``sebulba eval``: play the trained policy of a run. Free of JAX until it plays."""

from __future__ import annotations

import sys
from pathlib import Path

from sebulba.commands.playing import check_playing, open_played_run, playing_parser
from sebulba.errors import UsageError
from sebulba.runs.exit_codes import EXIT_OK
from sebulba.support.files import write_json


def evaluate(argv: list[str]) -> int:
    """Play a policy as the words say; returns the exit code."""
    parser = playing_parser(
        "sebulba eval", "Play the trained policy of a run and print its return.", episodes=100
    )
    parser.add_argument("--num-envs", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write the result to FILE")
    arguments = parser.parse_args(argv)
    _check_folder_of("--json", arguments.json)
    check_playing(arguments)
    if arguments.num_envs < 1:
        raise UsageError(f"num_envs={arguments.num_envs} must be at least 1; use 1 or more")
    folder, env = open_played_run(arguments)
    from sebulba.commands.episode_progress import EpisodeProgress
    from sebulba.runs.build import evaluate_run

    with EpisodeProgress(arguments.episodes, sys.stderr) as progress:
        evaluation = evaluate_run(
            folder,
            env,
            num_episodes=arguments.episodes,
            num_envs=arguments.num_envs,
            seed=arguments.seed,
            max_episode_steps=arguments.max_episode_steps,
            progress=progress,
            explore=arguments.explore,
            best=arguments.best,
            trust=arguments.trust,
            platform=arguments.platform,
        )
    print(evaluation)
    if arguments.json is not None:
        write_json(arguments.json, evaluation.record())
    return EXIT_OK


def _check_folder_of(option: str, file: str | None) -> None:
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise UsageError(f"{option} {file} is in a folder that does not exist; make it")

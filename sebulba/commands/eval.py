"""``sebulba eval``: play the trained policy of a run. Free of JAX until it plays."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sebulba.errors import UsageError
from sebulba.options import INT32, MOST_EPISODE_STEPS
from sebulba.policies.pretrained import folder_of
from sebulba.runs.exit_codes import EXIT_OK
from sebulba.runs.folder import RunFolder
from sebulba.support.files import write_json
from sebulba.support.user_code import import_from_here


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sebulba eval", description="Play the trained policy of a run and print its return."
    )
    parser.add_argument(
        "run", metavar="RUN", help="folder of the run, such as runs/NAME, or pretrained:NAME"
    )
    parser.add_argument("--episodes", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--num-envs", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--max-episode-steps",
        type=int,
        default=MOST_EPISODE_STEPS,
        metavar="N",
        help="cut an episode that has not ended after N steps; default: %(default)s",
    )
    parser.add_argument(
        "--explore", action="store_true", help="sample actions as in training, not the best ones"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="the policy that returned most in an evaluation during training, not the last",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result there")
    parser.add_argument(
        "--trust", action="store_true", help="run the code that a run of somebody else names"
    )
    parser.add_argument("--platform", choices=("cpu", "cuda", "tpu"), help="what JAX runs on")
    return parser


def evaluate(argv: list[str]) -> int:
    """Play a policy as the words say; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.seed not in INT32:
        raise UsageError(f"seed={arguments.seed} must be a 32-bit integer, such as 1")
    _check_folder_of("--json", arguments.json)
    for name in ("episodes", "num_envs", "max_episode_steps"):
        if (value := getattr(arguments, name)) < 1:
            raise UsageError(f"{name}={value} must be at least 1; use 1 or more")

    folder = RunFolder(folder_of(arguments.run))
    record = folder.record()  # once: nobody can exchange it between the check and its use
    trust = folder.trust(arguments.trust, record)
    env = folder.read_env_config(trust, record)
    if trust.is_trusted:
        import_from_here()
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

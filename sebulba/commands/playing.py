"""What commands share that play a trained policy: ``eval``, ``video``, ``watch``. Free of JAX."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from sebulba.configs.experiment import EnvConfig
from sebulba.errors import UsageError
from sebulba.options import INT32, MOST_EPISODE_STEPS
from sebulba.policies.pretrained import folder_of
from sebulba.runs.folder import RunFolder
from sebulba.support.user_code import import_from_here


def playing_parser(prog: str, description: str, episodes: int) -> argparse.ArgumentParser:
    """Return a parser of the run, the episodes and the policy; ``episodes`` is how many."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "run", metavar="RUN", help="folder of the run, such as runs/NAME, or pretrained:NAME"
    )
    parser.add_argument(
        "--episodes", type=int, default=episodes, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--max-episode-steps",
        type=int,
        default=MOST_EPISODE_STEPS,
        metavar="N",
        help="cut episodes after N steps; default: %(default)s",
    )
    parser.add_argument(
        "--explore",
        action="store_true",
        help="sample actions as in training, instead of the most probable ones",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="the policy with the highest evaluation return, not the last one",
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the code that an untrusted run names"
    )
    parser.add_argument("--platform", choices=("cpu", "cuda", "tpu"), help="platform of JAX")
    return parser


def check_playing(arguments: argparse.Namespace) -> None:
    """Raise UsageError for numbers of ``playing_parser`` that are out of range."""
    if arguments.seed not in INT32:
        raise UsageError(f"seed={arguments.seed} must be a 32-bit integer, such as 1")
    for name in ("episodes", "max_episode_steps"):
        if (value := getattr(arguments, name)) < 1:
            raise UsageError(f"{name}={value} must be at least 1; use 1 or more")


def open_played_run(
    arguments: argparse.Namespace, check: Callable[[], object] = lambda: None
) -> tuple[RunFolder, EnvConfig]:
    """Return the folder of the run and its environment; what it names may be imported from here.

    Args:
      arguments: Of ``playing_parser``.
      check: Called once the run was found, before it is trusted.

    Raises:
      UsageError: There is no such run, or it names code and is not trusted.
    """
    folder = RunFolder(folder_of(arguments.run))
    record = folder.record()  # once: nobody can exchange it between the check and its use
    check()
    trust = folder.trust(arguments.trust, record)
    env = folder.read_env_config(trust, record)
    if trust.is_trusted:
        import_from_here()
    return folder, env

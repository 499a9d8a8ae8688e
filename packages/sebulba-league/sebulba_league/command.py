"""``sebulba league RUN``: what a run knows of its opponents, and who of them beats whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sebulba.commands.options import TRUST, flag, json_of, number, option, parse
from sebulba.runs.api import open_run
from sebulba.runs.exit_codes import EXIT_OK
from sebulba.support.checks import at_least
from sebulba.support.files import check_folder_of, write_json
from sebulba_league.config import LeagueConfig
from sebulba_league.history import newest_checkpoint, read_history
from sebulba_league.ratings import elo
from sebulba_league.table import print_ratings, print_rows, record_of, rows_of, snapshots_of

if TYPE_CHECKING:
    from sebulba.checkpoints.checkpointer import Checkpoint
    from sebulba.configs.experiment import ExperimentConfig
    from sebulba.runs.folder import RunFolder

GAMES = 100
"""Games of a pair and seat in a cross-play where nothing else is said."""
NOW = "now"
"""The learner at the end of the run, among the players of a cross-play."""


def main(argv: Sequence[str]) -> int:
    """Print the table of a league, and have its snapshots play each other; return the exit code."""
    arguments = parse(
        "league",
        "Show whom the learner of a run beats, from which seat, and whom it meets next.",
        argv,
        (
            option("run", "folder of the run", metavar="RUN"),
            flag(
                "--cross-play", f"let all snapshots play each other, {GAMES} games a pair and seat"
            ),
            number("--games", 0, "the same with N games"),
            number("--seed", 1, "of these games"),
            option("--picture", "also draw it into FILE", metavar="FILE.png"),
            json_of("the table"),
            TRUST,
        ),
    )
    at_least(0, "games", arguments.games)
    if arguments.cross_play and not arguments.games:
        arguments.games = GAMES
    check_folder_of(arguments.picture, "--picture")
    folder, _, (_, config) = open_run(arguments.run, trust=arguments.trust)
    checkpoint = newest_checkpoint(folder, config, trust=arguments.trust)
    assert isinstance(config.agent, LeagueConfig)
    rows = rows_of(config.agent, checkpoint.snapshot.arrays)
    title = f"{folder.path.name} after {checkpoint.env_steps:,} env steps"
    print_rows(rows, title)
    record: dict[str, Any] = {"opponents": [record_of(row) for row in rows]}
    if not arguments.games and arguments.picture:
        from sebulba.metrics.plots import read_records
        from sebulba_league.pictures import draw_league

        arrays = checkpoint.snapshot.arrays
        payoff = snapshots_of(arrays["lasting/generation"], arrays["lasting/payoff"])
        draw_league(rows, payoff, read_records(folder.metrics), arguments.picture, title)
    if arguments.games:
        record["cross_play"] = _cross_play(folder, config, checkpoint, arguments)
    if arguments.json:
        write_json(arguments.json, record)
    return EXIT_OK


def _cross_play(
    folder: RunFolder, config: ExperimentConfig, checkpoint: Checkpoint, arguments: Any
) -> dict[str, Any]:
    """Play, print and draw; return what JSON keeps."""
    import jax
    import numpy as np

    from sebulba.envs import env_spec, make_env_factory
    from sebulba.policies.policy import load_policy
    from sebulba_league.cross_play import cross_play
    from sebulba_league.pictures import draw_cross_play

    factory: Any = make_env_factory(config.env.id, **config.env.factory_arguments())
    league, generations, players = read_history(config, env_spec(factory), checkpoint)
    names = [f"#{generation}" for generation in generations]
    if folder.policy.is_dir():
        now = load_policy(folder.policy, trust=arguments.trust).acting_networks
        players = jax.tree.map(
            lambda x, one: np.concatenate([x, np.asarray(one)[None]]), players, now
        )
        names.append(NOW)
    results = cross_play(league, players, factory, games=arguments.games, seed=arguments.seed)
    ratings, margins = elo(results)
    print_ratings(names, ratings, margins)
    if arguments.picture:
        draw_cross_play(names, results, ratings, margins, arguments.picture)
    return {
        "players": names,
        "results": results.tolist(),
        "elo": ratings.tolist(),
        "elo_interval_95": margins.tolist(),
    }

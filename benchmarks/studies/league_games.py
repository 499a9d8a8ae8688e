"""Leagues in poker, by exact NashConv: ``python -m benchmarks.studies.league_games kuhn-league``.

It trains three seeds of each row of ``ROWS`` and prints a Markdown table. The mixture of the
history is the strategy of a player who draws a snapshot before each game: the mean of behaviour
weighted by the player's own chance to come where it is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from sebulba_league.config import LeagueConfig
from sebulba_league.history import newest_checkpoint, read_history
from sebulba_league.table import rows_of

import sebulba
from benchmarks.studies import games
from benchmarks.studies.tables import table
from sebulba.agents.configs import OptimizerConfig, PPOConfig
from sebulba.configs.presets import PRESETS
from sebulba.envs import env_spec, make_env_factory
from sebulba.envs.multi.envpool_games import PLAYER
from sebulba.policies.policy import Policy, load_policy
from sebulba.runs.api import open_run

RULES: Mapping[str, games.Poker] = {"kuhn-league": games.KUHN, "leduc-league": games.LEDUC}
"""By preset."""
LAST, EQUAL, LINEAR, SQUARE = "last policy", "equal weights", "linear weights", "square weights"
META = "meta-strategy"
"""Figures: the last policy, and mixtures. Linear weights are the numbers of the snapshots, from 1,
and square ones their squares, as in Brown and Sandholm 2019, arXiv 1809.04040. Those of the
meta-strategy are an equilibrium of the snapshots."""
POWERS = {EQUAL: 0, LINEAR: 1, SQUARE: 2}
FIGURES = (LAST, *POWERS, META)


def mixture(
    rules: games.Poker,
    players: Sequence[dict[tuple, np.ndarray]],
    weights: Sequence[float] | np.ndarray,
) -> dict[tuple, np.ndarray]:
    """Return the behaviour of a player who draws one of ``players`` before each game.

    Kuhn 1953, "Extensive games and the problem of information": a mixture in sequence form.
    """
    mixed: dict[tuple, np.ndarray] = {}
    rest = [(hand, np.array([weights, weights], np.float64)) for hand in rules.deals]
    while rest:
        hand, reach = rest.pop()  # [seat, player]: the chance that its own actions lead here
        if hand.payoff is not None:
            continue
        key = hand.mover, *rules.seen(hand, hand.mover)
        own = np.stack([chances[key] for chances in players])
        total = reach[hand.mover] @ own
        mixed[key] = total / max(total.sum(), 1e-300)
        for action in rules.legal(hand):
            after = reach.copy()
            after[hand.mover] *= own[:, action]
            rest.append((rules.after(hand, action), after))
    return mixed


def figures_of(rules: games.Poker, run: str | Path) -> dict[str, float]:
    """Return the NashConv of the last policy of a league's run, and of mixtures of its history."""
    folder, _, (_, config) = open_run(run, trust=False)
    checkpoint = newest_checkpoint(folder, config, trust=False)
    league_config: Any = config.agent
    arrays = checkpoint.snapshot.arrays
    factory: Any = make_env_factory(config.env.id, **config.env.factory_arguments())
    league, generations, networks = read_history(config, env_spec(factory), checkpoint)
    player: Any = league.player
    alone = player.members[PLAYER].agent
    players = [
        _chances(rules, Policy(alone, jax.tree.map(lambda x, i=i: x[i], networks[PLAYER])))
        for i in range(len(generations))
    ]
    last: Any = load_policy(folder.policy / PLAYER)
    number = np.array(generations) + 1.0
    mixtures = {
        name: games.nash_conv_of(rules, mixture(rules, players, number**power))
        for name, power in POWERS.items()
    }
    shares = [row.meta for row in rows_of(league_config, arrays) if row.generation >= 0]
    mixtures[META] = games.nash_conv_of(rules, mixture(rules, players, shares))
    of_last = games.nash_conv_of(rules, _chances(rules, last))
    return {LAST: of_last, **mixtures, "snapshots": len(players)}


def _chances(rules: games.Poker, policy: Policy) -> dict[tuple, np.ndarray]:
    return games.chances_of(rules, games.of_policy(policy))


Changes = Mapping[str, Any]


def _lanes(opponents: int, mirrors: int, learner: Changes | None = None, **league: Any) -> Any:
    """Return what changes in the learner and in the league."""
    return learner or {}, {"opponents": opponents, "mirrors": mirrors, **league}


UNIFORM_MAGNET = {"kl_coefficient": 1.0, "entropy_coefficient": 0.05, "magnet_rate": 0.0}
"""Settings of a prototype."""
OFTEN = 32_768
ROWS: Mapping[str, tuple[Changes, Changes]] = {
    "the preset": ({}, {}),
    "gradients limited to 0.5": ({"optimizer": OptimizerConfig()}, {}),
    "KL 1, temperature 0.05, a uniform magnet, 3 lanes and 1": _lanes(
        3, 1, UNIFORM_MAGNET, snapshot_every=OFTEN
    ),
    "as self-play, 3 lanes and 1": _lanes(3, 1, snapshot_every=OFTEN),
    "as self-play, 3 lanes and 1, uniform": _lanes(
        3, 1, snapshot_every=OFTEN, matchmaker="uniform"
    ),
    "PSRO": _lanes(8, 0, matchmaker="psro"),
    "PSRO, each best response from nothing": _lanes(8, 0, matchmaker="psro", restart=1.0),
    "as self-play, 1 lane and 3": _lanes(1, 3, snapshot_every=OFTEN),
    "temperature 0.2, magnet rate 0.004, 1 lane and 3": _lanes(
        1, 3, {"magnet_rate": 0.004, "entropy_coefficient": 0.2}, history=200, snapshot_every=OFTEN
    ),
}
"""What each row changes in the learner and in the league of a preset; lanes are those with
snapshots and mirrors. All but the first two and PSRO are meant for ``kuhn-league``."""


def trained(
    preset: str,
    learner: Changes,
    league: Changes,
    seed: int,
    show_moves: int | None = None,
    **run: Any,
) -> dict[str, float]:
    """Train; return the figures and the seconds of the training."""
    config = PRESETS[preset].make()
    if show_moves is not None:
        options = {**config.env.options, "show_moves": show_moves}
        config = dataclasses.replace(config, env=dataclasses.replace(config.env, options=options))
    agent: Any = config.agent
    assert isinstance(agent, LeagueConfig)
    ((name, player),) = agent.agents.items()
    assert isinstance(player, PPOConfig)
    agent = dataclasses.replace(agent, agents={name: dataclasses.replace(player, **learner)})
    agent = dataclasses.replace(agent, **league)
    config = dataclasses.replace(config, agent=agent, seed=seed, writers=(), **run)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            sebulba.train(config, run_dir=str(Path(folder) / "run"))
        seconds = time.perf_counter() - began
        return {**figures_of(RULES[preset], Path(folder) / "run"), "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", choices=sorted(RULES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rows", default="", help="only those that begin so")
    parser.add_argument("--total-env-steps", type=int)
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--show-moves", type=int, help="of the game, to both players")
    given = parser.parse_args(argv)
    sizes = {"total_env_steps": given.total_env_steps, "num_envs": given.num_envs}
    run = {name: size for name, size in sizes.items() if size}
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    lines = []
    for name, (learner, league) in ROWS.items():
        if not name.startswith(given.rows):
            continue
        found = []
        for seed in seeds:
            found.append(trained(given.preset, learner, league, seed, given.show_moves, **run))
            print(name, seed, {key: round(float(x), 4) for key, x in found[-1].items()}, flush=True)
        shown = [", ".join(f"{one[key]:.3f}" for one in found) for key in FIGURES]
        lines.append([name, *shown, f"{np.mean([one['seconds'] for one in found]):.0f}"])
    print(table(["row", *FIGURES, "seconds"], lines))


if __name__ == "__main__":
    main()

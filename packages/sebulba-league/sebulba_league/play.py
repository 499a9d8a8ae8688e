"""``sebulba play RUN``: a person plays a game in the terminal against a trained policy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from sebulba.commands.options import BEST, TRUST, number, option, parse
from sebulba.commands.playing import policy_of, run_to_play
from sebulba.errors import UsageError, shown
from sebulba.options import INT32
from sebulba.policies.pretrained import folder_of
from sebulba.runs.api import open_run
from sebulba.runs.exit_codes import EXIT_OK
from sebulba.runs.folder import RunFolder
from sebulba.support.user_code import import_from_here
from sebulba.tools.compare.tables import console
from sebulba_league.game_words import MARKS, game_words, texts
from sebulba_league.history import newest_checkpoint, read_history

if TYPE_CHECKING:
    from sebulba.configs.experiment import EnvConfig
    from sebulba.policies.policy import Policy

COLOURS = {r"\bX\b": "bold red", r"\bO\b": "bold yellow", r"\b[JQK]\b": "bold cyan"}
"""Of marks and cards, as regular expressions."""


class Opponent(NamedTuple):
    """Who plays the other seats."""

    name: str
    """What the person is told of it."""
    factory: Any
    """Makes the environment."""
    agent: Any
    """Of all seats, or of one."""
    networks: Any
    """Acting networks of ``agent``."""


def main(argv: Sequence[str]) -> int:
    """Play until the person has had enough; return the exit code."""
    given = parse(
        "play",
        "Play TicTacToe, ConnectFour, Kuhn poker or Leduc hold'em against a trained policy.",
        argv,
        (
            option("run", "folder of a run or a policy, such as runs/NAME", metavar="RUN"),
            option("--snapshot", "snapshot N of a league, not the policy", type=int, metavar="N"),
            number("--seat", 0, "0 begins, 1 is second", choices=(0, 1)),
            number("--seed", 1, "of the cards, and of the policy's chance"),
            option(
                "--greedy",
                "the policy takes its most probable move; default: on boards, but not with cards",
                action=argparse.BooleanOptionalAction,
            ),
            *(BEST, TRUST),
        ),
    )
    if given.seed not in INT32:
        raise UsageError(f"seed={given.seed} must be a 32-bit integer, such as 1")
    try:
        _play(given, _opponent(given))
    except (KeyboardInterrupt, EOFError):  # the usual ends
        print()
    return EXIT_OK


def _opponent(given: argparse.Namespace) -> Opponent:
    """Read the networks, and find the environment."""
    given.platform, given.explore = "cpu", False
    if given.snapshot is not None:
        return _snapshot(given)
    policy = policy_of(given)
    if "format" in RunFolder(folder_of(given.run)).record():
        factory = _factory_of(policy)
    else:
        factory = _factory(run_to_play(given)[1])
    return Opponent(given.run, factory, policy.agent, policy.acting_networks)


def _snapshot(given: argparse.Namespace) -> Opponent:
    """Read the networks of a snapshot of a league."""
    if given.best:
        raise UsageError("--best and --snapshot choose different networks; leave one out")
    run = folder_of(given.run)
    folder, _, (_, config) = open_run(run, trust=given.trust, if_trusted=import_from_here)
    import jax

    from sebulba.envs import env_spec
    from sebulba.runs.jax_setup import configure_jax

    configure_jax(given.platform)
    factory = _factory(config.env)
    checkpoint = newest_checkpoint(folder, config, trust=given.trust)
    league, generations, players = read_history(config, env_spec(factory), checkpoint)
    if given.snapshot not in generations:
        there = ", ".join(map(str, generations))
        raise UsageError(f"snapshot={given.snapshot} is not in {given.run}; use one of {there}")
    row = generations.index(given.snapshot)
    networks = jax.tree.map(lambda leaf: leaf[row], players)
    return Opponent(f"#{given.snapshot} of {given.run}", factory, league.player, networks)


def _factory(env: EnvConfig) -> Any:
    from sebulba.envs import make_env_factory

    return make_env_factory(env.id, **env.factory_arguments())


def _factory_of(policy: Policy) -> Any:
    """Return the factory of a policy that knows its environment by name, and what it shows."""
    from sebulba.envs import make_env_factory
    from sebulba.envs.multi.envpool_games import BEGAN, MOVES, SHOW_BEGINNER, SHOW_MOVES

    spec: Any = policy.spec
    game_words(spec.name)
    seen = next(iter(spec.groups.values())).spec if hasattr(spec, "groups") else spec
    parts = seen.observation_space.spaces
    options: dict[str, Any] = {SHOW_BEGINNER: True} if BEGAN in parts else {}
    if MOVES in parts:
        options[SHOW_MOVES] = parts[MOVES].shape[0] // int(seen.action_space.n)
    return make_env_factory(spec.name, **options)


def _play(given: argparse.Namespace, opponent: Opponent) -> None:
    """Play game after game."""
    from sebulba.loops.evaluation import DRAWN, check_spaces

    adapter: Any = opponent.factory(1, [given.seed])
    try:
        words = game_words(adapter.spec.name)
        greedy = not words.has_cards if given.greedy is None else given.greedy
        policy = _policy(opponent, adapter.spec, explore=not greedy, seed=given.seed)
        check_spaces(policy, adapter)
        mark = "" if words.has_cards else f" with {MARKS[given.seat]}"
        turn = ("begin", "are second")[given.seat]
        print(f"You {turn}{mark}, against {opponent.name}. q ends the game.")
        goes_on = True
        while goes_on:
            paid = _game(policy, adapter, given.seat)
            chips = f" {abs(paid):g} chip{'s' * (abs(paid) != 1)}" if words.has_cards else ""
            won, lost = paid > DRAWN, paid < -DRAWN
            print(f"You {'win' if won else 'lose'}{chips}." if won or lost else "A draw.")
            goes_on = sys.stdin.isatty() and _read("Another game? [Y/n] ") in ("", "y", "yes")
    finally:
        adapter.close()


def _policy(opponent: Opponent, spec: Any, **options: Any) -> Policy:
    """Return a policy for all seats."""
    from sebulba.agents.configs import MultiAgentConfig
    from sebulba.agents.multi.multi_agent import MultiAgent
    from sebulba.policies.policy import Policy

    agent, networks = opponent.agent, opponent.networks
    if not isinstance(agent, MultiAgent):
        (name,) = spec.groups
        agent, networks = MultiAgent(spec, MultiAgentConfig({name: agent.config})), {name: networks}
    return Policy(agent, networks, **options)


def _game(policy: Policy, adapter: Any, is_second: bool) -> float:
    """Play a game, and return what the person was paid; the environment draws who begins."""
    import numpy as np

    from sebulba.envs.observation_parts import MASK
    from sebulba.inference.cycle import env_step_of

    (group,) = adapter.spec.groups
    output, state, paid = adapter.reset(), policy.new_state(1), 0.0
    person = int(output.acting[group][0].argmax()) ^ is_second
    words = game_words(adapter.spec.name)
    while not output.episode_end[0]:
        (game,) = adapter.games()
        actions, state = policy.act(env_step_of(output, ()), state)
        action = np.array(actions[group])
        names = words.moves(game)
        if output.acting[group][0, person]:
            _show(adapter, person)
            mask = output.obs[group][MASK][0, person]
            action[0, person] = _ask(names, mask, words.why_not)
        else:
            print(f"The policy: {names[action[0, 1 - person]]}")
        state = state._replace(prev_action={group: action})
        output = adapter.step({group: action})
        paid += float(output.unclipped_reward[group][0, person])
    _show(adapter, person)
    return paid


def _show(adapter: Any, seat: int) -> None:
    text = Text(f"\n{texts(adapter, seat)[0]}\n")
    for pattern, style in COLOURS.items():
        text.highlight_regex(pattern, style)
    console().print(text)


def _ask(names: Sequence[str], mask: Any, why_not: str) -> int:
    """Return the number of the legal move that the person names, or the first letters of."""
    legal = [name for name, is_legal in zip(names, mask, strict=True) if is_legal]
    while True:
        word = _read(f"Your move ({', '.join(legal)}): ")
        meant = [name for name in names if word and name.startswith(word)]
        if len(meant) == 1 and meant[0] in legal:
            return names.index(meant[0])
        said = why_not.format(meant[0]) if len(meant) == 1 else f"{shown(word)} is not a move"
        print(f"{said}; choose one of {', '.join(legal)}")


def _read(prompt: str) -> str:
    """Return a line of the person in small letters; EOFError at the end of the input or for q."""
    word = input(prompt).strip().lower()
    if not sys.stdin.isatty():
        print(word)
    if word in ("q", "quit"):
        raise EOFError
    return word

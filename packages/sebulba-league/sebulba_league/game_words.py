"""envpool's games in words: what ``render_mode="ansi"`` shows elsewhere, and names of moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sebulba.errors import UsageError

MARKS = "XO"
"""On boards; X is of the player who began."""
RANKS = "JQK"
"""Of cards."""
Game = Mapping[str, Any]
"""What envpool says of one game, and ``over``."""


class GameWords(NamedTuple):
    """How people see a game."""

    board: Callable[[Game, int | None], str]
    """The text of a game as a seat sees it; None sees all."""
    moves: Callable[[Game], tuple[str, ...]]
    """The names of all actions, legal or not."""
    why_not: str
    """What is said of a move that is not legal, with ``{}`` for its name."""
    has_cards: bool = False
    """Whether players see cards of their own and play for chips; else they have ``MARKS``."""


def _tic_tac_toe(game: Game, seat: int | None) -> str:
    cells = [MARKS[by] if by >= 0 else str(n) for n, by in enumerate(game["board"].ravel(), 1)]
    return "\n---+---+---\n".join(" " + " | ".join(cells[i : i + 3]) for i in (0, 3, 6))


def _connect_four(game: Game, seat: int | None) -> str:
    rows = [[MARKS[by] if by >= 0 else "." for by in row] for row in game["board"]]
    return "\n".join(map(" ".join, [_numbered(len(rows[0])), *rows]))


def _hands(game: Game, seat: int | None, chips: Any) -> str:
    lines = ["         card  chips"]
    for i in sorted(range(len(chips)), key=lambda i: i != seat):
        card = RANKS[game["cards"][i]] if game["over"] or seat in (None, i) else "?"
        who = f"seat {i}" if seat is None else "you" if i == seat else "opponent"
        lines.append(f"{who:9}{card:6}{chips[i]:>5}")
    return "\n".join(lines)


def _leduc(game: Game, seat: int | None) -> str:
    table = RANKS[game["cards"][2]] if game["round"] else "-"
    return f"{_hands(game, seat, game['chips'])}\n{'table':9}{table}"


def _numbered(number: int) -> tuple[str, ...]:
    return tuple(str(n + 1) for n in range(number))


def _leduc_moves(game: Game) -> tuple[str, ...]:
    owes = game["chips"][0] != game["chips"][1]
    return ("call", "raise", "fold") if owes else ("check", "bet", "fold")


_WORDS = {
    "TicTacToe-v1": GameWords(_tic_tac_toe, lambda game: _numbered(9), "cell {} is taken"),
    "ConnectFour-v1": GameWords(_connect_four, lambda game: _numbered(7), "column {} is full"),
    "KuhnPoker-v1": GameWords(
        lambda game, seat: _hands(game, seat, game["pot"] + 1),  # the ante
        lambda game: ("call", "fold") if game["last_action"] == 0 else ("bet", "check"),
        "{} is not allowed now",
        has_cards=True,
    ),
    "LeducHoldem-v1": GameWords(_leduc, _leduc_moves, "{} is not allowed now", has_cards=True),
}


def game_words(name: str) -> GameWords:
    """Return how people see a game; UsageError for others than these."""
    if name not in _WORDS:
        raise UsageError(
            f"env={name!r} has no text in which people can play it; use {', '.join(_WORDS)}"
        )
    return _WORDS[name]


def texts(adapter: Any, seat: int | None = None) -> list[str]:
    """Return the games of an adapter as text, ``[B]``; only after a reset.

    Args:
      adapter: Of one of these games.
      seat: Cards that it cannot see are hidden until a game is over; None hides none.
    """
    board = game_words(adapter.spec.name).board
    return [board(game, seat) for game in adapter.games()]

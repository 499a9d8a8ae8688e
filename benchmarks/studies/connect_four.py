"""Exams of policies of ConnectFour: ``python -m benchmarks.studies.connect_four POLICY [OTHER]``.

``POLICY`` is the folder of the member that plays all seats, such as ``runs/x/policy/player``. It
takes its best action against the script that wins or blocks in one move, against alpha-beta of four
moves ahead, and where a solver knows the result. With ``OTHER`` both policies play each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.studies.games import Opponent, at_random, share_won, wins_or_blocks
from sebulba.envs import make_env_factory
from sebulba.envs.multi.envpool_games import MASK, PLAYER
from sebulba.envs.tree import OBSERVATION
from sebulba.policies.policy import Policy, load_policy

ENV = "ConnectFour-v1"
COLUMNS, ROWS = 7, 6
COLUMN_BITS = ROWS + 1
ORDER = (3, 2, 4, 1, 5, 0, 6)
"""Columns, the best ones first."""
BOTTOM = sum(1 << COLUMN_BITS * column for column in range(COLUMNS))
CELLS = BOTTOM * ((1 << ROWS) - 1)
"""A board is two integers, cells of the player who moves and cells of both. Bit 0 is the bottom of
the first column, and above each column one bit stays 0."""
DIRECTIONS = (1, COLUMN_BITS - 1, COLUMN_BITS, COLUMN_BITS + 1)


def bits_of(board: np.ndarray) -> tuple[int, int]:
    """Return a board ``[ROWS, COLUMNS, 2]``, the top row first, as integers."""
    own, both = 0, 0
    for row, column in zip(*np.nonzero(board.any(axis=-1)), strict=True):
        bit = 1 << int(column) * COLUMN_BITS + ROWS - 1 - int(row)
        both |= bit
        own |= bit if board[row, column, 0] else 0
    return own, both


def is_four(cells: int) -> bool:
    """Tell whether four cells are in a line."""
    for shift in DIRECTIONS:
        pairs = cells & cells >> shift
        if pairs & pairs >> 2 * shift:
            return True
    return False


def moves(both: int) -> Iterator[tuple[int, int]]:
    """Yield legal columns and the bits that they fill."""
    free = (both + BOTTOM) & CELLS
    for column in ORDER:
        bit = free & ((1 << ROWS) - 1) << column * COLUMN_BITS
        if bit:
            yield column, bit


LINES = [
    sum(1 << (column + dx * i) * COLUMN_BITS + row + dy * i for i in range(4))
    for column in range(COLUMNS)
    for row in range(ROWS)
    for dx, dy in ((1, 0), (0, 1), (1, 1), (1, -1))
    if column + 3 * dx < COLUMNS and 0 <= row + 3 * dy < ROWS
]
WON = 10_000


def worth(own: int, other: int) -> int:
    """Return how much better the lines are that a player can still fill than those of the other."""
    total = 0
    for line in LINES:
        mine, theirs = line & own, line & other
        if mine and not theirs:
            total += mine.bit_count() ** 2
        elif theirs and not mine:
            total -= theirs.bit_count() ** 2
    return total


def alpha_beta(own: int, both: int, plies: int, alpha: int, beta: int) -> int:
    """Return what a position without a four is worth to the player who moves."""
    if both == CELLS:
        return 0
    if plies == 0:
        return worth(own, both ^ own)
    for _, bit in moves(both):
        if is_four(own | bit):
            return WON + plies
    for _, bit in moves(both):
        alpha = max(alpha, -alpha_beta(both ^ own, both | bit, plies - 1, -beta, -alpha))
        if alpha >= beta:
            break
    return alpha


def looks_ahead(plies: int) -> Opponent:
    """Return alpha-beta of so many moves; of equal ones it takes any."""

    def opponent(boards: np.ndarray, legal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        chosen = np.zeros(len(boards), np.int64)
        for row, board in enumerate(boards):
            own, both = bits_of(board)
            best, columns = -2 * WON, list[int]()
            for column, bit in moves(both):
                if is_four(own | bit):
                    value = WON + plies
                else:
                    floor = max(best - 1, -2 * WON)
                    value = -alpha_beta(both ^ own, both | bit, plies - 1, -2 * WON, -floor)
                if value > best:
                    best, columns = value, []
                if value == best:
                    columns.append(column)
            chosen[row] = rng.choice(columns) if columns else 0
        return chosen

    return opponent


def result(own: int, both: int, known: dict[tuple[int, int], int]) -> int:
    """Return 1, 0 or -1: won, drawn or lost for the player who moves, in a game without a four."""
    if both == CELLS:
        return 0
    key = own, both
    if key in known:
        return known[key]
    legal = [bit for _, bit in moves(both)]
    other = both ^ own
    found = -1
    if any(is_four(own | bit) for bit in legal):
        found = 1
    else:
        threats = [bit for bit in legal if is_four(other | bit)]
        for bit in threats or legal:
            if len(threats) > 1:
                break
            found = max(found, -result(other, both | bit, known))
            if found == 1:
                break
    known[key] = found
    return found


def solved(policy: Policy, number: int, empty: int, seed: int = 0) -> dict[str, float]:
    """Return in which share of positions that matter the greedy move keeps the result.

    They have at most ``empty`` free cells and come from games in which every fourth move is random.
    Some move in them would be worse than the best.
    """
    rng = np.random.default_rng(seed)
    kept: dict[str, list[bool]] = {"won": [], "drawn": []}
    seen: set[tuple[int, int]] = set()
    for board, own, both in positions(policy, rng, empty):
        if (own, both) in seen:
            continue
        seen.add((own, both))
        known: dict[tuple[int, int], int] = {}
        values = {
            column: 1 if is_four(own | bit) else -result(both ^ own, both | bit, known)
            for column, bit in moves(both)
        }
        best = max(values.values())
        if best < 0 or min(values.values()) == best:
            continue
        column = int(greedy(policy)(board[None], legal_of(board[None]), rng)[0])
        kept["won" if best else "drawn"].append(values[column] == best)
        if sum(map(len, kept.values())) >= number:
            break
    everything = kept["won"] + kept["drawn"]
    return {
        **{name: float(np.mean(own)) for name, own in kept.items() if own},
        "all": float(np.mean(everything)),
        "positions": len(everything),
        "won positions": len(kept["won"]),
    }


def legal_of(boards: np.ndarray) -> np.ndarray:
    """Return masks of the columns that are not full, ``[N, COLUMNS]``."""
    return np.asarray(~boards[:, 0].any(axis=-1), np.int8)


def greedy(policy: Policy) -> Opponent:
    """Return a policy that takes its best action."""
    return lambda boards, legal, rng: policy({OBSERVATION: boards, MASK: legal})[0]


def positions(
    policy: Policy, rng: np.random.Generator, empty: int
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield boards and their integers from games of the policy with itself."""
    act = greedy(policy)
    for boards, going in play(rng, lambda boards, legal: mixed(act, boards, legal, rng)):
        free = (~boards.any(axis=-1)).sum(axis=(1, 2))
        for row in np.flatnonzero(going & (free <= empty)):
            yield boards[row], *bits_of(boards[row])


def mixed(
    act: Opponent, boards: np.ndarray, legal: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return actions of which every fourth is random."""
    return np.where(
        rng.random(len(boards)) < 0.25, at_random(boards, legal, rng), act(boards, legal, rng)
    )


def play(
    rng: np.random.Generator,
    choose: Callable[[np.ndarray, np.ndarray], np.ndarray],
    num_envs: int = 64,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Play without an end; yield boards as the mover sees them, and which games go on."""
    env: Any = make_env_factory(ENV)(num_envs, list(rng.integers(2**31, size=num_envs)))
    output = env.reset()
    try:
        while True:
            obs, acting = output.obs[PLAYER], output.acting[PLAYER]
            rows = np.arange(num_envs), acting.argmax(axis=1)
            boards, legal = obs[OBSERVATION][rows], obs[MASK][rows]
            yield boards, acting.any(axis=1)
            action = np.zeros(acting.shape, np.int32)
            action[rows] = choose(boards, legal)
            output = env.step({PLAYER: action})
    finally:
        env.close()


def against(one: Opponent, other: Opponent, *, games: int = 500, opening: int = 2) -> np.ndarray:
    """Return the games that ``one`` won, drew and lost, as first and as second player, ``[2, 3]``.

    The first ``opening`` moves are random.
    """
    rng, counts, num_envs = np.random.default_rng(0), np.zeros((2, 3)), 64
    env: Any = make_env_factory(ENV)(num_envs, list(range(num_envs)))
    output, seats = env.reset(), np.arange(num_envs) % 2
    began, everyone = np.zeros(num_envs, np.int64), np.arange(num_envs)
    try:
        while counts.sum(axis=1).min() < games:
            obs, acting = output.obs[PLAYER], output.acting[PLAYER]
            mover = acting.argmax(axis=1)
            boards, legal = (obs[part][everyone, mover] for part in (OBSERVATION, MASK))
            stones = boards.any(axis=-1).sum(axis=(1, 2))
            began = np.where(stones == 0, mover, began)
            mine, theirs = (act(boards, legal, rng) for act in (one, other))
            move = np.where(mover == seats, mine, theirs)
            move = np.where(stones < opening, at_random(boards, legal, rng), move)
            action = np.zeros(acting.shape, np.int32)
            action[everyone, mover] = move
            output = env.step({PLAYER: action})
            paid = output.reward[PLAYER][everyone, seats]
            for i in np.flatnonzero(output.episode_end):
                counts[int(began[i] != seats[i]), 1 - int(np.sign(paid[i]))] += 1
    finally:
        env.close()
    return counts


def print_counts(counts: np.ndarray) -> None:
    """Print what ``against`` returned."""
    for name, line in zip(("first", "second"), counts, strict=True):
        won, drawn, lost = line.astype(int)
        print(f"{name} player: won {won}, drew {drawn}, lost {lost}; {won / line.sum():.3f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy")
    parser.add_argument("other", nargs="?")
    parser.add_argument("--games", type=int, default=500, help="of each seat")
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--empty", type=int, default=14, help="most free cells of solved positions")
    given = parser.parse_args(argv)
    policy: Any = load_policy(given.policy)
    if given.other:
        print_counts(against(greedy(policy), greedy(load_policy(given.other)), games=given.games))
    for name, opponent, games in [
        ("random", at_random, given.games),
        ("script, one move ahead", wins_or_blocks, given.games),
        ("alpha-beta, four moves ahead", looks_ahead(4), given.games // 4),
    ]:
        print(name, round(share_won(policy, ENV, opponent, num_games=games), 3), flush=True)
    print("alpha-beta after two random moves")
    print_counts(against(greedy(policy), looks_ahead(4), games=given.games // 2))
    if given.positions:
        print("solver", solved(policy, given.positions, given.empty))


if __name__ == "__main__":
    main()

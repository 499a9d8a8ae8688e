"""What a policy is worth in a small game: exactly, or against opponents that are known.

``python -m benchmarks.studies.games EXAM POLICY`` prints the figure; ``POLICY`` is the folder of
the member that plays all seats, such as ``runs/x/policy/player``, or of all, ``runs/x/policy``.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sebulba.envs import make_env_factory
from sebulba.envs.multi.envpool_games import BEGAN, MASK, MOVES, PLAYER
from sebulba.envs.tree import OBSERVATION
from sebulba.loops.evaluation import evaluate
from sebulba.policies.policy import Policy, load_policy
from sebulba.types import EnvOutput

# Poker: how much two players would win, together, by playing the best reply.


class Hand(NamedTuple):
    """A hand of poker between two decisions; seat 0 is the one who begins."""

    cards: tuple[int, ...]
    """Of seat 0, seat 1, and those that come to the table."""
    chips: tuple[int, int] = (0, 0)
    """What each has put in."""
    mover: int = 0
    """Seat that decides."""
    last: int = -1
    """Last action of this round; -1 where there was none."""
    raises: int = 0
    """Raises in this round."""
    round: int = 0
    """Number of the round."""
    history: tuple[int, ...] = ()
    """All actions, which both have seen."""
    payoff: float | None = None
    """What seat 0 has won; None while the hand goes on."""


class Poker(NamedTuple):
    """The rules of a game, as envpool has them."""

    deals: tuple[Hand, ...]
    """All, which have the same chance."""
    num_actions: int
    """Actions, legal or not."""
    legal: Callable[[Hand], Sequence[int]]
    """Legal actions."""
    after: Callable[[Hand, int], Hand]
    """The hand after an action."""
    observation: Callable[[Hand, int], np.ndarray]
    """What a seat observes."""
    seen: Callable[[Hand, int], tuple]
    """What a seat knows."""


def _kuhn_after(hand: Hand, action: int) -> Hand:
    """Bet or call with 0, check or fold with 1."""
    chips = list(hand.chips)
    chips[hand.mover] += action == 0
    sign = 1 if hand.mover == 0 else -1
    payoff = None
    if hand.last == 0 and action == 1:
        payoff = -1.0 * sign
    elif hand.last == action:
        payoff = (2.0 if action == 0 else 1.0) * (1 if hand.cards[0] > hand.cards[1] else -1)
    return hand._replace(
        chips=(chips[0], chips[1]),
        mover=1 - hand.mover,
        last=action,
        history=(*hand.history, action),
        payoff=payoff,
    )


def _kuhn_observation(hand: Hand, seat: int) -> np.ndarray:
    seen = np.zeros(7, np.int8)
    seen[[hand.cards[seat], 3 + hand.chips[seat], 5 + hand.chips[1 - seat]]] = 1
    return seen


KUHN = Poker(
    tuple(Hand(cards) for cards in itertools.permutations(range(3), 2)),
    2,
    lambda hand: (0, 1),
    _kuhn_after,
    _kuhn_observation,
    lambda hand, seat: (hand.cards[seat], hand.history),
)


def _leduc_after(hand: Hand, action: int) -> Hand:
    """Call with 0, raise with 1, fold with 2."""
    chips, mover = list(hand.chips), hand.mover
    if action == 0:
        chips[mover] = chips[1 - mover]
    elif action == 1:
        chips[mover] = max(chips) + 2 * (hand.round + 1)
    ends_round = action == 2 or (hand.last != -1 and action == 0)
    payoff = None
    if action == 2:
        payoff = float(min(chips)) * (-1 if mover == 0 else 1)
    elif ends_round and hand.round == 1:
        payoff = float(min(chips)) * _leduc_winner(hand.cards)
    return hand._replace(
        chips=(chips[0], chips[1]),
        mover=0 if ends_round else 1 - mover,
        last=-1 if ends_round else action,
        raises=0 if ends_round else hand.raises + (action == 1),
        round=hand.round + ends_round,
        history=(*hand.history, action),
        payoff=payoff,
    )


def _leduc_winner(cards: tuple[int, ...]) -> int:
    """Return 1 if seat 0 wins, -1 if it loses, 0 if nobody wins."""
    first, second, table = cards
    strength = [(card == table, card) for card in (first, second)]
    return (strength[0] > strength[1]) - (strength[0] < strength[1])


def _leduc_legal(hand: Hand) -> Sequence[int]:
    may_fold = hand.last == 1
    return (0, *((1,) if hand.raises < 2 else ()), *((2,) if may_fold else ()))


def _leduc_observation(hand: Hand, seat: int) -> np.ndarray:
    seen = np.zeros(34, np.int8)
    seen[[hand.cards[seat], 6 + hand.chips[seat], 20 + hand.chips[1 - seat]]] = 1
    if hand.round == 1:
        seen[3 + hand.cards[2]] = 1
    return seen


LEDUC = Poker(
    tuple(Hand(cards, (1, 1)) for cards in itertools.permutations((0, 0, 1, 1, 2, 2), 3)),
    3,
    _leduc_legal,
    _leduc_after,
    _leduc_observation,
    lambda hand, seat: (hand.cards[seat], hand.cards[2] if hand.round else None, hand.history),
)

Probabilities = Callable[[dict[str, np.ndarray]], np.ndarray]
"""Of actions ``[N, A]``, given parts of the observation ``[N, ...]``, masks of legal ones among
them."""


def nash_conv(game: Poker, probabilities: Probabilities) -> float:
    """Return the sum of what each seat gains by the best reply; 0 in an equilibrium."""
    return nash_conv_of(game, chances_of(game, probabilities))


def nash_conv_of(game: Poker, chances: dict[tuple, np.ndarray]) -> float:
    """Return the same, given the chances of actions in all that a seat can know."""
    deals = [(hand, 1.0 / len(game.deals)) for hand in game.deals]
    return sum(_best_reply(game, seat, deals, chances) for seat in (0, 1))


def chances_of(game: Poker, probabilities: Probabilities) -> dict[tuple, np.ndarray]:
    """Return the chances of actions in all that a seat can know."""
    hands: dict[tuple, Hand] = {}
    rest = list(game.deals)
    while rest:
        hand = rest.pop()
        if hand.payoff is None:
            hands[hand.mover, *game.seen(hand, hand.mover)] = hand
            rest += [game.after(hand, action) for action in game.legal(hand)]
    observed = np.stack([game.observation(hand, hand.mover) for hand in hands.values()])
    mask = np.zeros((len(hands), game.num_actions), np.int8)
    for row, hand in zip(mask, hands.values(), strict=True):
        row[list(game.legal(hand))] = 1
    began = np.array([[hand.mover == 0] for hand in hands.values()], np.int8)
    most = max(len(hand.history) for hand in hands.values()) + 1
    moves = np.zeros((len(hands), most, game.num_actions), np.int8)
    for row, hand in zip(moves, hands.values(), strict=True):
        row[range(len(hand.history)), list(hand.history)] = 1
    parts = {OBSERVATION: observed, MASK: mask, BEGAN: began, MOVES: moves.reshape(len(hands), -1)}
    chances = probabilities(parts)
    return dict(zip(hands, chances.astype(np.float64), strict=True))


def _best_reply(
    game: Poker, seat: int, hands: Iterable[tuple[Hand, float]], chances: dict[tuple, np.ndarray]
) -> float:
    """Return what a seat wins at most in hands that it cannot tell apart, times their chances."""
    groups: dict[tuple, list[tuple[Hand, float]]] = {}
    total = 0.0
    for hand, chance in hands:
        if hand.payoff is not None:
            total += chance * (hand.payoff if seat == 0 else -hand.payoff)
        else:
            groups.setdefault(game.seen(hand, seat), []).append((hand, chance))
    for alike in groups.values():
        first = alike[0][0]
        by_action = [
            [(game.after(hand, action), chance) for hand, chance in alike]
            for action in game.legal(first)
        ]
        if first.mover == seat:
            total += max(_best_reply(game, seat, after, chances) for after in by_action)
            continue
        told = [
            (after, chance * chances[hand.mover, *game.seen(hand, hand.mover)][after.history[-1]])
            for branch in by_action
            for (after, chance), (hand, _) in zip(branch, alike, strict=True)
        ]
        total += _best_reply(game, seat, told, chances)
    return total


# Boards.


LINES = np.array(
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
)


def lost_replies(policy: Policy) -> float:
    """Return in how many positions of TicTacToe, of both seats, the opponent wins.

    The policy takes its best action, the opponent tries all replies.
    """
    return float(sum(_lost(policy, begins) for begins in (True, False)))


def _lost(policy: Policy, begins: bool) -> int:
    boards = np.zeros((1, 9), np.int8)  # 1 is the policy's, -1 the opponent's
    lost, moves = 0, begins
    while len(boards):
        if moves:
            obs = np.stack([boards == 1, boards == -1], axis=-1).reshape(-1, 3, 3, 2)
            action, _ = policy(
                {OBSERVATION: obs.astype(np.int8), MASK: (boards == 0).astype(np.int8)}
            )
            after = boards.copy()
            after[np.arange(len(boards)), action] = 1
        else:
            env, square = np.nonzero(boards == 0)
            after = boards[env]
            after[np.arange(len(env)), square] = -1
        sums = after[:, LINES].sum(axis=2)
        lost += int((sums == -3).any(axis=1).sum())
        goes_on = ~(np.abs(sums) == 3).any(axis=1) & (after == 0).any(axis=1)
        boards, moves = np.unique(after[goes_on], axis=0), not moves
    return lost


Opponent = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""Chooses ``[N]`` actions, given boards as the player who moves sees them, masks, and chance."""


def at_random(boards: np.ndarray, legal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Take any legal action."""
    return (rng.random(legal.shape) + legal).argmax(axis=1)


def wins_or_blocks(boards: np.ndarray, legal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Win ConnectFour if one move does it, else keep the other from doing so, else anything."""
    score = rng.random(legal.shape) + legal
    for row, board in enumerate(boards):
        for column in np.nonzero(legal[row])[0]:
            height = int((~board.any(axis=-1))[:, column].sum()) - 1
            for plane, worth in ((0, 20.0), (1, 10.0)):
                if _is_four(board[:, :, plane], height, int(column)):
                    score[row, column] += worth
    return score.argmax(axis=1)


def _is_four(own: np.ndarray, row: int, column: int) -> bool:
    """Tell whether a piece at (row, column) makes four in a line."""

    def run(down: int, right: int) -> int:
        count, y, x = 0, row + down, column + right
        while 0 <= y < own.shape[0] and 0 <= x < own.shape[1] and own[y, x]:
            count, y, x = count + 1, y + down, x + right
        return count

    lines = ((0, 1), (1, 0), (1, 1), (1, -1))
    return any(run(y, x) + run(-y, -x) >= 3 for y, x in lines)


def share_won(
    policy: Policy, env_id: str, opponent: Opponent, *, num_games: int = 500, num_envs: int = 64
) -> float:
    """Return the share of games that a policy wins from the seat from which it wins fewer.

    It takes its best action. At least ``num_games`` are played from each seat, whoever begins.
    """
    env = make_env_factory(env_id)(num_envs, list(range(num_envs)))
    seats, rng = np.arange(num_envs) % 2, np.random.default_rng(0)
    won, games = np.zeros(2), np.zeros(2)
    output = env.reset()
    try:
        while games.min() < num_games:
            obs, acting = output.obs[PLAYER], output.acting[PLAYER]
            mover = acting.argmax(axis=1)
            rows = np.arange(num_envs), mover
            seen = {name: part[rows] for name, part in obs.items()}
            own, _ = policy(seen)
            others = opponent(seen[OBSERVATION], seen[MASK], rng)
            action = np.zeros(acting.shape, np.int32)
            action[rows] = np.where(mover == seats, own, others)
            output = env.step({PLAYER: action})
            ends = output.episode_end
            paid = output.reward[PLAYER][np.arange(num_envs), seats]
            games += np.bincount(seats, ends, 2)
            won += np.bincount(seats, ends & (paid > 0), 2)
    finally:
        env.close()
    return float((won / games).min())


# A speaker and a listener.

SPEAKER_LISTENER = "jaxmarl:MPE_simple_speaker_listener_v4"


class ShuffledWords:
    """The environment of jaxmarl, in which every listener hears the speaker of another game."""

    def __init__(self, env: Any) -> None:
        """Take over the adapter ``env`` of several games."""
        self._env, self.spec, self.num_envs = env, env.spec, env.num_envs

    def reset(self) -> EnvOutput:
        """Begin new games."""
        return self._shuffled(self._env.reset())

    def step(self, action: Any) -> EnvOutput:
        """Let both act."""
        return self._shuffled(self._env.step(action))

    def close(self) -> None:
        """Free the environment."""
        self._env.close()

    def _shuffled(self, output: EnvOutput) -> EnvOutput:
        heard = np.array(output.obs["listener"])
        heard[..., -3:] = np.roll(heard[..., -3:], 1, axis=0)  # the word is one of three, one-hot
        return output._replace(obs={**output.obs, "listener": heard})


def worth_of_words(policy: Policy, *, num_episodes: int = 512) -> float:
    """Return by how much shuffled words lower the sum of both agents' returns."""

    def shuffled(num_envs: int, seeds: list[int]) -> Any:
        return ShuffledWords(make_env_factory(SPEAKER_LISTENER)(num_envs, seeds))

    with_words, without = (
        evaluate(policy, env, num_episodes=num_episodes, num_envs=64).episode_return_mean
        for env in (SPEAKER_LISTENER, shuffled)
    )
    return 2 * (with_words - without)


# Exams.


def of_policy(policy: Policy) -> Probabilities:
    """Return the probabilities by which a policy acts."""
    known: Any = policy.spec.observation_space
    return lambda obs: policy.distribution({name: obs[name] for name in known})


EXAMS: dict[str, Callable[[Policy], float]] = {
    "NashConv of KuhnPoker-v1": lambda policy: nash_conv(KUHN, of_policy(policy)),
    "NashConv of LeducHoldem-v1": lambda policy: nash_conv(LEDUC, of_policy(policy)),
    "lost positions of TicTacToe-v1": lost_replies,
    "share won of ConnectFour-v1": lambda p: share_won(p, "ConnectFour-v1", at_random),
    "share won of ConnectFour-v1 against a script": lambda p: share_won(
        p, "ConnectFour-v1", wins_or_blocks
    ),
    "return lost by shuffled words": worth_of_words,
}
"""Figures of a policy, by what they are called in goals."""


def _of_history(preset: str) -> Callable[[Path], float]:
    """Return the exam of the mixture of a league's history, given the run."""

    def exam(run: Path) -> float:
        from benchmarks.studies.league_games import RULES, SQUARE, figures_of

        return figures_of(RULES[preset], run)[SQUARE]

    return exam


RUN_EXAMS = {
    "NashConv of a league's history in KuhnPoker-v1": _of_history("kuhn-league"),
    "NashConv of a league's history in LeducHoldem-v1": _of_history("leduc-league"),
}
"""Figures of a run. The weight of a snapshot is the square of its number."""


def main(argv: Sequence[str]) -> None:
    """Print the figure of an exam, which may be one of the run that has the policy's folder."""
    exam, folder = argv
    if exam in RUN_EXAMS:
        figure = RUN_EXAMS[exam](Path(folder).parents[1])
    else:
        policy: Any = load_policy(folder)
        figure = EXAMS[exam](policy)
    print(json.dumps(figure))


if __name__ == "__main__":
    main(sys.argv[1:])

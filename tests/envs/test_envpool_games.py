"""envpool's games for several players: turns, legal moves, rewards, and exams of policies.

``RANDOM_GAMES=10000 pytest tests/envs/test_envpool_games.py --timeout 0`` plays as many of games in
Python, too.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from benchmarks.studies import games
from sebulba import ActionError, EnvError
from sebulba.agents.multi import waiting_agents
from sebulba.envs.multi.envpool_cooperative import CooperativeAdapter
from sebulba.tools.check.env_players import RandomActions
from sebulba.types import EnvOutput, EnvSpec, EnvStep, FusedEnv

GAMES = int(os.environ.get("RANDOM_GAMES", "600"))
MANY = 10_000
"""Games that are played at once in a pool of envpool's."""
HAS_PETTINGZOO = all(importlib.util.find_spec(name) for name in ("pettingzoo", "pygame"))
of_pettingzoo = pytest.mark.skipif(not HAS_PETTINGZOO, reason="needs pettingzoo and pygame")


@jax.jit
def follow(state: waiting_agents.TurnState, row: EnvStep, acting: jax.Array) -> Any:
    """Return the reward that a row credits, ``[N]``, and the state after it."""
    shown = waiting_agents.show(state, row, acting)
    state = waiting_agents.advance(state, row, shown, waiting_agents.Pending(shown.row, (), (), ()))
    return jnp.where(shown.keep, shown.row.reward, 0.0), state


class Ledger:
    """Adds up what slots are paid, what is credited, and what is counted as nobody's."""

    def __init__(self, num_slots: int) -> None:
        none, no_reward = np.zeros(num_slots, np.bool_), np.zeros(num_slots, np.float32)
        row = EnvStep((), (), no_reward, none, none, none)
        self.state = waiting_agents.new_turns(row, (), (), ())
        self.paid, self.credited, self.early = (np.zeros(num_slots) for _ in range(3))
        self._acted = none

    def add(self, output: Any) -> None:
        one = {name: jax.tree.leaves(getattr(output, name)) for name in EnvStep._fields[2:6]}
        reward, terminated, truncated, is_first = (x[0].ravel() for x in one.values())
        acting = next(iter(output.acting.values())).ravel()
        row = EnvStep((), (), reward, terminated, truncated, is_first)
        credited, self.state = follow(self.state, row, acting)
        acted = self._acted & ~is_first
        self.paid += reward
        self.credited += np.asarray(credited)
        self.early += np.where(acted, 0.0, np.abs(reward))
        self._acted = acted | acting


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "env",
    [
        "TicTacToe-v1",
        "KuhnPoker-v1",
        "ConnectFour-v1",
        "LeducHoldem-v1",
        pytest.param("pettingzoo:classic/tictactoe_v3", marks=of_pettingzoo),
        pytest.param("pettingzoo:classic/connect_four_v3", marks=of_pettingzoo),
        "tests.support.populations:Turns",
    ],
)
def test_all_rewards_of_random_games_are_credited_or_counted(env):
    is_pool = ":" not in env
    num_envs, games = (1024, MANY) if is_pool else (64, GAMES)
    adapter = sebulba.make_env_factory(env)(num_envs, list(range(num_envs)))
    choose = RandomActions(adapter.spec, num_envs, 0)
    ledger, played, ends_seen = Ledger(2 * num_envs), 0, set()
    output = adapter.reset()
    ledger.add(output)
    while played < games:
        output = adapter.step(choose(output))
        ledger.add(output)
        (reward,) = output.reward.values()
        np.testing.assert_array_equal(reward.sum(axis=1), 0.0)
        played += int(output.episode_end.sum())
        ends_seen |= set(reward[output.episode_end].ravel().tolist())
    adapter.close()
    pending = np.asarray(ledger.state.reward)  # of games that go on
    uncredited = np.asarray(ledger.state.uncredited)
    np.testing.assert_array_equal(uncredited, ledger.early)
    if env == "tests.support.populations:Turns":
        assert uncredited.sum() > 0  # the second seat is paid before it has acted
    else:
        assert uncredited.sum() == 0 and {-1.0, 1.0} <= ends_seen
        np.testing.assert_array_equal(ledger.credited + pending, ledger.paid)


class FakePool:
    """An adapter of a cooperative pool: agents are an axis within the observations of a row."""

    num_envs = 4
    spec = EnvSpec(
        spaces.Dict(
            agents_view=spaces.Box(0, 9999, (3, 2), np.int32),
            action_mask=spaces.MultiBinary((3, 5)),
            step_count=spaces.Discrete(100),
        ),
        spaces.MultiDiscrete([5] * 3),
        name="LevelBasedForaging-v0",
    )

    def output(self, t: Any, sent: Any, xp: Any) -> EnvOutput:
        """Say who and when it is, and what each agent did, in every cell; the mask, too."""
        env, agent = np.arange(4)[:, None], np.arange(3)
        place = xp.stack([1000 * env + 100 * agent + t, 10 * sent + agent], axis=-1)
        mask = (np.arange(5) + env[..., None] + agent[:, None]) % 3 > 0
        obs = {"agents_view": place, "action_mask": mask, "step_count": xp.full(4, t)}
        row = np.arange(4)
        ends, cut = row == t % 4, row == (t + 1) % 4
        reward = xp.float32(10 * row + t)
        return EnvOutput(obs, reward, ends, cut, row == (t + 2) % 4, reward, ends | cut)

    def reset(self) -> EnvOutput:
        self.t = 0
        return self.output(0, np.zeros((4, 3), np.int32), np)

    def step(self, action: np.ndarray) -> EnvOutput:
        self.t += 1
        return self.output(self.t, action, np)

    def fused(self) -> FusedEnv:
        def step(t: Any, action: Any) -> Any:
            return t + 1, self.output(t + 1, action, jnp), 0

        return FusedEnv(np.int32(0), step)


@pytest.mark.parametrize("kind", ["stepped", "fused"])
def test_agents_of_a_cooperative_pool_are_in_their_places(kind):
    pool = FakePool()
    adapter = CooperativeAdapter(pool, "LevelBasedForaging-v0")  # type: ignore[arg-type]
    adapter.reset()
    state, step = adapter.fused()[:2]  # type: ignore[index]
    rng = np.random.default_rng(0)
    for t in range(1, 6):
        action = {"agent": rng.integers(0, 5, (4, 3))}
        if kind == "stepped":
            output = adapter.step(action)
        else:
            state, output, _ = step(state, action)
        own, common = output.obs["agent"], output.obs["common"]
        for env, agent in np.ndindex(4, 3):
            sent = 10 * action["agent"][env, agent] + agent
            assert own["agents_view"][env, agent].tolist() == [1000 * env + 100 * agent + t, sent]
            legal = [(n + env + agent) % 3 > 0 for n in range(5)]
            assert own["action_mask"][env, agent].tolist() == legal
            assert output.reward["agent"][env, agent] == 10 * env + t
            flags = (output.terminated, output.truncated, output.is_first)
            said = [bool(flag["agent"][env, agent]) for flag in flags]
            assert said == [env == (t + n) % 4 for n in range(3)]
        assert common["step_count"].tolist() == [t] * 4 and set(common) == {"step_count"}


def test_the_mover_acts_and_its_moves_are_the_legal_ones():
    adapter = sebulba.make_env_factory("TicTacToe-v1")(8, list(range(8)))
    output = adapter.reset()
    choose = RandomActions(adapter.spec, 8, 1)
    for _ in range(60):
        acting, obs = output.acting["player"], output.obs["player"]
        ended = output.episode_end
        np.testing.assert_array_equal(acting.sum(axis=1), ~ended)
        board = obs["observation"].sum(axis=-1).reshape(8, 2, 9)
        np.testing.assert_array_equal(obs["action_mask"], acting[..., None] * (1 - board))
        for flag in (output.terminated, output.truncated, output.is_first):
            np.testing.assert_array_equal(flag["player"][:, 0], flag["player"][:, 1])
        before, output = ended, adapter.step(choose(output))
        np.testing.assert_array_equal(output.is_first["player"][:, 0], before)
    adapter.close()


def test_a_move_that_is_not_legal_is_refused_and_no_game_has_moved():
    adapter = sebulba.make_env_factory("TicTacToe-v1")(2, [0, 1])
    adapter.reset()
    first = np.full((2, 2), 4, np.int32)
    adapter.step({"player": first})
    for wrong, words in ((first, "of environment 0 is not legal"), (first + 9, "outside")):
        with pytest.raises(ActionError, match=words):
            adapter.step({"player": wrong})
    again = adapter.step({"player": np.zeros((2, 2), np.int32)})
    assert again.obs["player"]["observation"].sum(axis=(1, 2, 3, 4)).tolist() == [4, 4]
    adapter.close()
    with pytest.raises(EnvError, match="is closed"):
        adapter.reset()


@pytest.mark.parametrize(
    ("env", "players", "payoff"),
    [
        ("Go9x9-v1", 2, "zero_sum"),
        ("Backgammon-v1", 2, "zero_sum"),
        ("SparrowMahjong-v1", 3, "gen"),
    ],
)
def test_other_games_of_envpool_are_played_too(env, players, payoff):
    adapter = sebulba.make_env_factory(env)(3, [0, 1, 2])
    assert adapter.spec.teams[0].payoff.startswith(payoff)
    output, choose = adapter.reset(), RandomActions(adapter.spec, 3, 0)
    for _ in range(40):
        assert output.acting["player"].shape == (3, players)
        output = adapter.step(choose(output))
    assert isinstance(adapter.fused(), str) and isinstance(adapter.state(), str)
    adapter.close()


# Exams.


def uniform(obs: dict[str, np.ndarray]) -> np.ndarray:
    mask = obs["action_mask"]
    return mask / mask.sum(axis=1, keepdims=True)


def test_nash_conv_is_that_of_open_spiel():
    """pyspiel 2.0.2, exploitability.nash_conv of UniformRandomPolicy."""
    assert games.nash_conv(games.KUHN, uniform) == pytest.approx(0.916667, abs=1e-6)
    assert games.nash_conv(games.LEDUC, uniform) == pytest.approx(4.747222, abs=1e-6)

    def folds(obs):
        return np.tile([0.0, 1.0], (len(obs["began"]), 1))

    assert games.nash_conv(games.KUHN, folds) == pytest.approx(2.0)


def test_an_equilibrium_of_kuhn_poker_has_no_nash_conv_where_policies_see_who_began():
    """The equilibrium of Kuhn (1950) with alpha = 0; without ``began`` there is none."""

    def equilibrium(obs):
        card = obs["observation"][:, :3].argmax(axis=1)
        faces_bet = obs["observation"][:, 6] == 1  # the other has put in a chip
        began = obs["began"][:, 0] == 1
        # Bets: never as the first; as the second with the king, and the jack in a third of cases.
        bets = np.where(began, 0.0, np.choose(card, [1 / 3, 0.0, 1.0]))
        calls = np.choose(card, [0.0, 1 / 3, 1.0])
        first = np.where(faces_bet, calls, bets)
        return np.stack([first, 1 - first], axis=1)

    assert games.nash_conv(games.KUHN, equilibrium) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("env", "rules"), [("KuhnPoker-v1", games.KUHN), ("LeducHoldem-v1", games.LEDUC)]
)
def test_the_rules_of_poker_are_those_of_envpool(env, rules):
    known: dict[bytes, set] = {}
    rest = list(rules.deals)
    ends = set()
    while rest:
        hand = rest.pop()
        if hand.payoff is None:
            legal = rules.legal(hand)
            seen = rules.observation(hand, hand.mover).tobytes()
            known.setdefault(seen, set()).add(tuple(legal))
            rest += [rules.after(hand, action) for action in legal]
        else:
            ends.add(abs(hand.payoff))
    adapter = sebulba.make_env_factory(env)(64, list(range(64)))
    output, choose, paid, found = adapter.reset(), RandomActions(adapter.spec, 64, 0), set(), set()
    for _ in range(150):
        obs, acting = output.obs["player"], output.acting["player"]
        for row, mask in zip(obs["observation"][acting], obs["action_mask"][acting], strict=True):
            assert tuple(np.nonzero(mask)[0].tolist()) in known[row.tobytes()]
            found.add(row.tobytes())
        output = adapter.step(choose(output))
        paid |= set(np.abs(output.reward["player"][output.episode_end]).ravel().tolist())
    adapter.close()
    assert paid <= ends and len(found) > 0.6 * len(known)
    if env == "KuhnPoker-v1":
        assert found == known.keys() and paid == ends


def test_observations_show_who_began():
    factory = sebulba.make_env_factory("KuhnPoker-v1", show_beginner=True)
    assert sebulba.env_spec(factory).groups["player"].spec.observation_space["began"].shape == (1,)
    adapter = factory(64, list(range(64)))
    output, choose = adapter.reset(), RandomActions(adapter.spec, 64, 0)
    first, seen = np.zeros((64, 2), bool), set()
    for _ in range(60):
        starts = output.is_first["player"]
        first = np.where(starts, output.acting["player"], first)
        np.testing.assert_array_equal(output.obs["player"]["began"][..., 0], first)
        seen |= set(first[:, 0].tolist())
        output = adapter.step(choose(output))
    adapter.close()
    assert seen == {True, False}
    assert "began" not in sebulba.env_spec("KuhnPoker-v1").groups["player"].spec.observation_space
    for env, value in (("KuhnPoker-v1", "yes"), ("CartPole-v1", True)):
        with pytest.raises(sebulba.UsageError, match="show_beginner"):
            sebulba.make_env_factory(env, show_beginner=value)


def test_observations_show_the_moves_so_far():
    """In Leduc hold'em a pot does not say who raised; the rules of the exam know all moves."""
    factory = sebulba.make_env_factory("LeducHoldem-v1", show_beginner=True, show_moves=8)
    assert sebulba.env_spec(factory).groups["player"].spec.observation_space["moves"].shape == (24,)
    known = {}

    def noted(obs):
        for row in zip(*(obs[name] for name in ("observation", "began", "moves")), strict=True):
            known[b"".join(part.tobytes() for part in row)] = len(known)
        return uniform(obs)

    games.nash_conv(games.LEDUC, noted)
    # By what one sees: 180 cases without the moves, 288 with them.
    assert len(known) == 288
    adapter = factory(64, list(range(64)))
    output, choose, found = adapter.reset(), RandomActions(adapter.spec, 64, 0), set()
    for _ in range(150):
        obs, acting = output.obs["player"], output.acting["player"]
        for row in zip(*(obs[n][acting] for n in ("observation", "began", "moves")), strict=True):
            found.add(b"".join(part.tobytes() for part in row))
        np.testing.assert_array_equal(obs["moves"][:, 0], obs["moves"][:, 1])
        output = adapter.step(choose(output))
    adapter.close()
    assert found <= known.keys() and len(found) > 0.6 * len(known)
    with pytest.raises(sebulba.UsageError, match="show_moves"):
        sebulba.make_env_factory("LeducHoldem-v1", show_moves=-1)


def test_moves_beyond_those_that_are_shown_are_not():
    adapter = sebulba.make_env_factory("TicTacToe-v1", show_moves=2)(8, list(range(8)))
    output, choose = adapter.reset(), RandomActions(adapter.spec, 8, 0)
    for step in range(5):
        moves = output.obs["player"]["moves"][:, 0].reshape(8, 2, 9)
        np.testing.assert_array_equal(moves.sum(axis=2).sum(axis=1), min(step, 2))
        output = adapter.step(choose(output))
    adapter.close()


class Scripted:
    """A policy for TicTacToe: perfect play, or the first empty square."""

    def __init__(self, perfect: bool) -> None:
        self.perfect = perfect
        self.memory: dict[tuple, int] = {}

    def __call__(self, obs: dict) -> tuple[np.ndarray, None]:
        own, other = (obs["observation"][..., plane].reshape(-1, 9) for plane in (0, 1))
        boards = own.astype(int) - other
        if not self.perfect:
            return (boards == 0).argmax(axis=1), None
        return np.array([self.best(tuple(board))[1] for board in boards.tolist()]), None

    def best(self, board: tuple) -> tuple[int, int]:
        sums = np.array(board)[games.LINES].sum(axis=1)
        if (sums == -3).any() or 0 not in board:
            return -int((sums == -3).any()), -1
        if board not in self.memory:
            moves = [i for i in range(9) if board[i] == 0]
            after = [tuple(-(x + (j == i)) for j, x in enumerate(board)) for i in moves]
            worth = [-self.best(one)[0] for one in after]
            self.memory[board] = (max(worth), moves[int(np.argmax(worth))])
        return self.memory[board]


def test_all_replies_in_tic_tac_toe_are_tried():
    assert games.lost_replies(Scripted(perfect=True)) == 0
    assert games.lost_replies(Scripted(perfect=False)) > 10


def test_shuffled_words_are_those_of_another_game_and_nothing_else_changes():
    heard = np.arange(4 * 11, dtype=np.float32).reshape(4, 1, 11)
    output = SimpleNamespace(obs={"speaker": np.ones((4, 1, 3)), "listener": heard.copy()})
    output._replace = lambda obs: SimpleNamespace(obs=obs)
    env = SimpleNamespace(spec=None, num_envs=4, reset=lambda: output, step=lambda _: output)
    shuffled = games.ShuffledWords(env)
    for obs in (shuffled.reset().obs, shuffled.step(None).obs):
        np.testing.assert_array_equal(obs["listener"][..., :8], heard[..., :8])
        np.testing.assert_array_equal(obs["listener"][..., 8:], heard[[3, 0, 1, 2], :, 8:])
        assert obs["speaker"] is output.obs["speaker"]
    np.testing.assert_array_equal(output.obs["listener"], heard)  # which the environment may own


def test_the_script_of_connect_four_wins_blocks_and_beats_chance():
    board = np.zeros((1, 6, 7, 2), np.int8)
    board[0, 5, :3, 1] = 1  # the other has three in the bottom row
    legal, rng = np.ones((1, 7), np.int8), np.random.default_rng(0)
    assert games.wins_or_blocks(board, legal, rng) == [3]
    board[0, 3:, 6, 0] = 1  # three on top of each other
    assert games.wins_or_blocks(board, legal, rng) == [6]

    class Script:
        def __call__(self, obs):
            return games.wins_or_blocks(obs["observation"], obs["action_mask"], rng), None

    won = games.share_won(Script(), "ConnectFour-v1", games.at_random, num_games=60)
    assert won > 0.7


def test_a_game_is_described():
    text = sebulba.describe(sebulba.env_spec("KuhnPoker-v1"))
    assert "player_0, player_1" in text and "masks the actions" in text
    assert "zero_sum, symmetric" in text
    spec = sebulba.env_spec("ConnectFour-v1").groups["player"].spec
    assert spec.observation_space["observation"] == spaces.MultiBinary((6, 7, 2))

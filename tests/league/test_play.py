"""``sebulba play``: a person plays a policy, a policy folder or a snapshot in the terminal."""

from __future__ import annotations

import builtins
import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from sebulba_league import play
from sebulba_league.game_words import texts

import sebulba
from sebulba import UsageError
from sebulba.agents.configs import make_agent
from sebulba.configs.presets import PRESETS
from sebulba.policies.policy import save_policy
from sebulba.tools.check.env_players import RandomActions
from sebulba.types import RunSpec

ONE = RunSpec(num_envs=4, num_inferencers=1, steps_per_cycle=1, num_update_devices=1)
BOARDS, CARDS = ("tic-tac-toe", "connect-four"), ("kuhn", "leduc")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an untrained policy for each game."""
    folder = tmp_path_factory.mktemp("policies")
    for name in (*BOARDS, *CARDS):
        config = PRESETS[name].make()
        factory: Any = sebulba.make_env_factory(config.env.id, **config.env.factory_arguments())
        agent = make_agent(sebulba.env_spec(factory), config.agent)
        networks = agent.new_networks(jax.random.key(0))
        experience = agent.new_experience(jax.random.key(1), networks, ONE)
        save_policy(folder / name, agent, agent.acting_networks(networks, experience))
    return folder


class Person:
    """Answers each question by a function of the moves that it offers, and notes what was asked."""

    def __init__(self, answer: Callable[[list[str]], str]) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self, prompt: str) -> str:
        self.asked += 1
        offered = re.search(r"\((.*)\)", prompt)
        return self.answer(offered[1].split(", ") if offered else [])


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    def sits_down(answer: Callable[[list[str]], str], *, tty: bool = False) -> Person:
        one = Person(answer)
        monkeypatch.setattr(builtins, "input", one)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: tty))
        return one

    return sits_down


def first(moves: list[str]) -> str:
    return moves[0]


@pytest.mark.parametrize("seat", ["0", "1"])
@pytest.mark.parametrize("game", BOARDS)
def test_a_board_is_played_to_its_end_from_both_seats(game, seat, policies, person, capsys):
    one = person(first)
    assert play.main([str(policies / game), "--seat", seat]) == 0
    said = capsys.readouterr().out
    mark = "XO"[int(seat)]
    assert said.startswith(f"You {('begin', 'are second')[int(seat)]} with {mark}, against")
    assert re.search(r"^(You win|You lose|A draw)\.$", said, re.MULTILINE)
    board = said.rstrip().split("\n\n")[-2]
    marks = {one: len(re.findall(rf"\b{one}\b", board)) for one in "XO"}
    assert marks[mark] == one.asked and marks["X"] - marks["O"] in (0, 1)
    grid = "1 2 3 4 5 6 7\n" if game == "connect-four" else "---+---+---\n"
    assert said.count(grid) == (one.asked + 1) * (1 if game == "connect-four" else 2)


@pytest.mark.parametrize("seat", ["0", "1"])
@pytest.mark.parametrize("game", CARDS)
def test_cards_of_the_opponent_are_hidden_until_the_end(game, seat, policies, person, capsys):
    folded = False

    def call(moves: list[str]) -> str:
        nonlocal folded
        folded = "fold" in moves
        return "FOLD" if folded else "c"

    for seed in range(4):
        one = person(call)
        folder = policies / game / "player"
        assert play.main([str(folder), "--seat", seat, "--seed", str(seed)]) == 0
        said = capsys.readouterr().out
        *during, end = re.findall(r"^opponent (.)", said, re.MULTILINE)
        assert during == ["?"] * one.asked and end in "JQK"
        (own,) = set(re.findall(r"^you +(.)", said, re.MULTILINE))
        assert own in "JQK" and ("You lose 1 chip." in said or not folded)


def test_moves_that_are_not_legal_are_explained_and_the_game_goes_on(policies, person, capsys):
    words = iter(["", "0", "ten", "left"])
    taken: list[str] = []

    def answer(moves: list[str]) -> str:
        if wrong := next(words, None):
            return wrong
        gone = [cell for cell in "123456789" if cell not in moves]
        if gone and not taken:
            taken.append(gone[0])
            return gone[0]
        return moves[-1]

    person(answer)
    assert play.main([str(policies / "tic-tac-toe")]) == 0
    said = capsys.readouterr().out
    assert said.count("is not a move; choose one of 1, 2, 3") == 3
    assert f"cell {taken[0]} is taken; choose one of" in said
    assert re.search(r"^(You win|You lose|A draw)\.$", said, re.MULTILINE)

    again = iter(["7"])
    person(lambda moves: "7" if "7" in moves else next(again, moves[0]))
    play.main([str(policies / "connect-four"), "--seat", "1"])
    assert "column 7 is full; choose one of 1, 2" in capsys.readouterr().out


def test_greedy_and_seed_decide_what_the_policy_does(policies, person, capsys):
    def said(*options: str) -> str:
        person(first)
        play.main([str(policies / "connect-four"), *options])
        return capsys.readouterr().out

    assert said("--seed", "1") == said("--seed", "2") == said("--greedy")
    sampled = {said("--no-greedy", "--seed", str(seed)) for seed in (1, 1, 2, 3)}
    assert len(sampled) == 3


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt, "q", "Quit"])
def test_a_person_may_leave(end, policies, person, capsys):
    def leave(moves: list[str]) -> str:
        if isinstance(end, str):
            return end
        raise end

    person(leave)
    assert play.main([str(policies / "kuhn")]) == 0
    said = capsys.readouterr()
    assert "win" not in said.out and said.err == ""


def test_another_game_is_offered_on_a_terminal_only(policies, person, capsys):
    for tty, games in ((True, 3), (False, 1)):
        more = iter(["y", "", "n"])
        person(lambda moves, more=more: moves[0] if moves else next(more), tty=tty)
        assert play.main([str(policies / "kuhn")]) == 0
        said = capsys.readouterr().out
        assert len(re.findall(r"^You (?:win|lose) \d chips?\.$", said, re.MULTILINE)) == games


@pytest.mark.slow
def test_the_end_of_a_pipe_ends_the_game(policies):
    code = "import sys; from sebulba_league.play import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, str(policies / "tic-tac-toe")]
    done = subprocess.run(words, input="5\n5\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "cell 5 is taken" in done.stdout, done.stderr


def test_what_cannot_be_played_is_said_in_words(policies, tmp_path):
    with pytest.raises(UsageError, match=r"CartPole-v1.* no text .* use TicTacToe-v1"):
        play.main(["pretrained:cartpole"])
    with pytest.raises(UsageError, match=r"folder of a policy, .* name the folder of its run"):
        play.main([str(policies / "kuhn"), "--snapshot", "1"])
    with pytest.raises(UsageError, match="nowhere"):
        play.main([str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        play.main([str(policies / "kuhn"), "--seat", "2"])


@pytest.mark.slow
def test_a_snapshot_of_a_league_is_played(tmp_path, person, capsys):
    config = PRESETS["kuhn-league"].make()
    agent = dataclasses.replace(config.agent, snapshot_every=1024)
    small = {
        "num_envs": 32,
        "steps_per_cycle": 16,
        "total_env_steps": 2048,
        "eval_every_env_steps": 0,
    }
    small |= {"run_dir": str(tmp_path / "run"), "inference_devices": (0,), "update_devices": (0,)}
    result = sebulba.train(dataclasses.replace(config, agent=agent, **small))
    assert result is not None
    seen, experience = result.metrics, result.state.experience
    assert 1 <= seen["snapshots"] <= int((experience.generation >= 0).sum())
    assert 0 < seen["win_rate/hardest"] <= seen["win_rate/history"] < 1
    assert seen["win_rate/hardest"] <= seen["win_rate/newest"] < 1
    run = str(tmp_path / "run")
    for words, name in ((["--snapshot", "1"], f"#1 of {run}"), ([], run)):
        person(first)
        assert play.main([run, *words]) == 0
        assert f"against {name}. q ends" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"snapshot=77 is not in .* use one of 0, 1"):
        play.main([run, "--snapshot", "77"])
    with pytest.raises(UsageError, match="leave one out"):
        play.main([run, "--snapshot", "1", "--best"])


def test_games_are_shown_as_text_and_cards_to_whom_they_belong():
    adapter = sebulba.make_env_factory("LeducHoldem-v1")(32, list(range(32)))
    output, choose, shown = adapter.reset(), RandomActions(adapter.spec, 32, 0), set()
    for _ in range(12):
        cards = output.obs["player"]["observation"][..., :3].argmax(axis=-1)
        shown_to = [texts(adapter, seat) for seat in (None, 0, 1)]
        for game, (all_, *own) in enumerate(zip(*shown_to, strict=True)):
            over = bool(output.episode_end[game])
            for seat, text in enumerate(own):
                card = "JQK"[cards[game, seat]]
                assert re.search(rf"^seat {seat} +{card} ", all_, re.MULTILINE)
                assert re.search(rf"^you +{card} ", text, re.MULTILINE)
                (other,) = re.findall(r"^opponent +(.)", text, re.MULTILINE)
                assert other == ("JQK"[cards[game, 1 - seat]] if over else "?")
                shown.add((over, other, text.splitlines()[-1][9:]))
        output = adapter.step(choose(output))
    adapter.close()
    assert {(False, "?", "-"), (False, "?", "J"), (True, "K", "Q")} <= shown
    other = sebulba.make_env_factory("Go9x9-v1")(1, [0])
    other.reset()
    with pytest.raises(sebulba.UsageError, match=r"Go9x9-v1.* no text .* use TicTacToe-v1"):
        texts(other)
    other.close()

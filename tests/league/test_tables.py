"""What a run says of its league: the command, its table and pictures, ratings and cross-play."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from sebulba_league import League, Rollout, SelfPlay
from sebulba_league.command import main
from sebulba_league.cross_play import cross_play
from sebulba_league.matchmakers import DRAWN, LOST, WON
from sebulba_league.presets import PRESETS as OWN
from sebulba_league.ratings import elo, ratings_now
from sebulba_league.table import Row, print_rows

import sebulba
from sebulba import UsageError
from sebulba.agents.configs import PPOConfig
from sebulba.configs.presets import PRESETS
from tests.league.games import CYCLE, PPO, Throws, Turns, league_of, loop_of, planted

ALONE: Any = CYCLE | {"schedule": "lockstep"}


def test_ratings_are_those_that_made_the_results():
    strength = np.array([-200.0, 0.0, 50.0, 150.0])
    expected = 1 / (1 + 10 ** ((strength[None] - strength[:, None]) / 400))
    results = np.zeros((4, 4, 3))
    results[..., WON], results[..., LOST] = 1000 * expected, 1000 * (1 - expected)
    ratings, margins = elo(results)
    np.testing.assert_allclose(ratings, strength, atol=2)
    assert (margins > 5).all() and (margins < 30).all()
    information = -results[..., WON] * (1 - expected) * 2
    np.fill_diagonal(information, 0.0)
    np.fill_diagonal(information, -information.sum(axis=1))
    errors = np.sqrt(np.diag(np.linalg.pinv(information)))
    np.testing.assert_allclose(margins, 1.96 * 400 / np.log(10) * errors, rtol=0.01)
    few, wide = elo(results / 100)
    assert (wide > 5 * margins).all() and np.isfinite(few).all()


def test_one_who_won_all_has_a_rating_and_draws_are_half():
    results = np.zeros((3, 3, 3))
    results[0, 1:, WON] = results[1:, 0, LOST] = 10
    results[1, 2, DRAWN] = results[2, 1, DRAWN] = 10
    ratings, margins = elo(results)
    assert ratings[0] > ratings[1] + 200 and ratings[1] == pytest.approx(ratings[2], abs=1e-6)
    assert np.isfinite(ratings).all() and np.isfinite(margins).all()


def league_whose_players_have(strength: np.ndarray, num_snapshots: int, games: float) -> Any:
    """Return the tables of a league in which the last player is the learner, after snapshots and
    anchors."""
    shares = 1 / (1 + 10 ** ((strength[None] - strength[:, None]) / 400))
    results = games * np.stack([shares, 0 * shares, 1 - shares], axis=-1)
    size, others = num_snapshots, len(strength) - 1
    record = results[:size, :others] * (np.arange(others) < np.arange(size)[:, None])[..., None]
    record[:, size:] = results[:size, size:others]
    return SimpleNamespace(
        generation=np.array([*range(size), -1]),
        record=np.pad(np.insert(record, size, 0, axis=1), ((0, 1), (0, 0), (0, 0))),
        results=np.insert(results[-1, :others, None] / 2, size, 0, axis=0).repeat(2, axis=1),
        ratings=np.zeros((others + 2, 2)),
    )


def test_the_ratings_of_a_league_are_those_that_made_its_results_and_can_be_compared_later():
    strength = np.array([0.0, 80, 150, -30, 240])  # three snapshots, an anchor, the learner
    league = league_whose_players_have(strength, 3, games=4000)
    ratings = ratings_now(league)
    np.testing.assert_allclose(ratings[[0, 1, 2, 4, 5], 0], strength, atol=3)
    assert ratings[3].tolist() == [0, 0]  # no snapshot
    assert (ratings[[0, 1, 2, 4, 5], 1] > 2).all() and (ratings[:, 1] < 15).all()
    # Later the learner is better, and its opponents keep their ratings.
    better = league_whose_players_have(np.append(strength[:-1], 400.0), 3, games=4000)
    better.ratings = ratings
    later = ratings_now(better)
    np.testing.assert_allclose(later[[0, 1, 2, 4, 5], 0], [0, 80, 150, -30, 400], atol=4)


def test_a_seat_without_games_has_no_win_rate(capsys):
    rows = [Row("#0", np.array([4.0, 0.0]), np.array([0.75, 0.5]), 0.1, 1, 1, np.nan, np.nan, 0)]
    print_rows(rows, "")
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "#0" in one]
    assert line.split() == ["#0", "75%", "?", "?", "4", "100%", "100%", "?"]


class ThrowsInTurn(Turns):
    """Rock-paper-scissors in which seat 1 throws after seat 0, and is not told its throw."""

    def step(self, actions: dict) -> Any:
        self.t += 1
        if self.t == 1:
            self.thrown = actions["seat_0"]
            return {"seat_1": 1}, {"seat_0": 0.0, "seat_1": 0.0}, False, False
        won = (0.0, 1.0, -1.0)[(self.thrown - actions["seat_1"]) % 3]
        return {}, {"seat_0": won, "seat_1": -won}, True, False


@pytest.mark.parametrize("env", [pytest.param(Throws, marks=pytest.mark.slow), ThrowsInTurn])
def test_in_cross_play_every_pair_plays_from_both_seats(env):
    agent = league_of(env)
    with loop_of(env, agent) as loop:
        history = planted(loop.new_state(0, 4)).experience.history
    players = jax.tree.map(lambda x: x[:3], history)  # rock, paper, scissors
    results = cross_play(agent, players, env, games=7)
    assert (results.sum(axis=-1) == 7).all()
    won = np.argmax(results, axis=-1)
    paper_first = (np.arange(3)[:, None] - np.arange(3)) % 3
    assert (won == np.array([DRAWN, WON, LOST])[paper_first]).all()
    with pytest.raises(UsageError, match="games=0"):
        cross_play(agent, players, env, games=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short league in Kuhn poker."""
    folder = tmp_path_factory.mktemp("league") / "kuhn"
    config = PRESETS["kuhn-league"].make()
    agent = dataclasses.replace(
        config.agent, anchors={"random": "legal-random"}, mirrors=2, snapshot_every=8192
    )
    small = {"total_env_steps": 32768, "run_dir": str(folder), "eval_every_env_steps": 32768}
    small |= {"inference_devices": (0,), "update_devices": (0,), "anneal_learning_rate": False}
    sebulba.train(dataclasses.replace(config, agent=agent, eval_episodes=20, **small))
    return folder


@pytest.mark.slow
def test_a_league_by_the_command_is_a_run_like_others(run, tmp_path, capsys):
    assert (
        main([str(run), "--json", str(tmp_path / "a.json"), "--picture", str(tmp_path / "a.png")])
        == 0
    )
    assert "random" in (said := capsys.readouterr().out) and "#0" in said
    table = json.loads((tmp_path / "a.json").read_text())["opponents"]
    assert [row["generation"] for row in table] == [0, 1, 2, 3, 4, None]
    assert sum(row["chance"] for row in table) == pytest.approx(1)
    assert all(len(row["win_rate_by_seat"]) == 2 for row in table)
    assert sum(row["meta_strategy"] for row in table) == pytest.approx(1)
    assert all(row["elo_interval_95"] > 0 for row in table)
    assert sum(table[-1]["games"]) > 100
    assert (tmp_path / "a.png").stat().st_size > 10_000
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < metrics[-1]["win_rate/random"] < 1 and 0 < metrics[-1]["win_rate/history"] < 1
    policy = sebulba.load_policy(run)
    kuhn = sebulba.make_env_factory("KuhnPoker-v1", show_beginner=True)
    assert sebulba.evaluate(policy, kuhn, num_episodes=20).is_zero_sum
    assert (run / "best_policy").is_dir()
    resumed = sebulba.resume(run, total_env_steps=40960)
    assert resumed is not None and int(resumed.state.experience.made) == 6
    before, after = (x["elo"] for x in (metrics[-1], resumed.metrics))
    assert abs(before - after) < 100 and resumed.metrics["elo_interval"] > 0


@pytest.mark.slow
def test_cross_play_of_a_run_has_ratings_and_a_picture(run, tmp_path, capsys):
    picture, file = tmp_path / "b.png", tmp_path / "b.json"
    main([str(run), "--games", "4", "--picture", str(picture), "--json", str(file)])
    assert "Elo" in capsys.readouterr().out and picture.stat().st_size > 10_000
    played = json.loads(file.read_text())["cross_play"]
    assert played["players"][-1] == "now" and len(played["elo"]) == len(played["players"])
    assert (np.sum(played["results"], axis=-1) == 4).all()


def test_a_run_without_a_league_is_refused_in_words(tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        main([str(tmp_path / "nowhere")])
    with pytest.raises(UsageError, match=r"--picture .* folder that does not exist"):
        main([str(tmp_path), "--picture", str(tmp_path / "no/a.png")])


def test_trainers_nest_and_each_iteration_says_whom_the_learner_beats(tmp_path):
    rollout = Rollout(Turns, PPO, num_envs=16, steps_per_cycle=8, rounds=4, **ALONE)
    fields = {"history": 4, "opponents": 2, "mirrors": 1, "snapshot_every": 512}
    trainer = League(SelfPlay(rollout, **fields), "latest", {"random": "legal-random"})
    with trainer:
        first, second = trainer.train(), trainer.train()
        assert (first.env_steps, second.env_steps) == (512, 1024) and trainer.env_steps == 1024
        assert set(first.win_rates) == {"#0", "#1", "random"}
        assert trainer.evaluate(10).returns.shape == (10,)
        trainer.save(tmp_path / "p")
        with pytest.raises(UsageError, match="has begun to train"):
            SelfPlay(rollout)
    assert sebulba.load_policy(tmp_path / "p").acting_networks.keys() == {rollout.loop.agent.group}


def test_trainers_in_the_wrong_order_are_refused_in_words():
    rollout = Rollout(Turns, PPO, num_envs=16)
    with pytest.raises(UsageError, match="League needs a history; put a SelfPlay between"):
        League(rollout)
    with pytest.raises(UsageError, match="nothing has been trained yet"):
        rollout.result()


@pytest.mark.parametrize("name", sorted(OWN))
def test_presets_have_lanes_that_fit(name):
    config = OWN[name].make()
    factory: Any = sebulba.make_env_factory(config.env.id)
    from sebulba.runs.build import build_agent
    from sebulba.types import RunSpec

    agent = build_agent(config, sebulba.env_spec(factory))
    agent.check_run(RunSpec(config.num_envs, 1, config.steps_per_cycle, 1))
    assert isinstance(next(iter(config.agent.agents.values())), PPOConfig)

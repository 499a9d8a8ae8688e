"""Self-play against a history: whose rows are whose, who plays whom for how long, and results."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from sebulba_league.agent import GAMES, Games
from sebulba_league.lanes import Lanes
from sebulba_league.matchmakers import DRAWN, LOST, MATCHMAKERS, WON, Standings

import sebulba
from sebulba import UsageError
from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs import TorsoConfig
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.types import RunSpec
from tests.league.games import (
    NUM_ACTIONS,
    PPO,
    JaxTurns,
    Throws,
    Turns,
    league_of,
    loop_of,
    planted,
)
from tests.support.loop_helpers import Recorder, leaves_equal

EVERY_CYCLE: dict[str, Any] = {"snapshot_every": 32, "rematch_every": 32}
HALF = np.full((1, 1), 0.5)
OFTEN: dict[str, Any] = {"rematch_every": 1, "snapshot_every": 10**9, "matchmaker": "uniform"}


# Lanes.


@pytest.mark.parametrize(
    "lanes", [Lanes(3, 1, 2, 2), Lanes(1, 0, 0, 2), Lanes(4, 2, 0, 3)], ids=str
)
def test_every_row_is_one_players_and_the_learner_has_every_seat_alike(lanes):
    num_envs = 3 * lanes.number * lanes.seats
    others = [lanes.others(i, num_envs) for i in range(lanes.opponents + lanes.anchors)]
    own = lanes.learner(num_envs)
    rows = np.concatenate([own, *others])
    assert sorted(rows) == list(range(num_envs * lanes.seats))
    assert {len(x) for x in others} == {3 * lanes.seats * (lanes.seats - 1)}
    by_seat = np.bincount(own % lanes.seats)
    assert len(set(by_seat)) == 1 and len(by_seat) == lanes.seats
    # Any shard of the environments is as the whole.
    assert (lanes.learner(num_envs // 3) == own[: len(own) // 3]).all()


def test_lanes_that_do_not_divide_are_refused_in_words():
    with pytest.raises(UsageError, match=r"num_envs=20 must be divisible by 16: 4 lanes \(oppon"):
        league_of(Turns).check_run(RunSpec(20, 1, 8, 2))


# Matchmakers.


def standings(win_rates: list[float], games: float = 1e6) -> Standings:
    results = np.zeros((len(win_rates) + 1, 2, 3))
    results[:-1, :, WON] = games * np.array(win_rates)[:, None]
    results[:-1, :, LOST] = games - results[:-1, :, WON]
    none = np.full((len(results), len(results)), 0.5)
    return Standings(np.array([*range(len(win_rates)), -1]), results, none)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latest", [0, 0, 1]),
        ("uniform", [1, 1, 1]),
        ("pfsp", [0.81, 0.25, 0.01]),
        ("pfsp-variance", [0.09, 0.25, 0.09]),
        ("league-exploiter", [0.5, 0.5, 0.1]),
    ],
)
def test_chances_follow_win_rates_and_rows_without_a_snapshot_have_none(name, expected):
    chances = MATCHMAKERS[name](standings([0.1, 0.5, 0.9]))
    np.testing.assert_allclose(chances, [*np.array(expected) / sum(expected), 0], atol=1e-5)


def test_the_main_agent_plays_what_it_forgot_more_often():
    chances = MATCHMAKERS["main"](standings([0.1, 0.25, 0.6, 0.9]))
    assert chances[1] > MATCHMAKERS["pfsp"](standings([0.1, 0.25, 0.6, 0.9]))[1]
    assert (
        MATCHMAKERS["main"](standings([0.5, 0.6])) == MATCHMAKERS["pfsp"](standings([0.5, 0.6]))
    ).all()


def test_nash_finds_the_equilibrium_of_biased_rock_paper_scissors_and_leaves_out_the_dominated():
    gain = np.zeros((5, 5))
    for winner, loser, worth in ((1, 0, 1.0), (0, 2, 2.0), (2, 1, 0.2)):
        gain[winner, loser], gain[loser, winner] = worth, -worth
    gain[:3, 3], gain[3, :3] = 0.1, -0.1  # row 3 loses to all; row 4 has no snapshot
    generation = np.array([0, 1, 2, 3, -1])
    chances = MATCHMAKERS["nash"](Standings(generation, np.zeros((5, 2, 3)), 0.5 + gain / 4))
    np.testing.assert_allclose(chances, [0.2 / 3.2, 2 / 3.2, 1 / 3.2, 0, 0], atol=1e-6)


def test_the_seats_of_an_opponent_count_the_same_however_often_they_were_played():
    results = np.zeros((1, 2, 3))
    results[0, 0, WON], results[0, 1, LOST] = 9998, 98
    assert Standings(np.array([0]), results, HALF).win_rate == pytest.approx(0.5, abs=0.01)
    assert Standings(np.array([0]), 0 * results, HALF).win_rate == 0.5
    draws = np.zeros((1, 2, 3))
    draws[..., DRAWN] = 50
    assert Standings(np.array([0]), draws, HALF).win_rate == 0.5


# Opponents.


def check_constant(recorder: Recorder, agent: Any, *, waits: bool) -> set[tuple[int, int]]:
    """Hold every action of an opponent to the snapshot that its episode began with.

    Returns:
      Pairs of opponents that were next to each other in an environment.
    """
    follows = set()
    for inferencer in {int(t.inferencer) for t in recorder.trajectories}:
        own = recorder.of(inferencer)
        games = [jax.tree.map(np.asarray, t.extras[GAMES]) for t in own]
        first = np.concatenate([t.env_step.is_first[agent.group][:-1, :, 0] for t in own])
        action = np.concatenate([t.action[agent.group] for t in own])
        opponent = np.concatenate([g.opponent for g in games])
        acting = np.ones(action.shape, bool)
        if waits:
            acting = np.concatenate([t.env_step.acting[agent.group][:-1] for t in own])
        num_envs = first.shape[1]
        seat, lane = agent.lanes.seat(num_envs), agent.lanes.lane(num_envs)
        for env in np.flatnonzero(lane < agent.lanes.opponents):
            playing = None
            for t in range(len(first)):
                if first[t, env]:
                    if playing is not None:
                        follows.add((playing, int(opponent[t, env])))
                    playing = int(opponent[t, env])
                assert playing == opponent[t, env]
                other = 1 - seat[env]
                if acting[t, env, other]:
                    assert action[t, env, other] == playing % NUM_ACTIONS
    return follows


@pytest.mark.parametrize(
    "env",
    [
        Turns,
        pytest.param(Throws, marks=pytest.mark.slow),
        pytest.param(JaxTurns, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("schedule", ["lockstep", "async"])
def test_an_opponent_is_the_same_snapshot_in_the_whole_of_an_episode(env, schedule):
    agent, recorder = league_of(env, **OFTEN), Recorder()

    def slow(num_envs: int, seeds: list[int]) -> Any:
        made = sebulba.make_env_factory(env)(num_envs, seeds)
        step, wait_s = made.step, 0.002 * (len(workers) % 2)
        workers.append(made)
        made.step = lambda action: (time.sleep(wait_s), step(action))[1]
        return made

    workers: list[Any] = []
    options = {"schedule": schedule, "num_inferencers_per_device": 2, "observe_cycle": recorder}
    with loop_of(slow, agent, **options) as loop:
        state = loop.run(planted(loop.new_state(0, 8)), 24, 8).state
        loop.run(state, 24, 8)  # a lane waits for the slowest to compile
    follows = check_constant(recorder, agent, waits=env is not Throws)
    changed = {pair for pair in follows if pair[0] != pair[1]}
    assert len(changed) > 5  # opponents did change


@pytest.mark.slow
def test_an_opponent_is_the_same_while_an_inferencer_is_replaced():
    agent, recorder = league_of(Turns, **OFTEN), Recorder()
    failed = threading.Event()

    class Failing(Turns):
        def step(self, actions: dict) -> Any:
            if not failed.is_set() and len(recorder.trajectories) > 6:
                failed.set()
                raise RuntimeError("once")
            return super().step(actions)

    options = {"schedule": "async", "on_env_failure": "restart", "observe_cycle": recorder}
    loop = loop_of(Failing, agent, num_inferencers_per_device=2, **options)
    with loop, pytest.warns(RuntimeWarning, match="gets replaced"):
        result = loop.run(planted(loop.new_state(0, 8)), 40, 8)
    assert result.counters.env_restarts == 1
    for inferencer in (0, 1):  # a gap in the cycles is where the new one began
        own = recorder.of(inferencer)
        gap = next((i for i in range(1, len(own)) if own[i].cycle > own[i - 1].cycle + 1), len(own))
        for part in (own[:gap], own[gap:]):
            if part:
                half = Recorder()
                half.trajectories = part
                check_constant(half, agent, waits=True)


@pytest.mark.slow
def test_opponents_with_memory_forget_where_an_episode_begins():
    """An LSTM that plays both generations of a lane keeps the state of each row's own."""
    agent = league_of(Turns, dataclasses.replace(PPO, lstm_size=4), **OFTEN)
    recorder = Recorder()
    with loop_of(Turns, agent, observe_cycle=recorder) as loop:
        result = loop.run(planted(loop.new_state(0, 8)), 10, 8)
    assert check_constant(recorder, agent, waits=True)
    assert np.isfinite(result.metrics["loss"])


def test_many_lanes_with_many_rows_act_in_one_program():
    """All of their draws together are too many for the one kernel that those of a lane are."""
    agent, run = league_of(Turns, opponents=16, mirrors=0), RunSpec(4096, 1, 1, 1)
    state = jax.eval_shape(lambda key: agent.new_state(key, run), jax.random.key(0))
    given = jax.eval_shape(agent.staged, state.networks, state.experience)
    jax.jit(agent.step).lower(given, state.step[0], agent.empty_env_step(4096)).compile()


def test_a_snapshot_does_not_change_while_the_learner_does():
    agent = league_of(Throws, snapshot_every=16 * 8 * 4, rematch_every=16 * 8)
    with loop_of(Throws, agent) as loop:
        state = loop.run(loop.new_state(0, 8), 5, 8).state
        assert list(state.experience.generation[:3]) == [0, 1, -1]
        kept = jax.device_get(jax.tree.map(lambda x: x[:2], state.experience.history))
        learner = jax.device_get(state.networks)
        state = loop.run(state, 100, 8).state
    now = jax.device_get(jax.tree.map(lambda x: x[:2], state.experience.history))
    assert int(state.experience.made) == 27
    rows = [r for r in (0, 1) if state.experience.generation[r] == r]
    for row in rows:
        assert leaves_equal(*(jax.tree.map(lambda x, r=row: x[r], h) for h in (kept, now)))
    assert not leaves_equal(learner, jax.device_get(state.networks))


# Results.


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
def test_results_are_by_seat_and_a_truncated_game_has_none(cut):
    env = functools.partial(Turns, cut)
    agent = league_of(env, anchors={"random": "legal-random"}, mirrors=0, payoff_games=10**9)
    recorder = Recorder()
    with loop_of(env, agent, observe_cycle=recorder) as loop:
        state = loop.run(loop.new_state(0, 16), 6, 16).state
    results = np.asarray(state.experience.results)
    if cut:
        assert not results.any()
        return
    games = jax.tree.map(
        lambda *x: np.concatenate(x), *(t.extras[GAMES] for t in recorder.trajectories)
    )
    # No snapshot was made, and the table forgets almost nothing.
    np.testing.assert_allclose(state.experience.fresh, results.sum(axis=1), rtol=1e-4)
    for row in (0, agent.config.history):  # the first snapshot, and the anchor
        assert results[row, 0, WON] > 20 and results[row, 1, LOST] > 20
        assert results[row].sum() == results[row, 0, WON] + results[row, 1, LOST]
        assert results[row].sum() == (games.over & (games.opponent == row)).sum()


def test_results_of_a_snapshot_that_was_replaced_count_for_nobody():
    agent = league_of(Throws)
    with loop_of(Throws, agent) as loop:
        experience = planted(loop.new_state(0, 4)).experience
    shape = (4, 16)
    games = Games(
        jnp.zeros(shape, jnp.int32),
        jnp.ones(shape),
        jnp.full(shape, 2, jnp.int32),
        jnp.full(shape, 2, jnp.int32),
        jnp.ones(shape, bool),
    )
    with_results = jax.vmap(
        lambda games: agent._with_results(experience, games)[0], axis_name=LEARNER_AXIS
    )
    (now,) = with_results(jax.tree.map(lambda x: x[None], games))
    assert now[2, :, WON].tolist() == [32, 32] and now.sum() == 64
    (none,) = with_results(
        jax.tree.map(lambda x: x[None], games._replace(generation=games.generation + 1))
    )
    assert not none.any()


def draws(agent: Any, experience: Any, num: int) -> np.ndarray:
    """Return which rows the lanes were given in ``num`` edits, by the seed of each."""
    host = jax.device_get(experience)
    counts = np.zeros(agent.config.history)
    for seed in range(num):
        ready = host._replace(seen=np.repeat(host.matches.number[None], len(host.seen), 0))
        away = ready._replace(
            matches=ready.matches._replace(row=np.full_like(host.matches.row, -1))
        )
        matches = agent._next_matches(away, np.random.default_rng([1, seed]))
        counts += np.bincount(matches.row[0], minlength=len(counts))
    return counts


def test_opponents_are_met_as_often_as_the_matchmaker_says():
    agent = league_of(Throws, matchmaker="pfsp")
    with loop_of(Throws, agent) as loop:
        experience = planted(loop.new_state(0, 4)).experience
    results = np.zeros(experience.results.shape, np.float32)
    rates = np.linspace(0.2, 0.9, agent.config.history)
    results[:, :, WON], results[:, :, LOST] = 1e4 * rates[:, None], 1e4 * (1 - rates[:, None])
    counts = draws(agent, experience._replace(results=results), 2000)
    expected = (1 - rates) ** 2
    assert chisquare(counts, counts.sum() * expected / expected.sum()).pvalue > 1e-3
    # Twice as many results of the same kind say the same.
    twice = draws(agent, experience._replace(results=2 * results), 100)
    assert (twice == draws(agent, experience._replace(results=results), 100)).all()


# Running.


@pytest.mark.slow
def test_lockstep_leagues_are_the_same_twice_and_after_a_resume_at_every_cycle(tmp_path):
    fields = {"snapshot_every": 16 * 8 * 3, "rematch_every": 16 * 8, "matchmaker": "pfsp"}

    def league() -> Any:
        return league_of(Turns, anchors={"random": "legal-random"}, mirrors=0, **fields)

    with loop_of(Turns, league()) as loop:
        whole = jax.device_get(loop.run(loop.new_state(0, 8), 8, 8).state)
    with Checkpointer(tmp_path) as checkpointer:
        again = in_parts(lambda **o: loop_of(Turns, league(), checkpointer=checkpointer, **o), 8)
    for name in ("networks", "opt", "experience"):
        assert leaves_equal(getattr(whole, name), getattr(again, name)), name


def in_parts(make_loop: Any, cycles: int) -> Any:
    """Return the state after so many cycles, each in a new loop that resumes from the last."""
    for cycle in range(1, cycles + 1):
        with make_loop(observe_cycle=(recorder := Recorder())) as loop:
            total = cycle * loop.num_envs * 8
            state = loop.train(total_env_steps=total, steps_per_cycle=8, seed=0).state
            assert not loop.resume_notes and loop.counters.cycles == cycle
        assert len(recorder.trajectories) == 1, "it went on, and did not begin anew"
    return jax.device_get(state)


@pytest.mark.slow
def test_four_update_devices_learn_what_one_does_and_resume_to_the_bit(tmp_path):
    whole = dataclasses.replace(PPO, minibatches=1)  # minibatches are drawn on each device
    fields = {"agent": whole, "snapshot_every": 32 * 8 * 3, "rematch_every": 32 * 8}

    def trained(devices: int) -> Any:
        with loop_of(Turns, league_of(Turns, **fields), 32, update_devices=range(devices)) as loop:
            return jax.device_get(loop.run(loop.new_state(0, 8), 6, 8).state)

    one, four = trained(1), trained(4)
    assert leaves_equal(one.experience.matches, four.experience.matches)
    assert leaves_equal(one.experience.results, four.experience.results)
    np.testing.assert_allclose(
        *(jax.tree.leaves(s.networks)[0] for s in (one, four)), rtol=1e-3, atol=1e-5
    )
    options = {"update_devices": range(4)}
    with Checkpointer(tmp_path) as saver:
        again = in_parts(
            lambda **more: loop_of(
                Turns, league_of(Turns, **fields), 32, checkpointer=saver, **options, **more
            ),
            6,
        )
    for name in ("networks", "opt", "experience"):
        assert leaves_equal(getattr(four, name), getattr(again, name)), name


OFTEN_KEPT: dict[str, Any] = {"snapshot_every": 128, "rematch_every": 128, "mirrors": 1}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return the experience of a run in ``Turns``, and what loads its checkpoint."""
    folder, agent = tmp_path_factory.mktemp("kept"), league_of(Turns, **OFTEN_KEPT)
    with Checkpointer(folder) as saver, loop_of(Turns, agent, checkpointer=saver) as loop:
        state = loop.run(loop.new_state(0, 8), 4, 8).state
    return jax.device_get(state.experience), Checkpointer(folder).load_newest


@pytest.mark.slow
def test_a_league_without_ratings_resumes_and_gets_some(kept):
    """As leagues of before there were ratings."""
    before, checkpoint = kept[0], kept[1]()
    assert before.ratings[-1, 1] > 0 and before.record.any()
    for part in ("experience", "lasting"):
        for name in ("record", "fresh", "ratings"):
            del checkpoint.snapshot.arrays[f"{part}/{name}"]
    with loop_of(Turns, league_of(Turns, **OFTEN_KEPT)) as loop:
        state = loop.restore(checkpoint)
        assert not np.any(state.experience.ratings) and not np.any(state.experience.record)
        assert leaves_equal(before.history, jax.device_get(state.experience.history))
        after = loop.run(state, 1, 8).state
    assert after.experience.ratings[-1, 1] > 0


@pytest.mark.slow
def test_another_number_of_environments_is_said_and_the_league_is_kept(kept):
    before, load = kept
    with loop_of(Turns, league_of(Turns, **OFTEN_KEPT), 32) as loop:
        now = jax.device_get(loop.restore(load()).experience)
        assert "1 x 16 environments were saved and there are 1 x 32 now" in loop.resume_notes[0]
    for name in ("history", "generation", "results", "payoff", "record", "ratings"):
        assert leaves_equal(getattr(before, name), getattr(now, name)), name
    refused = pytest.raises(UsageError, match="num_envs=20 must be divisible by 8: 4 lanes")
    with refused, loop_of(Turns, league_of(Turns, **OFTEN_KEPT), 20) as loop:
        loop.restore(load())


def test_a_snapshot_of_another_network_shape_is_refused_in_words(kept):
    wide = dataclasses.replace(PPO, torso=TorsoConfig(hidden_sizes=(16,)))
    refused = pytest.raises(UsageError, match=r"does not fit this run: .* Use the agent")
    with refused, loop_of(Turns, league_of(Turns, agent=wide, **OFTEN_KEPT)) as loop:
        loop.restore(kept[1]())


@pytest.mark.slow
def test_a_history_above_64_mib_is_in_every_checkpoint(tmp_path):
    """The rest of so large an experience is saved every half hour only."""
    wide = dataclasses.replace(PPO, torso=TorsoConfig(hidden_sizes=(1000, 1000)))
    agent = league_of(Turns, agent=wide, history=20, opponents=1, mirrors=0, **EVERY_CYCLE)
    options = {"every_updates": 1, "keep_last": 3}
    with (
        Checkpointer(tmp_path, **options) as checkpointer,
        loop_of(Turns, agent, 4, checkpointer=checkpointer) as loop,
    ):
        state = jax.device_get(loop.run(loop.new_state(0, 8), 6, 8).state)
    history = state.experience.history
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(history)) > 64 * 2**20
    with Checkpointer(tmp_path) as checkpointer:
        agent = league_of(Turns, agent=wide, history=20, opponents=1, mirrors=0, **EVERY_CYCLE)
        with loop_of(Turns, agent, 4) as loop:
            newest = checkpointer.load_newest()
            assert newest is not None and newest.snapshot.record["experience"] is not None
            again = jax.device_get(loop.restore(newest).experience)
    assert int(again.made) == int(state.experience.made) == 7
    for name in ("history", "generation", "results", "payoff", "ratings"):
        assert leaves_equal(getattr(state.experience, name), getattr(again, name)), name


def test_the_policy_of_a_league_is_an_ordinary_one(tmp_path):
    agent = league_of(Turns)
    with loop_of(Turns, agent) as loop:
        result = loop.run(loop.new_state(0, 8), 2, 8)
    sebulba.save_policy(tmp_path, agent, result.acting_networks)
    policy = sebulba.load_policy(tmp_path)
    assert leaves_equal(policy.acting_networks, result.acting_networks)
    played = sebulba.evaluate(policy, Turns, num_episodes=20)
    assert played.slot_returns["seat/seat_0"].tolist() == [1.0] * 20
    assert type(sebulba.load_policy(tmp_path / agent.group).agent).__name__ == "PPO"


@pytest.mark.slow
def test_a_hand_written_opponent_and_a_policy_are_anchors(tmp_path):
    agent = league_of(Turns)
    with loop_of(Turns, agent) as loop:
        result = loop.run(loop.new_state(0, 8), 1, 8)
    sebulba.save_policy(tmp_path / "p", agent, result.acting_networks)
    two = {
        "script": lambda obs, key: 0 * obs + 2,
        "old": tmp_path / "p" / agent.group,
    }
    recorder, agent = Recorder(), league_of(Turns, anchors=two, opponents=1)
    with loop_of(Turns, agent, observe_cycle=recorder) as loop:
        loop.run(loop.new_state(0, 8), 2, 8)
    (scripted,) = (agent.lanes.others(1, 16),)
    for t in recorder.trajectories:
        actions = t.action[agent.group].reshape(8, -1)[:, scripted]
        assert (actions == 2).all()


WRONG = [
    ({"history": 0}, "agent.history=0 must be a whole number of at least 1"),
    ({"opponents": 0}, "agent.opponents=0 must be"),
    ({"matchmaker": "best"}, "agent.matchmaker='best' must be"),
    ({"anchors": {"a/b": "legal-random"}}, "agent.anchors='a/b' must be a name"),
    ({"anchors": ["x"]}, "agent.anchors=.* must be a dict by name"),
    ({"anchors": {"x": "no/such/folder"}}, r"agent.anchors\['x'\]='no/such/folder'"),
    ({"anchors": {"x": "nowhere:f"}}, "nowhere"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=lambda x: str(x)[:20])
def test_what_is_wrong_with_a_league_is_said_in_words(fields, words):
    with pytest.raises(UsageError, match=words):
        league_of(Turns, **fields)


def test_a_game_whose_seats_do_not_share_a_policy_is_refused():
    from tests.support.populations import Visitors

    with pytest.raises(UsageError, match="a league needs a game whose seats form one group"):
        league_of(Visitors)


@pytest.mark.slow
def test_draws_do_not_depend_on_the_hash_seed():
    code = (
        "import numpy as np; from sebulba_league.matchmakers import MATCHMAKERS, Standings\n"
        "r = np.random.default_rng(0).random\n"
        "s = Standings(np.arange(5), r((5, 2, 3)), r((5, 5)))\n"
        "for m in MATCHMAKERS.values(): print(np.random.default_rng([1, 2]).choice(5, 9, p=m(s)))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(said) == 1

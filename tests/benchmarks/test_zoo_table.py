"""The tables of what agents learned: rows, what is left out, IQMs, intervals and scores."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.studies import zoo_scores, zoo_table
from benchmarks.studies.learning_goals import GOALS, NEUTRAL_TASKS
from benchmarks.studies.zoo_scores import estimate


def learned(*returns, env_id="CartPole-v1", env_steps=100_000, seeds=None):
    """Return a result of ``benchmarks learn``, as far as the tables read it."""
    return {
        "config": {"env": {"id": env_id}, "total_env_steps": env_steps},
        "seeds": seeds or len(returns),
        "figures": {"run, s": [60.0, 66.0, 240.0], "return that counts": [*returns]},
    }


def test_the_iqm_leaves_out_a_quarter_at_either_end():
    found = estimate([[1000.0, 3.0, 2.0, -1000.0]])
    assert found.iqm == 2.5
    assert found.low < found.iqm < found.high


def test_seeds_are_drawn_within_their_task():
    tasks = [[0.0] * 3, [1.0] * 3]  # other draws of tasks would change the mean
    assert estimate(tasks) == (0.5, 0.5, 0.5)


def test_the_interval_of_three_seeds_is_their_range_and_of_one_that_seed():
    assert estimate([[5.0, 1.0, 3.0]]) == (3, 1, 5)
    assert estimate([[7.0]]) == (7, 7, 7)


def test_the_interval_is_that_of_all_equally_likely_draws():
    seeds = np.array([[1.0, 4.0, 6.0], [0.0, 3.0, 5.0]])
    drawn = [[*itertools.product(task, repeat=3)] for task in seeds]
    means = [np.sort([*a, *b])[1:-1].mean() for a in drawn[0] for b in drawn[1]]
    found = estimate(seeds.tolist())
    assert (found.low, found.high) == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=0.2)


def test_a_row_has_the_figures_of_its_result():
    assert zoo_table.row("cartpole-dqn", learned(480.0, 470.5, 500.0)) == [
        "CartPole-v1",
        "DQN",
        "[cartpole-dqn](#learn-cartpole-dqn)",
        "100,000",
        "480, 470.5, 500",
        "483.5 (470.5 to 500)",
        GOALS["cartpole-dqn"].reference,
        "66 s",
    ]


def test_env_steps_are_those_that_count():
    beyond = learned(500.0, env_steps=1_000_000)
    assert zoo_table.row("cartpole", beyond)[3:6] == ["600,000", "500", "500"]


def test_a_seed_that_failed_is_shown_and_leaves_no_iqm():
    row = zoo_table.row("cartpole-dqn", learned(480.0, 470.5, seeds=3))
    assert row[4:6] == ["480, 470.5, none", ""]


def test_exams_limits_and_other_benchmarks_are_left_out():
    names = ("kuhn", "connect-four", "cartpole-r2d2-memoryless", "cartpole-dqn")
    results = {f"learn-{name}": learned(1.0, 2.0, 3.0) for name in names} | {"inference": {}}
    assert [*zoo_table.learned(results)] == ["cartpole-dqn"]
    text = "\n".join(zoo_table.markdown(results, has_picture=True))
    assert "### Classic control" in text and "MuJoCo" not in text and "Aggregates" not in text
    assert zoo_table.markdown({"inference": {}}, has_picture=True) == []


@pytest.mark.parametrize(
    ("env_id", "family"),
    [
        ("Pendulum-v1", "Classic control"),
        ("InvertedPendulum-v4", "MuJoCo"),
        ("gymnax:Breakout-MinAtar", "MinAtar"),
        ("gymnax:MemoryChain-bsuite", "Memory"),
        ("sebulba.envs.memory_tasks:cartpole_without_velocities", "Memory"),
        ("MiniGrid-DoorKey-5x5-v0", "MiniGrid"),
        ("Qbert-v5", "Games"),
        ("sebulba/CongestionControl-v0", "Networks"),
    ],
)
def test_a_task_has_a_family(env_id, family):
    assert zoo_table.family(env_id) == family


def test_scores_are_0_at_random_returns_and_1_at_the_reference():
    task = NEUTRAL_TASKS["neutral-dqn-mountaincar"]
    middle = (task.random_return_mean + task.episode_return_mean) / 2
    returns = (task.random_return_mean, task.episode_return_mean, middle)
    results = {
        "neutral-dqn-mountaincar": learned(*returns),
        "neutral-dqn-catch": learned(1.0, 1.0, seeds=3),
        "cartpole-dqn": learned(500.0),  # is not neutral
    }
    assert zoo_scores.scores_by_agent(results) == {
        "DQN": [[1.0, 1.0, 0.0], [0.0, 1.0, pytest.approx(0.5)]]
    }


def test_every_neutral_task_has_a_scale():
    for name, task in NEUTRAL_TASKS.items():
        assert task.random_return_mean < task.episode_return_mean, name


def test_the_picture_is_beside_the_page_and_small(tmp_path):
    page = tmp_path / "page.md"
    zoo_table.draw_scores({"learn-cartpole-dqn": learned(500.0)}, page)
    assert not [*tmp_path.iterdir()]
    results = {"learn-neutral-dqn-catch": learned(0.8, 1.0, 0.9, env_id="Catch-v0")}
    zoo_table.draw_scores(results, page)
    assert 0 < (tmp_path / "zoo.png").stat().st_size < 100_000
    text = "\n".join(zoo_table.markdown(results, has_picture=True))
    assert "](zoo.png)" in text and "| DQN | 1 |" in text
    assert "](zoo.png)" not in "\n".join(zoo_table.markdown(results, has_picture=False))

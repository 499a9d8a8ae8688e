"""Learning curves: which episodes are kept for them, and what the pictures show."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from sebulba.configs.presets import PRESETS, goal_of
from sebulba.inference.places import Places
from sebulba.loops.records import Records
from sebulba.metrics import plots, short_text
from sebulba.metrics.counters import Counters
from sebulba.metrics.episode_log import MOST_PENDING, EpisodeLog
from sebulba.metrics.episode_sample import MOST_EPISODES, Episodes, episodes_of, is_sampled
from sebulba.metrics.timer import PhaseTimer
from sebulba.metrics.window import MetricWindow
from sebulba.metrics.writers import few_episodes
from sebulba.options import LoopOptions
from sebulba.types import StepInfos

CYCLE = 7 * 3
"""Environment steps of a cycle here."""


def infos(returns) -> StepInfos:
    cells = np.zeros((7, 3), bool)
    returns = np.asarray(returns, np.float64)
    rewards = cells.astype(np.float32)
    return StepInfos(rewards, cells, cells, cells, returns, np.full(len(returns), 5))


def logged(path, num_cycles: int, log: EpisodeLog | None = None, first: int = 0) -> EpisodeLog:
    """Have episodes logged whose return is their index, 3 a cycle, a record every 10 cycles."""
    log = log or EpisodeLog(path)
    for cycle in range(num_cycles):
        log.observe(None, infos(first + 3 * cycle + np.arange(3)))
        if cycle % 10 == 9:
            log.write({"env_steps": (first // 3 + cycle + 1) * CYCLE})
    return log


def record(i: int, mean: float | None = None, **more) -> dict:
    steps = 21 * 50 * i
    return {
        **{"env_steps": steps, "seconds": 3.0 + 0.5 * i, "episodes": 150 * i},
        **{"episode_return_mean": mean, **more},
    }


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def figures(monkeypatch):
    """Return the figures that are saved meanwhile."""
    saved, save = [], Figure.savefig

    def keep(figure, *arguments, **options):
        saved.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


# Which episodes are kept.


def test_all_episodes_of_a_short_run_are_kept_from_the_first_on(tmp_path):
    logged(tmp_path / "e", 20).close()
    episodes = episodes_of(lines(tmp_path / "e"))
    assert episodes.indices.tolist() == episodes.returns.tolist() == list(range(60))
    assert episodes.env_steps[:4].tolist() == [CYCLE, CYCLE, CYCLE, 2 * CYCLE]


@pytest.mark.parametrize("num", [1999, 2001, 50_000, 3_000_000])
def test_the_sample_of_a_long_run_is_bounded_and_even(num):
    index = np.arange(num)
    sampled = index[is_sampled(index, num)]
    assert 0.45 * min(num, MOST_EPISODES) < len(sampled) <= MOST_EPISODES + 2
    gaps = np.diff(sampled)
    assert gaps.max() <= 4 * max(1, num / MOST_EPISODES)
    written = is_sampled(index, index + 1)
    assert not np.any(is_sampled(index, num) & ~written), "what is needed later was written"
    assert written.sum() < 2000 + 1100 * max(0, np.log2(num / 2000) + 1)
    if num > MOST_EPISODES:
        for num_envs in (16, 64, 50):  # whose episodes all end at the same time
            of_env = np.bincount(sampled % num_envs, minlength=num_envs)
            assert of_env.min() > 0.5 * of_env.mean()


def test_the_log_goes_on_where_a_run_is_resumed(tmp_path):
    logged(tmp_path / "whole", 40).close()
    logged(tmp_path / "parts", 20).close()
    logged(tmp_path / "parts", 20, EpisodeLog(tmp_path / "parts", 60, 20 * CYCLE), 60).close()
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


def test_what_waits_to_be_written_is_bounded_and_not_lost(tmp_path, monkeypatch):
    log = EpisodeLog(tmp_path / "e")
    for cycle in range(3 * MOST_PENDING):
        log.observe(None, infos([cycle]))
    assert len(log._pending) < MOST_PENDING
    with monkeypatch.context() as patch:
        patch.setattr("sebulba.metrics.writers.open", refuse, raising=False)
        with pytest.raises(OSError, match="disk full"):
            log.write({"env_steps": 1})
    log.write({"env_steps": 1})
    log.write({"env_steps": 2})
    log.close()
    (line,) = lines(tmp_path / "e")
    assert line["index"][:2000] == list(range(2000))


def refuse(*arguments, **options):
    raise OSError("disk full")


def test_a_return_that_is_not_finite_is_left_out(tmp_path):
    log = EpisodeLog(tmp_path / "e")
    log.observe(None, infos([1.0, float("nan"), 2.0]))
    log.write({"env_steps": 1})
    log.close()
    assert lines(tmp_path / "e")[0]["returns"] == [1.0, 2.0]


# When records are written.


def test_the_first_windows_are_short_and_each_twice_as_long_as_the_one_before():
    now, counters, closed = [0.0], Counters(), []

    class Window(MetricWindow):
        age_s = property(lambda self: now[0] - (closed[-1] if closed else 0.0))

    session = SimpleNamespace(
        options=LoopOptions(metrics_interval_s=0.5),
        attached=SimpleNamespace(
            metric_writer=SimpleNamespace(write=lambda record: closed.append(now[0])), callbacks=()
        ),
        timer=PhaseTimer("metrics"),
        counters=counters,
        began=0.0,
        target=10,
        inferencers=[SimpleNamespace(timer=PhaseTimer("cycle"), env=None)],
        episodes=SimpleNamespace(means=dict),
    )
    updater = SimpleNamespace(take_metrics=dict, pop_skipped=lambda: 0)
    records = Records(session, updater, SimpleNamespace(pop=dict), Places(None))
    records.window = Window(counters, 0.0)
    for tick in range(1000):
        now[0] = tick / 400
        counters.updates = int(now[0] >= 0.1)
        records.write_when_due()
    assert np.diff(closed[:6]) == pytest.approx([0.5 / 16, 0.5 / 8, 0.25 / 2, 0.25, 0.5], abs=0.003)
    assert np.diff(closed[5:]) == pytest.approx(0.5, abs=0.003)


# What the pictures show.


def draw(tmp_path, records, **options) -> bool:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(one) + "\n" for one in records))
    return plots.learning_curve(metrics, tmp_path / "curve.png", "CartPole-v1, PPO", **options)


def test_a_curve_shows_everything_from_the_first_episodes_on(tmp_path, figures):
    logged(tmp_path / "episodes.jsonl", 1000).close()
    evaluated = {"eval_env_steps": 12_000, "eval_return_mean": 900.0, "eval_return_std": 50.0}
    records = [record(1), record(10, 40.0, **evaluated), record(20, 90.0)]
    options = {"episodes": tmp_path / "episodes.jsonl", "subtitle": "seed 3", "goal": 4000.0}
    assert draw(tmp_path, records, **options)
    assert (tmp_path / "curve.png").stat().st_size < 100_000
    (figure,) = figures
    (axes,) = figure.axes
    (above,) = axes.child_axes
    assert axes.get_title("left") == "CartPole-v1, PPO" and axes.get_title("right") == "seed 3"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("1,500 of 3,000 episodes", "10 % to 90 % of them", "running mean", "goal 4000"),
        "evaluation: mean ± standard deviation",
    ]
    texts = [text.get_text() for text in axes.get_xticklabels()]
    assert texts[:3] == ["0", "2.5k", "5k"]
    assert [text.get_text() for text in above.get_xticklabels()][:3] == ["0 s", "4.2 s", "5.4 s"]
    mean = next(line for line in axes.lines if line.get_label() == "running mean")
    x, y = mean.get_data()
    assert x[0] == CYCLE and y[0] < 60, "from the first episodes on"
    assert axes.get_ylim()[0] < 0 and axes.get_ylim()[1] > 4000
    assert not any("100" in text.get_text() for text in axes.texts)


def test_groups_of_agents_have_curves_of_their_own(tmp_path, figures):
    def of(i: int, *groups: str) -> str:
        means = {f"episode_return_mean/{group}": float(i) for group in groups}
        return json.dumps(record(i, 1.0, **means, **{"episode_return_mean/guide/0": 9.0})) + "\n"

    (tmp_path / "two").write_text("".join(of(i, "guide", "crew") for i in range(1, 4)))
    (tmp_path / "one").write_text("".join(of(i, "guide") for i in range(1, 4)))
    for name, groups in (("two", ["guide", "crew"]), ("one", [])):
        assert plots.learning_curve(tmp_path / name, tmp_path / "curve.png")
        lines = {line.get_label(): line for line in figures[-1].axes[0].get_lines()}
        drawn = [label for label in lines if label in ("guide", "crew", "guide/0")]
        assert drawn == groups
        assert all(lines[group].get_ydata().tolist() == [1, 2, 3] for group in groups)


def test_a_run_of_an_older_version_is_drawn_from_its_records(tmp_path, figures):
    records = [record(1), record(2, 20.0), record(3, 30.0)]
    assert draw(tmp_path, records, episodes=tmp_path / "episodes.jsonl")
    (line,) = figures[0].axes[0].lines
    assert tuple(line.get_ydata()) == (20.0, 30.0)
    # Resumed by this version, it has episodes from there on.
    log = EpisodeLog(tmp_path / "episodes.jsonl", 450, 21 * 150)
    logged(None, 50, log, 450).close()
    assert draw(tmp_path, [*records, record(4, 50.0)], episodes=tmp_path / "episodes.jsonl")
    mean = next(one for one in figures[1].axes[0].lines if one.get_label() == "running mean")
    assert tuple(mean.get_ydata()[:2]) == (20.0, 30.0) and mean.get_ydata()[-1] > 500


def test_a_run_without_an_episode_says_so(tmp_path, figures):
    assert draw(tmp_path, [record(1) | {"episodes": 0}], goal=5.0)
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["no episode has ended yet"]


@pytest.mark.parametrize(
    ("goal", "label"), [(25.0, "goal 25"), (900.0, "goal 900, above"), (-900.0, "goal -900, below")]
)
def test_a_goal_that_is_far_away_does_not_flatten_the_curve(tmp_path, figures, goal, label):
    assert draw(tmp_path, [record(1, 10.0), record(2, 30.0)], goal=goal)
    assert label in [text.get_text() for text in figures[0].legends[0].get_texts()]
    low, high = figures[0].axes[0].get_ylim()
    assert 5 < low < high < 35


def test_a_few_far_returns_do_not_hide_the_rest(tmp_path, figures):
    log = EpisodeLog(tmp_path / "e")
    returns = np.r_[np.zeros(900), [-1e9], np.ones(600)]
    log.observe(None, infos(returns))
    log.write({"env_steps": CYCLE})
    log.close()
    assert draw(tmp_path, [record(1)], episodes=tmp_path / "e")
    band = figures[0].axes[0].get_ylim()
    assert -5e8 < band[0] < 0 < band[1]


def test_running_mean_and_band_are_those_of_the_episodes_around():
    steps = np.array([10, 10, 20, 30, 30, 30, 40, 50])
    returns = np.array([1.0, 3.0, 5.0, 0.0, 2.0, 4.0, 8.0, 9.0])
    x, (mean, low, high) = plots.running_mean(Episodes(np.arange(8), steps, returns))
    assert x.tolist() == [10, 20, 30, 40, 50]
    assert mean[0] == 3.0 and mean[2] == 2.0 and mean[-1] == 8.5
    assert low[2] == pytest.approx(0.4) and high[2] == pytest.approx(3.6)


def test_numbers_and_times_on_axes():
    shown = [short_text.short(x) for x in (0, 0.5, 500, -2500, 150_000, 1.25e6, 3e9)]
    assert shown == ["0", "0.5", "500", "-2.5k", "150k", "1.25M", "3G"]
    assert [plots._time(x) for x in (0, 2.54, 45.3, 119.6, 750, 11_100)] == [
        *("0 s", "2.5 s", "45.3 s", "119.6 s", "12:30", "3:05:00"),
    ]


def test_a_preset_has_its_goal_only_in_its_own_environment():
    import dataclasses

    config = PRESETS["cartpole-ppo"].make()
    assert goal_of("cartpole-ppo", config) == 475
    other = dataclasses.replace(config, env=dataclasses.replace(config.env, id="Acrobot-v1"))
    assert goal_of("cartpole-ppo", other) is None
    assert goal_of("my.json", config) is None


def test_a_mean_of_few_episodes_says_of_how_many():
    assert few_episodes({"episodes_averaged": 12}) == " (of 12 episodes)"
    assert few_episodes({"episodes_averaged": 1}) == " (of 1 episode)"
    for enough in ({"episodes_averaged": 100}, {"episodes_averaged": 0}, {}):
        assert few_episodes(enough) == ""

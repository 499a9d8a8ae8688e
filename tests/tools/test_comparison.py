"""``sebulba runs``, ``plot`` and ``diff``: what they say of run folders, whoever made them."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sebulba.commands import cli
from sebulba.errors import UsageError
from sebulba.runs.summary import read_run, run_folders
from sebulba.tools.compare import curves
from sebulba.tools.compare.tables import differences, figures

CONFIG = {
    "sebulba": "0.1.0",
    "run_id": "f",
    "preset": "cartpole",
    "command": ["sebulba", "train"],
    "agent_config": "ImpalaConfig",
    "agent": {"learning_rate": 1e-3},
    "env": {"id": "CartPole-v1"},
    "seed": 0,
    "total_env_steps": 400,
    "environment": {"versions": {"envpool": "1.2.5"}},
}
STEPS = (100, 200, 300, 400)


def make_run(
    folder: Path, *, returns=(1, 2, 3, 4), steps=STEPS, ended="exit code 0: done", **config
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    lines = [
        {"env_steps": step, "seconds": step / 10, "episode_return_mean": value}
        for step, value in zip(steps, returns, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if ended:
        (folder / "ended.txt").write_text(f"2026-11-23 01:02:03  {ended}\n\nLast metrics:\n")
    return folder


def text_of(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


# sebulba runs


def test_runs_says_what_when_how_far_how_well_and_how_it_ended(tmp_path, capsys):
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", returns=(1.5, 7.25), steps=(100, 200), ended="exit code 5: hang: a")
    best = tmp_path / "two" / "best_policy"
    best.mkdir()
    (best / "evaluation.json").write_text('{"episode_return_mean": 9.5}')
    assert cli.main(["runs", str(tmp_path), "--json", str(tmp_path / "runs.json")]) == 0
    text = text_of(capsys)
    assert re.search(r"one \d\d:\d\d 400 100% 0:40 4 - done Impala CartPole-v1 seed 0", text)
    assert re.search(r"two \d\d:\d\d 200 50% 0:20 7.25 9.5 hang Impala CartPole-v1 seed 0", text)
    rows = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert {row["folder"]: row["best"] for row in rows} == {
        str(tmp_path / "one"): None,
        str(tmp_path / "two"): 9.5,
    }


def make_self_play(folder: Path, **more: float) -> Path:
    run = make_run(folder)
    seats = {"episode_return_mean/player/0": -0.25, "episode_return_mean/player/1": 0.25}
    evaluated = {"eval_return_mean": 0.0, "eval_return_mean/player/0": -0.5}
    line = {"env_steps": 400, "seconds": 40.0, "episode_return_mean": 0.0, **seats, **evaluated}
    line |= {"eval_return_mean/player/1": 0.5, **more}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return run


def test_a_run_of_self_play_has_the_return_of_each_seat(tmp_path, capsys):
    # A name that no group has is left out, whoever wrote the file.
    run = make_self_play(tmp_path / "one", **{"episode_return_mean/$x$/\n": 1.0})
    assert read_run(run).last_groups == {"player/0": -0.25, "player/1": 0.25}
    assert read_run(run).evaluated_groups == {"player/0": -0.5, "player/1": 0.5}
    assert cli.main(["runs", str(tmp_path), "--json", str(tmp_path / "runs.json")]) == 0
    assert "player/0 -0.25" in (text := text_of(capsys)) and "player/1 0.25" in text
    (row,) = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert (
        row["groups"] == {"player/0": -0.25, "player/1": 0.25} and row["episode_return_mean"] == 0.0
    )


def test_the_best_of_a_run_of_self_play_and_differences_are_those_of_its_seats(tmp_path, capsys):
    runs = [make_self_play(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        (run / "best_policy").mkdir()
        (run / "best_policy" / "evaluation.json").write_text('{"episode_return_mean": 1e-17}')
    summary = read_run(runs[0])
    assert summary.best_groups == {"player/0": -0.5, "player/1": 0.5}
    assert figures(summary)[-1] == "player/0 -0.5\nplayer/1 0.5"
    results = differences(*map(read_run, runs))["results"]
    assert results["return of player/1 in the best evaluation"] == (0.5, 0.5)
    assert results["return of player/0 in the last evaluation"] == (-0.5, -0.5)
    assert results["return of player/1 in the last training episodes"] == (0.25, 0.25)
    assert "return of the best evaluation" not in results
    (runs[0] / "best_policy" / "evaluation.json").write_text('{"episode_return_mean": 3.0}')
    assert figures(read_run(runs[0]))[-1] == "3"  # its record is not there


def test_a_run_that_holds_its_lock_is_running_and_one_that_left_nothing_was_killed(tmp_path):
    folder = make_run(tmp_path / "one", ended="")
    assert read_run(folder).ended == "killed"
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).ended == "running"
    assert read_run(folder).ended == "killed"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("exit code 143: stopped by SIGTERM", "SIGTERM"),
        ("exit code 130: stopped by Ctrl-C", "Ctrl-C"),
        ("exit code 139: stopped by signal 11", "exit code 139"),
        ("something else", "unknown"),
    ],
)
def test_the_first_line_of_ended_txt_says_how_a_run_ended(tmp_path, line, said):
    assert read_run(make_run(tmp_path / "one", ended=line)).ended == said


def test_a_run_without_metrics_has_not_gone_far(tmp_path, capsys):
    make_run(tmp_path / "one", returns=(), steps=(), ended="exit code 2: usage: a")
    (tmp_path / "one" / "metrics.jsonl").unlink()
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "0 0% 0:00 - - usage" in text_of(capsys)


HOSTILE = {
    "no JSON": lambda run: (run / "config.json").write_text("{"),
    "a list": lambda run: (run / "config.json").write_text("[]"),
    "too deep": lambda run: (run / "config.json").write_text("[" * 10**5),
    "best return no number": lambda run: (
        (run / "best_policy").mkdir(),
        (run / "best_policy" / "evaluation.json").write_text('{"episode_return_mean": "x"}'),
    ),
    "metrics lead elsewhere": lambda run: (
        (run / "metrics.jsonl").unlink(),
        (run / "metrics.jsonl").symlink_to("/etc/passwd"),
    ),
    "end leads elsewhere": lambda run: (
        (run / "ended.txt").unlink(),
        (run / "ended.txt").symlink_to("/etc/passwd"),
    ),
    "configuration leads elsewhere": lambda run: (
        (run / "config.json").rename(run / "other.json"),
        (run / "config.json").symlink_to(run / "other.json"),
    ),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_a_damaged_or_hostile_folder_is_left_out_by_name(tmp_path, capsys, damage):
    make_run(tmp_path / "good")
    HOSTILE[damage](make_run(tmp_path / "bad"))
    with pytest.warns(UserWarning, match="left out: .*bad"):
        assert cli.main(["runs", str(tmp_path)]) == 0
    text = text_of(capsys)
    assert "good" in text and "bad" not in text and "root:" not in text


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "[bold red]x[/]", "[link=x]y[/link]", "${x}"])
def test_names_cannot_write_to_the_terminal(tmp_path, capsys, name):
    run = make_run(tmp_path / name, env={"id": name}, agent={"learning_rate": name})
    other = make_run(tmp_path / "other")
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert cli.main(["diff", str(run), str(other)]) == 0
    assert cli.main(["plot", str(tmp_path), "--out", str(tmp_path / "p.html")]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "a\nb" not in text
    assert (name if name.isprintable() else repr(name)) in text
    assert "\x1b" not in (tmp_path / "p.html").read_text()


def test_a_page_shows_names_and_does_not_run_them(tmp_path):
    make_run(tmp_path / "one", env={"id": "<script>alert(1)</script>"}, preset="<img src=x>")
    assert cli.main(["plot", str(tmp_path), "--out", str(tmp_path / "p.html")]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "<script" not in page and "<img" not in page and "http://" not in _without_names(page)


def _without_names(page: str) -> str:
    """Return a page without the names of SVG's vocabulary, which nothing fetches."""
    return re.sub(r'(xmlns\S*|rdf:\S+|"http://www.w3.org/\S*)="[^"]*"|http://purl\S+', "", page)


# sebulba plot


def test_seeds_are_one_curve_with_its_interquartile_mean_and_interval(tmp_path, capsys):
    for seed in range(4):
        make_run(tmp_path / f"a{seed}", returns=[seed, 10, 20, 30 + seed * 10], seed=seed)
    make_run(tmp_path / "b", preset="other", returns=(5, 5, 5, 5))
    file = tmp_path / "table.json"
    words = ["plot", str(tmp_path), "--out", str(tmp_path / "p.png"), "--json", str(file)]
    assert cli.main(words) == 0
    of_seeds, of_one = json.loads(file.read_text())["groups"]
    assert (of_seeds["group"], of_seeds["seeds"], of_seeds["steps"]) == ("cartpole", 4, 400)
    assert of_seeds["mean"] == 45 and of_seeds["IQM"] == 45  # of 30, 40, 50, 60
    low, high = of_seeds["interval"]
    assert 30 <= low < 40 and 50 < high <= 60
    assert (of_one["group"], of_one["IQM"], of_one["interval"]) == ("other", 5, [5, 5])
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.size[0] > 1000
    said = text_of(capsys)
    assert "cartpole 4 400 40 45" in said and said.count("CartPole-v1") == 1


def test_a_run_of_one_record_is_one_point_and_time_goes_on_to_the_longest_seed():
    one = (np.array([5.0]), np.array([2.0]))
    assert curves.curve([one]).x.tolist() == [5.0]
    short, long = ((np.array([0.0, end]), np.array([0.0, end])) for end in (1.0, 4.0))
    assert curves.curve([short, long]).x[-1] == 1.0
    over_time = curves.curve([short, long], to_the_longest=True)
    assert over_time.x[-1] == 4.0 and over_time.mean[-1] == 2.5  # of 1, which is done, and 4


def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end():
    values = np.array([[-1000.0], [1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [9000.0]])
    assert curves.interquartile_mean(values) == [3.5]
    assert curves.interquartile_mean(values[1:4]) == [2.0]  # of three seeds, the mean


def test_a_curve_over_env_steps_ends_where_its_shortest_seed_does(tmp_path):
    runs = [
        make_run(tmp_path / "a", returns=(0, 10, 20, 30)),
        make_run(tmp_path / "b", returns=(0, 20), steps=(100, 200)),
    ]
    group = curves.grouped([read_run(run) for run in runs], "preset", "training")[0]
    assert group.by_env_steps.x[[0, -1]].tolist() == [100, 200]
    assert group.by_env_steps.mean[[0, -1]].tolist() == [0, 15]
    assert group.by_seconds.x[-1] == 40  # over time a seed that is done keeps its last return


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_picture_of_evaluations_may_be_svg_or_a_page(tmp_path, suffix):
    run = make_run(tmp_path / "a")
    lines = [
        {"env_steps": 90, "seconds": 9, "eval_env_steps": 80, "eval_return_mean": 1.0},
        {"env_steps": 190, "seconds": 19, "eval_env_steps": 160, "eval_return_mean": 3.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    picture = tmp_path / f"p{suffix}"
    assert cli.main(["plot", str(run), "--out", str(picture)]) == 0
    assert "return, evaluation" in picture.read_text() and "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plot", "{runs}", "--out", "x.pdf"], "must end in .png, .svg, .html"),
        (["plot", "{runs}", "--out", "no/x.png"], "folder that does not exist"),
        (["plot", "{runs}", "--by", "agent.learning_rat"], "agent.learning_rate"),
        (["plot", "{runs}", "--of", "evaluation"], "no returns of evaluation"),
        (["plot", "{runs}/none"], "is not a folder"),
        (["runs", "{runs}/a"], None),
        (["runs", "{runs}/a/empty"], "holds no run"),
        (["diff", "{runs}/a", "{runs}"], "config.json cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(tmp_path, capsys, words, said):
    (make_run(tmp_path / "a") / "empty").mkdir()
    code = cli.main([word.format(runs=tmp_path) for word in words])
    assert code == (2 if said else 0)
    assert (said or "") in capsys.readouterr().err


# sebulba diff


def test_diff_shows_configurations_versions_and_results_that_differ(tmp_path, capsys):
    one = make_run(tmp_path / "one", agent={"learning_rate": 1e-3, "lstm_size": 0})
    two = make_run(
        tmp_path / "two",
        agent={"learning_rate": 0.5},
        returns=(1, 2, 3, 44),
        environment={"versions": {"envpool": "2.0"}},
    )
    assert cli.main(["diff", str(one), str(two)]) == 0
    text = text_of(capsys)
    assert "agent.learning_rate 0.001 0.5" in text
    assert "agent.lstm_size 0 -" in text
    assert "envpool 1.2.5 2.0" in text
    assert "return of the last training episodes 4 44" in text
    assert "total_env_steps" not in text


def test_diff_of_a_run_with_itself(tmp_path, capsys):
    run = str(make_run(tmp_path / "one"))
    assert cli.main(["diff", run, run]) == 0
    assert "configuration: the same versions: the same" in text_of(capsys)


def test_a_name_that_no_folder_can_have_is_refused_in_words():
    with pytest.raises(UsageError, match="is not a folder"):
        run_folders(["a" * 5000])

"""``sebulba report``: a run as one page, whoever made its folder."""

from __future__ import annotations

import base64
import itertools
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sebulba_board import charts, records
from sebulba_board.records import read_newest, read_sample
from sebulba_board.run_details import RunDetails, time_shares

from sebulba.commands import cli
from sebulba.errors import UsageError
from tests.support.hostile_runs import NAMES, SCRIPT, SPOILED, check_harmless
from tests.tools.test_comparison import make_run

_NUMBERS = st.floats(-1e30, 1e30) | st.integers(-(10**30), 10**30) | st.sampled_from([0, 5e-324])


def report_of(run, tmp_path) -> str:
    assert cli.main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    return (tmp_path / "report.html").read_text()


def words_of(page: str) -> str:
    body = page.partition("<body>")[2]
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def record(env_steps: int, **more) -> str:
    return json.dumps({"env_steps": env_steps, "seconds": env_steps / 100, **more}) + "\n"


def test_it_says_what_ran_how_far_and_how_it_ended(tmp_path):
    text = words_of(report_of(make_run(tmp_path / "one", returns=(1, 2, 3, 7.25)), tmp_path))
    assert "one done Impala, CartPole-v1, seed 0" in text
    assert "400 of 400 env steps" in text and "7.25 return" in text
    assert "2026-11-23 01:02:03 exit code 0: done" in text and "envpool 1.2.5" in text


def test_it_marks_what_differs_from_the_preset(tmp_path):
    page = report_of(make_run(tmp_path / "one"), tmp_path)
    assert "agent.learning_rate 0.005 0.001" in words_of(page)
    assert "<mark>0.001</mark>" in page
    assert "<td>agent.learning_rate</td><td>0.005</td><td><mark>0.001</mark></td>" in page
    assert "agent.discount" not in page  # which the run does not have
    other = report_of(make_run(tmp_path / "two", preset="own:quick"), tmp_path)
    assert "has no preset own:quick" in other and "<mark>" not in other


def test_curves_are_drawn_for_returns_evaluations_speed_and_what_the_agent_measures(tmp_path):
    run = make_run(tmp_path / "one")
    more = {"loss": 0.5, "entropy": 1.0, "env_steps_per_s": 9.0, "eval_return_mean": 5.0}
    (run / "metrics.jsonl").write_text(
        "".join(record(i, **more, eval_env_steps=i, eval_return_std=1.0) for i in (100, 200))
    )
    page = report_of(run, tmp_path)
    for title in ("return", "environment steps/s", "loss", "entropy"):
        assert f'alt="{title} over environment steps"' in page, title
    assert page.count("data:image/svg+xml;base64,") == 4
    assert page.count("nothing yet") == 3  # updates/s, policy lag, queue
    assert "5 last evaluation" in words_of(page)


def test_it_loads_nothing(tmp_path):
    page = report_of(make_run(tmp_path / "one"), tmp_path)
    assert "default-src &#x27;none&#x27;" in page and "<script" not in page
    assert set(re.findall(r'(?:src|href)="([a-z]*:?)', page)) == {"data:"}


def test_the_profile_weights_windows_with_their_seconds_and_counts_none_twice():
    records = [
        {"updates": 1, "seconds": 3.0, "time/learner/get": 1.0, "time/learner/update": 0.0},
        {"updates": 9, "seconds": 4.0, "time/learner/get": 0.2, "time/learner/update": 0.8},
        {"updates": 9, "seconds": 9.0, "time/learner/get": 0.2, "time/learner/update": 0.8},
    ]
    assert time_shares(records, "learner") == pytest.approx({"get": 0.8, "update": 0.2})
    assert time_shares([*records, {**records[1], "updates": 12, "seconds": 1.0}], "learner") == (
        pytest.approx({"get": 3.4 / 5, "update": 1.6 / 5})  # it was resumed
    )
    assert time_shares(records, "inferencer") == {}


def test_faults_are_named(tmp_path):
    run = make_run(tmp_path / "one", ended="exit code 3: environment: one raised")
    faults = {"env_restarts": 3, "skipped_updates": 0, "eval_cut_episodes": 2}
    (run / "metrics.jsonl").write_text(record(1, **faults) + "{\n" + record(2))
    (run / "last_transition.npz").write_bytes(b"")
    text = words_of(report_of(run, tmp_path))
    assert "3 environments were replaced after they had failed (env_restarts)" in text
    assert "2 episodes of one evaluation were cut" in text and "skipped_updates)" not in text
    assert "1 lines of metrics.jsonl are damaged" in text and "last_transition.npz has" in text


def test_checkpoints_are_listed_with_what_is_wrong(tmp_path):
    from sebulba.checkpoints.part_files import Snapshot
    from sebulba.checkpoints.store import CheckpointStore

    run = make_run(tmp_path / "one")
    store = CheckpointStore(run / "checkpoints")
    for number in (100, 200):
        snapshot = Snapshot({"versions": {"jax": "9.9"}}, {}, {"state": b"x" * 1000})
        store.save(number, snapshot, score=number / 4)
    (blob,) = (run / "checkpoints/000000000200/blobs").iterdir()
    blob.write_bytes(b"x")
    damaged, whole = RunDetails(run).checkpoints
    assert "has 1 of 1000 bytes" in damaged.problem and damaged.num_bytes is None
    assert (whole.env_steps, whole.score, whole.problem) == (100, 25.0, None)
    text = words_of(report_of(run, tmp_path))
    assert "files and sizes are right" in text and "jax 9.9" in text


@pytest.mark.parametrize("what", SPOILED)
def test_nothing_in_a_folder_does_anything(tmp_path, monkeypatch, what):
    monkeypatch.setattr(records, "MOST_BYTES", 2**26)  # 1 GB takes seconds
    run = make_run(tmp_path / "runs/one")
    SPOILED[what](run)
    out = tmp_path / "report.html"
    code = cli.main(["report", str(run), "--out", str(out)])
    assert code in (0, 2) and out.exists() == (code == 0)
    if code == 0:
        check_harmless(out.read_text())
    if "script" in what:
        assert "&lt;script&gt;" in out.read_text() and SCRIPT not in out.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_no_name_does_anything(tmp_path, name):
    check_harmless(report_of(make_run(tmp_path / name), tmp_path))


def test_a_long_run_is_sampled_evenly_with_all_its_evaluations(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [record(i, padding="x" * 100) for i in range(5000)]
    lines[1234] = record(1234, eval_return_mean=1.5)
    lines[2345] = record(2345, eval_return_mean=None)
    file.write_text("".join(lines) + '{"half": ')
    found = read_sample(file, 100)
    steps = [one["env_steps"] for one in found.records]
    assert found.is_sample and found.num_damaged == 0 and 100 <= len(steps) <= 103
    assert steps[0] == 0 and steps[-1] == 4999 and 1234 in steps and 2345 not in steps
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 60
    assert read_newest(file).records[-1]["env_steps"] == 4999
    assert not read_sample(file, 20_000).is_sample


def test_a_chart_has_no_text_but_numbers_and_its_legend():
    address = charts.draw([charts.Line([(0, 1.0), (3e6, 2.0)], "training")])
    svg = base64.b64decode(address.partition(",")[2]).decode()
    shown = set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    assert {"training", "0", "1M", "2M", "3M", "1.5"} <= shown
    assert all(re.fullmatch(r"-?[\d.]+[kMG]?|training", word) for word in shown), shown


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (-0.3, 0.7, 4, [-0.25, 0.0, 0.25, 0.5]),
        (3.2e6, 3.4e6, 2, [3.2e6, 3.3e6, 3.4e6]),
        (-1e30, 1e30, 3, [-1e30, 0, 1e30]),
    ],
)
def test_the_numbers_of_an_axis_are_round(low, high, most, expected):
    assert charts.ticks(low, high, most) == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=5))
def test_any_numbers_are_drawn_within_the_picture(points):
    address = charts.draw([charts.Line(sorted(points))])
    svg = base64.b64decode(address.partition(",")[2]).decode()
    for attribute in ("x1", "x2", "cx", "y1", "y2", "cy"):
        for value in re.findall(rf'{attribute}="([^"]*)"', svg):
            assert 0 <= float(value) <= (charts.SMALL[0] if "x" in attribute else charts.SMALL[1])


def test_it_needs_no_jax_and_runs_no_agent_that_a_folder_names(tmp_path):
    run = make_run(tmp_path / "one", agent_config="os:abort", agent_class="os:abort")
    code = (
        "import sys; from sebulba.commands.cli import main; "
        f"assert main(['report', {str(run)!r}, '--out', {str(tmp_path / 'p.html')!r}]) == 0; "
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_what_cannot_be_reported_is_said(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    run = make_run(tmp_path / "one")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "no/a.html")]) == 2
    said = capsys.readouterr().err
    assert "config.json" in said and "cannot be written (No such file" in said
    with pytest.raises(UsageError, match="link"):
        link = tmp_path / "metrics.jsonl"
        link.symlink_to(run / "metrics.jsonl")
        read_sample(link, 10)

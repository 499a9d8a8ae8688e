"""``benchmarks report``: every figure on the page is the one in the JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.studies import report
from benchmarks.studies.learning_goals import GOALS
from sebulba.errors import UsageError

KEPT = Path(report.__file__).parents[1] / "results"
ABOUT = {
    "command": None,
    "config": {"repeats": 3},
    "machine": {
        "cores": 2,
        "processor": "x86_64",
        "processor_model": "Slow 3000",
        "memory_gb": 7.5,
        "devices": ["cpu", "cpu"],
    },
    "versions": {"jax": "0.10.2", "python": "3.11.7"},
    "commit": "0123456789abcdef",
    "commit_date": "2026-02-03",
    "is_modified": False,
}
INFERENCE = {
    "fused_over_bare": 2.345678,
    "stepped_over_bare": 0.61,
    "jit_gain": 1.5,
    "fused_env_steps_per_s": 206123.4,
    "figures": {"fused": [206123.4, 205000.0, 207000.0], "bare": [80.25, 70.5, 90.0]},
    **ABOUT,
}
OVERHEAD = {
    "overhead_us_per_step": 24.7,
    "phases_us": {"act": 22.125},
    "figures": {"envpool overhead": [24.7]},
    **ABOUT,
    "command": "sebulba bench overhead --repeats 7",
    "commit": "fedcba9876543210",
    "is_modified": True,
}


def write(folder, **results):
    folder.mkdir(exist_ok=True)
    for name, result in results.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(result))
    return str(folder)


def cells(page):
    lines = page.read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


def test_every_figure_on_the_page_is_the_one_in_the_json(tmp_path):
    page = tmp_path / "README.md"
    folder = write(tmp_path / "results", inference=INFERENCE, overhead=OVERHEAD)
    report.run(folder, str(page))
    rows = cells(page)
    of = ["0123456789", "2026-02-03"]
    for row in (
        ["inference", "`fused_over_bare`", "2.346", "≥ 2.2", "met", *of],
        ["inference", "`stepped_over_bare`", "0.61", "≥ 0.85", "**short**", *of],
        ["inference", "`jit_gain`", "1.5", "≥ 1.37", "met", *of],
        ["overhead", "`overhead_us_per_step`", "24.7", "≤ 15", "**short**"]
        + ["fedcba9876 (changed)", "2026-02-03"],
        ["`fused_env_steps_per_s`", "206,123"],
        ["`phases_us.act`", "22.12"],
        ["fused", "206,123", "205,000", "207,000", "3"],
        ["bare", "80.25", "70.5", "90", "3"],
        ["envpool overhead", "24.7", "24.7", "24.7", "1"],
    ):
        assert row in rows
    text = page.read_text()
    assert "`python -m benchmarks overhead --repeats 7`" in text
    assert "`python -m benchmarks inference --json benchmarks/results/inference.json`" in text
    assert "Slow 3000, 2 cores, 7.5 GB; JAX 0.10.2 on cpu, Python 3.11.7; commit 012" in text


def test_what_was_not_measured_is_said(tmp_path):
    page = tmp_path / "README.md"
    report.run(write(tmp_path / "results", inference=INFERENCE), str(page))
    assert ["memory", "`rss_slope_mb_per_min`", "not measured", "≤ 1"] in [
        row[:4] for row in cells(page)
    ]


def test_pictures_are_small_and_those_of_the_benchmarks_are_shown(tmp_path):
    page = tmp_path / "pages" / "README.md"
    page.parent.mkdir()
    folder = write(tmp_path / "results", inference=INFERENCE, overhead=OVERHEAD)
    (tmp_path / "results" / "overhead.png").write_bytes(b"a picture")
    report.run(folder, str(page))
    assert 0 < page.with_name("bars.png").stat().st_size < 100_000
    assert "(bars.png)" in page.read_text()
    assert "![overhead](../results/overhead.png)" in page.read_text()
    assert "inference.png" not in page.read_text()


def test_a_missing_key_is_an_error_that_names_file_and_key(tmp_path):
    for key in ("jit_gain", "commit", "figures"):
        lacking = {name: value for name, value in INFERENCE.items() if name != key}
        folder = write(tmp_path, inference=lacking)
        with pytest.raises(UsageError, match=rf"inference\.json has no key '{key}'; make it anew"):
            report.run(folder, str(tmp_path / "README.md"))


def test_a_result_of_another_machine_has_no_bars(tmp_path):
    page = tmp_path / "README.md"
    folder = write(tmp_path / "results", inference_gpu=INFERENCE, train_pong_gpu=OVERHEAD)
    report.run(folder, str(page))
    assert not [row for row in cells(page) if "met" in row or "**short**" in row]
    assert ["`jit_gain`", "1.5"] in cells(page)
    assert "--json benchmarks/results/inference-gpu.json`" in page.read_text()


def test_files_of_no_benchmark_and_no_files_are_refused(tmp_path):
    page = str(tmp_path / "README.md")
    with pytest.raises(UsageError, match="holds no results; make some"):
        report.run(str(tmp_path), page)
    with pytest.raises(UsageError, match=r"flight\.json is named after no benchmark"):
        report.run(write(tmp_path, flight=INFERENCE), page)


def test_a_bar_is_met_on_the_right_side_of_it():
    least, most = report.Bar(0.85), report.Bar(2.5, is_limit=True)
    assert least.is_met(0.85) and not least.is_met(0.84)
    assert most.is_met(2.5) and most.is_met(-3) and not most.is_met(2.6)
    assert least.reached(1.7) == 2 and most.reached(5) == 0.5
    assert most.reached(-1) == float("inf")


@pytest.mark.parametrize("name", report.BENCHMARKS)
def test_a_name_belongs_to_itself(name):
    assert report.benchmark_of(name) == report.benchmark_of(f"{name}-gpu") == name


# The gallery.

LEARNED = {
    **OVERHEAD,
    "config": {"env": {"id": "CartPole-v1"}, "total_env_steps": 100_000},
    "seeds": 3,
    "share_of_seeds": 2 / 3,
    "figures": {"run, s": [60.0, 66.0, 240.0], "return that counts": [480.0, 470.5, 500.0]},
}


def test_the_gallery_shows_every_seed_and_the_command(tmp_path):
    folder = write(tmp_path / "results", **{"learn-cartpole-dqn": LEARNED, "overhead": OVERHEAD})
    (tmp_path / "results" / "learn-cartpole-dqn.png").write_bytes(b"a picture")
    page = tmp_path / "gallery.md"
    report.run(folder, str(tmp_path / "README.md"), str(page))
    text = page.read_text()
    assert "## DQN" in text and "## PPO" not in text and "overhead" not in text
    row = ["[cartpole-dqn](#cartpole-dqn)", str(GOALS["cartpole-dqn"]), "**2 of 3**"]
    assert [*row, "480, 470.5, 500", "66 s"] in cells(page)
    assert "`sebulba train cartpole-dqn`" in text and "Known: " in text
    assert "![What cartpole-dqn learned](results/learn-cartpole-dqn.png)" in text


def test_the_kept_results_make_both_pages_and_every_picture_is_there(tmp_path):
    page, gallery = tmp_path / "results.md", tmp_path / "gallery.md"
    results = report.run(str(KEPT), str(page), str(gallery))
    for made in (page, gallery):
        pictures = re.findall(r"!\[.*\]\((.*)\)", made.read_text())
        assert pictures and all((tmp_path / picture).exists() for picture in pictures)
    learned = [name for name in results if name.startswith("learn-")]
    assert len(re.findall("^### ", gallery.read_text(), re.MULTILINE)) == len(learned)
    assert "sebulba bench learn" not in page.read_text()


def test_without_a_file_the_page_is_printed(tmp_path, capsys):
    report.run(write(tmp_path / "results", inference=INFERENCE))
    printed = capsys.readouterr().out
    assert printed.startswith("# Results of the benchmarks") and "bars.png" not in printed
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    ("made_by", "today"),
    [
        ("sebulba bench learn kuhn --seeds 2", "python -m benchmarks learn kuhn --seeds 2"),
        (
            "sebulba bench train x --compare prototype",
            "python -m benchmarks train x --compare prototype",
        ),
        ("sebulba bench train pong", "sebulba bench train pong"),
        ("python -m benchmarks learn kuhn", "python -m benchmarks learn kuhn"),
        (None, None),
    ],
)
def test_a_result_is_shown_with_the_command_of_today(made_by, today):
    assert report.command_today(made_by) == today

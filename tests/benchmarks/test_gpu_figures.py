"""What ``make gpu-figures`` measures, and how it reads the speed of a run."""

import json

import pytest

from benchmarks.studies import gpu_figures


def test_the_speed_is_that_of_the_second_half(tmp_path):
    file = tmp_path / "metrics.jsonl"
    records = [(100, 1.0), (200, 2.0), (800, 4.0), (2000, 8.0)]
    file.write_text("".join(json.dumps({"env_steps": n, "seconds": s}) + "\n" for n, s in records))
    assert gpu_figures.speed_of(file, "") == (2000 - 800) / 4.0
    with pytest.raises(RuntimeError, match="no GPU"):
        gpu_figures.speed_of(tmp_path / "none", "first line\nno GPU\n")


def test_all_limits_together_leave_time_to_start():
    rows = gpu_figures.rows()
    assert len({row.name for row in rows}) == len(rows)
    assert sum(row.seconds for row in rows) <= 400


def test_ratios_are_those_whose_figures_are_there():
    found = {"pong": 20.0, "raw envpool a": 25.0, "raw envpool b": 40.0, "cartpole": 3.0}
    assert gpu_figures.ratios(found) == {"pong / best raw envpool": 0.5}
    found["cartpole --platform cpu"] = 2.0
    assert gpu_figures.ratios(found)["cartpole / --platform cpu"] == 1.5
    names = {row.name for row in gpu_figures.rows()}
    assert len(gpu_figures.ratios(dict.fromkeys(names, 1.0))) == 6


def test_a_row_that_fails_says_why_and_costs_only_itself(tmp_path, monkeypatch, capsys):
    def fails(seconds):
        raise RuntimeError("out of memory")

    rows = [gpu_figures.Row("bad", 1.0, fails), gpu_figures.Row("good", 1.0, lambda s: 7.0)]
    monkeypatch.setattr(gpu_figures, "rows", lambda: rows)
    gpu_figures.main(["--json", str(tmp_path / "figures.json")])
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["figures"] == {"good": 7.0} and record["failed"] == {"bad": "out of memory"}
    assert "bad: out of memory" in capsys.readouterr().out

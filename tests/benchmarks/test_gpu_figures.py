"""What ``make gpu-figures`` measures, and how it reads the speed of a run."""

import json
import sys

import pytest

from benchmarks.studies import gpu_figures


def test_the_speed_is_that_of_the_second_half(tmp_path):
    file = tmp_path / "metrics.jsonl"
    records = [(100, 1.0), (200, 2.0), (800, 4.0), (2000, 8.0)]
    file.write_text("".join(json.dumps({"env_steps": n, "seconds": s}) + "\n" for n, s in records))
    assert gpu_figures.speed_of(file, "") == (2000 - 800) / 4.0
    with pytest.raises(RuntimeError, match="no GPU"):
        gpu_figures.speed_of(tmp_path / "none", "first line\nno GPU\n")
    file.write_text('{"env_steps": 1, "seconds": 0.1}\n')
    with pytest.raises(RuntimeError, match="no two records"):
        gpu_figures.speed_of(file, "sebulba: warning: something else\n")


def test_all_limits_together_leave_time_to_start_and_to_learn_pong():
    rows = gpu_figures.rows()
    assert len({row.name for row in rows}) == len(rows)
    names = [row.name for row in rows]
    pong = names.index("pong")
    assert rows[pong].seconds == 300
    # With 8 s for each start, Pong has 4.5 of 9 minutes.
    assert sum(8 + row.seconds for row in rows[:pong]) <= 270
    assert all("8192" in name for name in names[pong + 1 :])


def test_every_figure_that_a_gpu_is_asked_for_has_a_row():
    names = [row.name for row in gpu_figures.rows()]
    assert {
        *("pong", "cartpole", "cartpole --platform cpu", "cartpole --num-envs 4096"),
        *("cartpole-dqn", "cartpole-dqn --platform cpu", "pendulum-sac", "atari-dqn"),
        *("pendulum-sac --platform cpu", "breakout-minatar --num-envs 64"),
        *("breakout-minatar --num-envs 4096", "PureJaxRL's form, 64 environments"),
        "PureJaxRL's form, 4096 environments",
    } <= set(names)
    assert sum(name.startswith("raw envpool") for name in names) == 3
    assert set(gpu_figures.ratios(dict.fromkeys(names, 1.0))) >= {
        *("pong / best raw envpool", "cartpole / --platform cpu", "atari-dqn / 2,700 before"),
        *("cartpole-dqn / --platform cpu", "pendulum-sac / --platform cpu"),
        "breakout-minatar / PureJaxRL's form, 4096",
    }


def test_when_a_return_was_reached_is_read_from_the_records(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert gpu_figures.reached_in(file, 18.0) == {}
    returns = [None, -20.0, 17.0, 18.5, 19.0, 12.0]
    records = [
        {"episode_return_mean": value, "seconds": 10.0 * i, "env_steps": 100 * i}
        for i, value in enumerate(returns)
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with file.open("a") as whole:
        whole.write('{"episode_return_mean": 21.0, "sec')  # killed while it wrote
    names = "highest mean return", "seconds until then", "env steps until then"
    assert gpu_figures.reached_in(file, 18.0) == dict(zip(names, (18.5, 30.0, 300), strict=True))
    assert gpu_figures.reached_in(file, 21.0) == dict(zip(names, (19.0, 40.0, 400), strict=True))


def test_ratios_are_those_whose_figures_are_there():
    found = {"pong": 20.0, "raw envpool a": 25.0, "raw envpool b": 40.0, "cartpole": 3.0}
    assert gpu_figures.ratios(found) == {"pong / best raw envpool": 0.5}
    found["cartpole --platform cpu"] = 2.0
    assert gpu_figures.ratios(found)["cartpole / --platform cpu"] == 1.5
    names = {row.name for row in gpu_figures.rows()}
    assert len(gpu_figures.ratios(dict.fromkeys(names, 1.0))) == 8


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError])
def test_a_row_that_fails_says_why_and_costs_only_itself(tmp_path, monkeypatch, capsys, error):
    def fails(seconds, left):
        raise error("out of memory")

    def learns(seconds, left):
        return {"": 7.0, "highest mean return": 18.0}

    rows = [gpu_figures.Row("bad", 1.0, fails), gpu_figures.Row("good", 1.0, learns)]
    monkeypatch.setattr(gpu_figures, "rows", lambda: rows)
    gpu_figures.main(["--json", str(tmp_path / "figures.json")])
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["figures"] == {"good": 7.0} and record["failed"] == {"bad": "out of memory"}
    assert record["learning"] == {"good, highest mean return": 18.0}
    printed = capsys.readouterr().out
    assert "not measured: bad: out of memory" in printed and "good ..." in printed


def test_what_was_measured_is_kept_where_the_call_is_killed(tmp_path, monkeypatch):
    def killed(seconds, left):
        raise KeyboardInterrupt

    rows = [
        gpu_figures.Row("good", 1.0, lambda seconds, left: {"": 7.0}),
        gpu_figures.Row("killed", 1.0, killed),
    ]
    monkeypatch.setattr(gpu_figures, "rows", lambda: rows)
    with pytest.raises(KeyboardInterrupt):
        gpu_figures.main(["--json", str(tmp_path / "figures.json")])
    assert json.loads((tmp_path / "figures.json").read_text())["figures"] == {"good": 7.0}


def test_no_row_lasts_longer_than_what_is_left(tmp_path, monkeypatch, capsys):
    now, given = [0.0], []

    def takes_all(seconds, left):
        given.append(left)
        now[0] += min(seconds, left)
        return {"": 1.0}

    rows = [gpu_figures.Row(name, 300.0, takes_all) for name in "abc"]
    hung = gpu_figures.Row("hangs", 0.0, lambda seconds, left: given.append(left) or {"": 1.0})
    monkeypatch.setattr(gpu_figures, "rows", lambda: rows)
    monkeypatch.setattr(gpu_figures.time, "monotonic", lambda: now[0])
    gpu_figures.main(["--json", str(tmp_path / "figures.json")])
    assert given == [540.0, 240.0]
    rows[:] = [hung]
    now[0] = 0.0
    gpu_figures.main(["--json", str(tmp_path / "figures.json")])
    assert given[-1] == gpu_figures.START_S
    assert "not measured: c: no time was left" in capsys.readouterr().out


CHILD = """
import pathlib, sys, time
sys.stderr.write("a warning" * 20_000)  # more than a pipe holds
folder = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
folder.mkdir()
begin = float(sys.argv[2])
time.sleep(begin)
with open(folder / "metrics.jsonl", "w", buffering=1) as file:
    for i in range(10_000):
        file.write('{"env_steps": %d, "seconds": %f}\\n' % (100 * i, 0.01 * i))
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("begin", "seconds", "left", "found"), [(1.0, 0.5, 300.0, True), (60.0, 0.5, 1.0, False)]
)
def test_a_run_is_measured_from_its_first_record_on(
    tmp_path, monkeypatch, begin, seconds, left, found
):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {child} x "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(gpu_figures.sys, "executable", str(script))
    measure = gpu_figures.train(str(begin))
    if found:
        assert measure(seconds, left) == {"": pytest.approx(10_000.0)}
    else:
        with pytest.raises(RuntimeError):
            measure(seconds, left)

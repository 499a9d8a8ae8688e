"""Metric writers: what each leaves behind, and that one that fails does not end the others."""

from __future__ import annotations

import io
import json
import os
import warnings

import numpy as np
import pytest
from rich.console import Console

from sebulba.metrics.live_panel import PanelWriter, sparkline, stacked_bar
from sebulba.metrics.plots import learning_curve, read_records
from sebulba.metrics.writers import (
    CompositeWriter,
    JsonLinesWriter,
    LinesWriter,
    SpacedJsonLinesWriter,
    TensorBoardWriter,
    count,
    duration,
    evaluation_line,
    number,
    plain_line,
    seconds_left,
)
from sebulba.support.streams import notify


def record(i: int = 3) -> dict:
    return {
        "updates": 10 * i,
        "env_steps": 640 * i,
        "cycles": i,
        "total_cycles": 12,
        "seconds": 0.5 * i,
        "env_steps_per_s": 960.0,
        "updates_per_s": 78.9,
        "episodes": 210 * i,
        "episode_return_mean": 17.5 + i,
        "episode_length_mean": 17.5,
        "policy_lag_mean": 1.25,
        "policy_lag_max": 3,
        "policy_lag_counts": {1: 3, 3: 1},
        "queue_fill": 0.5,
        "dropped_cycles": 0,
        "loss": -0.125,
        "entropy": 0.693,
        "time/learner/get": 0.25,
        "time/learner/update": 0.5,
        "time/inferencer/cycle": 0.75,
    }


class Failing:
    def __init__(self) -> None:
        self.calls = []

    def write(self, metrics) -> None:
        self.calls.append("write")
        raise OSError("disk full")

    def close(self) -> None:
        self.calls.append("close")


def test_json_lines_hold_null_for_what_is_unknown_or_not_finite(tmp_path):
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    writer.write({"a": None, "b": float("nan"), "c": np.float32("inf"), "d": np.int64(7)})
    writer.write({"lags": {2: 5}, "image": np.zeros((4, 5, 3), np.uint8), "e": np.float32(0.5)})
    writer.close()
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"a": None, "b": None, "c": None, "d": 7},
        {"lags": {"2": 5}, "e": 0.5},
    ]


def test_json_lines_can_be_read_while_the_run_goes_on(tmp_path):
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    writer.write(record())
    assert read_records(tmp_path / "metrics.jsonl")[0]["env_steps"] == 1920
    writer.close()


def test_writers_leave_nothing_before_the_first_record(tmp_path):
    for writer in (JsonLinesWriter(tmp_path / "m"), TensorBoardWriter(tmp_path / "t")):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_numbers_and_images_over_env_steps(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    writer = TensorBoardWriter(tmp_path)
    writer.write({**record(), "frame": np.zeros((4, 5, 3), np.uint8), "unknown": None})
    writer.close()
    writer.close()
    (file,) = tmp_path.iterdir()
    data, values, offset = file.read_bytes(), {}, 0
    while offset < len(data):
        # TFRecord: length (8 bytes), checksum (4), payload, checksum (4).
        length = int.from_bytes(data[offset : offset + 8], "little")
        event = Event.FromString(data[offset + 12 : offset + 12 + length])
        values |= {v.tag: (event.step, v) for v in event.summary.value}
        offset += 16 + length
    assert values["loss"][0] == 1920
    assert values["loss"][1].simple_value == -0.125
    assert values["frame"][1].image.width == 5
    assert "unknown" not in values and "policy_lag_counts" not in values


def test_after_a_full_disk_lines_go_on_and_no_half_of_one_is_left(tmp_path, monkeypatch):
    writer = JsonLinesWriter(tmp_path / "m.jsonl")
    writer.write(record(1))

    class Full(io.StringIO):
        def write(self, text):
            with open(tmp_path / "m.jsonl", "a") as file:
                file.write(text[: len(text) // 2])
            raise OSError("disk full")

    writer.close()
    writer._file = Full()
    with pytest.raises(OSError, match="disk full"):
        writer.write(record(2))
    writer.write(record(3))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["env_steps"] for line in lines] == [record(1)["env_steps"], record(3)["env_steps"]]


def test_a_failing_writer_is_warned_about_once_and_the_others_go_on(tmp_path):
    failing, lines = Failing(), JsonLinesWriter(tmp_path / "m.jsonl")
    writer = CompositeWriter(failing, lines)
    with pytest.warns(RuntimeWarning, match="Failing failed.*OSError: disk full"):
        writer.write(record(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.write(record(2))
        writer.close()
    assert failing.calls == ["write", "write", "close"]
    assert len(read_records(tmp_path / "m.jsonl")) == 2


def test_lines_are_few_and_the_last_record_is_always_among_them():
    stream = io.StringIO()
    writer = LinesWriter(stream, lambda: "two Inferencers")
    for i in range(1, 8):
        writer.write(record(i) | {"seconds": 0.3 * i})
    writer.close()
    writer.close()
    about, *lines = stream.getvalue().splitlines()
    assert about == "two Inferencers"
    assert len(lines) == 3
    assert "4480 env steps" in lines[-1]


def test_an_evaluation_that_ends_after_the_training_repeats_no_line():
    stream = io.StringIO()
    writer = LinesWriter(stream)
    for seconds in (6.2, 90.0, 200.0):
        writer.write({**record(), "seconds": seconds, "eval_return_mean": 1.0})
    writer.close()
    lines = stream.getvalue().splitlines()
    assert ["evaluation" in line for line in lines] == [True, False, True, True]


def test_lines_have_the_seats_of_a_zero_sum_game_whose_mean_is_0():
    seats = {"episode_return_mean/player/0": 0.25, "episode_return_mean/player/1": -0.25}
    seats |= {f"eval_{name[8:]}": mean for name, mean in seats.items()}
    metrics = {**record(), **seats, "episode_return_mean": 0.0, "eval_return_mean": 0.0}
    assert "return player/0 0.25, player/1 -0.25" in plain_line(metrics)
    assert "return player/0 0.25, player/1 -0.25 over" in evaluation_line(metrics)
    assert "return 0 ± 2 (" in evaluation_line({"eval_return_mean": 0.0, "eval_return_std": 2.0})


def test_plain_line_shows_dashes_for_what_is_not_known():
    line = plain_line({"seconds": 3.2, "env_steps": 10, "loss": None, "policy_lag_mean": None})
    assert "return        -" in line and "left" not in line
    assert "return     20.5" in plain_line(record()) and "0:06 left" in plain_line(record())


def test_numbers_for_people():
    assert [count(x) for x in (None, 0, 9999, 12_345, 123_456, 1_234_567, 2.5e9)] == [
        *("-", "0", "9999", "12.3k", "123k", "1.23M", "2.5G"),
    ]
    assert [number(x) for x in (None, float("nan"), 0.0, 0.00123, -0.5, 487.25, 12_345.0)] == [
        *("-", "-", "0", "0.00123", "-0.5", "487.2", "12.3k"),
    ]
    assert [duration(x) for x in (0, 61, 3723.9)] == ["0:00", "1:01", "1:02:03"]


def test_time_left_goes_by_the_last_window_and_not_by_the_compile():
    metrics = {"cycles": 4, "total_cycles": 8, "env_steps": 80, "env_steps_per_s": 40.0}
    assert seconds_left(metrics) == 2.0
    for unknown in metrics:
        assert seconds_left({**metrics, unknown: None}) is None
    stream = io.StringIO()
    writer = LinesWriter(stream)
    writer.write(record(1) | {"seconds": 4.0})
    writer.write(record(2) | {"seconds": 6.0})
    first, second = stream.getvalue().splitlines()
    assert "left" not in first and "left" in second


@pytest.mark.parametrize("width", [40, 80, 120])
def test_panel_fits_the_terminal(width):
    view = PanelWriter("cartpole", "runs/cartpole", lambda: "2 Inferencers x 64 environments")
    for metrics in (None, {}, record(1) | {"episode_return_mean": None}, record(2), record(12)):
        if metrics is not None:
            view.write(metrics)
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(view)
        lines = console.export_text().splitlines()
        assert max(len(line) for line in lines) <= width
        assert len(lines) > 3
    if width >= 80:
        text = "\n".join(lines)
        for shown in ("29.5", "960 env steps/s", "50%", "1.25 mean", "update 50%", "100%"):
            assert shown in text, shown


def test_panel_has_a_line_for_groups_of_agents():
    def shown(*groups: str) -> str:
        view = PanelWriter("x", "runs/x", lambda: "devices")
        view.write(record(2) | {f"episode_return_mean/{name}": 1.5 for name in groups})
        console = Console(width=80, file=io.StringIO(), record=True)
        console.print(view)
        return console.export_text()

    assert "guide 1.5  crew 1.5" in shown("guide", "crew", "crew/0")
    assert "by group" not in shown("guide")
    assert "player/0 1.5  player/1 1.5" in shown("player", "player/0", "player/1")


def test_panel_has_a_line_for_whom_a_league_beats():
    view = PanelWriter("x", "runs/x", lambda: "devices")
    shares = {"win_rate/history": 0.61, "win_rate/random": 0.987}
    view.write(record(2) | shares | {"elo": 120.4, "elo_interval": 14.6})
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(view)
    assert "win rate   Elo +120 ± 15  history 61%  random 99%" in console.export_text()


def test_panel_writer_shows_and_closes_twice():
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    writer = PanelWriter("cartpole", "runs/x", lambda: "devices", console)
    writer.start()
    writer.write(record())
    writer.close()
    writer.close()
    assert "960" in console.file.getvalue()


def test_a_stop_is_said_within_the_panel_which_a_line_on_its_terminal_would_tear(capfd):
    def shown(writer: PanelWriter) -> str:
        console = Console(width=80, file=io.StringIO(), record=True)
        console.print(writer)
        return console.export_text()

    writer = PanelWriter("x", "runs/x", lambda: "devices", Console(file=io.StringIO()))
    writer.start()
    terminal, end = os.openpty()
    before = os.dup(2)
    os.dup2(end, 2)
    try:
        notify("stopping")
        os.set_blocking(terminal, False)
        with pytest.raises(BlockingIOError):
            os.read(terminal, 100)
    finally:
        os.dup2(before, 2)
    assert "stopping" in shown(writer)
    notify("for the log")  # standard error is a file, which nothing tears
    writer.close()
    assert "for the log" not in shown(writer)
    notify("afterwards")
    assert capfd.readouterr().err.split("\n") == ["sebulba: for the log", "sebulba: afterwards", ""]


def test_bars_and_sparklines_keep_their_width():
    for shares in ([0.3, 0.31, 0.08], [0.9, 0.4], [0.004], [1.0]):
        phases = {str(i): share for i, share in enumerate(shares)}
        assert len(stacked_bar(phases, 37)) == 37
    assert sparkline([], 5) == ""
    assert sparkline([1.0], 5) == "▁"
    assert sparkline([0.0, 7.0], 5) == "▁█"
    assert len(sparkline([float(i) for i in range(1000)], 13)) == 13


def test_learning_curve_is_drawn_and_leaves_out_a_line_cut_short(tmp_path):
    file, picture = tmp_path / "metrics.jsonl", tmp_path / "curve.png"
    file.write_text(json.dumps(record(1)) + "\n" + json.dumps(record(2)) + '\n{"env_st')
    assert len(read_records(file)) == 2
    assert learning_curve(file, picture, "cartpole")
    assert picture.read_bytes().startswith(b"\x89PNG")
    file.write_text("")
    assert not learning_curve(file, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_records_of_a_run_are_the_further_apart_the_older_it_is(tmp_path):
    file = tmp_path / "metrics.jsonl"
    writer = SpacedJsonLinesWriter(file)
    day = 24 * 3600
    for second in range(day):
        evaluated = {"eval_return_mean": 1.0} if second == day - 100 else {}
        writer.write({"seconds": float(second), "env_steps": second, **evaluated})
    writer.close()
    seconds = [json.loads(line)["seconds"] for line in file.read_text().splitlines()]
    assert seconds[:3000] == list(range(3000)), "a short run has all of them"
    assert len(seconds) < 14_000 < day / 6
    assert max(np.diff(seconds)) <= day / 3000 + 1
    assert day - 100 in seconds and seconds[-1] == day - 1

"""``bench scale``: when a cost rises, what stands in the record, a picture. Never a time."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
from sebulba_sweep import scale
from sebulba_sweep.scale import Axis, AxisResult

from sebulba.agents.configs import TorsoConfig
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError
from sebulba.tools.bench.trial import Measurement, Series

AXIS = Axis("num-envs", (2, 4, 8), lambda config, n: dataclasses.replace(config, num_envs=n))
CPU = [types.SimpleNamespace(platform="cpu")]
GPU = [types.SimpleNamespace(platform="gpu")]


def series(*speeds, parameters=10):
    measurements = (
        Measurement(s, 100.0 + i, 7.0, 1.0, parameters=parameters) for i, s in enumerate(speeds)
    )
    return Series(tuple(measurements))


def tiny_config(**changes):
    """Return a CartPole run that starts and trains in seconds."""
    config = PRESETS["cartpole"].make()
    agent = dataclasses.replace(config.agent, torso=TorsoConfig(hidden_sizes=(5,)))
    small = {
        "agent": agent,
        "num_envs": 2,
        "steps_per_cycle": 3,
        "num_inferencers_per_device": 1,
        "total_env_steps": 600,
        "platform": "cpu",
        "compile_cache": "off",
    }
    return dataclasses.replace(config, **{**small, **changes})


# When a cost rises.


def test_a_cost_that_falls_or_stays_level_has_no_offender():
    points = {2: series(100, 110), 4: series(200, 210), 8: series(195, 190)}
    assert scale.cost_rises(AXIS, points) == {}


def test_a_cost_that_rises_names_the_point_and_by_how_much():
    points = {2: series(100, 100), 4: series(200, 200), 8: series(100, 100)}
    assert scale.cost_rises(AXIS, points) == {8: 2.0}


def test_a_slow_rise_is_seen_since_the_cheapest_point_is_what_counts():
    points = {2: series(200, 200), 4: series(185, 185), 8: series(170, 170)}
    assert scale.cost_rises(AXIS, points) == {8: pytest.approx(200 / 170)}


def test_a_machine_that_drifts_from_round_to_round_does_not_decide():
    """The medians are 200 and 150, yet in two rounds of three the second was no dearer."""
    points = {2: series(100, 200, 300), 4: series(150, 210, 80)}
    assert scale.cost_rises(AXIS, points) == {}


def test_a_larger_network_may_cost_more_but_not_more_a_parameter():
    axis = dataclasses.replace(AXIS, per_parameter=True)
    points = {
        2: series(100, 100, parameters=10),
        4: series(50, 50, parameters=40),
        8: series(10, 10, parameters=80),
    }
    assert list(scale.cost_rises(AXIS, points)) == [4, 8]
    assert scale.cost_rises(axis, points) == {8: 2.5}


def test_the_notes_name_offenders_and_what_cannot_run():
    result = AxisResult(AXIS, {2: series(200, 200), 4: series(100, 100)}, {8: "too large"})
    text = "\n".join(scale.axis_notes(result))
    assert "cost_falls: false" in text
    assert "num-envs 4: 2.00 times the lowest cost before it" in text
    assert "num-envs 8 cannot run: too large" in text


def test_a_value_has_median_spread_cost_and_peak():
    record = scale.record_of(series(100, 400, 250))
    assert record["env_steps_per_s"] == {"median": 250, "lowest": 100, "highest": 400}
    assert record["us_per_env_step"] == 4000.0
    assert (record["rss_mb"], record["device_mb"]) == (102.0, 7.0)


# Axes.


def test_the_configuration_itself_is_a_point_of_its_axes():
    config = dataclasses.replace(PRESETS["cartpole"].make(), num_envs=48, steps_per_cycle=20)
    axes = {axis.name: axis for axis in scale.all_axes(config, CPU)}
    assert 48 in axes["num-envs"].values and 20 in axes["steps-per-cycle"].values
    assert config.agent.torso.hidden_sizes in axes["hidden-sizes"].values
    for axis in axes.values():
        changed = [axis.change(config, value) for value in axis.values]
        assert len({repr(c) for c in changed}) == len(axis.values) > 1


def test_an_image_network_grows_by_its_features():
    names = [axis.name for axis in scale.all_axes(PRESETS["pong"].make(), CPU)]
    assert names[-1] == "image-features"


def test_a_single_accelerator_has_no_axis_of_devices():
    def names(devices):
        return [axis.name for axis in scale.all_axes(PRESETS["cartpole"].make(), devices)]

    assert "devices" not in names(GPU)
    assert "devices" in names(GPU * 2) and "devices" in names(CPU)


def test_devices_are_halved_and_only_a_cpu_is_split():
    config = PRESETS["cartpole"].make()
    four = scale.with_devices(config, 4, on_cpu=True)
    assert (four.num_cpu_devices, four.inference_devices, four.update_devices) == (
        4,
        (0, 1),
        (2, 3),
    )
    one = scale.with_devices(config, 1, on_cpu=False)
    assert (one.num_cpu_devices, one.inference_devices, one.update_devices) == (None, (0,), (0,))


def test_an_unknown_axis_is_refused():
    with pytest.raises(UsageError, match="axis 'num_envs' is unknown; use num-envs, steps-per"):
        scale.run(tiny_config(), preset="cartpole", axes=["num_envs"])


# All of it.


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_record_has_figures_of_each_value_and_why_others_failed(tmp_path, monkeypatch, capsys):
    axis = dataclasses.replace(AXIS, values=(0, 2, 6))
    monkeypatch.setattr(scale, "all_axes", lambda config, devices: [axis])
    file, picture = tmp_path / "scale.json", tmp_path / "scale.png"
    scale.run(
        tiny_config(),
        preset="cartpole",
        repeats=2,
        seconds=0.05,
        json_file=str(file),
        png_file=str(picture),
    )
    record = json.loads(file.read_text())
    measured = record["axes"]["num-envs"]
    assert list(measured["points"]) == ["2", "6"]
    for figures in measured["points"].values():
        speed = figures["env_steps_per_s"]
        assert 0 < speed["lowest"] <= speed["median"] <= speed["highest"]
        assert figures["us_per_env_step"] == pytest.approx(1e6 / speed["median"])
        assert figures["rss_mb"] > 50 and figures["device_mb"] > 0
    assert "num_envs=0 must be at least 1" in measured["failed"]["0"]
    assert record["cost_falls"] == {"num-envs": measured["cost_falls"]}
    assert [len(v) for v in record["figures"].values()] == [2, 2]
    assert record["config"]["repeats"] == 2 and record["config"]["num_envs"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "cost_falls" in capsys.readouterr().out

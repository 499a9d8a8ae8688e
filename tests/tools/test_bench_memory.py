"""``bench memory``: slope, bound and form of the record. Never how much memory a run takes."""

from __future__ import annotations

import dataclasses
import json
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sebulba
from sebulba.configs.impala_presets import cartpole
from sebulba.errors import UsageError
from sebulba.tools.bench import memory, memory_use
from sebulba.types import RunSpec
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig


def test_the_slope_is_that_of_a_line_and_stands_when_points_are_displaced():
    minutes = np.arange(10.0)
    values = 700 + 2.5 * minutes
    assert memory.theil_sen(minutes, values) == pytest.approx(2.5)
    values[-2:] += 300
    assert memory.theil_sen(minutes, values) == pytest.approx(2.5)
    assert np.polyfit(minutes, values, 1)[0] > 10


def test_samples_become_windows_and_a_last_one_that_is_not_full_is_left_out():
    seconds_and_mb = [(0, 5), (4, 6), (9, 100), (10, 7), (19, 9), (20, 500)]
    samples = [memory.Sample(s / 60, mb, 2.0 * mb, 3.0 * mb, 4.0 * mb) for s, mb in seconds_and_mb]
    assert memory.windows_of(samples, 10.0) == {
        "minute": pytest.approx([4 / 60, 14.5 / 60]),
        "rss_mb": [6, 8],
        "device_mb": [200, 18],
        "allocated_mb": pytest.approx([111, 24]),
        "kept_mb": [24, 32],
        "rss_lowest_mb": [5, 7],
        "rss_highest_mb": [100, 9],
    }
    elsewhere = [sample._replace(allocated_mb=None, kept_mb=None) for sample in samples]
    assert memory.windows_of(elsewhere, 10.0)["allocated_mb"] == [None, None]


def test_the_error_of_a_slope_is_that_of_least_squares():
    x, y = [0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 5.0, 4.0]
    _, covariance = np.polyfit(x, y, 1, cov=True)
    assert memory.slope_error(x, y) == pytest.approx(covariance[0, 0] ** 0.5)
    assert memory.slope_error(x, [2 * a for a in x]) == pytest.approx(0, abs=1e-12)


def test_keys_say_slopes_and_whether_devices_are_within_the_bound():
    settled = {
        "minute": [1.0, 2.0, 3.0, 4.0],
        "rss_mb": [503.0, 506.0, 509.0, 512.0],
        "rss_highest_mb": [510.0, 513.0, 516.0, 519.0],
        "device_mb": [39.0, 38.0, 37.0, 36.0],
        "allocated_mb": [91.0, 92.0, 93.0, 94.0],
    }
    keys = memory.keys_of(settled, {"networks": 30_000_000, "queue": 9_000_000})
    assert keys["rss_slope_mb_per_min"] == pytest.approx(3)
    assert keys["rss_slope_least_squares_mb_per_min"] == pytest.approx(3)
    assert keys["device_slope_mb_per_min"] == pytest.approx(-1)
    assert keys["allocated_slope_mb_per_min"] == pytest.approx(1)
    assert keys["rss_highest_mb"] == 519
    assert keys["device_highest_mb"] == 39 and keys["device_bound_mb"] == 39
    assert keys["device_is_within_bound"]
    assert not memory.keys_of(settled, {"networks": 38_000_000})["device_is_within_bound"]
    no_glibc = memory.keys_of({**settled, "allocated_mb": [None] * 4}, {"networks": 1})
    assert no_glibc["allocated_slope_mb_per_min"] is None


def test_the_bound_counts_every_holder():
    sizes = dict(
        trajectory=1_000_000,
        row=100_000,
        step_state=1_000,
        networks=10_000,
        acting_networks=5_000,
        opt=20_000,
        experience=3_000_000,
    )
    bound = memory.bound_bytes(
        sizes, num_inferencers=6, num_inference_devices=2, num_update_devices=4, queue_size=3
    )
    assert bound == {
        "trajectories being filled": 6 * 1_200_000,
        "trajectories being handed over": 6 * 1_002_000,
        "trajectories waiting": 3 * 1_002_000,
        "trajectory being consumed": 1_002_000,
        "step states of Inferencers": 18_000,
        "experience": 6_000_000,
        "networks and optimizer": 8 * 30_000,
        "acting networks": 12 * 5_000,
    }


def test_sizes_are_those_of_the_arrays():
    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
    sizes = memory.sizes_of(agent, RunSpec(5, 2, 7, 1))
    row = 5 * (2 * 4 + 4 + 4 + 1 + 1 + 1)  # observation, action, reward, flags
    extras = 5 * 3 * 4
    assert sizes == {
        "trajectory": 8 * row + 7 * (5 * 4 + extras) + 3 * 4,
        "row": row,
        "step_state": 8 + 5 * 4,  # a key and a count
        "networks": (2 * 3 + 3) * 4,
        "acting_networks": (2 * 3 + 3) * 4,
        "opt": 4,
        "experience": 8 * row + 7 * (5 * 4 + extras) + 3 * 4,
    }


def test_living_arrays_are_counted_on_every_device_that_holds_them():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    before = memory_use.device_bytes()
    everywhere = jax.device_put(np.zeros((8, 3), np.float32), NamedSharding(mesh, P()))
    assert memory_use.device_bytes() - before == 4 * 96
    split = jax.device_put(np.zeros((8, 5), np.float32), NamedSharding(mesh, P("x")))
    assert memory_use.device_bytes() - before == 4 * 96 + 160
    del everywhere, split
    assert memory_use.device_bytes() == before


def test_resident_memory_and_the_allocator_see_what_is_taken():
    before, _ = memory_use.allocator_mb()
    block = np.ones(25_000_000, np.uint8)
    assert memory_use.rss_bytes() > block.nbytes
    if before is not None:
        assert memory_use.allocator_mb()[0] - before > 24


def test_watching_stops_the_loop_when_the_time_is_over_and_also_when_it_fails(monkeypatch):
    class Loop:
        stops = 0

        def stop(self):
            self.stops += 1

    loop = Loop()
    assert len(memory.watch(loop, 1e-6, 60.0, threading.Event())) == 1
    assert loop.stops == 1

    def fail():
        raise OSError("no such file")

    monkeypatch.setattr(memory, "rss_bytes", fail)
    with pytest.raises(OSError, match="no such file"):
        memory.watch(loop, 60.0, 60.0, threading.Event())
    assert loop.stops == 2


def test_a_run_too_short_for_a_slope_is_refused():
    with pytest.raises(UsageError, match=r"minutes=1 must leave three windows.* use 2 or more"):
        memory.run(cartpole(), preset="cartpole", minutes=1)


@pytest.mark.slow
def test_the_record_has_the_promised_keys_and_a_picture(tmp_path, capsys):
    config = dataclasses.replace(
        cartpole(), num_envs=4, steps_per_cycle=3, compile_cache="off", inference_devices=(0,),
        update_devices=(0,),
    )  # fmt: skip
    files = tmp_path / "memory.json", tmp_path / "memory.png"
    memory.run(
        config,
        preset="cartpole",
        minutes=3 / 60,
        interval_s=0.05,
        window_s=0.3,
        settle_s=0.0,
        json_file=str(files[0]),
        png_file=str(files[1]),
    )
    record = json.loads(files[0].read_text())
    assert {"rss_slope_mb_per_min", "device_highest_mb", "device_bound_mb"} <= record.keys()
    assert len({len(values) for values in record["figures"].values()}) == 1
    assert sum(record["bound_mb"].values()) == pytest.approx(record["device_bound_mb"])
    assert record["config"]["steps_per_cycle"] == 3
    assert 0 < files[1].stat().st_size < 100_000
    assert "rss_slope_mb_per_min" in capsys.readouterr().out

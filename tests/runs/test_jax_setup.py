"""How the CPU is split for a run (``sebulba/runs/jax_setup.py``)."""

import dataclasses
import os
import time

import jax
import pytest

from sebulba.agents.configs import TorsoConfig
from sebulba.configs.presets import OWN_NUMBERS, PRESETS
from sebulba.runs import jax_setup

PONG = PRESETS["pong"].make()


@pytest.fixture
def cores(monkeypatch):
    """Let the machine have as many cores as is said."""

    def have(number):
        monkeypatch.setattr(jax_setup, "num_cores", lambda: number)

    have(2)
    return have


def image_presets():
    return [
        name
        for name, preset in OWN_NUMBERS.items()
        if getattr(preset.make().agent, "torso", TorsoConfig("mlp")).kind
        in jax_setup.IMAGE_NETWORKS
    ]


@pytest.mark.parametrize("name", image_presets())
def test_the_update_of_an_image_network_is_split_over_the_cores(cores, name):
    config = PRESETS[name].make()
    assert jax_setup.num_cpu_devices_for(config) == 2
    cores(1)
    assert jax_setup.num_cpu_devices_for(config) == 1
    cores(3)
    assert jax_setup.num_cpu_devices_for(config) == 2  # 3 do not divide the environments
    cores(64)
    assert jax_setup.num_cpu_devices_for(config) == jax_setup.MOST_CPU_DEVICES


@pytest.mark.parametrize(
    "changes",
    [
        {"num_cpu_devices": 1},
        {"update_devices": (0,)},
        {"inference_devices": (0,)},
        {"platform": "cuda"},
        {"num_envs": 9},
    ],
)
def test_what_is_said_is_not_chosen(cores, changes):
    assert jax_setup.num_cpu_devices_for(dataclasses.replace(PONG, **changes)) == 1


def test_small_networks_stay_whole(cores):
    assert jax_setup.num_cpu_devices_for(PRESETS["cartpole"].make()) == 1


@pytest.mark.parametrize(
    ("preset", "agent"),
    [("pong-dqn", {"replay": {"batch_size": 33}}), ("pong-ppo", {"minibatches": 1024})],
)
def test_what_an_update_draws_must_be_divisible(cores, preset, agent):
    config = PRESETS[preset].make()
    changes = {
        name: dataclasses.replace(getattr(config.agent, name), **value)
        if isinstance(value, dict)
        else value
        for name, value in agent.items()
    }
    config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, **changes))
    assert jax_setup.num_cpu_devices_for(config) == 1


def test_a_process_in_which_jax_runs_already_keeps_its_devices(cores, monkeypatch):
    monkeypatch.setattr(jax_setup, "_use_compile_cache", lambda folder: None)
    monkeypatch.setenv("NPROC", "8")
    monkeypatch.setattr(jax_setup, "configure_jax", lambda *arguments: None)
    assert len(jax.local_devices()) == 8  # tests/conftest.py
    assert jax_setup.set_up_jax(PONG) == PONG


def test_the_devices_that_were_chosen(cores, monkeypatch):
    for name in ("configure_jax", "_split_cpu"):
        monkeypatch.setattr(jax_setup, name, lambda *arguments: None)
    monkeypatch.setattr(jax_setup.jax, "local_devices", lambda: ["first", "second"])
    chosen = jax_setup.set_up_jax(PONG)
    devices = {"num_cpu_devices": 2, "inference_devices": (0,), "update_devices": (0, 1)}
    assert chosen == dataclasses.replace(PONG, **devices)
    monkeypatch.setattr(jax_setup.jax, "default_backend", lambda: "gpu")
    assert jax_setup.set_up_jax(PONG) == PONG


def test_the_folder_of_programs_may_hold_folders_and_keeps_its_size(tmp_path, monkeypatch):
    (tmp_path / "xla_gpu_per_fusion_autotune_cache_dir").mkdir()
    now = time.time()
    for name, age_s in (("old", 31 * 86400), ("a", 300), ("b", 200), ("c", 100)):
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (now - age_s, now - age_s))
    os.utime(tmp_path / "xla_gpu_per_fusion_autotune_cache_dir", (0, 0))
    monkeypatch.setattr(jax_setup, "COMPILE_CACHE_BYTES", 2500)
    jax_setup._remove_old_files(str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"xla_gpu_per_fusion_autotune_cache_dir", "b", "c"}

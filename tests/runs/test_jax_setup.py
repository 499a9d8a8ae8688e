"""How the CPU is split for a run, and what an accelerator leaves to it."""

import dataclasses
import json
import os
import time

import jax
import pytest

from sebulba.agents.configs import TorsoConfig
from sebulba.commands.cli import main
from sebulba.configs.presets import OWN_NUMBERS, PRESETS
from sebulba.loops import devices
from sebulba.runs import jax_setup, placement
from tests.support.needs import needs_mujoco

PONG = PRESETS["pong"].make()
SMALL = "--agent.torso.image-features 8"


@pytest.fixture
def cores(monkeypatch):
    """Let the machine have as many cores as is said."""

    def have(number):
        for module in (jax_setup, placement):
            monkeypatch.setattr(module, "num_cores", lambda: number)

    have(2)
    return have


def image_presets():
    return [
        name
        for name, preset in OWN_NUMBERS.items()
        if getattr(preset.make().agent, "torso", TorsoConfig("mlp")).kind
        in placement.IMAGE_NETWORKS
    ]


@pytest.mark.parametrize("name", image_presets())
def test_the_update_of_an_image_network_is_split_over_the_cores(cores, name):
    config = PRESETS[name].make()
    assert placement.num_cpu_devices_for(config) == 2
    cores(1)
    assert placement.num_cpu_devices_for(config) == 1
    cores(3)
    assert placement.num_cpu_devices_for(config) == 2  # 3 do not divide the environments
    cores(64)
    assert placement.num_cpu_devices_for(config) == placement.MOST_CPU_DEVICES


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
    assert placement.num_cpu_devices_for(dataclasses.replace(PONG, **changes)) == 1


def test_small_networks_stay_whole(cores):
    assert placement.num_cpu_devices_for(PRESETS["cartpole"].make()) == 1


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
    assert placement.num_cpu_devices_for(config) == 1


def test_a_process_in_which_jax_runs_already_keeps_its_devices(cores, monkeypatch):
    monkeypatch.setattr(jax_setup, "_use_compile_cache", lambda folder: None)
    monkeypatch.setenv("NPROC", "8")
    monkeypatch.setattr(jax_setup, "configure_jax", lambda *arguments, **more: None)
    assert len(jax.local_devices()) == 8  # tests/conftest.py
    assert jax_setup.set_up_jax(PONG) == PONG


def test_the_devices_that_were_chosen(cores, monkeypatch):
    for name in ("configure_jax", "_split_cpu"):
        monkeypatch.setattr(jax_setup, name, lambda *arguments, **more: None)
    monkeypatch.setattr(jax_setup.jax, "local_devices", lambda: ["first", "second"])
    chosen = jax_setup.set_up_jax(PONG)
    devices = {"num_cpu_devices": 2, "inference_devices": (0,), "update_devices": (0, 1)}
    assert chosen == dataclasses.replace(PONG, **devices)
    monkeypatch.setattr(jax_setup.jax, "default_backend", lambda: "gpu")
    assert jax_setup.set_up_jax(PONG) == PONG


ON_THE_CPU = [
    "cartpole",
    "cartpole-dqn",
    "acrobot-ppo",
    pytest.param("halfcheetah", marks=needs_mujoco),
]
ON_BOTH = [
    "pendulum-sac",
    pytest.param("halfcheetah-sac", marks=needs_mujoco),
    "pendulum-ddpg",
]
ON_THE_ACCELERATOR = ["pong", "atari-dqn", "breakout-minatar", "kuhn", "cartpole-r2d2"]


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_a_small_network_with_native_environments_leaves_an_accelerator_alone(name):
    found = placement.placement_of(PRESETS[name].make())
    assert found.updates_on_cpu and "--platform cuda" in found.why


@pytest.mark.parametrize("name", ON_BOTH)
def test_large_updates_of_a_small_policy_are_for_the_accelerator(name):
    found = placement.placement_of(PRESETS[name].make())
    assert not found.updates_on_cpu and "--platform cpu" in found.why


@pytest.mark.parametrize("name", ON_THE_ACCELERATOR)
def test_images_and_environments_in_jax_are_for_the_accelerator(name):
    assert placement.placement_of(PRESETS[name].make()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"platform": "cuda"},
        {"inference_devices": (0,)},
        {"update_devices": ("gpu:0",)},
        {"cycle": "stepped"},
    ],
)
def test_what_is_said_of_the_place_of_a_run_holds(changes):
    config = dataclasses.replace(PRESETS["cartpole"].make(), **changes)
    assert placement.placement_of(config) is None


@pytest.mark.parametrize(
    ("name", "inference", "update"),
    [("cartpole", ("cpu:0",), ("cpu:0",)), ("pendulum-sac", ("cpu:0",), None)],
)
def test_the_place_on_a_machine_with_an_accelerator(monkeypatch, capsys, name, inference, update):
    configured = []
    monkeypatch.setattr(
        jax_setup, "configure_jax", lambda *given, **more: configured.append(given[0])
    )
    monkeypatch.setattr(jax_setup, "has_accelerator", lambda: True)
    monkeypatch.setattr(jax_setup, "_is_platform_named", lambda: True)
    config = PRESETS[name].make()
    assert jax_setup.set_up_jax(config) == config  # JAX_PLATFORMS decides
    assert not capsys.readouterr().out
    configured.clear()
    monkeypatch.setattr(jax_setup, "_is_platform_named", lambda: False)
    assert jax_setup.set_up_jax(config) == config  # JAX starts on the CPU
    monkeypatch.setattr(jax_setup.jax, "default_backend", lambda: "gpu")
    chosen = jax_setup.set_up_jax(config)
    assert (chosen.inference_devices, chosen.update_devices) == (inference, update)
    assert configured == ["cpu" if update else None] * 2
    # Where JAX finds no accelerator, nothing is said that is not so.
    assert capsys.readouterr().out.count("a small network acts") == 1 + bool(update)


def test_without_an_accelerator_nothing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(jax_setup, "configure_jax", lambda *given, **more: None)
    monkeypatch.setattr(jax_setup, "has_accelerator", lambda: False)
    config = PRESETS["cartpole"].make()
    assert jax_setup.set_up_jax(config) == config and not capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("platform", "platforms"), [("cuda", "cuda,cpu"), ("tpu", "tpu,cpu"), ("cpu", "cpu")]
)
def test_jax_has_a_cpu_beside_the_platform_of_a_run(platform, platforms, monkeypatch):
    said = {}
    monkeypatch.setattr(jax.config, "update", said.__setitem__)
    jax_setup.configure_jax(platform, None, "off")
    assert said["jax_platforms"] == platforms


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "cartpole-dqn --total-env-steps 2000"),
        (3, "cartpole --total-env-steps 9000"),
        (4, "pendulum-sac --total-env-steps 1500"),
        (6, "cartpole --total-env-steps 18000"),
        (8, f"pong --num-envs 24 --steps-per-cycle 8 --total-env-steps 2000 {SMALL}"),
    ],
)
def test_plain_commands_train_on_any_number_of_devices(count, words, tmp_path, monkeypatch):
    everywhere = jax.local_devices()[:count]
    monkeypatch.setattr(devices, "local_devices", lambda platform=None: everywhere)
    folder = tmp_path / "run"
    assert main(["train", *words.split(), "--writers", "--run-dir", str(folder)]) == 0
    records = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["updates"] > 0


# Memory.


@pytest.mark.parametrize(
    ("call", "given", "expected"),
    [
        (lambda: jax_setup.configure_jax("cpu", 8, "off"), None, "false"),
        (lambda: jax_setup.configure_jax("cpu", 8, "off"), "true", "true"),
        (lambda: jax_setup.set_up_jax(CPU_RUN), None, None),
        (lambda: jax_setup.set_up_jax(CPU_RUN), "false", "false"),
    ],
)
def test_only_a_training_lets_jax_take_most_of_a_gpu(monkeypatch, call, given, expected):
    monkeypatch.setattr(jax_setup, "_split_cpu", lambda number: None)
    monkeypatch.setattr(jax_setup.jax.config, "update", lambda name, value: None)
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(name, "")  # what is there now comes back
    monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv(name, given)
    call()
    assert os.environ.get(name) == expected


CPU_RUN = dataclasses.replace(PRESETS["cartpole"].make(), platform="cpu", compile_cache="off")

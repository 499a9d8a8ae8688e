"""How many Inferencers and environment threads a run has, by cores and by what infers."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

import sebulba
from sebulba.configs.presets import PRESETS
from sebulba.envs import envpool_adapter, make_env_factory
from sebulba.loops import devices
from sebulba.options import ClusterOptions, DistributedOptions, LoopOptions
from sebulba.runs.build import build_agent
from sebulba.types import RunSpec
from tests.support.loop_helpers import make_tiny_loop
from tests.support.made_presets import made
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

PONG, CARTPOLE = "Pong-v5", "CartPole-v1"
HOSTS = DistributedOptions(coordinator="a:1", num_hosts=2, host=0)


@pytest.fixture
def machine(monkeypatch):
    """Pretend a number of cores, and an accelerator that infers."""

    def have(cores, *, accelerator=False):
        for module in (devices, envpool_adapter):
            monkeypatch.setattr(module, "num_cores", lambda: cores)
        if accelerator:
            monkeypatch.setattr(devices, "_infers_on_cpu", lambda *given: False)

    return have


def placed(env, **options):
    factory = make_env_factory(env)
    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
    return devices.place(LoopOptions(inference_devices=(0,), **options), factory, agent, 8)


def numbers(found):
    return found.options.num_inferencers_per_device, found.factory.num_threads


@pytest.mark.parametrize(
    ("cores", "env", "on_cpu", "on_accelerator"),
    [
        (1, PONG, (2, 1), (2, 1)),
        (2, PONG, (2, 1), (2, 2)),
        (4, PONG, (2, 2), (4, 2)),
        (8, PONG, (2, 4), (4, 4)),
        (16, PONG, (4, 4), (8, 4)),
        (96, PONG, (4, 24), (8, 24)),
        (2, CARTPOLE, (2, 1), (2, 1)),
        (16, CARTPOLE, (4, 1), (8, 1)),
        (16, CountingEnv, (2, None), (2, None)),
    ],
)
def test_numbers_follow_from_cores_and_placement(machine, cores, env, on_cpu, on_accelerator):
    machine(cores)
    found = placed(env)
    assert numbers(found) == on_cpu and not found.unpinned
    machine(cores, accelerator=True)
    found = placed(env)
    assert numbers(found) == on_accelerator and found.unpinned


def test_what_is_said_holds(machine):
    machine(16)
    found = placed(PONG, num_inferencers_per_device=3)
    assert numbers(found) == (3, 5) and found.about is None
    assert numbers(placed(PONG, num_inferencers_per_device=0)) == (0, 15)
    factory = make_env_factory(PONG, num_threads=2)
    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
    assert numbers(devices.place(LoopOptions(), factory, agent, 8)) == (4, 2)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"schedule": "lockstep"}, 2),
        ({"cluster": ClusterOptions(address="processes")}, 8),
        ({"cluster": ClusterOptions(address="auto")}, 2),
        ({"distributed": HOSTS}, 2),
        ({"distributed": HOSTS, "cluster": ClusterOptions(address="processes")}, 2),
    ],
)
def test_where_the_number_decides_what_is_learned_or_cores_are_others_it_stays(
    machine, options, number
):
    machine(16)
    assert placed(PONG, **options).options.num_inferencers_per_device == number


WITHOUT_DATA = [
    name for name in sorted(PRESETS) if not hasattr(PRESETS[name].make().agent, "dataset")
]


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_two_cores_have_what_they_always_had_and_sixteen_what_an_agent_takes(machine, name):
    config = PRESETS[name].make()
    factory, agent = made(config)
    given = config.num_inferencers_per_device
    machine(2)
    found = devices.place(config, factory, agent, config.num_envs)
    assert numbers(found)[0] == (2 if given is None else given)
    assert numbers(found)[1] in (None, 1)
    machine(16, accelerator=True)
    found = devices.place(config, factory, agent, config.num_envs)
    assert numbers(found)[0] == given or given is None
    in_all = max(1, numbers(found)[0]) * len(found.inference)
    agent.check_run(RunSpec(config.num_envs, in_all, config.steps_per_cycle, len(found.update)))


def test_a_replay_that_begins_too_soon_for_many_has_two(machine):
    machine(16, accelerator=True)
    config = PRESETS["cartpole-r2d2"].make()
    factory = make_env_factory(CARTPOLE)

    def number(warm_up_cycles, *inference, given=None):
        replay = dataclasses.replace(config.agent.replay, warm_up_cycles=warm_up_cycles)
        changed = dataclasses.replace(
            config,
            agent=dataclasses.replace(config.agent, replay=replay),
            num_inferencers_per_device=given,
        )
        agent = build_agent(changed, sebulba.env_spec(factory))
        rows = agent.replay.rows_of_start
        found = devices.place(changed, factory, agent, config.num_envs, inference or None)
        return numbers(found)[0], rows, len(found.inference)

    _, rows, _ = number(100)
    others = -(-rows // config.steps_per_cycle) - 1
    assert others > 0
    assert number(8 * others + 1, 0)[0] == 8
    assert number(8 * others + 1, 0, 1)[0] == 2, "8 for each of two would be too many"
    assert number(2 * others + 1, 0)[0] == 2
    # Refused with two as with many, and so by its own message.
    assert number(1, 0)[0] == 8
    # No device is idle so that others have more Inferencers.
    assert number(8 * others + 1) == number(8 * others + 1, given=2)
    assert number(8 * others + 1)[2] > 1


@pytest.mark.slow
def test_a_loop_on_a_pretended_accelerator_has_many_unpinned_inferencers(machine, monkeypatch):
    machine(16, accelerator=True)
    shares = []
    loop, _ = make_tiny_loop(CARTPOLE, inference_devices=[0], update_devices=[0])
    with loop:
        shares = loop._envs._cores
        result = loop.run(loop.new_state(0, 5), 16, 5)
    assert loop.num_inferencers == 8 and shares == (None,) * 8
    assert result.counters.updates == 16


@pytest.mark.slow
def test_a_run_says_what_was_chosen_and_keeps_it_where_it_is_resumed(machine, tmp_path, capsys):
    config = dataclasses.replace(
        PRESETS["cartpole"].make(),
        total_env_steps=8192,
        anneal_learning_rate=False,
        run_dir=str(tmp_path / "run"),
        writers=(),
        inference_devices=(0,),
        update_devices=(0,),
    )
    machine(16)
    sebulba.train(config)
    said = capsys.readouterr().out
    assert "sebulba: 4 Inferencers per inference device, 1 environment thread each, on 16" in said
    assert f"learns from the {config.num_envs} environments of one" in said
    kept = json.loads((tmp_path / "run/config.json").read_text())
    assert kept["num_inferencers_per_device"] == 4
    machine(2)
    more = dataclasses.replace(config, total_env_steps=16384, resume=True)
    sebulba.train(more)
    said = capsys.readouterr().out
    assert "4 Inferencers x" in said and "split over" not in said
    assert jax.devices()[0].platform == "cpu"

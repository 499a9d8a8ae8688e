"""Many update devices are one; networks that act are whole; donation never bites."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError
from sebulba.learning.update import Updater
from sebulba.loops import devices
from sebulba.transport.hand_off import HandOffToMesh
from sebulba.transport.item import Item
from sebulba.transport.mesh import UpdateMesh
from sebulba.types import EnvStep, RunSpec, Trajectory
from tests.faults.counts import rounds
from tests.support.loop_helpers import make_tiny_loop
from tests.support.made_presets import made
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

T, B = 5, 8
NUM_CYCLES = rounds(500, 2000)


def batches(agent, count):
    """Make trajectories whose masked cells differ in number between environments."""
    rng = np.random.default_rng(0)
    for index in range(count):
        is_first = rng.random((T + 1, B)) < np.linspace(0, 0.6, B)
        terminated = rng.random((T + 1, B)) < 0.1
        env_step = EnvStep(
            obs=rng.normal(size=(T + 1, B, 2)).astype(np.float32),
            prev_action=np.zeros((T + 1, B), np.int32),
            reward=rng.normal(size=(T + 1, B)).astype(np.float32),
            terminated=terminated,
            truncated=np.zeros((T + 1, B), bool),
            is_first=is_first,
        )
        extras = {
            "checksum": np.zeros((T, B), np.float32),
            "steps": np.zeros((T, B), np.int32),
            "noise": np.zeros((T, B), np.float32),
        }
        action = rng.integers(0, 3, (T, B)).astype(np.int32)
        number = np.array(index, np.int32)
        yield Trajectory(env_step, action, extras, number, np.array(0, np.int32), number)


@functools.cache
def train(num_devices, num_updates=10):
    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig(learning_rate=2.0))
    mesh = UpdateMesh(jax.local_devices()[:num_devices])
    run = RunSpec(B, 1, T, num_devices)
    state = jax.jit(lambda key: agent.new_state(key, run))(jax.random.key(0))
    updater = Updater(agent, mesh, jax.random.key(1))
    updater.begin(run)
    updater.place(state)
    hand_off = HandOffToMesh(agent, mesh)
    for index, trajectory in enumerate(batches(agent, num_updates)):
        item = Item(trajectory, state.step[0], state.step[0], ())
        updater.consume(hand_off(item), updates=index, due=1)
    return jax.device_get(updater.state(()).networks), updater.take_metrics()


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_many_update_devices_give_the_networks_of_one(num_devices):
    one, one_metrics = train(1)
    many, many_metrics = train(num_devices)
    assert abs(one["w"]).max() > 0.3, "it has to move for the comparison to say anything"
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), one, many)
    assert one_metrics["valid_count"] == pytest.approx(many_metrics["valid_count"] * num_devices)


@dataclasses.dataclass(frozen=True)
class CountingConfig(TinyConfig):
    size: int = 120


class CountingAgent(TinyAgent):
    """Every element of its networks equals the number of updates; acting records the extremes."""

    def new_networks(self, key):
        return {"count": jnp.zeros((self.config.size, self.config.size)), "more": jnp.zeros(7)}

    def logits(self, networks, obs):
        return jnp.zeros((*obs.shape[:-1], 3)) + 0 * networks["count"][0, 0]

    def step(self, networks, step_state, env_step, *, explore=True):
        output, step_state = super().step(networks, step_state, env_step, explore=explore)
        leaves = jax.tree.leaves(networks)
        extremes = {
            "min": jnp.stack([x.min() for x in leaves]).min(),
            "max": jnp.stack([x.max() for x in leaves]).max(),
        }
        extremes = jax.tree.map(lambda x: jnp.full(output.action.shape, x), extremes)
        return output._replace(extras=output.extras | extremes), step_state

    def optimize(self, networks, opt, grads):
        return jax.tree.map(lambda x: x + 1, networks), opt


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("inference", "update"), [([0], [0]), ([0], [1]), ([0, 1], [0, 1]), ([0], [1, 2])]
)
def test_networks_that_act_are_exactly_those_of_their_version(inference, update):
    wrong = []

    def observe(trajectory, step_infos):
        version = int(trajectory.policy_version)
        low, high = np.asarray(trajectory.extras["min"]), np.asarray(trajectory.extras["max"])
        if not (np.all(low == version) and np.all(high == version)):
            wrong.append((version, low.min(), high.max()))

    loop, _ = make_tiny_loop(
        agent_class=CountingAgent,
        config=CountingConfig(),
        inference_devices=inference,
        update_devices=update,
        observe_cycle=observe,
    )
    with loop:
        result = loop.run(loop.new_state(0, 2), NUM_CYCLES, 2)
    assert result.counters.updates == result.counters.policy_version == NUM_CYCLES
    assert not wrong


@pytest.mark.slow
def test_inference_and_update_devices_of_every_kind_train():
    for inference, update in (([0], [0]), ([0], [1]), ([0, 1], [2, 3]), ([0, 1], [1, 0])):
        loop, _ = make_tiny_loop(inference_devices=inference, update_devices=update)
        with loop:
            result = loop.run(loop.new_state(0, 5), 12, 5)
        assert result.counters.updates == 12
        for leaf in jax.tree.leaves(result.state.networks):
            assert leaf.devices() == {jax.local_devices()[i] for i in update}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inference", "update", "numbers"),
    [(("cpu:0",), ("cpu:1", "cpu:2"), ([0], [1, 2])), (("cpu:3",), (0,), ([3], [0]))],
)
def test_devices_are_named_by_platform_and_number(inference, update, numbers):
    loop, _ = make_tiny_loop(inference_devices=inference, update_devices=update)
    with loop:
        found = loop.inference_devices, loop.update_devices
    assert found == tuple([jax.local_devices()[n] for n in chosen] for chosen in numbers)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpu", "'cpu'; use a number or a name such as cpu:0"),
        ("cpu:x", "use a number or a name such as cpu:0"),
        ("cpu:8", "names device 8, but there are 8 cpu devices"),
        ("gpu:0", "JAX cannot start platform 'gpu'.*or choose cpu"),
        ("cuda:0", "JAX cannot start platform 'gpu'"),
        ("cpu:0", "names a device twice"),
    ],
)
def test_names_of_devices_that_are_none(name, message):
    with pytest.raises(UsageError, match=message):
        devices.choose_devices([0], [name, 0], lambda update, inference: True)


def test_the_devices_of_a_side_are_of_one_platform(monkeypatch):
    class Device(NamedTuple):
        platform: str
        id: int

    here = {None: "gpu", "gpu": "gpu", "cpu": "cpu"}
    monkeypatch.setattr(
        devices, "local_devices", lambda name=None: [Device(here[name], i) for i in range(2)]
    )
    fits = lambda update, inference: True  # noqa: E731
    assert devices.choose_devices(["cpu:1"], None, fits) == (
        [Device("cpu", 1)],
        [Device("gpu", 0), Device("gpu", 1)],
    )
    with pytest.raises(UsageError, match="mixes platforms"):
        devices.choose_devices(["cpu:0", 1], None, fits)


def test_step_states_reach_the_update_devices_split_by_environment():
    seen = []

    class Looks(TinyAgent):
        def update_experience(self, experience, initial, final, trajectory, networks):
            seen.append((initial["steps"].shape, trajectory.action.shape))
            return trajectory

    loop, _ = make_tiny_loop(agent_class=Looks, num_envs=8, update_devices=[0, 1, 2, 3])
    with loop:
        loop.run(loop.new_state(0, 5), 2, 5)
    assert set(seen) == {((2,), (5, 2))}


def test_a_discrete_action_space_with_a_start_is_acted_in():
    class FromTen(CountingEnv):
        action_space = gymnasium.spaces.Discrete(3, start=10)

        def step(self, action):
            assert 10 <= action < 13
            return super().step(action)

    loop, _ = make_tiny_loop(env=FromTen)
    with loop:
        loop.run(loop.new_state(0, 5), 4, 5)


def distinct_presets():
    """Return a preset of each agent and sizes: what can be split depends on nothing else."""
    found = {}
    for name, preset in PRESETS.items():
        config = preset.make()
        if hasattr(config.agent, "dataset"):
            continue  # one Inferencer reads it
        found.setdefault((repr(config.agent), config.num_envs, config.steps_per_cycle), name)
    return sorted(found.values())


@pytest.mark.parametrize("preset", distinct_presets())
def test_every_preset_can_be_split_over_the_devices_that_are_chosen(preset, monkeypatch):
    config = PRESETS[preset].make()
    _, agent = made(config)
    per_device = config.num_inferencers_per_device or devices.FEW_INFERENCERS
    fits = devices.what_fits(agent, config.num_envs, per_device, config.steps_per_cycle)
    for count in range(1, 17):
        everywhere = list(range(count))
        monkeypatch.setattr(devices, "local_devices", lambda everywhere=everywhere: everywhere)
        inference, update = devices.choose_devices(None, None, fits)
        num_inferencers = len(inference) * per_device
        assert config.num_envs % len(update) == 0
        agent.check_run(
            RunSpec(config.num_envs, num_inferencers, config.steps_per_cycle, len(update))
        )

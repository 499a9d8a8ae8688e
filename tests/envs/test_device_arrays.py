"""Environments whose arrays are on another device: what is exchanged, and what is not copied.

A second CPU device stands for an accelerator. The arrays of the double are of a library of its own,
which is this module: it knows DLPack and refuses to become NumPy.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

import sebulba
from sebulba.envs.device_arrays import are_on_device
from sebulba.envs.gymnasium_adapter import GymnasiumAdapter
from sebulba.errors import EnvError, UsageError
from sebulba.inference import stepped_cycle
from tests.support.loop_helpers import Recorder
from tests.support.tiny import TinyAgent, TinyConfig

DEVICE = 1
MODES = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP


class There:
    """An array of CPU device 1, over memory that its environment writes again."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, DEVICE

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__()

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise AssertionError("a copy to the host")

    def __or__(self, other: There) -> There:
        return There(self.memory | other.memory)


def from_dlpack(array: jax.Array) -> There:
    """Take an action, as the library of the double."""
    assert isinstance(array, jax.Array) and array.devices() == {jax.devices()[DEVICE]}
    return There(np.from_dlpack(array))


class OnDevice(VectorWrapper):
    """A vector environment with the arrays of ``There``; it writes into those that it returned."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.memories: list[np.ndarray] = []

    def there(self, *values: Any) -> list[There]:
        for memory in self.memories:
            memory.view(np.uint8)[...] = 1
        self.memories = [np.array(value) for value in values]
        self.memories = [x.astype(np.float32) if x.dtype.kind == "f" else x for x in self.memories]
        return [There(memory) for memory in self.memories]

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        return self.there(obs)[0], info

    def step(self, actions: There) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(actions.memory)
        final = info.pop("final_obs", None)
        if final is None:
            return *self.there(obs, reward, terminated, truncated), {}
        rows = np.stack([np.zeros_like(obs[0]) if one is None else one for one in final])
        *arrays, rows, given = self.there(
            obs, reward, terminated, truncated, rows, info["_final_obs"]
        )
        return *arrays, {"final_obs": rows, "_final_obs": given}


def cartpoles(num_envs: int, mode: AutoresetMode) -> SyncVectorEnv:
    make = lambda: gymnasium.make("CartPole-v1", max_episode_steps=9)  # noqa: E731
    return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)


class SeesLast(TinyAgent):
    """Has the last observations of episodes in its rows."""

    uses_final_obs = True


def trained(on_device: bool, mode: AutoresetMode) -> tuple[Any, Recorder]:
    def make(num_envs: int, seeds: list[int]) -> Any:
        env = cartpoles(num_envs, mode)
        return OnDevice(env) if on_device else env

    recorder = Recorder()
    agent = SeesLast(sebulba.env_spec(make), TinyConfig())
    with sebulba.GymnasiumLoop(
        make, agent, 4, schedule="lockstep", inference_devices=[0], update_devices=[0],
        num_inferencers_per_device=1, observe_cycle=recorder,
    ) as loop:  # fmt: skip
        return loop.run(loop.new_state(3, 6), 5, 6), recorder


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_those_of_the_host_and_only_what_the_host_counts_comes_there(mode, monkeypatch):
    here, of_host = trained(False, mode)
    fetched = []

    def fetch(tree):
        fetched.append(sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))
        return get(tree)

    def refuse(action):
        raise AssertionError("an action came to the host")

    get = jax.device_get
    monkeypatch.setattr(stepped_cycle.jax, "device_get", fetch)
    monkeypatch.setattr(stepped_cycle, "_on_host", refuse)
    there, of_device = trained(True, mode)
    monkeypatch.undo()
    for one, other in zip(of_host.trajectories, of_device.trajectories, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    for one, other in zip(of_host.step_infos, of_device.step_infos, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert sum(len(infos.episode_returns) for infos in of_device.step_infos) > 4
    jax.tree.map(np.testing.assert_array_equal, here.state.networks, there.state.networks)
    # [7, 4] rows: 4 bytes for observation, action and reward, 3 flags; [6, 4] rewards and ends.
    of_cycle = 28 * (3 * 4 + 3) + 24 * (4 + 1)
    of_final = 28 * (4 + 1) if mode is AutoresetMode.SAME_STEP else 0
    assert fetched.count(of_cycle + of_final) in (5, 6)  # lockstep begins a sixth
    assert max(fetched) == of_cycle + of_final


def adapter(mode: AutoresetMode = AutoresetMode.SAME_STEP) -> Any:
    return GymnasiumAdapter(OnDevice(cartpoles(3, mode)), [1, 2, 3], name="there")


def test_what_an_environment_returns_says_where_it_is():
    there = There(np.zeros(3, np.float32))
    assert are_on_device(there) and are_on_device({"a": np.zeros(3), "b": there})
    assert not are_on_device(np.zeros(3)) and not are_on_device(jax.numpy.zeros(3))
    assert not are_on_device([1.0])


def test_an_adapter_takes_actions_of_numpy_and_is_not_saved():
    env = adapter()
    first = env.reset()
    assert first.obs.devices() == {jax.devices()[DEVICE]} and first.is_first.all()
    output = env.step(np.array([0, 1, 0], np.int32))
    assert output.obs.devices() == {jax.devices()[DEVICE]} and not output.is_first.any()
    kept = np.asarray(output.obs).copy()
    env.step(output.reward.astype(np.int32))
    np.testing.assert_array_equal(output.obs, kept)
    assert env.state() == "environment 'there' has its arrays on a device"


def test_resets_by_the_caller_and_other_shapes_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="use an autoreset mode of NEXT_STEP or SAME_STEP"):
        adapter(AutoresetMode.DISABLED).reset()
    env = adapter()
    env.reset()
    wrong = lambda *values: [There(np.zeros((3, 2), np.float32)), *map(There, values[1:])]  # noqa: E731
    monkeypatch.setattr(env._vector_env, "there", wrong)
    with pytest.raises(
        EnvError, match=r"obs must have shape \(3, 4\) and dtype float32; got \(3, 2"
    ):
        env.step(np.zeros(3, np.int32))


class PartlyOnDevice(OnDevice):
    """Returns its observations on the device, and all else on the host."""

    def there(self, *values: Any) -> list[Any]:
        return [*super().there(values[0]), *values[1:]]


def test_what_comes_on_the_host_is_uploaded():
    envs = [
        GymnasiumAdapter(make(cartpoles(3, AutoresetMode.SAME_STEP)), [1, 2, 3])
        for make in (OnDevice, PartlyOnDevice)
    ]
    rows = [[env.reset() for env in envs]]
    rows += [[env.step(np.array([0, 1, 0], np.int32)) for env in envs] for _ in range(12)]
    for one, other in rows:
        assert isinstance(other.obs, jax.Array)
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert sum(int(other.final.given.sum()) for _, other in rows) > 2
    assert {leaf.device for leaf in jax.tree.leaves(rows[-1])} == {jax.devices()[DEVICE]}


def test_an_environment_has_an_action_of_its_own_that_it_may_write(monkeypatch):
    env = adapter()
    env.reset()
    given = []
    monkeypatch.setattr(env._on_device, "_native", lambda x: given.append(x) or from_dlpack(x))
    action = jax.device_put(np.array([0, 1, 0], np.int32), jax.devices()[DEVICE])
    env.step(action)
    assert given[0].unsafe_buffer_pointer() != action.unsafe_buffer_pointer()


def test_pinned_memory_is_on_the_host(monkeypatch):
    monkeypatch.setattr(There, "__dlpack_device__", lambda self: (3, 0))
    assert not are_on_device(There(np.zeros(3, np.float32)))

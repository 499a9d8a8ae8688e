"""An allocation that fails says what the run holds, and nothing tries it again."""

from __future__ import annotations

import dataclasses
import types

import jax
import pytest

import sebulba
from sebulba.agents.configs import make_agent
from sebulba.configs.presets import PRESETS
from sebulba.errors import OutOfMemoryError, is_env_failure
from sebulba.loops.memory import memory_in_words
from sebulba.types import RunSpec
from tests.support.loop_helpers import make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

SAID = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345678 bytes.\nmore"
RUN = RunSpec(num_envs=4, num_inferencers=2, steps_per_cycle=8, num_update_devices=1)


def no_memory(*given):
    raise jax.errors.JaxRuntimeError(SAID)


def words_of(agent, run=RUN):
    with pytest.raises(OutOfMemoryError) as found, memory_in_words(agent, run, 2):
        no_memory()
    return str(found.value)


def agent_of(preset, env="CartPole-v1", **replay):
    config = PRESETS[preset].make().agent
    if replay:
        replay = dataclasses.replace(config.replay, **replay)
        config = dataclasses.replace(config, replay=replay)
    return make_agent(sebulba.env_spec(env), config)


def test_a_large_replay_is_named_with_its_size_and_its_option():
    agent = agent_of("cartpole-dqn", capacity=8_000_000)
    said = words_of(agent)
    assert "12345678 bytes" in said and "more" not in said.partition("bytes")[2][:2]
    # A row has 4 numbers of the observation, action, reward and flags: 27 bytes at least.
    size = float(said.partition("the replay ")[2].partition(" MB")[0].replace(",", ""))
    assert 200 < size < 500
    assert "Use a smaller agent.replay.capacity=8000000" in said
    assert "agent.replay.batch_size" in said


def test_of_two_devices_each_holds_half_of_the_replay():
    agent = agent_of("cartpole-dqn", capacity=8_000_000)

    def size(devices):
        said = words_of(agent, dataclasses.replace(RUN, num_update_devices=devices))
        return float(said.partition("the replay ")[2].partition(" MB")[0].replace(",", ""))

    assert size(2) == pytest.approx(size(1) / 2, rel=0.01)


def test_large_trajectories_and_large_networks_are_named():
    agent = agent_of("pong", "Pong-v5")
    many = dataclasses.replace(RUN, num_envs=512, steps_per_cycle=64)
    assert "Use a smaller num_envs=512" in words_of(agent, many)
    assert "6 trajectories of 512 environments x 64 steps" in words_of(agent, many)
    few = dataclasses.replace(RUN, num_envs=agent.config.minibatches, steps_per_cycle=1)
    assert "Use a smaller agent.torso" in words_of(agent, few)


def test_options_that_an_agent_lacks_are_not_named():
    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
    said = words_of(agent)
    assert "num_envs" in said and not [
        name for name in ("minibatches", "torso", "replay") if f"agent.{name}" in said
    ]
    agent.config = types.SimpleNamespace(replay="of my own")
    assert "experience" in words_of(agent)


def test_other_errors_are_raised_as_they_are():
    for error in (ValueError("RESOURCE_EXHAUSTED"), jax.errors.JaxRuntimeError("INTERNAL")):
        with pytest.raises(type(error)) as found, memory_in_words(agent_of("cartpole"), RUN, 2):
            raise error
        assert found.value is error


class Greedy(CountingEnv):
    """Cannot allocate in its third step."""

    made = 0

    def __init__(self):
        super().__init__()
        Greedy.made += 1
        self.steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            no_memory()
        return super().step(action)


def test_environments_without_memory_are_not_made_again():
    Greedy.made = 0
    options = {"inference_devices": [0], "update_devices": [0], "num_inferencers_per_device": 1}
    loop, _ = make_tiny_loop(Greedy, on_env_failure="restart", **options)
    made = Greedy.made
    with loop, pytest.raises(OutOfMemoryError, match="num_envs"):
        loop.run(loop.new_state(0, 5), 4, 5)
    assert Greedy.made == made > 0


def test_a_state_that_cannot_be_made_says_so(monkeypatch):
    loop, _ = make_tiny_loop(inference_devices=[0], update_devices=[0])
    with loop:
        monkeypatch.setattr(loop, "_new_state", no_memory)
        with pytest.raises(OutOfMemoryError, match="An update device holds"):
            loop.new_state(0, 5)


def test_an_error_of_memory_is_no_failure_of_the_environment():
    try:
        no_memory()
    except Exception as error:
        assert not is_env_failure(error)

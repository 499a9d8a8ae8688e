"""A cycle that is put back makes the trajectories that it would have made."""

from __future__ import annotations

import threading

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.utils import EzPickle

from sebulba.agent import Agent
from sebulba.envs import env_spec, make_env_factory
from sebulba.errors import EnvError
from sebulba.inference.cycle import CyclePrograms, copy_tree
from sebulba.inference.inferencer import INFERENCER_PHASES
from sebulba.inference.places import make_cycle
from sebulba.metrics.timer import PhaseTimer
from sebulba.types import RunSpec
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

NUM_ENVS, STEPS = 3, 5
REPEAT = "sebulba.envs.memory_tasks:RepeatObservation"


class World:
    """What several cycles of one agent on one kind of environment share."""

    def __init__(self, env, kind="stepped"):
        self._factory, self._kind = make_env_factory(env), kind
        self.agent: Agent = TinyAgent(env_spec(env), TinyConfig())
        run = RunSpec(NUM_ENVS, 1, STEPS, 1)
        key = jax.random.key(3)
        self.networks = self.agent.new_networks(key)
        self.step_state = self.agent.new_step_state(key, run, 0)
        self._programs = CyclePrograms(self.agent, self.networks, self.step_state, run)

    def cycle(self, seed):
        env = self._factory(NUM_ENVS, list(range(seed, seed + NUM_ENVS)))
        return make_cycle(
            self._kind, env, self._programs, jax.devices()[0], PhaseTimer(*INFERENCER_PHASES)
        )[0]

    def run(self, cycle, step_state, num_cycles):
        outputs = []
        for _ in range(num_cycles):
            output, step_state = cycle.run(self.networks, step_state, threading.Event())
            outputs.append(
                jax.device_get(output._replace(initial_step_state=None, final_step_state=None))
            )
        return outputs, step_state


@pytest.mark.parametrize("env", [CountingEnv, REPEAT])
@pytest.mark.parametrize("num_before", [1, 4])
def test_a_cycle_that_was_put_back_goes_on_as_before(env, num_before):
    world = World(env)
    cycle, back = world.cycle(0), world.cycle(100)
    cycle.reset()
    before, step_state = world.run(cycle, copy_tree(world.step_state), num_before)
    position = cycle.position()
    kept = copy_tree(step_state)
    expected, _ = world.run(cycle, step_state, 16)
    back.put_back(position)  # and no reset
    outputs, _ = world.run(back, kept, 16)
    jax.tree.map(np.testing.assert_array_equal, outputs, expected)
    row_0, row_t = (
        jax.tree.map(lambda x, row=row: x[row], output.trajectory.env_step)
        for output, row in ((outputs[0], 0), (before[-1], STEPS))
    )
    jax.tree.map(np.testing.assert_array_equal, row_0, row_t)
    assert any(len(output.step_infos.episode_returns) for output in outputs)


class RebuiltEnv(CountingEnv, EzPickle):
    """Cannot be saved."""

    def __init__(self):
        CountingEnv.__init__(self)
        EzPickle.__init__(self)


class Stateless:
    """An adapter of somebody who knows nothing of states."""

    def __init__(self, num_envs, seeds):
        inside = make_env_factory(CountingEnv)(num_envs, seeds)
        self.spec, self.num_envs = inside.spec, num_envs
        self.reset, self.step = inside.reset, inside.step
        self.fused, self.close = inside.fused, inside.close


@pytest.mark.parametrize(
    ("env", "kind", "reason"),
    [
        (RebuiltEnv, "stepped", "EzPickle"),
        (Stateless, "stepped", "Stateless has no methods state"),
        ("CartPole-v1", "stepped", "envpool cannot save its environments"),
        ("CartPole-v1", "fused", "envpool cannot save its environments"),
        (REPEAT, "fused", "cycle='stepped' can"),
    ],
)
def test_a_cycle_that_cannot_be_put_back_says_why(env, kind, reason):
    cycle = World(env, kind).cycle(0)
    cycle.reset()
    assert reason in cycle.position()
    with pytest.raises(EnvError):
        cycle.put_back(b"")


def test_the_position_of_another_cycle_is_refused_and_a_reset_is_possible():
    world, other = World(CountingEnv), World(REPEAT)
    cycle, stranger = world.cycle(0), other.cycle(0)
    cycle.reset()
    stranger.reset()
    position = bytearray(cycle.position())
    position[-1] ^= 1
    for wrong in (bytes(position), stranger.position(), b""):
        with pytest.raises(EnvError, match="saved state"):
            cycle.put_back(wrong)
    cycle.reset()
    world.run(cycle, world.step_state, 1)


class WideEnv(CountingEnv):
    """Of any width, and with a state that fits all of them."""

    def __init__(self, width):
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(0, 1, (width,), np.float32)

    def _obs(self):
        return np.zeros(self.observation_space.shape, np.float32)

    def get_state(self):
        return None

    def set_state(self, state):
        raise AssertionError("it does not fit")


def test_rows_of_another_shape_are_refused():
    narrow, wide = (World(make_env_factory(WideEnv, width=width)).cycle(0) for width in (2, 3))
    narrow.reset()
    with pytest.raises(EnvError, match=r"has arrays .*\(3, 2\).*, the environment .*\(3, 3\)"):
        wide.put_back(narrow.position())

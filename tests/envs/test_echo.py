"""Many agents: not one cell out of place between any environment and what the learner is given.

``ECHO_TRANSITIONS=1000000 pytest tests/envs/test_echo.py --timeout 0`` runs the long counts.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.types import ActionOutput
from tests.loops.test_alignment import RandomAgent
from tests.support import echo
from tests.support.tiny import TinyConfig

TRANSITIONS = int(os.environ.get("ECHO_TRANSITIONS", "30000"))

PETTINGZOO = "the package pettingzoo is not installed"
WORLDS: dict[str, tuple[Any, echo.World, dict]] = {
    "MultiAgentEnv": (echo.Echo, echo.TREE, {}),
    "MultiAgentEnv in workers": (echo.Echo, echo.TREE, {"vectorization": "async"}),
    "envpool game": (echo.game_adapter, echo.GAME, {}),
    "Parallel": ("tests.support.pettingzoo_echo:EchoParallel", echo.TOGETHER, {}),
    "AEC": ("tests.support.pettingzoo_echo:EchoAEC", echo.IN_TURN, {}),
    "AEC, mask in info": ("tests.support.pettingzoo_echo:MaskInInfo", echo.IN_TURN, {}),
}


class RandomAgents(RandomAgent):
    """Acts at random in every slot, legally; learns nothing."""

    __module__ = "sebulba.tests"  # what is not Sebulba's own is checked as a single agent
    uses_final_obs = False

    def step(self, networks, step_state, env_step, *, explore=True):
        key, action_key = jax.random.split(step_state["key"])
        action = {
            name: self._action(jax.random.fold_in(action_key, i), name, env_step)
            for i, name in enumerate(self.spec.groups)
        }
        return ActionOutput(action, {"sent": action}), {**step_state, "key": key}

    def _action(self, key: jax.Array, name: str, env_step: Any) -> jax.Array:
        spec = self.spec.groups[name].spec
        shape = (*env_step.is_first[name].shape, spec.action_space.n)
        logits = jnp.zeros(shape)
        if spec.legal_actions is not None:
            mask = env_step.obs[name][spec.legal_actions]
            logits = jnp.where(mask.any(-1, keepdims=True) & (mask == 0), -1e9, 0.0)
        return jax.random.categorical(key, logits).astype(jnp.int32)


class Checker:
    """An ``observe_cycle`` that counts wrong cells, also between successive trajectories."""

    def __init__(self, world: echo.World, plant: Any = None) -> None:
        self.world = world
        self.plant = plant
        self.wrong = self.cells = 0
        self.kept: list = []
        self.last_rows: dict[int, Any] = {}

    def __call__(self, trajectory: Any, step_infos: Any) -> None:
        env_step, action = jax.device_get((trajectory.env_step, trajectory.action))
        self.kept = [*self.kept[-7:], (env_step, action)]
        self.wrong += echo.misplaced_cells(self.world, env_step, action)
        sent = jax.tree.map(lambda x, y: int((x != y).sum()), trajectory.extras["sent"], action)
        self.wrong += sum(jax.tree.leaves(sent))
        self.cells += int(np.prod(jax.tree.leaves(action)[0].shape[:2]))
        before = self.last_rows.get(int(trajectory.inferencer))
        first, last = (jax.tree.map(lambda x, row=row: x[row], env_step) for row in (0, -1))
        if before is not None:
            same = jax.tree.map(lambda x, y: int(np.sum(x != y)), before, first)
            self.wrong += sum(jax.tree.leaves(same))
        self.last_rows[int(trajectory.inferencer)] = last


def run(name: str, transitions: int, *, num_envs: int = 64, steps: int = 13) -> Checker:
    env, world, make_options = WORLDS[name]
    if isinstance(env, str):
        pytest.importorskip("pettingzoo", reason=PETTINGZOO)
    factory = sebulba.make_env_factory(env, **make_options)
    checker = Checker(world)
    agent = RandomAgents(sebulba.env_spec(factory), TinyConfig())
    options: dict = {"inference_devices": [0], "num_inferencers_per_device": 2}
    options |= {"update_devices": [1, 2], "observe_cycle": checker}
    with sebulba.GymnasiumLoop(factory, agent, num_envs, **options) as loop:
        result = loop.run(loop.new_state(0, steps), -(-transitions // (num_envs * steps)), steps)
    kept = jax.device_get(result.state.experience)
    checker.wrong += echo.misplaced_cells(world, kept.env_step, kept.action)
    return checker


@functools.cache
def rows_of(name: str) -> list:
    """Some rows of a world, without a wrong cell."""
    checker = run(name, 1500, num_envs=16)
    assert checker.wrong == 0
    return checker.kept


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WORLDS)
def test_what_every_agent_sees_and_does_arrives_in_its_place(name):
    slow = "workers" in name and "ECHO_TRANSITIONS" not in os.environ
    transitions = TRANSITIONS // 300 if slow else TRANSITIONS
    checker = run(name, transitions, num_envs=2 if slow else 64)
    assert checker.wrong == 0
    assert checker.cells >= transitions


FIELDS = ("obs", "prev_action", "reward", "terminated", "truncated", "is_first", "action", "acting")


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["turns", "rows", "seats"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("MultiAgentEnv", "envpool game", "AEC")
        ),
        "Parallel",
    ],
)
def test_a_planted_shuffle_is_found(name, field, axis):
    same_for_all = name == "envpool game" and field in ("terminated", "truncated", "is_first")
    if same_for_all and axis == 2:
        pytest.skip("both players are told the same")
    if axis == 2 and name != "MultiAgentEnv" and field == "is_first":
        pytest.skip("all are told the same")
    plant, world = echo.shuffled(field, axis), WORLDS[name][1]
    wrong = sum(echo.misplaced_cells(world, *plant(*rows)) for rows in rows_of(name))
    assert wrong > 0

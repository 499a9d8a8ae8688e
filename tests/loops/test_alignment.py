"""Not one cell out of place between any environment and the experience that the loss sees.

``ORACLE_TRANSITIONS=1000000 pytest THIS_FILE --timeout 0`` runs the long counts.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.agent import TRAJECTORY_SPEC
from sebulba.types import ActionOutput
from tests.support import oracle
from tests.support.tiny import TinyAgent, TinyConfig

TRANSITIONS = int(os.environ.get("ORACLE_TRANSITIONS", "12000"))
CARTPOLE_TRANSITIONS = max(100_000, TRANSITIONS)


class RandomAgent(TinyAgent):
    """Acts at random in every cell, whatever the observation space; learns nothing."""

    uses_final_obs = True

    def new_networks(self, key):
        return {"w": jnp.zeros(())}

    def step(self, networks, step_state, env_step, *, explore=True):
        key, action_key = jax.random.split(step_state["key"])
        action = jax.random.randint(
            action_key, env_step.is_first.shape, 0, self.spec.action_space.n
        )
        return ActionOutput(action, {"sent": action}), {**step_state, "key": key}

    def loss(self, networks, opt, experience, key):
        return networks["w"] * 0.0, (experience, {})

    def experience_spec(self):
        return TRAJECTORY_SPEC


class Checker:
    """An ``observe_cycle`` that counts wrong cells, also between successive trajectories."""

    def __init__(self, count):
        self.count = count
        self.wrong = self.cells = 0
        self.last_rows = {}

    def __call__(self, trajectory, step_infos):
        env_step, action = jax.device_get((trajectory.env_step, trajectory.action))
        self.wrong += self.count(env_step, action)
        self.wrong += int((trajectory.extras["sent"] != action).sum())
        self.cells += action.size
        before = self.last_rows.get(int(trajectory.inferencer))
        first, last = (jax.tree.map(lambda x, row=row: x[row], env_step) for row in (0, -1))
        if before is not None:
            same = jax.tree.map(lambda x, y: int(np.sum(x != y)), before, first)
            self.wrong += sum(jax.tree.leaves(same))
        self.last_rows[int(trajectory.inferencer)] = last


def run_random(env, count, transitions, *, num_envs=8, steps=13, make_options=None, **options):
    factory = sebulba.make_env_factory(env, **(make_options or {}))
    spec = sebulba.env_spec(factory)
    checker = Checker(count)
    options = {"inference_devices": [0], "update_devices": [1, 2]} | options
    agent = RandomAgent(spec, TinyConfig())
    with sebulba.GymnasiumLoop(factory, agent, num_envs, observe_cycle=checker, **options) as loop:
        num_cycles = -(-transitions // (num_envs * steps))
        result = loop.run(loop.new_state(0, steps), num_cycles, steps)
    kept = jax.device_get(result.state.experience)
    checker.wrong += count(kept.env_step, kept.action)
    return checker


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", oracle.ORACLES)
def test_oracle_arrives_with_every_cell_in_its_place(name):
    env, make_options, mode = oracle.ORACLES[name]
    slow = "async" in name and "ORACLE_TRANSITIONS" not in os.environ
    checker = run_random(
        env,
        lambda env_step, action: oracle.misplaced_cells(env_step, action, mode=mode),
        TRANSITIONS // 8 if slow else TRANSITIONS,
        make_options=make_options,
        num_envs=2 if slow else 8,
        num_inferencers_per_device=1 if slow else 2,
        cycle="stepped",
    )
    assert checker.wrong == 0
    assert checker.cells >= (TRANSITIONS // 8 if slow else TRANSITIONS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("update_devices", [[0], [1, 2, 3, 4]])
def test_oracle_arrives_through_fused_cycles(update_devices):
    checker = run_random(
        oracle.pool_adapter,
        lambda env_step, action: oracle.misplaced_cells(env_step, action, mode="next_step"),
        TRANSITIONS,
        cycle="fused",
        update_devices=update_devices,
    )
    assert checker.wrong == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cycle", ["stepped", "fused"])
def test_every_transition_of_real_cartpole_follows_from_its_equations(cycle):
    checker = run_random(
        "CartPole-v1", oracle.cartpole_violations, CARTPOLE_TRANSITIONS, num_envs=32, cycle=cycle
    )
    assert checker.wrong == 0
    assert checker.cells >= 100_000


@pytest.fixture(scope="module", params=["stepped", "fused"])
def trajectories(request):
    """Some hundred rows of the oracle, without a wrong cell."""
    env = oracle.OracleEnv if request.param == "stepped" else oracle.pool_adapter
    kept = []

    def count(env_step, action):
        kept.append((env_step, action))
        return oracle.misplaced_cells(env_step, action, mode="next_step")

    assert run_random(env, count, 2000, cycle=request.param).wrong == 0
    return kept


@pytest.mark.parametrize("by", [(1, 0), (-1, 0), (1, 1)], ids=["late", "early", "other env"])
@pytest.mark.parametrize(
    "field",
    ["obs", "prev_action", "reward", "terminated", "truncated", "is_first", "action"],
)
def test_a_planted_off_by_one_is_found(trajectories, field, by):
    wrong = 0
    for env_step, action in trajectories:
        if field == "action":
            action = np.roll(action, *by)
        else:
            env_step = env_step._replace(**{field: np.roll(getattr(env_step, field), *by)})
        wrong += oracle.misplaced_cells(env_step, action, mode="next_step")
    assert wrong > 0

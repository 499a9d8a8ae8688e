"""What every agent must pass, without a special case; ``tests/support/agent_suite`` lists them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest

import sebulba
from sebulba.agent import Agent, is_spec, spec_of_each_leaf
from sebulba.agents.configs import MultiAgentConfig
from sebulba.agents.configs.agent_config import agent_configs
from sebulba.errors import UsageError
from sebulba.policies.policy import load_policy, save_policy
from sebulba.tools.check import probe_envs
from sebulba.tools.check.agent_driver import (
    B,
    differs_by_device,
    replicated_leaves,
    run_spec,
    with_other_rewards,
)
from sebulba.transport.item import Item
from sebulba.types import EnvSpec, empty_env_step
from tests.support import oracle
from tests.support.agent_driver import Driver, quick_state
from tests.support.agent_suite import (
    AGENTS,
    Case,
    given_draws,
    kept_transitions,
    oracle_action,
)

spaces = gymnasium.spaces
NUM_CYCLES = 8
NOT_NORMALIZED = {"normalize_observations": False, "normalize_rewards": False}
NAMES = pytest.mark.parametrize("name", AGENTS)


def test_every_agent_of_the_package_is_in_the_suite() -> None:
    of_package = {cls for cls in agent_configs().values() if cls.__module__.startswith("sebulba.")}
    of_one = of_package - {MultiAgentConfig}  # whose members are of the suite: test_multi_agent.py
    assert {type(case.config) for case in AGENTS.values()} == of_one


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(tree))]


# Cells and devices.


@dataclasses.dataclass
class Fed:
    """An agent that was fed on one device, with draws that are given."""

    case: Case
    driver: Driver
    trajectories: list[Any]
    networks: list[np.ndarray]
    metrics: dict[str, float]


def feed(driver: Driver, trajectories: list[Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for made in trajectories:
        metrics = driver.consume(made) or metrics
    return metrics


@functools.lru_cache(maxsize=1)
def fed(name: str) -> Fed:
    case = AGENTS[name]
    driver = case.driver(1)
    made = [driver.streams.next(driver._acting, i % 2) for i in range(NUM_CYCLES)]
    with given_draws():
        metrics = feed(driver, made)
    return Fed(case, driver, made, leaves(driver.state.networks), metrics)


@NAMES
class TestUpdates:
    @pytest.mark.slow
    def test_four_devices_are_one(self, name: str) -> None:
        one = fed(name)
        four = one.case.driver(4, one.driver.first_state)
        before = leaves(four.state.networks)
        with given_draws():
            metrics = feed(four, one.trajectories)
        assert four.updates == one.driver.updates > 0
        moved = [np.abs(a - b).max() for a, b in zip(before, one.networks, strict=True)]
        assert max(moved) > 1e-3
        assert metrics == pytest.approx(one.metrics, abs=1e-4, rel=1e-4)
        for a, b in zip(one.networks, leaves(four.state.networks), strict=True):
            size = 1.0 if a.ndim else max(1.0, abs(float(a)))  # statistics of values are scalars
            np.testing.assert_allclose(a, b, atol=1e-5 * size)
        for name, leaf in replicated_leaves(four).items():
            assert len(leaf.addressable_shards) == 4
            assert not differs_by_device(leaf), name

    @pytest.mark.slow
    def test_masked_cells_change_nothing(self, name: str) -> None:
        was = fed(name)
        was.driver.begin_anew()
        assert any((~t.env_step.valid[1:]).any() for t, *_ in was.trajectories)
        feed(was.driver, [made_wild(made) for made in was.trajectories])
        for a, b in zip(was.networks, leaves(was.driver.state.networks), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)

    @pytest.mark.slow
    def test_what_is_donated_is_not_read_again_and_nothing_compiles(
        self, name: str, compiles: Any
    ) -> None:
        driver, trajectories = fed(name).driver, fed(name).trajectories
        driver.begin_anew()
        feed(driver, trajectories)
        state = driver.updater.state(())
        donated = [state.networks, state.opt]
        if hasattr(state.experience, "rows"):  # a replay, which is written in place
            donated.append(state.experience.rows)
        feed(driver, trajectories)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
        with compiles:
            feed(driver, trajectories)
        assert not compiles.names
        driver.updater.acting_networks()
        assert all(np.isfinite(x).all() for x in leaves(driver.state.networks))


def made_wild(made: Any) -> Any:
    """Return what was made with other numbers in the cells that are masked."""
    trajectory, *states = with_other_rewards(made)
    extras = trajectory.extras
    if hasattr(extras, "log_prob"):
        masked = ~trajectory.env_step.valid[1:]
        extras = extras._replace(log_prob=extras.log_prob - masked * 200.0)
    return trajectory._replace(extras=extras), *states


@pytest.mark.slow
@NAMES
def test_what_is_learned_from_is_what_happened(name: str) -> None:
    driver = AGENTS[name].driver(4, discount=0.0, **NOT_NORMALIZED)
    for cycle in range(NUM_CYCLES):
        driver.insert(driver.streams.next(driver._acting, cycle % 2))
    with given_draws():
        kept = kept_transitions(driver.agent, driver.state.experience)
    obs, action, reward = (np.asarray(x) for x in kept)
    seed, episode, t = (obs[..., i].astype(np.int64) for i in (1, 2, 3))
    scale = driver.agent.config.reward_scale
    expected = scale * oracle.reward_of(seed, episode, t + 1, oracle_action(action))
    assert obs.shape[0] >= B and np.unique(seed).size == B
    np.testing.assert_allclose(reward, expected, atol=0.3 * scale, rtol=1e-7)


class CompileCounter:
    """Counts what is compiled, or found in the cache of compiled programs, inside of it."""

    def __init__(self) -> None:
        self.names: list[Any] = []
        self._is_on = False

    def __call__(self, event: str, duration_s: float, **more: Any) -> None:
        if self._is_on and event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            self.names.append((event, more))

    def __enter__(self) -> None:
        self._is_on = True

    def __exit__(self, *exception: object) -> None:
        self._is_on = False


@pytest.fixture
def compiles() -> Any:
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.clear_event_listeners()


# Learning.


def in_lockstep(env: Any, agent: Any) -> sebulba.GymnasiumLoop:
    return sebulba.GymnasiumLoop(
        env, agent, 16, schedule="lockstep", cycle="stepped",
        inference_devices=[0], update_devices=[0],
    )  # fmt: skip


@pytest.mark.slow
@NAMES
def test_is_bit_reproducible_answers_every_question_and_is_saved(name: str, tmp_path: Any) -> None:
    case = AGENTS[name]
    agent, env = case.to_learn()
    run = sebulba.RunSpec(16, 2, 5, 1)
    with in_lockstep(env, agent) as loop:
        new = quick_state(agent, run)
        # Begun anew, everything happens again: so do the environments.
        first, again = (loop.run(new, 8, 5) for _ in range(2))
        assert first.counters.updates == again.counters.updates > 0
        for a, b in zip(leaves(learned(first)), leaves(learned(again)), strict=True):
            np.testing.assert_array_equal(a, b)
        result = loop.run(again.state, case.num_cycles - 8, 5)
    save_policy(tmp_path, agent, result.acting_networks, run)
    assert probe_envs.wrong_answers(load_policy(tmp_path), case.first_states) == []


@pytest.mark.slow
@NAMES
def test_learns_with_a_torso_in_bfloat16_and_all_else_in_float32(name: str, tmp_path: Any) -> None:
    case = AGENTS[name]
    torso = dataclasses.replace(case.config.torso, dtype="bfloat16")
    case = dataclasses.replace(case, config=dataclasses.replace(case.config, torso=torso))
    agent, env = case.to_learn()
    run = sebulba.RunSpec(16, 2, 5, 1)
    with in_lockstep(env, agent) as loop:
        result = loop.run(quick_state(agent, run), case.num_cycles, 5)
    floats = [x for x in leaves(learned(result)) if not np.issubdtype(x.dtype, np.integer)]
    assert {str(x.dtype) for x in floats} <= {"float32", "bool"}
    save_policy(tmp_path, agent, result.acting_networks, run)
    assert probe_envs.wrong_answers(load_policy(tmp_path), case.first_states) == []


def learned(result: Any) -> Any:
    return result.state._replace(step=())  # it has typed keys


# Acting, spaces.


@NAMES
@pytest.mark.parametrize("explore", [True, False])
def test_acting_networks_are_all_that_step_needs(name: str, explore: bool) -> None:
    agent = AGENTS[name].to_count()

    def act(key: jax.Array) -> Any:
        state = agent.new_state(key, run_spec())
        acting = agent.acting_networks(state.networks, state.experience)
        return agent.step(acting, state.step[1], empty_env_step(agent.spec, B), explore=explore)

    output, step_state = jax.eval_shape(act, jax.random.key(0))
    space = agent.spec.action_space
    assert output.action.shape == (B, *space.shape) and output.action.dtype == space.dtype
    before = jax.eval_shape(lambda key: agent.new_step_state(key, run_spec(), 1), jax.random.key(0))
    assert step_state == before, "another step state would be compiled again"


@NAMES
def test_a_step_state_is_declared_as_its_shapes_are(name: str) -> None:
    agent = AGENTS[name].to_count()
    step_state = jax.eval_shape(
        lambda key: agent.new_step_state(key, run_spec(), 1), jax.random.key(0)
    )
    declared = spec_of_each_leaf(agent.step_state_spec(), step_state)
    assert declared == Agent.step_state_spec(agent)
    assert any(map(any, jax.tree.leaves(declared, is_leaf=is_spec))) == any(
        leaf.shape[:1] == (B,) for leaf in jax.tree.leaves(step_state)
    )


@pytest.mark.slow
@NAMES
def test_an_update_is_prepared_before_there_is_a_trajectory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = AGENTS[name].driver(1)
    made = [driver.streams.next(driver._acting, i % 2) for i in range(NUM_CYCLES)]
    due = driver.agent.num_off_policy_optims_per_cycle(1)
    item = Item(*jax.eval_shape(lambda: made[0]), step_infos=())  # type: ignore[arg-type]
    driver.updater.prepare(item, due=due)
    monkeypatch.setattr(driver.updater, "_metric_shapes", None)  # otherwise it looks again
    if program := driver.updater._programs.get((True, due)):  # nothing is compiled again
        monkeypatch.setattr(program, "_jitted", None)
    assert "loss" in feed(driver, made) and driver.updates


OBSERVATIONS = {
    "image": spaces.Box(0, 255, (4, 36, 36), np.uint8),
    "dict": spaces.Dict({"x": spaces.Box(-1, 1, (3,)), "k": spaces.Discrete(5, dtype=np.int32)}),
}


@pytest.mark.slow
@NAMES
@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_takes_images_and_dicts(name: str, kind: str) -> None:
    agent = AGENTS[name].to_count(**NOT_NORMALIZED)
    space = OBSERVATIONS[kind]
    spec = EnvSpec(space, agent.spec.action_space, frame_stack=4 if kind == "image" else 0)
    driver = type(agent)(spec, agent.config)
    shapes = jax.eval_shape(lambda key: driver.new_state(key, run_spec()), jax.random.key(0))
    assert jax.tree.leaves(shapes.networks)


@NAMES
def test_refuses_spaces_that_it_cannot_take(name: str) -> None:
    case = AGENTS[name]
    agent = case.to_count()
    whole, real = spaces.MultiBinary(3), agent.spec.observation_space
    with pytest.raises(UsageError, match="MultiBinary"):
        type(agent)(EnvSpec(real, whole), agent.config)


def test_is_made_of_a_spec_and_of_its_own_configuration() -> None:
    ppo, dqn = (AGENTS[name].to_count() for name in ("ppo", "dqn"))
    with pytest.raises(UsageError, match="PPO is made of a PPOConfig, not of a DQNConfig"):
        type(ppo)(ppo.spec, dqn.config)
    with pytest.raises(UsageError, match=r"use sebulba.env_spec\('CartPole-v1'\)"):
        type(dqn)("CartPole-v1", dqn.config)


@pytest.mark.parametrize(
    ("name", "space"),
    [
        ("dqn", spaces.Box(-1, 1, (2,))),
        ("r2d2", spaces.Box(-1, 1, (2,))),
        ("sac", spaces.MultiDiscrete([3])),
        ("ddpg", spaces.Discrete(3)),
    ],
)
def test_a_discrete_agent_refuses_continuous_actions_and_the_reverse(name: str, space: Any) -> None:
    agent = AGENTS[name].to_count()
    with pytest.raises(UsageError, match=f"action_space={type(space).__name__}.*{name.upper()}"):
        type(agent)(EnvSpec(agent.spec.observation_space, space), agent.config)

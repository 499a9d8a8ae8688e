"""Agents under the update: masked means, device counts, recurrent replay, compile counts."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.configs import (
    ImpalaConfig,
    OptimizerConfig,
    TorsoConfig,
)
from sebulba.agents.impala import Impala
from sebulba.agents.kernels.optimizer import make_optimizer, make_optimizers, masked_mean
from sebulba.configs.presets import PRESETS
from sebulba.support.files import dataclass_from_json
from sebulba.tools.check.agent_driver import B, Streams, T, run_spec
from sebulba.transport.item import Item
from sebulba.types import RunSpec
from tests.support.agent_driver import SPEC, Driver, quick_state
from tests.support.contract_agents import (
    CONTRACT_AGENTS,
    MinibatchAgent,
    MinibatchConfig,
    RecurrentReplayAgent,
    ReplayConfig,
    TargetNetworkAgent,
)
from tests.support.tiny import TinyAgent, TinyConfig

SGD = {
    "learning_rate": 0.1,
    "torso": TorsoConfig(hidden_sizes=(7,)),
    "optimizer": OptimizerConfig("sgd", max_grad_norm=0.5),
}


@pytest.mark.slow
def test_four_devices_are_one_where_statistics_leave_through_the_acting_networks() -> None:
    config = MinibatchConfig(minibatches=1)
    results = []
    for devices in (1, 4):
        driver = Driver(MinibatchAgent(SPEC, config), devices)
        before = driver.state.networks
        metrics = [driver.cycle() for _ in range(10)]
        results.append((driver.state.networks, metrics[-1]))
    moved = max(np.abs(a - b).max() for a, b in _pairs(before, results[0][0]))
    assert moved > 1e-2
    for one, four in _pairs(*results):
        np.testing.assert_allclose(one, four, atol=1e-5)


def _pairs(a: Any, b: Any) -> Any:
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


def test_masked_mean_over_devices_is_that_over_all_valid_cells() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, T, B)).astype(np.float32)
    valid = rng.random((4, T, B)) < np.array([0.0, 0.1, 0.5, 1.0])[:, None, None]
    parts = jax.vmap(masked_mean, axis_name="learner")(x, valid)
    np.testing.assert_allclose(parts.mean(), x[valid].mean(), atol=1e-6)
    nothing = jax.vmap(masked_mean, axis_name="learner")(x, np.zeros_like(valid))
    np.testing.assert_array_equal(nothing, 0.0)


@pytest.mark.slow
def test_recurrent_state_that_acted_first_makes_rho_one() -> None:
    driver = Driver(Impala(SPEC, ImpalaConfig(lstm_size=4, **SGD)))
    driver.streams.next(driver._acting)
    assert driver.cycle()["rho_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_evaluation_takes_the_likeliest_action() -> None:
    agent = Impala(SPEC, ImpalaConfig(**SGD))
    state = quick_state(agent, run_spec())
    row = Streams(agent, state)._row[0]
    output, _ = agent.step(state.networks, state.step[0], row, explore=False)
    params = agent.evaluate(state.networks, row.obs[None], (), row.is_first[None]).params[0]
    np.testing.assert_array_equal(output.action, 2 + jnp.argmax(params, axis=-1))


@pytest.mark.slow
def test_different_inferencers_draw_different_noise() -> None:
    agent = Impala(SPEC, ImpalaConfig(**SGD))
    state = quick_state(agent, run_spec())
    row = Streams(agent, state)._row[0]
    actions = [agent.step(state.networks, step, row)[0].action for step in state.step]
    assert not np.array_equal(*actions)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_linear_schedule_ends_at_zero_and_what_comes_after_is_its_share(share: float) -> None:
    config = OptimizerConfig(
        *("sgd", 0.0), schedule="linear", schedule_updates=4, share_after_schedule=share
    )
    optimizer = make_optimizer(2.0, config)
    opt = optimizer.init(jnp.zeros(()))
    rates = []
    for _ in range(6):
        update, opt = optimizer.update(jnp.ones(()), opt)
        rates.append(-float(update))
    np.testing.assert_allclose(rates, [2.0, 1.5, 1.0, 0.5, 2 * share, 2 * share])


@pytest.mark.parametrize("kind", ["adam", "radam", "rmsprop", "sgd"])
def test_every_optimizer_goes_downhill(kind: Any) -> None:
    optimizer = make_optimizer(0.1, OptimizerConfig(kind, max_grad_norm=10.0))
    x = jnp.asarray([3.0, -2.0])
    opt = optimizer.init(x)
    for _ in range(20):
        update, opt = optimizer.update(2 * x, opt, x)
        x = x + update
    assert jnp.sum(jnp.square(x)) < 6.5


def test_a_part_with_a_period_moves_in_the_last_update_of_each_as_a_delayed_actor() -> None:
    config = OptimizerConfig("adam", 0.0, epsilon=1e-8)
    optimizer = make_optimizers({"actor": 0.1, "critics": 0.1}, config, {"actor": 3})
    networks = {"actor": jnp.ones(()), "critics": jnp.ones(())}
    opt = optimizer.init(networks)
    gradients = np.random.default_rng(0).normal(size=9).astype(np.float32)
    for update, gradient in enumerate(gradients, start=1):
        updates, opt = optimizer.update(jax.tree.map(lambda _: gradient, networks), opt, networks)  # noqa: B023
        networks = jax.tree.map(jnp.add, networks, updates)
        for part, used in (("critics", gradients[:update]), ("actor", gradients[2:update:3])):
            np.testing.assert_allclose(networks[part], adam(used, 0.1), rtol=1e-5)


def adam(gradients: np.ndarray, rate: float) -> float:
    """Return where Adam (Kingma and Ba 2015, algorithm 1) takes 1."""
    x, first, second = 1.0, 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        x -= rate * first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    return x


@pytest.mark.parametrize("in_root", [True, False])
def test_the_epsilon_of_rmsprop_is_inside_or_outside_the_root(in_root: bool) -> None:
    config = OptimizerConfig(
        "rmsprop", max_grad_norm=0.0, epsilon=0.04, epsilon_in_root=in_root, decay=0.75
    )
    optimizer = make_optimizer(2.0, config)
    gradient = jnp.asarray([0.0, 1e-3, 0.6])
    step, _ = optimizer.update(gradient, optimizer.init(gradient))
    square = 0.25 * np.square(gradient)
    size = np.sqrt(square + 0.04) if in_root else np.sqrt(square) + 0.04
    np.testing.assert_allclose(step, -2.0 * gradient / size, rtol=1e-5)


def test_a_record_without_the_place_of_epsilon_keeps_it_in_the_root() -> None:
    record = dataclasses.asdict(PRESETS["pong"].make().agent)
    assert not dataclass_from_json(ImpalaConfig, record).optimizer.epsilon_in_root
    del record["optimizer"]["epsilon_in_root"]
    assert dataclass_from_json(ImpalaConfig, record).optimizer.epsilon_in_root


def test_impala_on_atari_steps_for_means_as_its_paper_does_for_sums() -> None:
    of_means = PRESETS["pong"].make().agent.optimizer
    of_sums = dataclasses.replace(of_means, epsilon=0.01, max_grad_norm=40.0)  # table G.1
    mean = jnp.asarray([3e-4, -0.01, 0.2, 1e-6])
    steps = []
    for config, gradient in ((of_means, mean), (of_sums, 640 * mean)):
        optimizer = make_optimizer(6e-4, config)
        opt = optimizer.init(mean)
        for _ in range(3):
            step, opt = optimizer.update(gradient, opt)
        steps.append(step)
    np.testing.assert_allclose(*steps, rtol=1e-4)


# The agents of the contract.


def test_what_has_a_row_for_each_environment_is_found_by_shape() -> None:
    class Odd(TinyAgent):
        def new_step_state(self, key: Any, run: RunSpec, inferencer: int) -> Any:
            rows = {"row": jnp.zeros((run.num_envs, 2)), "not first": jnp.zeros((2, run.num_envs))}
            return {"key": key, "two": jnp.zeros(2), "three": jnp.zeros((3, 3)), **rows}

    spec = Odd(SPEC, TinyConfig()).step_state_spec()
    assert [name for name, leaf_spec in spec.items() if any(leaf_spec)] == ["row"]


@pytest.mark.slow
@pytest.mark.parametrize("agent_class", CONTRACT_AGENTS)
def test_contract_agents_run_on_two_devices(agent_class: Any) -> None:
    """On one and on four they do in ``test_contract``."""
    driver = Driver(agent_class(SPEC, agent_class.config_class()), devices=2)
    due = [driver.cycle(inferencer=i % 2) for i in range(9)]
    metrics = [m for m in due if m]
    assert metrics and all(np.isfinite(list(m.values())).all() for m in metrics)
    assert driver.state.opt["updates"] == driver.updates > 0
    for spec, leaf in zip(*_spec_and_leaves(driver), strict=True):
        if not any(spec):
            shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert len(shards) == 2
            for shard in shards[1:]:
                np.testing.assert_array_equal(shards[0], shard)


def _spec_and_leaves(driver: Driver) -> tuple[list[Any], list[Any]]:
    experience = driver.updater.state(()).experience
    is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
    specs = jax.tree.map(
        lambda spec, subtree: jax.tree.map(lambda _: spec, subtree),
        driver.agent.experience_spec(),
        experience,
        is_leaf=is_spec,
    )
    return jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(experience)


@pytest.mark.slow
def test_observation_statistics_are_those_of_all_devices() -> None:
    driver = Driver(MinibatchAgent(SPEC, MinibatchConfig()), 4)
    twin = Streams(driver.agent, driver.first_state)
    seen = [twin.next(driver._acting)[0].env_step.obs[:-1] for _ in range(3)]
    for _ in range(3):
        driver.cycle()
    stats = driver.state.experience["stats"]
    obs = np.concatenate(seen).reshape(-1, 3)
    assert stats["count"] == 1 + obs.shape[0]
    np.testing.assert_allclose(stats["mean"], obs.sum(0) / stats["count"], rtol=1e-4, atol=1e-6)
    acting = jax.device_get(driver.updater.acting_networks())
    np.testing.assert_array_equal(acting["stats"]["mean"], stats["mean"])


def test_replay_has_sequences_of_two_cycles_and_none_over_a_gap() -> None:
    driver = Driver(RecurrentReplayAgent(SPEC, ReplayConfig(capacity=3, warm_up_cycles=99)))
    agent, streams = driver.agent, driver.streams

    def take(inferencer: int) -> Any:
        made = streams.next(driver._acting, inferencer)
        item = Item(*made, step_infos=())  # type: ignore[arg-type]
        driver.updater.consume(driver._hand_off(item), updates=0, due=0)
        return jax.device_get((made[0].env_step, made[1]))

    (first, core), _ = take(0), take(1)
    second, _ = take(0)
    streams.next(driver._acting, 0)  # dropped on the way
    third, third_core = take(0)
    fourth, _ = take(0)
    experience = driver.state.experience
    assert experience["inserted"] == 2
    for slot, before, after, begin in ((0, first, second, core), (1, third, fourth, third_core)):
        sequence = experience["sequences"]["env_step"].obs[slot]
        np.testing.assert_array_equal(sequence[: T + 1], before.obs)
        np.testing.assert_array_equal(sequence[T:], after.obs)
        np.testing.assert_allclose(experience["cores"][slot], begin["core"], atol=1e-6)
    np.testing.assert_array_equal(experience["priority"][:, 0] > 0, [True, True, False])
    assert agent.num_off_policy_optims_per_cycle(99) == 0


@pytest.mark.slow
def test_replay_warms_up_then_sets_priorities() -> None:
    driver = Driver(RecurrentReplayAgent(SPEC, ReplayConfig(warm_up_cycles=3)), num_inferencers=1)
    for _ in range(3):
        driver.cycle()
    assert driver.updates == 0
    np.testing.assert_array_equal(driver.state.experience["priority"][:2], 1.0)
    driver.cycle()
    assert driver.updates == 2
    priority = driver.state.experience["priority"]
    assert np.any(priority != 1.0) and np.all(priority > 0)


@pytest.mark.slow
def test_target_networks_follow_with_a_ratio_of_updates_below_one() -> None:
    driver = Driver(TargetNetworkAgent(SPEC, TargetNetworkAgent.config_class()))
    gaps = [m["target_gap"] for m in (driver.cycle() for _ in range(12)) if m]
    assert driver.updates == 4
    # The target is set after every second update.
    assert gaps[0] == gaps[2] == 0 and gaps[1] > 0 and gaps[3] > 0


@pytest.mark.parametrize(("in_one", "signs"), [(True, 0), (False, 3)])
def test_there_is_a_sign_of_life_between_the_programs_of_a_trajectory(in_one, signs) -> None:
    driver = Driver(TinyAgent(SPEC, TinyConfig()))
    driver.agent.updates_in_one_program = in_one
    driver.updater.sign_of_life = mock.Mock()
    item = Item(*driver.streams.next(driver._acting, 0), step_infos=())  # type: ignore[arg-type]
    driver.updater.consume(driver._hand_off(item), updates=0, due=3)
    assert driver.updater.sign_of_life.call_count == signs

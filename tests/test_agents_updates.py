"""Agents under the update: masked means, device counts, recurrent replay, compile counts."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agent import Agent
from sebulba.agents.configs import (
    ImpalaConfig,
    OptimizerConfig,
    SimplePolicyGradientConfig,
    TorsoConfig,
)
from sebulba.agents.impala import Impala
from sebulba.agents.on_policy import make_optimizer, masked_mean
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.runtime.devices import learner_mesh
from sebulba.runtime.update import HandOffToMesh, Updater
from sebulba.types import EnvSpec, EnvStep, RunSpec, Trajectory
from tests.contract_agents import (
    CONTRACT_AGENTS,
    MinibatchAgent,
    MinibatchConfig,
    RecurrentReplayAgent,
    ReplayConfig,
    TargetNetworkAgent,
)

spaces = gymnasium.spaces
SPEC = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(5, start=2, dtype=np.int32))
BOX_SPEC = EnvSpec(SPEC.observation_space, spaces.Box(-1, 1, (2,)))
T, B = 6, 8
SGD = {
    "learning_rate": 0.1,
    "torso": TorsoConfig(hidden_sizes=(7,)),
    "optimizer": OptimizerConfig("sgd", max_grad_norm=0.5),
}


def run_spec(devices: int = 1, num_inferencers: int = 2) -> RunSpec:
    return RunSpec(B, num_inferencers, T, devices)


class Streams:
    """Makes what Inferencers would: random environments with next-step resets.

    Environment 0 ends often and the last ones never, so that devices hold unequal numbers of
    masked cells.
    """

    def __init__(self, agent: Agent, state: Any, seed: int = 0) -> None:
        self._agent = agent
        self._rng = np.random.default_rng(seed)
        self._step = jax.jit(agent.step)
        self._step_state = list(state.step)
        self._row = [self._new_row(None) for _ in state.step]
        self._cycle = [0 for _ in state.step]

    def _new_row(self, last: EnvStep | None) -> EnvStep:
        rng, ended = self._rng, np.zeros(B, bool)
        if last is not None:
            ended = last.terminated | last.truncated
        rate = np.array([0.5, 0.4, 0.3, 0.1, 0.1, 0.05, 0.0, 0.0]) if last is not None else 0.0
        end = (rng.random(B) < rate) & ~ended
        terminates = rng.random(B) < 0.5
        space = self._agent.spec.action_space
        return EnvStep(
            obs=rng.normal(size=(B, 3)).astype(np.float32),
            prev_action=np.zeros((B, *space.shape), space.dtype),
            reward=np.where(ended, 0, rng.normal(size=B)).astype(np.float32),
            terminated=end & terminates,
            truncated=end & ~terminates,
            is_first=ended if last is not None else np.ones(B, bool),
        )

    def next(self, networks: Any, inferencer: int = 0) -> tuple[Trajectory, Any, Any]:
        """Return (trajectory, initial step state, final step state) of the next cycle."""
        initial = self._step_state[inferencer]
        step_state, row, rows, outputs = initial, self._row[inferencer], [], []
        for _ in range(T):
            rows.append(row)
            output, step_state = self._step(networks, step_state, row)
            outputs.append(output)
            row = self._new_row(row)
        rows.append(row)
        self._step_state[inferencer], self._row[inferencer] = step_state, row
        stack = lambda *x: jnp.stack([jnp.asarray(leaf) for leaf in x])  # noqa: E731
        output = jax.tree.map(stack, *outputs)
        number = jnp.int32(self._cycle[inferencer])
        self._cycle[inferencer] += 1
        env_step = jax.tree.map(stack, *rows)
        zero = jnp.int32(0)
        trajectory = Trajectory(
            env_step, output.action, output.extras, zero, jnp.int32(inferencer), number
        )
        return trajectory, initial, step_state


class Driver:
    """Feeds an agent's update on some CPU devices, without environments and threads."""

    def __init__(self, agent: Agent, devices: int = 1, num_inferencers: int = 2) -> None:
        if len(jax.devices()) < devices:
            pytest.skip(f"needs {devices} devices")
        mesh = learner_mesh(jax.devices()[:devices])
        state = agent.new_state(jax.random.key(0), run_spec(devices, num_inferencers))
        self.agent = agent
        self.streams = Streams(agent, state)
        self._hand_off = HandOffToMesh(agent, mesh, B)
        self.updater = Updater(agent, mesh, jax.random.key(1))
        self.updater.place(state)
        # The same behaviour whatever the networks become: these act for ever.
        self._acting = agent.acting_networks(state.networks, state.experience)
        self.consumed = self.updates = 0

    @property
    def state(self) -> Any:
        return jax.device_get(self.updater.state(())._replace(step=()))

    def cycle(self, inferencer: int = 0) -> dict[str, float]:
        """Consume a trajectory, with the updates that are due, and return their metrics."""
        placed = self._hand_off(*self.streams.next(self._acting, inferencer))
        self.updater.update_experience(*placed)
        self.consumed += 1
        for _ in range(self.agent.num_off_policy_optims_per_cycle(self.consumed)):
            self.updater.update(self.updates)
            self.updates += 1
        return self.updater.take_metrics()


AGENTS = {
    "impala": (Impala, ImpalaConfig(**SGD), SPEC),
    "impala-lstm": (Impala, ImpalaConfig(lstm_size=4, **SGD), SPEC),
    "impala-box": (Impala, ImpalaConfig(separate_value_torso=True, **SGD), BOX_SPEC),
    "reinforce": (SimplePolicyGradient, SimplePolicyGradientConfig(**SGD), SPEC),
    "minibatches": (MinibatchAgent, MinibatchConfig(minibatches=1), SPEC),
}


@pytest.mark.parametrize("name", AGENTS)
def test_four_devices_are_one_after_ten_updates(name: str) -> None:
    agent_class, config, spec = AGENTS[name]
    results = []
    for devices in (1, 4):
        driver = Driver(agent_class(spec, config), devices)
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


@pytest.mark.parametrize("name", ["impala", "impala-lstm", "impala-box", "reinforce"])
def test_masked_cells_change_nothing(name: str) -> None:
    agent_class, config, spec = AGENTS[name]
    agent = agent_class(spec, config)
    state = agent.new_state(jax.random.key(0), run_spec())
    trajectory, initial, final = Streams(agent, state).next(state.networks)
    env_step = trajectory.env_step
    invalid = env_step.is_first[1:] & ~env_step.terminated[1:]
    assert invalid.any()
    wild = trajectory._replace(
        env_step=env_step._replace(
            reward=env_step.reward.at[1:].add(jnp.where(invalid, 99.0, 0.0))
        ),
        extras=trajectory.extras._replace(
            log_prob=trajectory.extras.log_prob - jnp.where(invalid, 200.0, 0.0)
        ),
    )

    def grads(trajectory: Trajectory) -> Any:
        def loss(networks: Any) -> jax.Array:
            experience = agent.update_experience(
                state.experience, initial, final, trajectory, networks
            )
            with_axis = jax.vmap(
                lambda x: agent.loss(networks, state.opt, x, jax.random.key(0))[0],
                axis_name="learner",
            )
            return with_axis(jax.tree.map(lambda x: x[None], experience)).sum()

        return jax.grad(loss)(state.networks)

    for a, b in _pairs(grads(trajectory), grads(wild)):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("name", ["impala", "impala-lstm", "impala-box", "reinforce"])
def test_step_compiles_once(name: str) -> None:
    agent_class, config, spec = AGENTS[name]
    agent = agent_class(spec, config)
    state = agent.new_state(jax.random.key(0), run_spec())
    streams = Streams(agent, state)
    for inferencer in (0, 1, 0):
        streams.next(state.networks, inferencer)
    assert streams._step._cache_size() == 1


def test_recurrent_state_that_acted_first_makes_rho_one() -> None:
    driver = Driver(Impala(SPEC, ImpalaConfig(lstm_size=4, **SGD)))
    driver.streams.next(driver._acting)
    assert driver.cycle()["rho_mean"] == pytest.approx(1.0, abs=1e-5)


def test_evaluation_takes_the_likeliest_action() -> None:
    agent = Impala(SPEC, ImpalaConfig(**SGD))
    state = agent.new_state(jax.random.key(0), run_spec())
    row = Streams(agent, state)._row[0]
    output, _ = agent.step(state.networks, state.step[0], row, explore=False)
    params = agent.evaluate(state.networks, row.obs[None], (), row.is_first[None]).params[0]
    np.testing.assert_array_equal(output.action, 2 + jnp.argmax(params, axis=-1))


def test_different_inferencers_draw_different_noise() -> None:
    agent = Impala(SPEC, ImpalaConfig(**SGD))
    state = agent.new_state(jax.random.key(0), run_spec())
    row = Streams(agent, state)._row[0]
    actions = [agent.step(state.networks, step, row)[0].action for step in state.step]
    assert not np.array_equal(*actions)


def test_linear_schedule_ends_at_zero() -> None:
    config = OptimizerConfig("sgd", max_grad_norm=0.0, schedule="linear", schedule_updates=4)
    optimizer = make_optimizer(2.0, config)
    opt = optimizer.init(jnp.zeros(()))
    rates = []
    for _ in range(6):
        update, opt = optimizer.update(jnp.ones(()), opt)
        rates.append(-float(update))
    np.testing.assert_allclose(rates, [2.0, 1.5, 1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["adam", "rmsprop", "sgd"])
def test_every_optimizer_goes_downhill(kind: Any) -> None:
    optimizer = make_optimizer(0.1, OptimizerConfig(kind, max_grad_norm=10.0))
    x = jnp.asarray([3.0, -2.0])
    opt = optimizer.init(x)
    for _ in range(20):
        update, opt = optimizer.update(2 * x, opt, x)
        x = x + update
    assert jnp.sum(jnp.square(x)) < 6.5


# The agents of the contract.


@pytest.mark.parametrize("agent_class", CONTRACT_AGENTS)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_contract_agents_run_on_any_number_of_devices(agent_class: Any, devices: int) -> None:
    driver = Driver(agent_class(SPEC, agent_class.config_class()), devices)
    due = [driver.cycle(inferencer=i % 2) for i in range(9)]
    metrics = [m for m in due if m]
    assert metrics and all(np.isfinite(list(m.values())).all() for m in metrics)
    assert driver.state.opt["updates"] == driver.updates > 0
    for spec, leaf in zip(*_spec_and_leaves(driver), strict=True):
        if not any(spec):
            shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert len(shards) == devices
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


def test_observation_statistics_are_those_of_all_devices() -> None:
    driver = Driver(MinibatchAgent(SPEC, MinibatchConfig()), 4)
    twin = Streams(driver.agent, driver.agent.new_state(jax.random.key(0), run_spec()))
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
        driver.updater.update_experience(*driver._hand_off(*made))
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


def test_target_networks_follow_with_a_ratio_of_updates_below_one() -> None:
    driver = Driver(TargetNetworkAgent(SPEC, TargetNetworkAgent.config_class()))
    gaps = [m["target_gap"] for m in (driver.cycle() for _ in range(12)) if m]
    assert driver.updates == 4
    # The target is set after every second update.
    assert gaps[0] == gaps[2] == 0 and gaps[1] > 0 and gaps[3] > 0

"""PPO: what acted is what is learned from, minibatches, the clipped loss, sizes, statistics."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.configs import ImpalaConfig, OptimizerConfig, PPOConfig, TorsoConfig
from sebulba.agents.impala import Impala
from sebulba.agents.kernels.returns import transitions, vtrace
from sebulba.agents.ppo import PPO
from sebulba.errors import UsageError
from sebulba.policies.policy import load_policy, save_policy
from sebulba.tools.check.agent_driver import B, Streams, T, run_spec
from sebulba.types import EnvSpec, RunSpec
from tests.support.agent_driver import BOX_SPEC, SPEC, Driver, quick_state

spaces = gymnasium.spaces
SGD = {
    "learning_rate": 0.1,
    "torso": TorsoConfig(hidden_sizes=(7,)),
    "optimizer": OptimizerConfig("sgd", max_grad_norm=0.5),
}
NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}
KINDS = {
    "mlp": (PPOConfig(**SGD), SPEC),
    "lstm": (PPOConfig(lstm_size=4, **NORMALIZED, **SGD), SPEC),
    "box": (PPOConfig(separate_value_torso=True, **NORMALIZED, **SGD), BOX_SPEC),
}


def with_axis(function: Any) -> Any:
    """Return ``function`` compiled for one device, with the axis bound."""
    mapped = jax.vmap(function, axis_name="learner", axis_size=1, in_axes=None)
    return jax.jit(lambda *args: jax.tree.map(lambda x: x[0], mapped(*args)))


class Fed:
    """An agent, its state, and the experience with some trajectories taken in."""

    def __init__(self, config: Any, spec: EnvSpec, num_trajectories: int = 1) -> None:
        self.agent: Any = (PPO if isinstance(config, PPOConfig) else Impala)(spec, config)
        state = quick_state(self.agent, run_spec())
        self.networks, self.opt = state.networks, state.opt
        self.experience = state.experience
        self.evaluate = jax.jit(self.agent.evaluate)
        self._loss = with_axis(self.agent.loss)
        streams = Streams(self.agent, state)
        acting = self.agent.acting_networks(state.networks, state.experience)
        # All of them acted with the first statistics, as behind a long queue.
        made = [streams.next(acting, i % 2) for i in range(num_trajectories)]
        update_experience = with_axis(self.agent.update_experience)
        for trajectory, initial, final in made:
            self.experience = update_experience(
                self.experience, initial, final, trajectory, self.networks
            )
        self.trajectory = made[-1][0]

    def loss(self, experience: Any, key: int = 0) -> Any:
        return self._loss(self.networks, self.opt, experience, jax.random.key(key))


@functools.cache
def fed_with(kind: str) -> Fed:
    return Fed(*KINDS[kind], num_trajectories=3)


@pytest.fixture(scope="module", params=KINDS)
def fed(request: Any) -> Fed:
    return fed_with(request.param)


@pytest.mark.slow
def test_ratio_is_one_before_the_first_update(fed: Fed) -> None:
    batch, agent = fed.experience.batch, fed.agent
    output = fed.evaluate(fed.networks, batch.obs, fed.experience.core, batch.is_first)
    log_prob = agent.distribution.log_prob(output.params, batch.raw)
    np.testing.assert_allclose(jnp.exp(log_prob - batch.log_prob), 1.0, atol=1e-5)
    np.testing.assert_allclose(output.value, batch.value, atol=1e-5)
    _, (_, metrics) = fed.loss(fed.experience)
    assert metrics["clip_fraction"] == 0
    assert abs(metrics["approx_kl"]) < 1e-6


def test_every_epoch_learns_once_from_everything(fed: Fed) -> None:
    agent, experience = fed.agent, fed.experience
    columns = B if agent.config.lstm_size else T * B
    assert agent.num_off_policy_optims_per_cycle(7) == 10 * 4
    orders = []
    for update in range(2 * agent.config.minibatches):
        _, (experience, _) = fed.loss(experience, update)
        orders.append(np.asarray(experience.order))
        np.testing.assert_array_equal(np.sort(orders[-1]), np.arange(columns))
    np.testing.assert_array_equal(orders[0], orders[3])
    np.testing.assert_array_equal(orders[4], orders[7])
    assert not np.array_equal(orders[0], orders[4])


def test_minibatches_are_whole_columns() -> None:
    fed = fed_with("lstm")
    chosen = jnp.asarray([5, 2])
    core, batch = fed.agent._minibatch(fed.experience, chosen)
    np.testing.assert_array_equal(batch.obs, fed.experience.batch.obs[:, chosen])
    np.testing.assert_array_equal(core[0], fed.experience.core[0][chosen])
    fed = fed_with("mlp")
    _, batch = fed.agent._minibatch(fed.experience, jnp.asarray([0, B + 3, T * B - 1]))
    expected = fed.experience.batch.log_prob[jnp.asarray([0, 1, T - 1]), jnp.asarray([0, 3, B - 1])]
    np.testing.assert_array_equal(batch.log_prob[0], expected)


def test_advantages_follow_from_the_next_row() -> None:
    fed = fed_with("mlp")
    row, batch = jax.device_get((fed.trajectory.env_step, fed.experience.batch))
    value = np.asarray(fed.evaluate(fed.networks, row.obs, (), row.is_first).value)
    advantage = np.zeros((T, B))
    after = np.zeros(B)
    for t in reversed(range(T)):
        last = row.terminated[t + 1] | row.truncated[t + 1]
        delta = row.reward[t + 1] + 0.99 * value[t + 1] * ~row.terminated[t + 1] - value[t]
        after = np.where(row.is_first[t + 1], 0.0, delta + 0.99 * 0.95 * after * ~last)
        advantage[t] = after
    np.testing.assert_allclose(batch.advantage, advantage, atol=1e-5)
    np.testing.assert_array_equal(batch.valid, ~row.is_first[1:])


def test_loss_by_hand() -> None:
    config = PPOConfig(
        minibatches=1, ratio_clip=0.25, value_clip=0.1, entropy_coefficient=0.3,
        normalize_advantages=False, **SGD,
    )  # fmt: skip
    fed = Fed(config, SPEC)
    batch = fed.experience.batch
    rng = np.random.default_rng(0)
    ratio = np.exp(rng.normal(size=(T, B)))
    moved = rng.normal(size=(T, B)).astype(np.float32)
    # As if the policy had been another when it acted, and the value another when it arrived.
    before = batch._replace(log_prob=batch.log_prob - jnp.log(ratio), value=batch.value + moved)
    loss, (_, metrics) = fed.loss(fed.experience._replace(batch=before))

    valid, advantage = np.asarray(batch.valid), np.asarray(batch.advantage)
    mean = lambda x: np.asarray(x)[valid].mean()  # noqa: E731
    gain = np.minimum(ratio * advantage, np.clip(ratio, 0.75, 1.25) * advantage)
    value, target = np.asarray(batch.value), np.asarray(before.value) + advantage
    clipped = np.asarray(before.value) + np.clip(-moved, -0.1, 0.1)
    square = np.maximum((value - target) ** 2, (clipped - target) ** 2)
    output = fed.evaluate(fed.networks, batch.obs, (), batch.is_first)
    entropy = mean(fed.agent.distribution.entropy(output.params))
    expected = {
        "policy_loss": -mean(gain),
        "value_loss": 0.5 * mean(square),
        "entropy": entropy,
        "approx_kl": mean(ratio - 1 - np.log(ratio)),
        "clip_fraction": mean(np.abs(ratio - 1) > 0.25),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name
    total = expected["policy_loss"] + 0.5 * expected["value_loss"] - 0.3 * entropy
    assert loss == pytest.approx(total, rel=1e-4)


def test_an_entropy_without_a_coefficient_is_estimated_and_has_no_gradient() -> None:
    agent = PPO(BOX_SPEC, PPOConfig(entropy_coefficient=0.0))
    params = jnp.broadcast_to(jnp.asarray([0.3, -0.5, -0.2, 0.4]), (20_000, 4))
    raw = agent.distribution.sample(params, jax.random.key(0))
    exact = float(agent.distribution.entropy(params[0]))
    assert jnp.mean(agent.entropy(params, raw)) == pytest.approx(exact, abs=0.03)
    gradient = jax.grad(lambda p: jnp.mean(agent.entropy(p, raw)))(params)
    assert not jnp.any(gradient)
    with_bonus = PPO(BOX_SPEC, PPOConfig(entropy_coefficient=0.1))
    assert jnp.mean(with_bonus.entropy(params, raw)) == pytest.approx(exact)


def test_an_estimated_entropy_falls_as_the_policy_becomes_sure_also_by_samples_of_before() -> None:
    agent = PPO(BOX_SPEC, PPOConfig(entropy_coefficient=0.0))
    before = jnp.broadcast_to(jnp.zeros(4), (20_000, 4))
    raw = agent.distribution.sample(before, jax.random.key(0))
    sure = before.at[:, 2:].set(-2.0)
    estimates = [float(jnp.mean(agent.entropy(params, raw))) for params in (before, sure)]
    assert estimates[1] == pytest.approx(estimates[0] - 2 * 2.0, abs=1e-3)


def test_advantages_are_normalized_over_valid_transitions() -> None:
    fed = Fed(PPOConfig(minibatches=1, **SGD), SPEC)
    batch = fed.experience.batch
    ratio = jnp.exp(jnp.linspace(-0.1, 0.1, T * B).reshape(T, B))
    wild = jnp.where(batch.valid, batch.advantage, 1e6)
    before = batch._replace(log_prob=batch.log_prob - jnp.log(ratio), advantage=wild)
    _, (_, metrics) = fed.loss(fed.experience._replace(batch=before))
    kept = np.asarray(batch.advantage)[batch.valid]
    normalized = (kept - kept.mean()) / kept.std()
    expected = -(np.asarray(ratio)[batch.valid] * normalized).mean()
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-3)


def test_statistics_of_four_devices_are_those_of_one() -> None:
    fed = fed_with("box")
    statistics = fed.agent.normalization.new(run_spec())
    final = fed.agent.new_step_state(jax.random.key(0), run_spec(), 0)

    def split(tree: Any) -> Any:
        """Return ``[4, T, B / 4, ...]``."""
        return jax.tree.map(lambda x: jnp.stack(jnp.split(x, 4, axis=1)), tree)

    def statistics_after(row: Any, so_far: jax.Array) -> Any:
        before = statistics._replace(rewards=statistics.rewards._replace(so_far=so_far))
        trajectory = fed.trajectory._replace(env_step=row)
        return fed.agent.normalization(trajectory, final.scaling, before)[1]

    arguments = fed.trajectory.env_step, statistics.rewards.so_far
    four = jax.jit(jax.vmap(statistics_after, axis_name="learner"))(*map(split, arguments))
    one = with_axis(statistics_after)(*arguments)
    so_far = jnp.concatenate(four.rewards.so_far, axis=1)
    np.testing.assert_allclose(so_far, one.rewards.so_far, rtol=1e-5)
    assert one.observations[0].num_samples == pytest.approx(T * B, abs=1e-2)
    replicated = four.observations, four.rewards.moments
    for leaf, expected in zip(
        jax.tree.leaves(replicated),
        jax.tree.leaves((one.observations, one.rewards.moments)),
        strict=True,
    ):
        np.testing.assert_array_equal(leaf, jnp.broadcast_to(leaf[:1], leaf.shape))
        np.testing.assert_allclose(leaf[0], expected, rtol=1e-4, atol=1e-6)


def test_statistics_leave_with_the_networks_and_rest_in_evaluation(tmp_path: Any) -> None:
    fed = fed_with("box")
    acting = fed.agent.acting_networks(fed.networks, fed.experience)
    moments = fed.experience.statistics.observations[0]
    np.testing.assert_array_equal(acting.scaling[0].mean[0], moments.mean)
    save_policy(tmp_path, fed.agent, acting)
    policy = load_policy(tmp_path)
    obs = np.asarray(fed.trajectory.env_step.obs[0])
    scaled = (obs - moments.mean[None]) / np.sqrt(moments.variance + 1e-8)[None]
    output = fed.evaluate(fed.networks, scaled[None], (), np.ones((1, B), bool))
    expected = fed.agent.distribution.action(fed.agent.distribution.mode(output.params[0]))
    state = None
    for _ in range(3):
        action, state = policy(obs, state)
        np.testing.assert_allclose(action, expected, atol=1e-5)


def test_impala_learns_from_what_it_acted_on_when_it_normalizes() -> None:
    fed = Fed(ImpalaConfig(**NORMALIZED, **SGD), SPEC, num_trajectories=3)
    _, (_, metrics) = fed.loss(fed.experience)
    assert metrics["rho_mean"] == pytest.approx(1.0, abs=1e-5)
    raw, kept = fed.trajectory.env_step, fed.experience.trajectory.env_step
    assert not np.allclose(raw.reward, kept.reward)


def test_impala_stops_pushing_ratios_that_are_far_and_normalizes_advantages() -> None:
    config = ImpalaConfig(epochs=3, ratio_clip=0.25, normalize_advantages=True, **SGD)
    fed = Fed(config, SPEC)
    assert fed.agent.num_off_policy_optims_per_cycle(5) == 3
    ratio = np.exp(np.random.default_rng(0).normal(scale=0.4, size=(T, B))).astype(np.float32)
    trajectory = fed.experience.trajectory
    log_prob = np.asarray(trajectory.extras.log_prob)
    # As if the policy had been another when it acted.
    extras = trajectory.extras._replace(log_prob=log_prob - np.log(ratio))
    trajectory = trajectory._replace(extras=extras)
    _, (_, metrics) = fed.loss(fed.experience._replace(trajectory=trajectory))

    row, step = trajectory.env_step, transitions(trajectory, config.discount)
    value = fed.evaluate(fed.networks, row.obs, (), row.is_first).value
    advantage = jax.vmap(vtrace, in_axes=1, out_axes=1)(value, step, jnp.asarray(ratio)).advantage
    valid, advantage = np.asarray(step.valid), np.asarray(advantage)
    advantage = (advantage - advantage[valid].mean()) / advantage[valid].std()
    far = np.where(advantage > 0, ratio > 1.25, ratio < 0.75)
    assert far[valid].any() and not far[valid].all()
    expected = float(np.mean((np.where(far, 0.0, -advantage) * log_prob)[valid]))
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-3)


def test_minibatches_of_impala_are_whole_unrolls_of_some_environments() -> None:
    config = ImpalaConfig(epochs=2, minibatches=2, lstm_size=4, **SGD)
    fed = Fed(config, SPEC, num_trajectories=2)
    assert fed.agent.num_off_policy_optims_per_cycle(5) == 4
    whole = fed.experience.trajectory
    # As if each environment's cells, and its recurrent state, were its number.
    number = np.arange(B)
    row = whole.env_step._replace(reward=np.tile(number, (T + 1, 1)))
    whole = whole._replace(env_step=row, action=np.tile(number, (T, 1)))
    core = (jnp.arange(B, dtype=jnp.float32)[:, None],)
    experience = fed.experience._replace(trajectory=whole, core=core)
    drawn = set()
    for seed in range(9):
        part, (state,) = fed.agent._minibatch(experience, jax.random.key(seed))
        chosen = np.asarray(state)[:, 0]
        assert len(set(chosen)) == B // 2
        np.testing.assert_array_equal(part.env_step.reward, np.tile(chosen, (T + 1, 1)))
        np.testing.assert_array_equal(part.action, np.tile(chosen, (T, 1)))
        drawn |= set(chosen)
    assert drawn == set(range(B))
    with pytest.raises(UsageError, match=f"minibatches=2 must divide the {B // 8} environments"):
        fed.agent.check_run(RunSpec(B // 8, 1, T, 1))


def test_learns_from_images() -> None:
    spec = EnvSpec(spaces.Box(0, 255, (2, 36, 36), np.uint8), SPEC.action_space, frame_stack=2)
    torso = TorsoConfig(kind="nature_cnn", image_features=5)
    agent = PPO(spec, PPOConfig(minibatches=3, torso=torso))
    run = RunSpec(num_envs=2, num_inferencers=1, steps_per_cycle=3, num_update_devices=1)
    state = jax.eval_shape(lambda: agent.new_state(jax.random.key(0), run))
    loss, (experience, _) = jax.eval_shape(
        with_axis(agent.loss), *state[:3], jax.eval_shape(jax.random.key, 0)
    )
    assert loss.shape == ()
    assert experience.batch.obs.dtype == np.uint8


@pytest.mark.parametrize(
    ("config", "run", "message"),
    [
        (PPOConfig(minibatches=5), RunSpec(6, 1, 7, 2), r"3 environments = 21 .* use 3 or 7"),
        (PPOConfig(minibatches=3, lstm_size=4), RunSpec(16, 1, 9, 2), r"8 environments .* 2 or 4"),
        (PPOConfig(minibatches=99), RunSpec(2, 1, 3, 1), r"minibatches=99 .* = 6 .* use 6$"),
    ],
)
def test_refuses_minibatches_of_unequal_sizes(config: Any, run: RunSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PPO(SPEC, config).new_state(jax.random.key(0), run)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"minibatches": 2.5}, "minibatches=2.5"),
        ({"ratio_clip": 0.0}, "ratio_clip=0.0"),
        ({"value_clip": -1.0}, "value_clip=-1.0"),
        ({"trace_decay": 1.1}, "trace_decay=1.1"),
        ({"lstm_size": 4, "central_critic": True}, "central_critic=True"),
        ({"memory": "rnn"}, "memory='rnn'"),
        (
            {
                "normalize_observations": True,
                "torso": TorsoConfig(scale_bounded_observations=True),
            },
            "normalize_observations=True",
        ),
    ],
)
def test_refuses_hyper_parameters_with_name_and_remedy(fields: Any, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} .*; (use|set)"):
        PPOConfig(**fields)


STOPS = PPOConfig(learning_rate=0.1, epochs=3, minibatches=2, torso=TorsoConfig(hidden_sizes=(7,)))


def arrays_of(state: Any, *, counts: bool) -> list[np.ndarray]:
    """Return the leaves of networks and optimizer that are counts, or the others."""
    leaves = [np.asarray(x) for x in jax.tree.leaves((state.networks, state.opt))]
    return [x for x in leaves if np.issubdtype(x.dtype, np.integer) == counts]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_beyond_the_target_kl_only_the_learning_rate_goes_on(devices):
    falls = OptimizerConfig(schedule="linear", schedule_updates=10)
    config = dataclasses.replace(
        STOPS, target_kl=1e-6, magnet_rate=0.1, kl_coefficient=1.0, optimizer=falls
    )
    stopped, once = (Driver(PPO(SPEC, config), devices) for _ in range(2))
    made = stopped.made()
    # Before the first update the policy is where it was, so the second one is the first to stop.
    stopped.insert(made, 6)
    once.insert(made, 1)
    after, before = stopped.state, once.state
    for x, y in zip(*(arrays_of(s, counts=False) for s in (after, before)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)  # a step is of about 0.1
    # Adam's count stays with its moments, or the next steps would be too large.
    assert [x.ravel()[0] for x in arrays_of(after, counts=True)] == [1, 6]
    # The next trajectory, which these networks make, is learned from.
    acting = stopped.agent.acting_networks(after.networks, after.experience)
    stopped.insert(stopped.streams.next(acting), 1)
    moved = arrays_of(stopped.state, counts=False)
    assert any((x != y).any() for x, y in zip(moved, arrays_of(after, counts=False), strict=True))


def test_a_target_kl_that_is_never_reached_changes_nothing():
    plain = Driver(PPO(SPEC, STOPS))
    limited = Driver(PPO(SPEC, dataclasses.replace(STOPS, target_kl=1e6)))
    made = plain.made()
    metrics = [driver.consume(made) for driver in (plain, limited)]
    for x, y in zip(
        *(jax.tree.leaves((d.state.networks, d.state.opt)) for d in (plain, limited)), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert metrics[1].pop("stopped") == 0
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-5)

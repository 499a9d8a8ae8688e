"""PopArt: beside the pseudo-code of the paper, what it preserves, refusals, saved values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sebulba
from sebulba.agents.configs import ImpalaConfig, OptimizerConfig, PPOConfig, TorsoConfig, make_agent
from sebulba.agents.configs.on_policy import ActorCriticConfig
from sebulba.agents.kernels import popart
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.agents.ppo import PPO
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.errors import UsageError
from sebulba.policies.policy import load_policy, save_policy
from sebulba.tools.check.agent_driver import run_spec
from tests.agents.test_ppo import SGD, Fed, with_axis
from tests.support.agent_driver import SPEC

CONFIGS = {
    "ppo": PPOConfig(popart=True, **SGD),
    "impala": ImpalaConfig(popart=True, **SGD),
    "lstm": PPOConfig(popart=True, lstm_size=4, **SGD),
}
AGENTS = pytest.mark.parametrize("name", CONFIGS)
RATE = 0.1


class Paper:
    """Algorithm 1 of van Hasselt et al. 2016, in 64 bits, for values ``W (theta x) + b``."""

    def __init__(self, theta: Any, kernel: Any, bias: float) -> None:
        self.theta, self.kernel, self.bias = theta.astype(float), kernel.astype(float), bias
        self.mean, self.square, self.deviation, self.steps = 0.0, 1.0, 1.0, 0

    def update(self, x: Any, y: Any) -> None:
        self.steps += 1
        beta = popart.RATE / (1.0 - (1.0 - popart.RATE) ** self.steps)
        mean = (1 - beta) * self.mean + beta * np.mean(y)
        self.square = (1 - beta) * self.square + beta * np.mean(y**2)
        deviation = np.clip(np.sqrt(self.square - mean**2), *popart.BOUNDS)
        self.kernel *= self.deviation / deviation
        self.bias = (self.deviation * self.bias + self.mean - mean) / deviation
        self.mean, self.deviation = mean, deviation
        h = self.theta * x
        delta = h @ self.kernel + self.bias - (y - mean) / deviation
        slope = np.mean(delta[:, None] * self.kernel * x, axis=0)
        self.kernel -= RATE * np.mean(delta[:, None] * h, axis=0)
        self.bias -= RATE * np.mean(delta)
        self.theta -= RATE * slope


@pytest.mark.parametrize("size", [0.01, 1.0, 10_000.0])
def test_updates_are_those_of_the_paper(size: float) -> None:
    rng = np.random.default_rng(0)
    theta, kernel = rng.normal(size=(2, 3)).astype(np.float32)
    kernel *= min(size, 1.0)  # descent diverges from values that are much larger than targets
    networks: Any = {
        "torso": jnp.asarray(theta),
        popart.HEAD: {"kernel": jnp.asarray(kernel)[:, None], "bias": jnp.zeros(1)},
        popart.SCALE: popart.new_statistics(),
    }
    paper = Paper(theta, kernel, 0.0)

    def value_of(networks: Any, x: Any) -> jax.Array:
        head = networks[popart.HEAD]
        y = (networks["torso"][None, None] * x) @ head["kernel"] + head["bias"][None, None]
        return popart.in_units_of_rewards(networks[popart.SCALE], y[..., 0])

    @with_axis
    def update(networks: Any, x: Any, y: Any, valid: Any) -> Any:
        def loss(networks: Any) -> jax.Array:
            scale = networks[popart.SCALE]
            new = popart.updated(scale, y, valid)
            error = (value_of(networks, x) - y) / new["deviation"]
            half_square = 0.5 * masked_mean(jnp.square(error), valid)
            return half_square + popart.telling(scale, new)

        networks, grads = popart.rescaled(networks, jax.grad(loss)(networks))
        return jax.tree.map(lambda p, g: p - RATE * g, networks, grads)

    for number in range(40):
        x = rng.normal(size=(2, 6, 3)).astype(np.float32)
        grown = size * (1 + number / 10)
        y = (grown * (3.0 + x @ [1.0, -2.0, 0.5] + rng.normal(size=(2, 6)))).astype(np.float32)
        valid = rng.random((2, 6)) < 0.8
        networks = update(networks, x, y, valid)
        paper.update(x[valid], y[valid].astype(float))
        scale, head = networks[popart.SCALE], networks[popart.HEAD]
        assert float(scale["mean"]) == pytest.approx(paper.mean, rel=1e-4)
        assert float(scale["deviation"]) == pytest.approx(paper.deviation, rel=1e-4)
        np.testing.assert_allclose(head["kernel"][:, 0], paper.kernel, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(head["bias"], paper.bias, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(networks["torso"], paper.theta, rtol=1e-3, atol=1e-4)


def test_large_targets_that_vary_little_keep_their_deviation() -> None:
    rng = np.random.default_rng(0)
    y = (1e6 + rng.normal(size=(20, 10))).astype(np.float32)
    new = with_axis(popart.updated)(popart.new_statistics(), y, np.ones((20, 10), bool))
    assert float(new["deviation"]) == pytest.approx(y.astype(float).std(), rel=0.1)
    again = with_axis(popart.updated)(new, y, np.zeros((20, 10), bool))
    assert again == new, "nothing valid was seen"


def changed(name: str, size: float) -> tuple[Fed, Any]:
    """Return an agent, and its networks with statistics of targets of this size."""
    fed = Fed(CONFIGS[name], SPEC)
    scale = fed.networks[popart.SCALE]
    y = size * np.random.default_rng(0).normal(1.0, 2.0, (5, 4)).astype(np.float32)
    new = with_axis(popart.updated)(scale, y, np.ones((5, 4), bool))
    zeros = jax.tree.map(jnp.zeros_like, fed.networks)
    grads = zeros | {popart.SCALE: jax.grad(popart.telling)(scale, new)}
    networks, _ = jax.jit(fed.agent.optimize)(fed.networks, fed.opt, grads)
    assert float(networks[popart.SCALE]["deviation"]) == pytest.approx(
        float(new["deviation"]), rel=1e-5
    )
    return fed, networks


@AGENTS
@pytest.mark.parametrize("size", [0.01, 1.0, 10_000.0])
def test_new_statistics_leave_values_and_policies_as_they_are(name: str, size: float) -> None:
    fed, networks = changed(name, size)
    row, core = fed.trajectory.env_step, fed.experience.core
    before, after = (fed.evaluate(n, row.obs, core, row.is_first) for n in (fed.networks, networks))
    kernels = [n[popart.HEAD]["kernel"] for n in (fed.networks, networks)]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.1
    np.testing.assert_allclose(before.value, after.value, rtol=1e-5, atol=1e-6 * max(1.0, size))
    np.testing.assert_array_equal(before.params, after.params)


@pytest.mark.slow
@AGENTS
def test_a_loss_of_larger_rewards_is_the_same_but_for_its_units(name: str) -> None:
    def networks_after(scale: float) -> Any:
        fed, networks = changed(name, scale)
        step = fed.trajectory.env_step
        reward = np.float32(scale) * np.asarray(step.reward)
        trajectory = fed.trajectory._replace(env_step=step._replace(reward=reward))
        # Values of the networks grow with rewards, as those that have learned do.
        head = networks[popart.HEAD]
        networks = networks | {popart.HEAD: jax.tree.map(lambda x: 0 * x + 0.1, head)}
        state = fed.experience, (), (), trajectory, networks
        states = fed.agent.new_step_state(jax.random.key(0), run_spec(), 0)
        experience = with_axis(fed.agent.update_experience)(state[0], states, states, *state[3:])

        def loss(networks: Any, experience: Any, key: Any) -> Any:
            return jax.value_and_grad(fed.agent.loss, has_aux=True)(
                networks, fed.opt, experience, key
            )

        (total, (_, metrics)), grads = with_axis(loss)(networks, experience, jax.random.key(1))
        learned, _ = jax.jit(fed.agent.optimize)(networks, fed.opt, grads)
        return float(total), metrics, learned, grads

    few, many = map(networks_after, (1.0, 1024.0))
    (total, metrics, one, grads), (large_total, large_metrics, large, large_grads) = few, many
    assert large_total == pytest.approx(total, rel=1e-3, abs=1e-5)
    norms = [float(optax.tree.norm(x)) for x in (large_grads, grads)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3), "statistics tell little of themselves"
    for name in ("target_mean", "target_deviation"):
        assert float(large_metrics[name]) == pytest.approx(1024 * float(metrics[name]), rel=1e-3)
    for part in (popart.HEAD, "torso", "policy"):
        for a, b in zip(jax.tree.leaves(one[part]), jax.tree.leaves(large[part]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


# What refuses it.


@pytest.mark.parametrize("config", [PPOConfig, ImpalaConfig])
@pytest.mark.parametrize("other", [{"reward_scale": 0.1}, {"normalize_rewards": True}])
def test_rewards_are_not_scaled_twice(config: Any, other: dict[str, Any]) -> None:
    (name,) = other
    with pytest.raises(UsageError, match=f"{name}=.* cannot be combined with popart.*popart=False"):
        config(popart=True, **other)


def test_an_agent_whose_loss_lacks_it_refuses_it() -> None:
    class Own(SimplePolicyGradient):
        pass

    with pytest.raises(UsageError, match="popart=True is of PPO and Impala; the loss of Own"):
        Own(SPEC, ActorCriticConfig(popart=True))  # type: ignore[arg-type]


def test_networks_without_statistics_refuse_it() -> None:
    class Own(PPO):
        def new_networks(self, key: jax.Array) -> Any:
            return {"torso": jax.random.normal(key, (4, 2))}

    with pytest.raises(UsageError, match="popart=True needs networks that have 'value_scale'; th"):
        Own(SPEC, PPOConfig(popart=True))


# Runs.


def lockstep(num_cycles: list[int], folder: Any) -> Any:
    """Train CartPole in so many runs, each of which begins with the state of the one before."""
    torso = TorsoConfig(hidden_sizes=(8,))
    config = PPOConfig(popart=True, epochs=2, optimizer=OptimizerConfig(), torso=torso)
    env = sebulba.make_env_factory("CartPole-v1")
    agent = make_agent(sebulba.env_spec(env), config)
    for total in num_cycles:
        with sebulba.GymnasiumLoop(
            env, agent, 8, schedule="lockstep", num_inferencers_per_device=1, inference_devices=[0],
            update_devices=[0], checkpointer=sebulba.Checkpointer(folder, every_s=0.0),
            cycle="stepped",
        ) as loop:  # fmt: skip
            result = loop.train(total_env_steps=total * 64, steps_per_cycle=8, seed=0)
    return agent, result


@pytest.mark.slow
def test_statistics_resume_and_a_saved_policy_has_values_in_units_of_rewards(tmp_path: Any) -> None:
    agent, result = lockstep([2, 6], tmp_path / "checkpoints")
    scale = result.state.networks[popart.SCALE]
    done = (1 - popart.RATE) ** result.counters.updates
    assert float(scale["weight"]) == pytest.approx(1 - done, rel=1e-3)
    assert float(scale["deviation"]) != 1.0
    save_policy(tmp_path / "policy", agent, result.acting_networks, run_spec())
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    values = load_policy(tmp_path / "policy").value(obs)
    head = result.state.networks[popart.HEAD]
    output = agent.evaluate(result.state.networks, obs[None], (), np.zeros((1, 3), bool))
    np.testing.assert_allclose(values, output.value[0], rtol=1e-5)
    without = {**result.state.networks, popart.SCALE: popart.new_statistics()}
    plain = agent.evaluate(without, obs[None], (), np.zeros((1, 3), bool)).value[0]
    wanted = float(scale["deviation"]) * plain + float(scale["mean"])
    np.testing.assert_allclose(values, wanted, rtol=1e-4)
    assert head["kernel"].shape == (8, 1)

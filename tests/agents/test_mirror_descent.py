"""Magnetic mirror descent: its update beside NumPy, its schedules, and games of two seats."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba import Act, AgentNode, Obs, Population
from sebulba.agents.configs import ImpalaConfig, OptimizerConfig, PPOConfig, TorsoConfig, make_agent
from sebulba.agents.impala import Impala
from sebulba.agents.kernels.distributions import Categorical, make_distribution
from sebulba.agents.kernels.legal_actions import ILLEGAL
from sebulba.agents.kernels.optimizer import annealed, make_optimizer
from sebulba.agents.ppo import PPO, MagnetOpt
from sebulba.errors import UsageError
from sebulba.tools.check.agent_driver import run_spec
from tests.agents.test_ppo import SGD, Fed
from tests.support.agent_driver import BOX_SPEC, SPEC, quick_state

spaces = gymnasium.spaces
MULTI = spaces.MultiDiscrete([3, 4])


def closed_form(
    before: np.ndarray, magnet: np.ndarray, q: np.ndarray, eta: float, alpha: float
) -> np.ndarray:
    """Return the policy of one update, ``(before magnet^(alpha eta) e^(eta q))^(1/(1+alpha eta))``.

    Normalised; Sokota et al. 2023, arXiv 2206.05825, for policies with the same support.
    """
    pi = np.zeros_like(before)
    for i in np.flatnonzero(before > 0):
        logit = np.log(before[i]) + alpha * eta * np.log(magnet[i]) + eta * q[i]
        pi[i] = np.exp(logit / (1 + alpha * eta))
    return pi / pi.sum()


@pytest.mark.parametrize("legal", [(1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1)], ids=str)
def test_the_loss_is_least_at_the_closed_form(legal):
    rng, mask = np.random.default_rng(0), np.array(legal, bool)
    before, magnet = (np.where(mask, rng.dirichlet(np.ones(4)), 0.0) for _ in range(2))
    before, magnet = before / before.sum(), magnet / magnet.sum()
    q, eta, alpha = rng.normal(size=4), 0.7, 0.3
    kl = Categorical(spaces.Discrete(4)).kl

    def logits(pi: np.ndarray) -> jax.Array:
        return jnp.asarray(np.log(pi, out=np.full(4, ILLEGAL), where=mask), jnp.float32)

    def loss(x: jax.Array) -> jax.Array:
        x = jnp.where(mask, x, ILLEGAL)
        gain = jnp.sum(jax.nn.softmax(x) * q)
        return -gain + alpha * kl(x, logits(magnet)) + kl(x, logits(before)) / eta

    best = logits(closed_form(before, magnet, q, eta, alpha))
    np.testing.assert_allclose(jax.grad(loss)(best), 0.0, atol=1e-6)
    for _ in range(20):
        other = jnp.where(mask, best + rng.normal(size=4), best)
        assert loss(other) > loss(best)
        assert np.isfinite(jax.grad(loss)(other)).all()


def kl_by_sums(p: np.ndarray, q: np.ndarray) -> float:
    return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def test_divergences_are_those_of_numpy():
    rng = np.random.default_rng(1)
    own, other = rng.normal(size=(2, 5, 7)).astype(np.float32)
    softmax = lambda x: np.exp(x) / np.exp(x).sum()  # noqa: E731
    expected = [
        kl_by_sums(softmax(a[:3]), softmax(b[:3])) + kl_by_sums(softmax(a[3:]), softmax(b[3:]))
        for a, b in zip(own, other, strict=True)
    ]
    np.testing.assert_allclose(make_distribution(MULTI).kl(own, other), expected, rtol=1e-4)
    # Of Gaussians, the mean over samples of what the log-probabilities differ by.
    gaussian = make_distribution(spaces.Box(-1, 1, (2,), np.float32))
    own, other = own[0, :4], other[0, :4]
    own, other = (jnp.tile(x, (200_000, 1)) for x in (own, other))
    raw = gaussian.sample(own, jax.random.key(0))
    gaps = gaussian.log_prob(own, raw) - gaussian.log_prob(other, raw)
    assert gaussian.kl(own, other)[0] == pytest.approx(float(gaps.mean()), rel=0.02)
    assert gaussian.kl(own, own)[0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, BOX_SPEC], ids=["discrete", "box"])
def test_the_penalties_of_ppo(spec):
    plain = PPOConfig(minibatches=1, normalize_advantages=False, **SGD)
    config = dict(entropy_coefficient=0.3, kl_coefficient=2.0, magnet_rate=0.5)
    with_both = Fed(PPOConfig(minibatches=1, normalize_advantages=False, **config, **SGD), spec)
    loss, _ = with_both.loss(with_both.experience)
    base, _ = Fed(plain, spec).loss(with_both.experience)
    assert float(loss) == pytest.approx(float(base), abs=1e-5), (
        "magnet and policy are where they began"
    )

    batch, agent = with_both.experience.batch, with_both.agent
    noise = 0.1 * jax.random.normal(jax.random.key(1), batch.params.shape)
    moved = batch._replace(params=batch.params + noise)
    other = jax.tree.map(lambda x: x + 0.1, with_both.networks)
    with_both.opt = with_both.opt._replace(magnet=other)
    loss, _ = with_both.loss(with_both.experience._replace(batch=moved))
    valid = np.asarray(batch.valid)
    params = agent.evaluate(with_both.networks, batch.obs, (), batch.is_first).params
    magnet = agent.evaluate(other, batch.obs, (), batch.is_first).params
    near, far = (
        np.asarray(agent.distribution.kl(params, x))[valid].mean() for x in (moved.params, magnet)
    )
    assert far > 0 and near > 0
    assert float(loss) == pytest.approx(float(base) + 2.0 * near + 0.3 * far, rel=1e-4)


def test_the_magnet_follows_the_networks():
    agent = PPO(SPEC, PPOConfig(magnet_rate=0.25, **SGD))
    state = quick_state(agent, run_spec())
    grads = jax.tree.map(jnp.ones_like, state.networks)
    networks, opt = jax.jit(agent.optimize)(state.networks, state.opt, grads)
    assert isinstance(opt, MagnetOpt)
    expected = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, state.networks, networks)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), opt.magnet, expected)
    plain = PPO(SPEC, PPOConfig(**SGD))
    assert not isinstance(quick_state(plain, run_spec()).opt, MagnetOpt)


@pytest.mark.parametrize("kind", ["sgd", "adam", "rmsprop"])
def test_a_temperature_falls_with_the_learning_rate(kind):
    config = OptimizerConfig(kind, schedule="linear", schedule_updates=4)
    optimizer, networks = make_optimizer(0.1, config), {"w": jnp.ones(3)}
    opt, seen = optimizer.init(networks), []
    for _ in range(6):
        seen.append(float(annealed(0.3, 0.1, config, opt)))
        opt = optimizer.update(networks, opt, networks)[1]
    np.testing.assert_allclose(seen, [0.3, 0.25, 0.2, 0.15, 0.1, 0.1], rtol=1e-5)
    assert annealed(0.3, None, config, opt) == 0.3


@pytest.mark.parametrize(
    ("agent", "config"), [(PPO, PPOConfig), (Impala, ImpalaConfig)], ids=["ppo", "impala"]
)
def test_a_temperature_that_falls_needs_a_learning_rate_that_falls(agent, config):
    with pytest.raises(UsageError, match=r"final_entropy_coefficient=0.1 is .*anneal"):
        agent(SPEC, config(final_entropy_coefficient=0.1)).check_run(run_spec())
    falls = OptimizerConfig(schedule="linear", schedule_updates=9)
    agent(SPEC, config(final_entropy_coefficient=0.1, optimizer=falls)).check_run(run_spec())


@pytest.mark.parametrize(
    "wrong", [{"kl_coefficient": -1.0}, {"magnet_rate": 1.5}, {"final_entropy_coefficient": -0.1}]
)
def test_wrong_values_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=rf"{name}=.*; use"):
        PPOConfig(**wrong)


PAYOFF = np.array([[0.0, -0.5, 1.0], [0.5, 0.0, -0.1], [-1.0, 0.1, 0.0]], np.float32)
"""Of rock, paper and scissors to who chooses the row."""
EQUILIBRIUM = np.array([1, 10, 5]) / 16


class RockPaperScissors:
    """Both choose at once, and one game is an episode."""

    node = AgentNode(Obs(spaces.Box(0, 1, (1,), np.float32)), Act(spaces.Discrete(3)))
    tree = Population({"seat_0": node, "seat_1": node}, payoff="zero_sum", symmetric=True)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        return {"seat": jnp.ones((2, 1))}, jnp.int32(0)

    def step(self, key: jax.Array, state: jax.Array, actions: Any) -> Any:
        won = jnp.asarray(PAYOFF)[actions["seat"][0], actions["seat"][1]]
        return {"seat": jnp.ones((2, 1))}, state, {"seat": jnp.stack([won, -won])}, True, False


def self_play(cycles: int = 500, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the last policy of self-play in biased rock-paper-scissors, and the average one.

    The average is over all actions of the second half.
    """
    updates = OptimizerConfig(schedule="linear", schedule_updates=cycles * 4)
    config = PPOConfig(
        learning_rate=5e-3, epochs=4, minibatches=1, normalize_advantages=False, discount=1.0,
        torso=TorsoConfig(hidden_sizes=(16,)), optimizer=updates, **fields,
    )  # fmt: skip
    agent: Any = make_agent(sebulba.env_spec(RockPaperScissors), config)
    counts: list[np.ndarray] = []

    def observe(trajectory: Any, infos: Any) -> None:
        counts.append(np.bincount(np.asarray(trajectory.action["seat"]).ravel(), minlength=3))

    with sebulba.GymnasiumLoop(
        RockPaperScissors, agent, 128, schedule="lockstep",
        num_inferencers_per_device=1, inference_devices=[0], update_devices=[0],
        observe_cycle=observe,
    ) as loop:  # fmt: skip
        result = loop.train(total_env_steps=cycles * 128 * 8, steps_per_cycle=8)
    own = agent.members["seat"].agent
    obs, is_first = jnp.ones((1, 1, 1)), np.zeros((1, 1), bool)
    output = own.evaluate(result.state.networks["seat"], obs, (), is_first)
    average = np.sum(counts[cycles // 2 :], axis=0)
    return np.asarray(jax.nn.softmax(output.params[0, 0])), average / average.sum()


def test_the_equilibrium_is_that_of_the_payoff():
    np.testing.assert_allclose(PAYOFF @ EQUILIBRIUM, 0.0, atol=1e-7)


@pytest.mark.slow
def test_mirror_descent_finds_the_equilibrium_of_biased_rock_paper_scissors():
    last, average = self_play(entropy_coefficient=0.1, kl_coefficient=2.0, magnet_rate=0.005)
    np.testing.assert_allclose(last, EQUILIBRIUM, atol=0.05)
    np.testing.assert_allclose(average, EQUILIBRIUM, atol=0.05)


@pytest.mark.slow
def test_the_latest_policy_alone_does_not():
    last, _ = self_play()
    assert 2 * (PAYOFF @ last).max() > 0.2, "its NashConv"
    assert np.abs(last - EQUILIBRIUM).max() > 0.2

"""SAC of discrete actions: its loss beside a loop of the paper's equations, masks, and acting."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.configs import SACConfig, TorsoConfig, make_agent
from sebulba.agents.replay.transitions_and_sequences import Transition
from sebulba.agents.sac import SAC, TARGET_SHARE, DiscreteSAC
from sebulba.runs.build import build_agent
from sebulba.runs.read_config import read_config
from sebulba.types import EnvSpec, RunSpec, empty_env_step
from tests.support.actor_critic import GivenReplay, column, linear, spaces

THREE = EnvSpec(spaces.Box(-9, 9, (1,)), spaces.Discrete(3, start=2))
PLAIN = TorsoConfig(hidden_sizes=())
ACTOR, Q, P, TARGETS = (
    [1.0, 0.1, -0.5],
    [1.0, 2.0, 0.5],
    [2.0, -1.0, 0.3],
    ([1.0, 0.5, -1.0], [0.7, 1.5, 0.2]),
)
"""Logits and values of the three actions, times what is observed."""
NETWORKS = {
    "actor": linear(ACTOR),
    "critics": (linear(Q), linear(P)),
    "log_temperature": jnp.log(jnp.float32(0.5)),
}
TRANSITIONS = Transition(
    obs=column(1, 2),
    action=jnp.asarray([4, 3], jnp.int32),
    extras=(),
    reward=jnp.asarray([1.0, 2.0]),
    discount=jnp.asarray([0.9, 0.0]),
    next_obs=column(2, 3),
)


def loss_and_gradient(**config: Any) -> Any:
    agent: Any = SAC(THREE, SACConfig(torso=PLAIN, **config))
    replay = GivenReplay(agent, (1.0, 0.5))
    replay.gathered = lambda *_: TRANSITIONS  # type: ignore[method-assign]
    opt = Opt((), tuple(linear(row) for row in TARGETS), jnp.int32(0))
    gradient = jax.value_and_grad(agent.loss, has_aux=True)
    return gradient(NETWORKS, opt, (), jax.random.key(0))


def softmax(logits: Any) -> np.ndarray:
    shares = np.exp(np.asarray(logits) - np.max(logits))
    return shares / shares.sum()


def test_loss_and_gradients_are_those_of_the_equations() -> None:
    (loss, (priority, metrics)), gradient = loss_and_gradient()
    alpha, weight = 0.5, (1.0, 0.5)
    critic_loss, actor_loss, entropies, sizes = 0.0, 0.0, [], []
    of_actor = np.zeros(3)
    for n in range(2):
        obs, following = float(TRANSITIONS.obs[n, 0]), float(TRANSITIONS.next_obs[n, 0])
        # Equation 10: V(s') = pi(s')^T (min Q(s') - alpha log pi(s'))
        pi = softmax(np.multiply(ACTOR, following))
        least = np.minimum(*np.multiply(TARGETS, following))
        value = float(np.dot(pi, least - alpha * np.log(pi)))
        target = float(TRANSITIONS.reward[n]) + float(TRANSITIONS.discount[n]) * value
        errors = [obs * critic[int(TRANSITIONS.action[n]) - 2] - target for critic in (Q, P)]
        critic_loss += sum(0.5 * weight[n] * error**2 for error in errors) / 2
        sizes.append(np.mean(np.abs(errors)))
        # Equation 12: pi(s)^T (alpha log pi(s) - min Q(s))
        pi = softmax(np.multiply(ACTOR, obs))
        cost = alpha * np.log(pi) - np.minimum(np.multiply(Q, obs), np.multiply(P, obs))
        actor_loss += float(np.dot(pi, cost)) / 2
        of_actor += pi * (cost - np.dot(pi, cost)) * obs / 2
        entropies.append(-float(np.dot(pi, np.log(pi))))
    # Equation 11, with half the entropy of random actions as target.
    temperature_loss = alpha * (np.mean(entropies) - TARGET_SHARE * np.log(3))
    assert metrics["critic_loss"] == pytest.approx(critic_loss, rel=1e-5)
    assert metrics["actor_loss"] == pytest.approx(actor_loss, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert loss == pytest.approx(critic_loss + actor_loss + temperature_loss, rel=1e-5)
    np.testing.assert_allclose(priority, sizes, rtol=1e-5)
    np.testing.assert_allclose(gradient["actor"]["head"]["kernel"][0], of_actor, rtol=1e-4)
    assert gradient["log_temperature"] == pytest.approx(temperature_loss, rel=1e-5)
    # Critics learn the values of the actions that were taken, and of no others.
    first = gradient["critics"][0]["head"]["bias"]
    assert first[0] == 0 and np.all(np.asarray(first[1:]) != 0)


def test_a_target_entropy_that_is_given_is_in_nats() -> None:
    (_, (_, metrics)), gradient = loss_and_gradient(target_entropy=0.2)
    wanted = 0.5 * (float(metrics["entropy"]) - 0.2)
    assert gradient["log_temperature"] == pytest.approx(wanted, rel=1e-5)


# Legal actions.

MASKED = EnvSpec(
    spaces.Dict({"x": spaces.Box(-9, 9, (1,)), "mask": spaces.MultiBinary(4)}),
    spaces.Discrete(4),
    legal_actions="mask",
)


def masked_row(mask: Any, agent: Any) -> Any:
    mask = jnp.asarray(mask, jnp.int8)
    row = empty_env_step(agent.spec, mask.shape[0])
    return row._replace(obs={"x": jnp.ones((mask.shape[0], 1)), "mask": mask})


@pytest.mark.parametrize("random_env_steps", [0, 10_000])
def test_takes_legal_actions_only(random_env_steps: int) -> None:
    config = SACConfig(torso=PLAIN, random_env_steps=random_env_steps)
    agent: Any = SAC(MASKED, config)
    actor = agent.new_networks(jax.random.key(0))["actor"]
    actor["head"]["bias"] = jnp.asarray([3.0, 0.0, 0.0, 0.0])
    row = masked_row([[0, 1, 1, 0]] * 200, agent)
    state = agent.new_step_state(jax.random.key(1), RunSpec(200, 1, 4, 1), 0)
    step = jax.jit(agent.step, static_argnames="explore")
    output, state = step(actor, state, row)
    assert sorted(np.unique(output.action)) == [1, 2]
    assert 70 < np.sum(np.asarray(output.action) == 1) < 130
    output, _ = step(actor, state, row, explore=False)
    assert set(np.unique(output.action)) <= {1, 2}
    probability = agent.acting_distribution(actor, state, row)
    np.testing.assert_array_equal(np.asarray(probability)[:, [0, 3]], 0.0)


def test_the_target_entropy_follows_the_number_of_legal_actions() -> None:
    agent: Any = SAC(MASKED, SACConfig(torso=PLAIN))
    row = masked_row([[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]], agent)
    got = agent.target_entropy(agent.encode(row.obs, num_leading=1))
    assert got == pytest.approx(TARGET_SHARE * np.mean(np.log([4, 1, 2])), rel=1e-6)


def test_actions_that_are_illegal_count_for_nothing_in_the_loss() -> None:
    agent: Any = SAC(MASKED, SACConfig(torso=PLAIN))
    networks = agent.new_networks(jax.random.key(0))
    obs = agent.encode(masked_row([[0, 1, 1, 0]], agent).obs, num_leading=1)

    def value(networks: Any) -> Any:
        probability, log_prob = agent.sampled(networks["actor"], obs, jax.random.key(0))
        outputs = agent.outputs(networks["critics"], obs, probability)
        least = agent.of_action(jnp.min(outputs, axis=0), probability)
        return jnp.sum(least - log_prob)

    gradient = jax.grad(value)(networks)
    bias = np.asarray(gradient["critics"][0]["head"]["bias"])
    assert np.all(bias[[0, 3]] == 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


# Acting.


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_actions_are_samples_of_the_softmax_whatever_their_correlation(correlation: float) -> None:
    num_envs = 4000
    agent: Any = SAC(THREE, SACConfig(torso=PLAIN, noise_correlation=correlation))
    row = empty_env_step(THREE, num_envs)._replace(obs=jnp.ones((num_envs, 1)))
    state = agent.new_step_state(jax.random.key(1), RunSpec(num_envs, 1, 4, 1), 0)
    step, taken = jax.jit(agent.step), []
    for _ in range(3):
        output, state = step(NETWORKS["actor"], state, row)
        taken.append(np.asarray(output.action) - 2)
    for index in taken:
        shares = np.bincount(index, minlength=3) / num_envs
        np.testing.assert_allclose(shares, softmax(ACTOR), atol=0.03)
    again = np.mean(taken[1] == taken[2])
    by_chance = np.sum(softmax(ACTOR) ** 2)
    assert again > by_chance + 0.15 if correlation else again == pytest.approx(by_chance, abs=0.04)
    output, _ = jax.jit(agent.step, static_argnames="explore")(
        NETWORKS["actor"], state, row, explore=False
    )
    np.testing.assert_array_equal(output.action, 2)


def test_the_value_of_a_policy_is_that_of_its_best_action() -> None:
    agent: Any = SAC(THREE, SACConfig(torso=PLAIN, reward_scale=0.5))
    state = agent.new_step_state(jax.random.key(1), RunSpec(1, 1, 4, 1), 0)
    row = empty_env_step(THREE, 1)._replace(obs=jnp.ones((1, 1)))
    value = agent.acting_value(NETWORKS["actor"], NETWORKS["critics"], state, row)
    np.testing.assert_allclose(value, [min(1.0, 2.0) / 0.5])


# Which agent.


def test_the_space_of_actions_chooses_the_agent() -> None:
    box = EnvSpec(THREE.observation_space, spaces.Box(-1, 1, (2,)))
    assert type(SAC(box, SACConfig())) is SAC
    for agent in (
        SAC(THREE, SACConfig()),
        SAC(spec=THREE, config=SACConfig()),  # type: ignore[call-arg]
        make_agent(THREE, SACConfig()),
        copy.copy(make_agent(THREE, SACConfig())),
    ):
        assert type(agent) is DiscreteSAC


def test_the_command_needs_no_other_word() -> None:
    _, config = read_config(["sac", "--env.id", "CartPole-v1"], "sebulba train")
    agent = build_agent(config, sebulba.env_spec("CartPole-v1"))
    assert type(agent) is DiscreteSAC


@pytest.mark.parametrize("target", [0.98, 0.0, -1.0])
def test_a_target_entropy_that_no_policy_has_is_refused(target: float) -> None:
    spec = EnvSpec(spaces.Box(-9, 9, (1,)), spaces.Discrete(2))
    with pytest.raises(
        sebulba.UsageError, match=r"target_entropy=.* between 0 and 0.693.*; use None"
    ):
        make_agent(spec, SACConfig(target_entropy=target))

"""Noisy layers beside a loop of the paper's equations, and how DQN explores by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.configs import DQNConfig
from sebulba.agents.dqn import DQN
from sebulba.agents.nets.q_networks import NOISE, NoisyDense, QHead
from sebulba.errors import UsageError
from sebulba.tools.check.agent_driver import Streams, run_spec
from tests.agents.test_dqn import TINY, with_axis
from tests.support.agent_driver import SPEC, Driver, quick_state

NOISY = dataclasses.replace(TINY, noisy=True, head_hidden_sizes=(5,))


def test_a_layer_is_that_of_the_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, of_inputs, of_outputs = (rng.normal(size=(3, n)).astype(np.float32) for n in (4, 4, 2))
    given = iter([of_inputs, of_outputs])
    draw = jax.random.normal
    monkeypatch.setattr(jax.random, "normal", lambda *_: jnp.asarray(next(given)))
    layer = NoisyDense(2)
    p: Any = {
        name: {"kernel": rng.normal(size=(4, 2)), "bias": rng.normal(size=2)}
        for name in ("mean", "noise")
    }
    got = layer.apply({"params": p}, x, rngs={NOISE: jax.random.key(0)})
    monkeypatch.setattr(jax.random, "normal", draw)
    quiet = layer.apply({"params": p}, x)

    def f(e: Any) -> Any:
        return np.sign(e) * np.sqrt(np.abs(e))

    for n in range(3):
        for j in range(2):
            total, mean = 0.0, float(p["mean"]["bias"][j])
            for i in range(4):
                noise = f(of_inputs[n, i]) * f(of_outputs[n, j])
                total += (p["mean"]["kernel"][i, j] + p["noise"]["kernel"][i, j] * noise) * x[n, i]
                mean += p["mean"]["kernel"][i, j] * x[n, i]
            total += p["mean"]["bias"][j] + p["noise"]["bias"][j] * f(of_outputs[n, j])
            np.testing.assert_allclose(got[n, j], total, rtol=1e-5)
            np.testing.assert_allclose(quiet[n, j], mean, rtol=1e-5)


def test_parameters_begin_as_in_the_paper() -> None:
    parameters: Any = NoisyDense(300).init(jax.random.key(0), jnp.zeros((1, 100)))["params"]
    for name in ("kernel", "bias"):
        assert np.abs(parameters["mean"][name]).max() <= 0.1
        assert np.std(parameters["mean"][name]) == pytest.approx(0.1 / np.sqrt(3), rel=0.1)
        np.testing.assert_allclose(parameters["noise"][name], 0.5 / 10, rtol=1e-6)


def test_rows_and_draws_have_noise_of_their_own() -> None:
    head = QHead(num_actions=3, hidden_sizes=(5,), dueling=True, atoms=4, noisy=True)
    features = jnp.ones((2, 7))
    variables: Any = head.init(jax.random.key(1), features)
    one, other = (head.apply(variables, features, rngs={NOISE: jax.random.key(i)}) for i in (0, 1))
    assert one.shape == (2, 3, 4)
    assert np.abs(one[0] - one[1]).min() > 0 and np.abs(one - other).min() > 0
    quiet = head.apply(variables, features)
    np.testing.assert_array_equal(quiet[0], quiet[1])


def test_explores_by_noise_alone_and_evaluates_without() -> None:
    agent: Any = DQN(SPEC, NOISY)
    state = quick_state(agent, run_spec())
    step_state = state.step[0]
    assert float(jnp.max(step_state.epsilon.value)) == 0.0
    row = Streams(agent, state).first_row(0)
    step = jax.jit(agent.step, static_argnames="explore")
    best = 2 + np.argmax(agent.values(state.networks, row.obs), axis=1)
    output, after = step(state.networks, step_state, row, explore=False)
    np.testing.assert_array_equal(output.action, best)
    chosen = []
    for _ in range(20):
        output, after = step(state.networks, after, row)
        chosen.append(output.action)
    assert np.any(np.stack(chosen) != best[None])
    assert np.any(np.std(np.stack(chosen), axis=0) > 0)


@pytest.mark.slow
def test_online_target_and_choice_have_noise_of_their_own_in_the_loss() -> None:
    agent: Any = DQN(SPEC, NOISY)
    driver = Driver(agent)
    for cycle in range(3):
        driver.cycle(cycle % 2)
    networks, opt, experience, _ = driver.state
    keys: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        evaluate = DQN._values_and_logits

        def noted(self: Any, networks: Any, obs: Any, **rngs: Any) -> Any:
            keys.append(rngs[NOISE])
            return evaluate(self, networks, obs, **rngs)

        patch.setattr(DQN, "_values_and_logits", noted)
        key = jax.random.key(3)
        jax.eval_shape(
            lambda x: with_axis(lambda x: agent.loss(networks, opt, x, key), x), experience
        )
    assert len(keys) == 3

    def gradient(key: Any) -> Any:
        loss = lambda n, x: agent.loss(n, opt, x, key)[0]  # noqa: E731
        return with_axis(lambda x: jax.grad(loss)(networks, x), experience)

    one = gradient(jax.random.key(3))
    kernel = one["head"]["advantage"]["noise"]["kernel"]
    assert np.abs(kernel).max() > 0, "the size of the noise is learned"


@pytest.mark.parametrize("options", [{"most_held_steps": 4}, {"epsilon_exponent": 7.0}])
def test_options_of_random_actions_are_refused(options):
    with pytest.raises(UsageError, match="has no use with noisy, without random actions; leave"):
        DQNConfig(noisy=True, **options)

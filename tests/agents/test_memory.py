"""A memory by one word: what it adapts, and its GRU beside an independent reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import PPOConfig, R2D2Config
from sebulba.agents.nets.torso import Core, zero_core
from sebulba.configs.presets import NEUTRAL
from sebulba.errors import UsageError
from sebulba.runs.build import build_agent, notes_of_memory
from sebulba.runs.read_config import parse

ALONE: Any = {"num_inferencers_per_device": 1, "inference_devices": [0], "update_devices": [0]}
WITH_MEMORY = ("ppo", "impala", "r2d2")


@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["--agent.memory", "lstm"], 64),
        (["--agent.memory", "gru", "--agent.lstm-size", "32"], 32),
        (["--agent.lstm-size", "32", "--num-envs", "48"], 32),
        (["--agent.memory", "gru", "--num-envs", "1"], 64),
    ],
)
def test_one_word_is_enough_for_every_neutral_preset(
    name: str, words: list[str], size: int
) -> None:
    config = parse(name, words)
    agent: Any = config.agent
    assert agent.lstm_size == size and not getattr(agent, "separate_value_torso", False)
    minibatches = getattr(agent, "minibatches", 1)
    assert config.num_envs % minibatches == 0
    most = getattr(NEUTRAL[name].make().agent, "minibatches", 1)
    assert not [n for n in range(minibatches + 1, most + 1) if config.num_envs % n == 0]
    notes = " ".join(notes_of_memory(config))
    if name != "r2d2":
        word = agent.memory or "lstm"
        each = config.num_envs // minibatches
        assert f"{word} of {size} units" in notes and f"of {each} of {config.num_envs}" in notes


def test_without_a_memory_nothing_is_adapted() -> None:
    for name in WITH_MEMORY[:2]:
        config = parse(name, ["--num-envs", "3"])
        assert config.agent.minibatches == NEUTRAL[name].make().agent.minibatches  # type: ignore[attr-defined]
        assert not list(notes_of_memory(config))


@pytest.mark.parametrize("name", ["dqn", "sac", "ddpg"])
@pytest.mark.parametrize("word", ["--agent.memory", "--agent.lstm_size=8"])
def test_agents_without_a_memory_name_those_that_have_one(name: str, word: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{word} is for agents with a memory.*{name.upper()}Config.*use r2d2"
    ):
        parse(name, [word, "lstm"])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MEMORY)
def test_every_agent_with_a_gru_trains_and_acts(name: str, tmp_path: Any) -> None:
    words = ["--agent.memory", "gru", "--agent.lstm-size", "8", "--agent.torso.hidden-sizes", "8"]
    words += ["--agent.replay.warm-up-cycles", "8"] if name == "r2d2" else ["--agent.epochs", "1"]
    config = parse(name, [*words, "--num-envs", "4"])
    spec = sebulba.env_spec("CartPole-v1")
    agent = build_agent(config, spec)
    steps = config.steps_per_cycle
    with sebulba.GymnasiumLoop("CartPole-v1", agent, 4, **ALONE) as loop:
        state = loop.new_state(0, steps)
        result = loop.run(state, 10, steps)
    before, after = (one.networks["core"] for one in (state, result.state))
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(moved)) and "GRUCell_0" in after
    sebulba.save_policy(tmp_path, agent, result.acting_networks, loop.run_spec(steps))
    policy = sebulba.load_policy(tmp_path)
    _, remembered = policy(np.zeros(4, np.float32))
    assert jax.tree.leaves(remembered)


def gru(params: Any, state: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the next state: Cho et al. 2014 (arXiv 1406.1078), with a reset after the product."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ params[name]["kernel"] + params[name].get("bias", 0.0)

    r = sigmoid(linear("ir", x) + linear("hr", state))
    z = sigmoid(linear("iz", x) + linear("hz", state))
    n = np.tanh(linear("in", x) + r * linear("hn", state))
    return (1 - z) * n + z * state


def test_a_gru_is_that_of_its_equations_and_forgets_where_episodes_begin() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(5, 3, 2)).astype(np.float32)
    final = rng.normal(size=(5, 3, 2)).astype(np.float32)
    is_first = rng.random((5, 3)) < 0.4
    assert is_first.any() and not is_first.all()
    config = PPOConfig(memory="gru", lstm_size=4)
    core, state = Core(4, "gru"), zero_core(config, 3)
    given = state + 0.5, features.reshape(15, 2), jnp.asarray(is_first), final.reshape(15, 2)
    params: Any = core.init(jax.random.key(0), *given)
    last, (outputs, final_outputs) = core.apply(params, *given)  # type: ignore[misc]
    cell = jax.tree.map(np.asarray, params["params"]["GRUCell_0"])
    now = np.full((3, 4), 0.5, np.float32)
    for t in range(5):
        of_final = gru(cell, now, final[t])
        np.testing.assert_allclose(final_outputs.reshape(5, 3, 4)[t], of_final, atol=1e-5)
        now = gru(cell, np.where(is_first[t][:, None], 0.0, now), features[t])
        np.testing.assert_allclose(outputs.reshape(5, 3, 4)[t], now, atol=1e-5)
    np.testing.assert_allclose(last, now, atol=1e-5)


def test_the_state_of_an_lstm_has_two_parts_and_no_memory_has_none() -> None:
    assert [x.shape for x in zero_core(R2D2Config(lstm_size=5), 2)] == [(2, 5), (2, 5)]
    assert zero_core(PPOConfig(), 2) == ()

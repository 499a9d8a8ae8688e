"""A memory by one word: what it adapts, and its cells beside independent references."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import PPOConfig, R2D2Config
from sebulba.agents.nets.torso import Core, has_convolutions, zero_core
from sebulba.configs.presets import NEUTRAL
from sebulba.errors import UsageError
from sebulba.runs.build import build_agent, notes_of_memory
from sebulba.runs.read_config import parse
from tests.agents import test_suite as suite
from tests.support.agent_suite import AGENTS

ALONE: Any = {"num_inferencers_per_device": 1, "inference_devices": [0], "update_devices": [0]}
WITH_MEMORY = ("ppo", "impala", "r2d2")
CELLS = {"lstm": "OptimizedLSTMCell_0", "gru": "GRUCell_0", "lru": "LRU_0", "gtrxl": "GTrXL_0"}
EACH = ("lstm", "gru", "lru", pytest.param("gtrxl", marks=pytest.mark.slow))


@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["--agent.memory", "lstm"], 64),
        (["--agent.memory", "gru", "--agent.lstm-size", "32"], 32),
        (["--agent.lstm-size", "32", "--num-envs", "48"], 32),
        (["--agent.memory", "gru", "--num-envs", "1"], 64),
        (["--agent.memory", "lru", "--agent.lstm-size", "32"], 32),
        (["--agent.memory", "gtrxl"], 64),
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
@pytest.mark.parametrize(
    ("name", "memory"),
    [*(("ppo", cell) for cell in CELLS), ("impala", "lstm"), ("r2d2", "gru"), ("r2d2", "gtrxl")],
)
def test_every_agent_with_a_memory_trains_and_acts(name: str, memory: str, tmp_path: Any) -> None:
    words = ["--agent.memory", memory, "--agent.lstm-size", "8", "--agent.torso.hidden-sizes", "8"]
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
    assert all(jax.tree.leaves(moved)) and CELLS[memory] in after
    sebulba.save_policy(tmp_path, agent, result.acting_networks, loop.run_spec(steps))
    policy = sebulba.load_policy(tmp_path)
    _, remembered = policy(np.zeros(4, np.float32))
    assert jax.tree.leaves(remembered)


def norm(params: Any, x: np.ndarray) -> np.ndarray:
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return (x - x.mean(-1, keepdims=True)) / deviation * params["scale"] + params["bias"]


def linear(params: Any, x: np.ndarray) -> np.ndarray:
    return x @ params["kernel"] + params.get("bias", 0.0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gru(params: Any, state: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the next state: Cho et al. 2014 (arXiv 1406.1078), with a reset after the product."""
    r = sigmoid(linear(params["ir"], x) + linear(params["hr"], state))
    z = sigmoid(linear(params["iz"], x) + linear(params["hz"], state))
    n = np.tanh(linear(params["in"], x) + r * linear(params["hn"], state))
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


def unrolled(memory: str, rows: int, size: int = 8) -> tuple[Any, Any, Any, Any]:
    """Return what applies a memory, its parameters, what it is given, and what it returns.

    Parameters are moved from the initial ones. Three environments, the last of which begins no
    episode, come from 5 other rows.
    """
    rng, core = np.random.default_rng(0), Core(size, memory)
    config: Any = PPOConfig(memory=memory, lstm_size=size)  # type: ignore[arg-type]

    def given(state: Any, rows: int) -> tuple:
        features, final = rng.normal(size=(2, rows * 3, 2)).astype(np.float32)
        is_first = np.zeros((rows, 3), np.bool_)
        is_first[rows // 3, 0] = is_first[0, 1] = is_first[rows // 2, 1] = True
        return state, features, jnp.asarray(is_first), final

    apply: Any = jax.jit(core.apply)
    new = given(zero_core(config, 3), 5)
    params = jax.jit(core.init)(jax.random.key(0), *new)
    params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), params)
    inputs = given(apply(params, *new)[0], rows)
    return apply, params, inputs, apply(params, *inputs)


@pytest.mark.parametrize("memory", EACH)
def test_rows_at_once_are_rows_one_by_one(memory: str) -> None:
    apply, params, (state, features, is_first, final), (last, outputs) = unrolled(memory, 90)
    for t in range(90):
        row = slice(3 * t, 3 * t + 3)
        state, one = apply(params, state, features[row], is_first[t][None], final[row])
        for by_one, at_once in zip(one, outputs, strict=True):
            np.testing.assert_allclose(by_one, at_once[row], atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state, last)


@pytest.mark.parametrize("memory", EACH)
def test_what_was_before_an_episode_changes_nothing(memory: str) -> None:
    apply, params, (state, features, is_first, final), _ = unrolled(memory, 4)
    is_first = jnp.zeros_like(is_first).at[1].set(True)
    moved = jax.tree.map(lambda x: x + 1.0, state), np.array(features), is_first, final
    moved[1][:3] += 1.0
    outputs = [
        apply(params, *given)[1][0].reshape(4, 3, 8)
        for given in ((state, features, is_first, final), moved)
    ]
    assert np.abs(outputs[0] - outputs[1])[0].min() > 0
    np.testing.assert_allclose(outputs[0][1:], outputs[1][1:], atol=1e-6)


def lru(p: Any, state: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the next complex state and the output of one step (arXiv 2303.06349, section 3)."""
    decay = np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"]))
    u = linear(p["Dense_0"], x)
    size = u.shape[-1]
    b, c = p["Dense_2"]["kernel"], p["Dense_3"]["kernel"]
    b, c = b[:, :size] + 1j * b[:, size:], c[:size] - 1j * c[size:]
    state = decay * state + np.exp(p["gamma"]) * (norm(p["LayerNorm_0"], u) @ b)
    y = (state @ c).real + p["skip"] * norm(p["LayerNorm_0"], u)
    gelu = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    inner = linear(p["Dense_1"], gelu)
    return state, u + inner[..., :size] * sigmoid(inner[..., size:])


def test_an_lru_is_that_of_its_equations() -> None:
    _, params, (state, features, is_first, final), (last, outputs) = unrolled("lru", 20)
    cell = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"]["LRU_0"])
    now = np.asarray(state[0]) + 1j * np.asarray(state[1])
    assert np.abs(now).min() > 0
    rows = [np.reshape(x, (20, 3, -1)) for x in (features, final, *outputs)]
    for x, x_final, output, of_final, first in zip(*rows, is_first, strict=True):
        np.testing.assert_allclose(of_final, lru(cell, now, x_final)[1], atol=1e-4)
        now, expected = lru(cell, np.where(first[:, None], 0.0, now), x)
        np.testing.assert_allclose(output, expected, atol=1e-4)
    np.testing.assert_allclose(last[0] + 1j * last[1], now, atol=1e-4)


def test_an_lru_begins_on_a_ring_and_with_inputs_of_a_size_that_fits() -> None:
    config: Any = PPOConfig(memory="lru", lstm_size=64)
    given = zero_core(config, 1), jnp.zeros((1, 2)), jnp.zeros((1, 1), jnp.bool_), ()
    p: Any = jax.jit(Core(64, "lru").init)(jax.random.key(0), *given)["params"]["LRU_0"]  # type: ignore[arg-type]
    radius = np.exp(-np.exp(p["nu"]))
    assert 0.9 <= radius.min() < 0.91 < 0.98 < radius.max() <= 0.999
    np.testing.assert_allclose(np.exp(2 * p["gamma"]), 1 - radius**2, rtol=1e-3)


def gate(p: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    wr, wz, wg = np.split(p["y"]["kernel"], 3, axis=-1)
    ur, uz = np.split(p["x"]["kernel"], 2, axis=-1)
    r, z = sigmoid(y @ wr + x @ ur), sigmoid(y @ wz + x @ uz - p["bias"])
    return (1 - z) * x + z * np.tanh(y @ wg + (r * x) @ p["rx"]["kernel"])


def gtrxl(p: Any, past: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return the output of one step of one environment (arXiv 1910.06764, section 3)."""
    a, heads = p["_Attention_0"], 4
    seen = norm(a["LayerNorm_0"], np.stack([*past, x]))
    size = len(x)
    far = np.arange(len(past), -1, -1)[:, None]
    angle = far / 10000.0 ** (np.arange(size // 2) / (size // 2))
    position = np.concatenate([np.sin(angle), np.cos(angle)], -1) @ a["r"]["kernel"]
    query = linear(a["q"], seen[-1])
    keys, values = linear(a["k"], seen), linear(a["v"], seen)
    found = []
    for h in np.split(np.arange(size), heads):
        logits = (
            keys[:, h] @ (query + a["content"])[h] + position[:, h] @ (query + a["distance"])[h]
        )
        weight = np.exp(logits / np.sqrt(len(h)))
        found.append(weight / weight.sum() @ values[:, h])
    y = linear(a["out"], np.concatenate(found))
    x = gate(p["_Gate_0"], x, np.maximum(y, 0))
    y = np.maximum(linear(p["Dense_1"], norm(p["LayerNorm_0"], x)), 0)
    return gate(p["_Gate_1"], x, np.maximum(linear(p["Dense_2"], y), 0))


@pytest.mark.slow
def test_a_gtrxl_is_that_of_its_equations_and_sees_64_rows() -> None:
    rows = 110
    _, params, (state, features, is_first, final), (last, outputs) = unrolled("gtrxl", rows)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"]["GTrXL_0"])
    is_long = False
    for env in range(3):
        count = int(state[1][env])
        past = list(np.asarray(state[0][env, 64 - count :]))
        assert 0 < count == len(past) and not np.asarray(state[0][env, : 64 - count]).any()
        for t in range(rows):
            of_row = [np.reshape(x, (rows, 3, -1))[t, env] for x in (features, final, *outputs)]
            x, x_final = linear(p["Dense_0"], of_row[0]), linear(p["Dense_0"], of_row[1])
            np.testing.assert_allclose(of_row[3], gtrxl(p, past[-64:], x_final), atol=1e-4)
            past = [] if is_first[t, env] else past
            np.testing.assert_allclose(of_row[2], gtrxl(p, past[-64:], x), atol=1e-4)
            past.append(x)
            is_long |= len(past) > 64
        assert last[1][env] == min(len(past), 64)
        np.testing.assert_allclose(last[0][env, -len(past) :], past[-64:], atol=1e-4)
    assert is_long


@pytest.mark.parametrize("memory", EACH)
def test_no_kernel_is_taken_for_that_of_a_convolution(memory: str) -> None:
    assert not has_convolutions(unrolled(memory, 20)[1])


def test_the_state_of_an_lstm_has_two_parts_and_no_memory_has_none() -> None:
    assert [x.shape for x in zero_core(R2D2Config(lstm_size=5), 2)] == [(2, 5), (2, 5)]
    assert zero_core(PPOConfig(), 2) == ()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "memory"), [("ppo", "lru"), ("r2d2", "gtrxl")])
def test_an_agent_is_the_same_on_four_devices_and_learns_from_what_happened(
    name: str, memory: str, monkeypatch: Any
) -> None:
    case = AGENTS[name]
    changed = dataclasses.replace(case.config, memory=memory, lstm_size=8)  # type: ignore[arg-type]
    monkeypatch.setitem(AGENTS, name, dataclasses.replace(case, config=changed, remembers=True))
    suite.TestUpdates().test_four_devices_are_one(name)
    suite.TestUpdates().test_masked_cells_change_nothing(name)
    suite.test_what_is_learned_from_is_what_happened(name)

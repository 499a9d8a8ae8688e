"""Exported policies do what ``load_policy`` does."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba.agents.configs import (
    DDPGConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    SACConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.commands import cli
from sebulba.errors import UsageError
from sebulba.policies.export import check
from sebulba.policies.export.acting import acting_of, in_float32
from sebulba.policies.export.check import OBSERVATIONS, largest_difference
from sebulba.policies.export.forms import FORMS
from sebulba.policies.policy import Policy
from sebulba.types import EnvSpec
from tests.video.test_video import SMALL, refused

FLAT, IMAGE = spaces.Box(-2, 2, (5,)), spaces.Box(0, 255, (4, 36, 36), np.uint8)
CHOICE = spaces.Discrete(4, dtype=np.int32)
FORCE = spaces.Box(np.float32([-1, -3]), np.float32([1, 5]))
PARTS = spaces.Dict({"left": FLAT, "right": spaces.Box(-1, 1, (2, 2))})
SIZES = TorsoConfig(hidden_sizes=(16,), image_features=16)
POLICIES: dict[str, tuple[Any, Any, Any]] = {
    "MLP, discrete": (ImpalaConfig(torso=SIZES), FLAT, CHOICE),
    "MLP, normalised, continuous": (PPOConfig(torso=SIZES), FLAT, FORCE),
    "MLP, parts": (ImpalaConfig(torso=SIZES), PARTS, CHOICE),
    "MLP, several choices": (
        ImpalaConfig(torso=SIZES),
        FLAT,
        spaces.MultiDiscrete([3, 2], dtype=np.int32),
    ),
    "CNN, discrete": (ImpalaConfig(torso=SIZES), IMAGE, CHOICE),
    "LSTM, discrete": (ImpalaConfig(torso=SIZES, lstm_size=8), FLAT, CHOICE),
    "LSTM, continuous": (PPOConfig(torso=SIZES, lstm_size=8), FLAT, FORCE),
    "LRU, continuous": (PPOConfig(torso=SIZES, memory="lru", lstm_size=8), FLAT, FORCE),
    "GTrXL, discrete": (ImpalaConfig(torso=SIZES, memory="gtrxl", lstm_size=8), FLAT, CHOICE),
    "CNN and LSTM": (ImpalaConfig(torso=SIZES, lstm_size=8), IMAGE, CHOICE),
    "LSTM, 64 bits": (
        ImpalaConfig(torso=SIZES, lstm_size=8),
        spaces.Box(-2, 2, (5,), np.float64),
        spaces.Discrete(4, dtype=np.int64),
    ),
    "MLP, bits": (ImpalaConfig(torso=SIZES), spaces.MultiBinary(6), CHOICE),
    "MLP, small numbers": (
        ImpalaConfig(torso=SIZES),
        spaces.Box(-100, 3000, (4,), np.int16),
        CHOICE,
    ),
    "MLP, bfloat16": (
        ImpalaConfig(torso=dataclasses.replace(SIZES, dtype="bfloat16")),
        FLAT,
        CHOICE,
    ),
    "DQN": (DQNConfig(torso=SIZES, normalize_observations=True), FLAT, CHOICE),
    "R2D2": (R2D2Config(torso=SIZES, lstm_size=8), FLAT, CHOICE),
    "SAC": (SACConfig(torso=SIZES, normalize_observations=True), FLAT, FORCE),
    "DDPG": (DDPGConfig(torso=SIZES), FLAT, FORCE),
}


def policy_of(name: str) -> Policy:
    """Return a policy with networks as they are drawn."""
    config, observes, does = POLICIES[name]
    agent = make_agent(EnvSpec(observes, does, name="Task-v0"), config)
    key = jax.random.key(0)
    networks = agent.new_networks(key)
    run = sebulba.RunSpec(4, 1, 5, 1)
    experience = agent.new_experience(key, networks, run)
    return in_float32(Policy(agent, agent.acting_networks(networks, experience), run))


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("form", ["stablehlo", "onnx"])
def test_it_equals_the_policy(name, form, tmp_path):
    if form == "onnx":
        pytest.importorskip("jax2onnx")
    policy = policy_of(name)
    acting = acting_of(policy, 8)
    run = FORMS[form](acting, tmp_path / "policy")
    assert largest_difference(policy, acting, run) <= 1e-5
    assert bool(acting.initial) == bool(getattr(POLICIES[name][0], "lstm_size", 0))
    assert "is_first" in {port.name for port in acting.inputs} or not acting.initial


def test_a_thousand_observations_are_tried(monkeypatch):
    policy = policy_of("MLP, discrete")
    acting = acting_of(policy, 8)
    tried = []

    def run(inputs):
        tried.append(len(inputs[0]))
        return [np.asarray(one) for one in acting.function(*inputs)]

    assert largest_difference(policy, acting, run) <= 1e-6  # the program is another
    assert sum(tried) >= OBSERVATIONS == 1000


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["action", "probabilities", "memory"])
def test_what_differs_is_not_kept(spoil):
    policy = policy_of("LSTM, discrete")
    acting = acting_of(policy, 8)
    names = [port.name for port in acting.outputs]
    first = next(iter(acting.carried.values()))

    def run(inputs):
        found = {
            name: np.asarray(one) for name, one in zip(names, acting.function(*inputs), strict=True)
        }
        match spoil:
            case "action":
                found["action"] = (found["action"] + 1) % 4
            case "probabilities":
                found["probabilities"] = found["probabilities"] + 1e-4
            case "memory":
                found[first] = found[first] * 0.9
        return [found[name] for name in names]

    with pytest.raises(UsageError, match="and 1e-05 is allowed; it is not kept"):
        largest_difference(policy, acting, run)


def test_choices_that_are_as_likely_may_change_places():
    likely = np.array([[0.5, 0.5], [0.4, 0.6]], np.float32)
    found = {"action": np.array([1, 1]), "probabilities": likely}
    right = {"action": np.array([0, 1]), "probabilities": likely}
    assert check._difference(found, right) == 0
    right["action"] = np.array([0, 0])
    assert check._difference(found, right) == pytest.approx(0.2)
    del found["probabilities"], right["probabilities"]
    assert check._difference(found, right) == float("inf")


def test_stablehlo_needs_nothing_but_jax(tmp_path):
    policy = policy_of("LSTM, discrete")
    acting = acting_of(policy, 2)
    FORMS["stablehlo"](acting, tmp_path / "policy")
    program = jax.export.deserialize(bytearray((tmp_path / "policy").read_bytes()))
    assert program.platforms == ("cpu", "cuda", "rocm", "tpu")
    inputs = [jnp.zeros(port.shape, port.dtype) for port in acting.inputs]
    shapes = [(one.shape, one.dtype.name) for one in program.call(*inputs)]
    assert shapes == [(port.shape, port.dtype) for port in acting.outputs]


@pytest.fixture(scope="module")
def in_c(tmp_path_factory):
    """Return the example in C, compiled, and the library that it loads."""
    (library,) = Path(pytest.importorskip("onnxruntime").__file__).parent.glob(
        "capi/libonnxruntime.so.*"
    )
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("there is no compiler")
    program = tmp_path_factory.mktemp("c") / "run_policy"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    source = Path(__file__).parents[2] / "examples/run_policy.c"
    subprocess.run([compiler, *warnings, "-O2", source, "-o", program, "-ldl"], check=True)
    return program, library


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("SAC", "DDPG")])
def test_the_example_in_c_does_what_the_policy_does(name, in_c, tmp_path):
    pytest.importorskip("jax2onnx")
    policy = policy_of(name)
    acting = acting_of(policy, 1)
    FORMS["onnx"](acting, tmp_path / "policy.onnx")
    num_steps = 200 if "CNN" in name else 1000
    random, state, expected, lines = np.random.default_rng(0), policy.new_state(1), [], []
    for step in range(num_steps):
        obs = check._observations(policy.spec.observation_space, 1, random)
        is_first, reward = step % 10 == 0, random.normal(size=1).astype(np.float32)
        action, state = policy(obs, state, reward=reward, is_first=np.array([is_first]))
        expected.append(np.ravel(action))
        parts = [*jax.tree.leaves(obs), *[reward] * (name == "R2D2")]
        numbers = np.concatenate([np.ravel(part) for part in parts])
        lines.append("reset " * is_first + " ".join(f"{x:.9g}" for x in numbers))
    words, given = [*in_c, tmp_path / "policy.onnx"], "\n".join(lines)
    done = subprocess.run(words, input=given, capture_output=True, text=True, check=True)
    found = np.array([line.split() for line in done.stdout.splitlines()], np.float64)
    assert found.shape == np.shape(expected) and np.abs(found - expected).max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, message",
    [
        ("1 2 3 4 5\n1 2", "the last observation: has too few numbers"),
        ("1 2 three 4 5", "three: is neither a number nor"),
        ("1 reset 2 3 4 5", "reset: is neither a number nor"),
    ],
)
def test_the_example_in_c_refuses_what_is_no_observation(given, message, in_c, tmp_path):
    pytest.importorskip("jax2onnx")
    FORMS["onnx"](acting_of(policy_of("MLP, discrete"), 1), tmp_path / "policy.onnx")
    words = [*in_c, tmp_path / "policy.onnx"]
    done = subprocess.run(words, input=given, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr
    done = subprocess.run([*words[:2], tmp_path / "none"], capture_output=True, text=True)
    assert done.returncode == 1 and "onnxruntime: " in done.stderr


def test_many_agents_are_refused():
    from sebulba.agents.configs import MultiAgentConfig
    from tests.support.populations import Pairs

    config = MultiAgentConfig({"red": ImpalaConfig(), "blue": ImpalaConfig()})
    agent = make_agent(sebulba.env_spec(Pairs), config)
    with pytest.raises(UsageError, match="export that of one, which is in the folder of its name"):
        acting_of(Policy(agent, {}), 1)


# The command.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run of one's own agent, network, environment and wrapper."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    words = [
        "train",
        "impala",
        "--env.id",
        "tests.support.own:MyEnv",
        "--agent.torso",
        "tests.support.own:MyTorso",
    ]
    wrappers = ["--env.wrappers", "tests.support.own:MyWrapper(factor=3)"]
    assert (
        cli.main([*words, *wrappers, *SMALL, "--total-env-steps", "80", "--run-dir", str(folder)])
        == 0
    )
    return folder


@pytest.mark.slow
def test_a_run_of_ones_own_is_exported(run, capsys):
    assert cli.main(["export", str(run), "--to", "stablehlo", "--batch", "3"]) == 0
    said = capsys.readouterr().out
    assert "policy.stablehlo" in said and "for 3 environments at once" in said
    described = json.loads((run / "export/policy.json").read_text())
    assert described["inputs"] == [{"name": "obs", "shape": [3, 3], "dtype": "float32"}]
    assert [port["name"] for port in described["outputs"]] == ["action", "probabilities"]
    assert described["largest_difference"] <= 1e-5 and described["carried"] == {}
    program = jax.export.deserialize(bytearray((run / "export/policy.stablehlo").read_bytes()))
    obs = np.float32([[0, 1, 0.5], [1, 0, 0.5], [0.2, 0.3, 0.5]])
    action, _ = sebulba.load_policy(run)(obs)
    assert (np.asarray(program.call(obs)[0]) == action).all()
    assert sorted(path.name for path in (run / "export").iterdir()) == [
        "policy.json",
        "policy.stablehlo",
    ]


@pytest.mark.slow
def test_a_policy_alone_is_exported(run, capsys, tmp_path):
    policy = sebulba.load_policy(run)
    sebulba.save_policy(tmp_path, policy.agent, policy.acting_networks)
    for folder in (run / "policy", tmp_path):
        assert cli.main(["export", str(folder), "--to", "stablehlo"]) == 0
        assert (folder / "export/policy.stablehlo").exists()
    assert "leave it out" in refused(capsys, "export", str(tmp_path), "--to", "onnx", "--best")
    record = json.loads((tmp_path / "config.json").read_text())
    record["run_id"] = "another"
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert "was changed" in refused(capsys, "export", str(tmp_path), "--to", "stablehlo")


def test_wrong_words_are_refused(run, capsys, tmp_path, monkeypatch):
    for words, expected in [
        (("--to", "stablehlo", "--batch", "0"), "batch=0 must be from 1 to 65,536"),
        (("--to", "stablehlo", "--out", str(tmp_path / "no/such")), "does not exist"),
        (("--to", "tensorflow"), "invalid choice"),
        ((), "required: --to"),
        (("--to", "stablehlo", "--best"), "has no best policy"),
    ]:
        assert expected in refused(capsys, "export", str(run), *words)
    assert "config.json" in refused(capsys, "export", str(tmp_path), "--to", "onnx")
    for form, module, extra in [
        ("onnx", "jax2onnx", "onnx"),
        ("stablehlo", "flatbuffers", "export"),
    ]:
        monkeypatch.setitem(sys.modules, module, None)
        said = refused(capsys, "export", str(run), "--to", form, "--out", str(tmp_path / "out"))
        assert f"pip install 'sebulba[{extra}]'" in said
        assert not list((tmp_path / "out").iterdir())

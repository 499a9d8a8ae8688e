"""Every example is imported from its file and trains; random CartPole episodes return 22."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.tools.test_check_agent import OF_PROGRAMS, OF_UPDATES, findings

EXAMPLES = Path(__file__).parents[2] / "examples"
TESTED = {"impala", "custom_agent", "custom_network", "custom_environment", "curiosity"}
# The tests have 8 devices, and every Inferencer compiles a program of its own. In lockstep a seed
# gives the same networks every time.
OPTIONS = {
    "inference_devices": [0],
    "update_devices": [0],
    "num_inferencers_per_device": 1,
    "schedule": "lockstep",
}


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of the example named by the parameter."""
    path = EXAMPLES / f"{request.param}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


@pytest.mark.slow
@pytest.mark.parametrize("example", ["impala"], indirect=True)
def test_impala_learns(example):
    progress = example.train(seed=0, env_steps=150_000, **OPTIONS)
    assert len(progress.returns) == 100
    assert progress.mean > 100, progress.mean
    assert progress.env_steps_per_s > 0


@pytest.mark.parametrize("example", ["impala"], indirect=True)
def test_impala_is_one_readable_file(example):
    assert len((EXAMPLES / "impala.py").read_text().splitlines()) <= 300


@pytest.mark.slow
@pytest.mark.parametrize("example", ["custom_agent", "custom_network"], indirect=True)
def test_a_custom_agent_and_a_custom_network_learn(example):
    result = example.train(num_cycles=150, **OPTIONS)
    assert result.metrics["episode_return_mean"] > 60


@pytest.mark.slow
@pytest.mark.parametrize("example", ["custom_environment"], indirect=True)
def test_an_agent_learns_in_a_custom_environment(example):
    result = example.train(num_cycles=150, **OPTIONS)
    assert result.metrics["episode_return_mean"] > 0.5  # -0.6 at random, at most 1


@pytest.mark.slow
@pytest.mark.parametrize("example", ["curiosity"], indirect=True)
def test_a_vault_is_not_opened_by_chance(example):  # learning takes half a minute
    assert example.train(seed=0, num_cycles=2, **OPTIONS) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "name", "config"),
    [("custom_agent", "A2C", {}), ("impala", "Impala", {"num_updates": 100})],
    indirect=["example"],
)
def test_check_agent_finds_nothing_in_the_agents(example, name, config):
    configs = {"A2C": "A2CConfig", "Impala": "Config"}
    config = getattr(example, configs[name])(**config)
    assert findings(getattr(example, name), *OF_PROGRAMS, *OF_UPDATES, config=config) == []

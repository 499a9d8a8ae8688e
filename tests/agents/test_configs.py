"""Hyper-parameters: bad ones are refused in words, and JAX is not needed to say so."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest

from sebulba.agents.configs import (
    AgentConfig,
    ImpalaConfig,
    OptimizerConfig,
    SimplePolicyGradientConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.impala import Impala
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError
from sebulba.runs.folder import RunFolder
from sebulba.runs.read_config import parse
from sebulba.types import EnvSpec

spaces = gymnasium.spaces


def test_does_not_import_jax() -> None:
    code = "import sys, sebulba.agents.configs; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_agents_are_found_in_their_package() -> None:
    from sebulba import agents

    for name in agents.__all__:
        assert getattr(agents, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'PP0'; use DDPG, DQN"):
        agents.PP0  # noqa: B018


@pytest.mark.parametrize(
    ("config_class", "name", "value"),
    [
        (ImpalaConfig, "learning_rate", 0.0),
        (ImpalaConfig, "learning_rate", float("nan")),
        (ImpalaConfig, "discount", 1.01),
        (ImpalaConfig, "discount", "0.9"),
        (ImpalaConfig, "entropy_coefficient", -0.1),
        (ImpalaConfig, "value_coefficient", -1.0),
        (ImpalaConfig, "trace_decay", 2.0),
        (ImpalaConfig, "max_rho", 0.0),
        (ImpalaConfig, "lstm_size", -1),
        (ImpalaConfig, "lstm_size", 2.5),
        (SimplePolicyGradientConfig, "reward_scale", -1.0),
        (SimplePolicyGradientConfig, "initial_std", float("inf")),
        (TorsoConfig, "kind", "resnet"),
        (TorsoConfig, "hidden_sizes", (64, 0)),
        (TorsoConfig, "resnet_channels", ()),
        (OptimizerConfig, "kind", "adamw"),
        (OptimizerConfig, "max_grad_norm", -1.0),
        (OptimizerConfig, "schedule_updates", True),
    ],
)
def test_refuses_with_name_and_remedy(config_class: type, name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"{name}=.*; use"):
        config_class(**{name: value})


def test_refuses_a_linear_schedule_without_an_end() -> None:
    with pytest.raises(UsageError, match="schedule_updates=0 must be a whole number of at least 1"):
        OptimizerConfig(schedule="linear")


def test_a_memory_is_shared_by_policy_and_value() -> None:
    for memory in ({"lstm_size": 8}, {"memory": "gru"}):
        assert not ImpalaConfig(separate_value_torso=True, **memory).separate_value_torso
    assert ImpalaConfig(separate_value_torso=True).separate_value_torso


def test_a_configuration_names_its_agent() -> None:
    spec = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2, dtype=np.int32))
    assert isinstance(make_agent(spec, ImpalaConfig()), Impala)
    assert isinstance(make_agent(spec, SimplePolicyGradientConfig()), SimplePolicyGradient)
    for names_none in (TorsoConfig(), AgentConfig()):
        with pytest.raises(UsageError, match="belongs to no agent"):
            make_agent(spec, names_none)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class OwnConfig(ImpalaConfig):
    """A configuration from outside the package, with one option more."""

    agent_class: ClassVar[str] = f"{__name__}:OwnAgent"

    temperature: float = 2.0
    """Of nothing."""


class OwnAgent(Impala):
    pass


def test_an_agent_of_ones_own_needs_no_edit_in_the_package(tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS["cartpole"].make(), agent=OwnConfig())
    words = ["--agent.temperature", "3", "--agent.torso.hidden-sizes", "8"]
    config = parse("cartpole", words, default=config)
    assert config.agent == OwnConfig(temperature=3.0, torso=TorsoConfig(hidden_sizes=(8,)))
    spec = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2, dtype=np.int32))
    assert type(make_agent(spec, config.agent)) is OwnAgent
    folder = RunFolder(tmp_path)
    folder.write_config(config, "cartpole", [])
    assert folder.read_config() == ("cartpole", config)


def test_a_run_folder_finds_the_configurations_of_all_agents(tmp_path: Path) -> None:
    for name in ("halfcheetah", "pong-dqn", "cartpole-r2d2", "pendulum-sac", "pendulum-ddpg"):
        folder, config = RunFolder(tmp_path / name), PRESETS[name].make()
        folder.create()
        folder.write_config(config, name, [])
        assert folder.read_config() == (name, config)


@pytest.mark.parametrize("space", [spaces.Box(0, 9, (2,), np.int32), spaces.MultiBinary(3)])
def test_refuses_action_spaces_without_a_distribution(space: gymnasium.Space) -> None:
    with pytest.raises(UsageError, match="must be a Discrete, a MultiDiscrete or a Box of floats"):
        make_agent(EnvSpec(spaces.Box(-1, 1, (3,)), space), ImpalaConfig())


def test_refuses_images_too_small_for_nature_cnn() -> None:
    spec = EnvSpec(spaces.Box(0, 255, (3, 20, 24), np.uint8), spaces.Discrete(2, dtype=np.int32))
    with pytest.raises(UsageError, match=r"36 x 36 pixels, not 20 x 24; use auto or mlp"):
        make_agent(spec, ImpalaConfig(torso=TorsoConfig("nature_cnn")))

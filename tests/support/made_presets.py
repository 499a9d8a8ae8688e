"""Environments and agents of presets."""

from __future__ import annotations

from typing import Any

import pytest

import sebulba
from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError
from sebulba.runs.build import build_agent


def made(config: ExperimentConfig) -> tuple[Any, sebulba.Agent]:
    """Return a configuration's environment factory and agent; skip without its library."""
    try:
        factory = sebulba.make_env_factory(config.env.id, **config.env.factory_arguments())
        return factory, build_agent(config, sebulba.env_spec(factory))
    except UsageError as error:
        pytest.skip(str(error))

"""``bench train CONFIG`` with ``--compare prototype``, the same training without this library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from benchmarks.studies.prototype_case import make_prototype_case
from sebulba.agent import Agent
from sebulba.configs.experiment import ExperimentConfig
from sebulba.tools.bench import train

PROTOTYPE = "prototype"


def run(config: ExperimentConfig, **options: Any) -> dict[str, Any]:
    """Measure as ``sebulba.tools.bench.train.run`` does, which takes the same options."""
    return train.run(config, others={PROTOTYPE: _prototype}, **options)


def _prototype(
    config: ExperimentConfig, agent: Agent, seconds: float, resources: contextlib.ExitStack
) -> Callable[[], float]:
    prototype = make_prototype_case(config, agent)
    resources.callback(prototype.close)
    prototype.warm_up(seconds)
    return prototype.measure

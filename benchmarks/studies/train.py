"""``bench train CONFIG`` with ``--compare prototype``, the same training without this library."""

from __future__ import annotations

from typing import Any

from benchmarks.studies.prototype_case import make_prototype_case
from sebulba.configs.experiment import ExperimentConfig
from sebulba.tools.bench import train

PROTOTYPE = "prototype"


def run(config: ExperimentConfig, **options: Any) -> dict[str, Any]:
    """Measure as ``sebulba.tools.bench.train.run`` does, which takes the same options."""
    return train.run(config, rivals={PROTOTYPE: make_prototype_case}, **options)

"""Hyper-parameters of SAC."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from sebulba.agents.configs.off_policy import ContinuousControlConfig
from sebulba.support.checks import check_positive, require


@dataclasses.dataclass(frozen=True)
class SACConfig(ContinuousControlConfig):
    """Hyper-parameters of SAC (Haarnoja et al. 2018, arXiv 1801.01290 and 1812.05905)."""

    agent_class: ClassVar[str] = "sebulba.agents.sac:SAC"

    crossq: bool = False
    """Critics with batch renormalisation, over transitions and what follows them in one batch, and
    without target networks (Bhatt et al. 2024, openreview.net/forum?id=PczQtTsTIX)."""
    temperature_learning_rate: float = 1e-3
    """Step size of the temperature's optimizer."""
    initial_temperature: float = 1.0
    """Initial weight of the entropy (alpha)."""
    target_entropy: float | None = None
    """Mean entropy, in nats, which the temperature keeps, of actions scaled to [-1, 1] or of
    discrete ones. None: minus the number of components, or half the entropy of random actions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "temperature_learning_rate", "initial_temperature")
        require(
            self.target_entropy is None or math.isfinite(self.target_entropy),
            "target_entropy",
            self.target_entropy,
            "must be a finite number",
            "use None, which suits the space",
        )
        if self.crossq:
            rule = "has no use with crossq, which has no target networks"
            require(self.target == type(self).target, "target", self.target, rule, "leave it out")
            rule = "cannot be combined with crossq, whose critics normalise batches"
            for name in ("layer_norm", "residual"):
                value = getattr(self.torso, name)
                require(not value, f"torso.{name}", value, rule, "leave one out")

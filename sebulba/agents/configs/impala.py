"""Hyper-parameters of IMPALA."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sebulba.agents.configs.on_policy import ActorCriticConfig
from sebulba.checks import require_positive


@dataclasses.dataclass(frozen=True)
class ImpalaConfig(ActorCriticConfig):
    """Hyper-parameters of IMPALA (Espeholt et al. 2018, arXiv 1802.01561)."""

    agent_class: ClassVar[str] = "sebulba.agents.impala:Impala"

    entropy_coefficient: float = 0.01
    """Weight of the entropy bonus."""
    trace_decay: float = 1.0
    """Lambda: multiplies the trace coefficients c; 1 is the paper's V-trace."""
    max_rho: float = 1.0
    """Clip of the importance weight of a temporal difference (rho-bar)."""
    max_c: float = 1.0
    """Clip of the trace coefficient (c-bar)."""
    max_policy_rho: float = 1.0
    """Clip of the importance weight of the policy gradient."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        for name in ("max_rho", "max_c", "max_policy_rho"):
            require_positive(name, getattr(self, name), "use 1")

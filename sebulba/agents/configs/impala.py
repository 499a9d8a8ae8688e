"""Hyper-parameters of IMPALA."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from sebulba.agents.configs.on_policy import ActorCriticConfig
from sebulba.support.checks import check_positive, check_ranges


@dataclasses.dataclass(frozen=True)
class ImpalaConfig(ActorCriticConfig):
    """Hyper-parameters of IMPALA (Espeholt et al. 2018, arXiv 1802.01561)."""

    agent_class: ClassVar[str] = "sebulba.agents.impala:Impala"

    entropy_coefficient: float = 0.01
    trace_decay: float = 1.0
    """Lambda: multiplies the trace coefficients c; 1 is the paper's V-trace."""
    epochs: int = 1
    """Passes over a trajectory; V-trace corrects for the newer policy."""
    minibatches: int = 1
    """Updates per epoch, each with complete unrolls of a random share of the environments. It
    divides the environments on each update device."""
    normalize_advantages: bool = False
    """Scale advantages to mean 0 and standard deviation 1 in every batch, so that the policy's
    gradient does not depend on the size of rewards."""
    ratio_clip: float = 0.0
    """Largest change of an action's probability ratio from 1 that the loss rewards, as in PPO (Luo
    et al. 2020, arXiv 1912.00167); 0: no limit."""
    max_rho: float = 1.0
    """Clip of the importance weight of a temporal difference (rho-bar)."""
    max_c: float = 1.0
    """Clip of the trace coefficient (c-bar)."""
    max_policy_rho: float = 1.0
    """Clip of the importance weight of the policy gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, epochs=1, minibatches=1, ratio_clip=(0, math.inf))
        check_positive(self, "max_rho", "max_c", "max_policy_rho")

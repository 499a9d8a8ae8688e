"""Hyper-parameters of auxiliaries: members without actions."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sebulba.agents.configs.network_and_optimizer import OptimizerConfig, TorsoConfig
from sebulba.support.checks import check_positive, check_ranges, check_types


@dataclasses.dataclass(frozen=True)
class AuxiliaryConfig:
    """The hyper-parameters of an auxiliary; a subclass adds them and names the auxiliary."""

    auxiliary_class: ClassVar[str] = ""
    """The auxiliary, as ``module:class``; the module is imported when the auxiliary is made."""


@dataclasses.dataclass(frozen=True)
class RandomNetworkDistillationConfig(AuxiliaryConfig):
    """Hyper-parameters of random network distillation (Burda et al. 2018, arXiv 1810.12894)."""

    auxiliary_class: ClassVar[str] = (
        "sebulba.agents.multi.random_network_distillation:RandomNetworkDistillation"
    )

    bonus_scale: float = 0.1
    """A bonus that is one standard deviation of all bonuses so far adds this to a reward."""
    learning_rate: float = 3e-4
    """Step size of the optimizer."""
    updates_per_cycle: int = 1
    """Updates after each trajectory, each with all its rows."""
    features: int = 32
    """Numbers that are predicted for an observation."""
    torso: TorsoConfig = TorsoConfig(activation="relu")
    """Network from observation to features, of predictor and target."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """From gradient to update."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "learning_rate")
        check_ranges(self, bonus_scale=(0, 1e6), updates_per_cycle=1, features=1)

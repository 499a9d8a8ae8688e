"""Hyper-parameters of DDPG."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from sebulba.agents.configs.off_policy import ContinuousControlConfig
from sebulba.support.checks import check_ranges


@dataclasses.dataclass(frozen=True)
class DDPGConfig(ContinuousControlConfig):
    """Hyper-parameters of DDPG (Lillicrap et al. 2015, arXiv 1509.02971) and its refinements."""

    agent_class: ClassVar[str] = "sebulba.agents.ddpg:DDPG"

    num_steps: int = 1
    """Rewards in a target before it bootstraps (n)."""
    num_critics: int = 1
    """1, or 2 with the smaller value as target (Fujimoto et al. 2018, arXiv 1802.09477)."""
    target_noise: float = 0.0
    """Standard deviation of the noise on the action of a target, in units of half the range of
    an action, clipped at 2.5 of it (Fujimoto et al. 2018, section 5.3)."""
    noise_scale: float = 0.1
    """Standard deviation of the noise on actions, in units of half their range; with a ladder, of
    the first environment."""
    noise_exponent: float = 0.0
    """A ladder: environment i of N has noise_scale ** (1 + noise_exponent * i / (N - 1)) (as
    epsilon in Horgan et al. 2018, arXiv 1803.00933); 0: all the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, num_steps=1, num_critics=1, noise_scale=(0, 1))
        check_ranges(self, target_noise=(0, math.inf), noise_exponent=(0, math.inf))

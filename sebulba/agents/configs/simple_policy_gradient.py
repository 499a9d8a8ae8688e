"""Hyper-parameters of REINFORCE."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sebulba.agents.configs.network_and_optimizer import TorsoConfig
from sebulba.agents.configs.on_policy import OnPolicyConfig


@dataclasses.dataclass(frozen=True)
class SimplePolicyGradientConfig(OnPolicyConfig):
    """Hyper-parameters of REINFORCE."""

    agent_class: ClassVar[str] = "sebulba.agents.simple_policy_gradient:SimplePolicyGradient"

    normalize_returns: bool = True
    """Subtract the mean return of the same row over all environments and divide by the standard
    deviation over the batch."""
    torso: TorsoConfig = TorsoConfig(hidden_sizes=(200,) * 5)

"""Hyper-parameters of agents that learn from a data set. Free of JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from sebulba.agents.configs import DDPGConfig, SACConfig
from sebulba.agents.configs.off_policy import ContinuousControlConfig, OffPolicyConfig
from sebulba.support.checks import check_positive, check_ranges, require


@dataclasses.dataclass(frozen=True)
class DataFields:
    """What every agent of a data set has besides the hyper-parameters of its algorithm."""

    dataset: str = ""
    """Folder of the data set."""
    online_after_env_steps: ClassVar[int | None] = None
    data_share: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        of_agent: Any = super()
        of_agent.__post_init__()
        replay: Any = self.replay  # type: ignore[attr-defined]
        require(
            not replay.prioritized,
            "replay.prioritized",
            replay.prioritized,
            "is not for agents that learn from a data set, which draw uniformly",
            "leave it out",
        )


@dataclasses.dataclass(frozen=True)
class OnlineFields(DataFields):
    """What an agent has that may go on in its environment."""

    online_after_env_steps: int | None = None  # type: ignore[misc]
    """Rows of data to read before the environment is stepped: 0 reads the data once. None never
    steps it."""
    data_share: float = 0.5  # type: ignore[misc]
    """Share of data in each batch once the environment is stepped (Ball et al. 2023, arXiv
    2302.02948, section 4.1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, data_share=(0, 1))
        after = self.online_after_env_steps
        require(
            after is None or after >= 0,
            "online_after_env_steps",
            after,
            "must not be negative",
            "use 0, which reads the data once",
        )


@dataclasses.dataclass(frozen=True)
class BCConfig(DataFields, OffPolicyConfig):
    """Hyper-parameters of behaviour cloning."""

    agent_class: ClassVar[str] = "sebulba_offline.cloning:BC"


@dataclasses.dataclass(frozen=True)
class IQLConfig(OnlineFields, ContinuousControlConfig):
    """Hyper-parameters of implicit Q-learning (Kostrikov et al. 2022, arXiv 2110.06169)."""

    agent_class: ClassVar[str] = "sebulba_offline.iql:IQL"

    value_learning_rate: float = 3e-4
    """Step size of the optimizer of the state values."""
    expectile: float = 0.7
    """Which expectile of the values of actions in the data a state value is (tau); 0.5 is the
    mean, near 1 the greatest."""
    inverse_temperature: float = 3.0
    """How much more an action with an advantage is imitated (beta); 0 is behaviour cloning."""
    most_advantage_weight: float = 100.0
    """Largest weight of an imitated action."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "value_learning_rate", "most_advantage_weight")
        check_ranges(self, expectile=(0.5, 0.999), inverse_temperature=(0, math.inf))


@dataclasses.dataclass(frozen=True)
class TD3BCConfig(OnlineFields, DDPGConfig):
    """Hyper-parameters of TD3+BC (Fujimoto and Gu 2021, arXiv 2106.06860) and ReBRAC."""

    agent_class: ClassVar[str] = "sebulba_offline.td3_bc:TD3BC"

    actor_penalty: float = 0.4
    """Weight of the squared distance of the actor's actions to those of the data (beta_1 of
    Tarasov et al. 2023, arXiv 2305.09836); TD3+BC's alpha is its inverse."""
    critic_penalty: float = 0.0
    """Weight of the squared distance of the target's action to the next action of the data (beta_2
    of ReBRAC); 0 is TD3+BC."""
    num_critics: int = 2
    target_noise: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, actor_penalty=(0, math.inf), critic_penalty=(0, math.inf))
        require(
            self.num_steps == 1,
            "num_steps",
            self.num_steps,
            "must be 1, since later actions of the data are not the policy's",
            "leave it out",
        )


@dataclasses.dataclass(frozen=True)
class SACWithDataConfig(OnlineFields, SACConfig):
    """Hyper-parameters of SAC whose replay begins with a data set (Ball et al. 2023)."""

    agent_class: ClassVar[str] = "sebulba_offline.sac_with_data:SACWithData"

    online_after_env_steps: int | None = 0  # type: ignore[misc]

"""Hyper-parameters of SAC."""

from __future__ import annotations

import dataclasses
import math

from sebulba.agents.configs.actor_critic import require_actor_critic
from sebulba.agents.configs.checks import require, require_positive
from sebulba.agents.configs.replay import ReplayConfig, TargetConfig
from sebulba.agents.configs.shared import OptimizerConfig, TorsoConfig
from sebulba.checks import check_types


@dataclasses.dataclass(frozen=True)
class SACConfig:
    """Hyper-parameters of SAC (Haarnoja et al. 2018, arXiv 1801.01290 and 1812.05905).

    Raises:
      UsageError: A field is out of its range.
    """

    learning_rate: float = 3e-4
    """Step size of the actor's optimizer."""
    critic_learning_rate: float = 1e-3
    """Step size of the critics' optimizer."""
    temperature_learning_rate: float = 1e-3
    """Step size of the temperature's optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before anything else."""
    initial_temperature: float = 1.0
    """Weight of the entropy before training (alpha)."""
    target_entropy: float | None = None
    """Mean entropy, in nats, to which the temperature steers actions scaled to [-1, 1]; None is
    minus the number of their components."""
    random_env_steps: int = 0
    """Environment steps of all Inferencers that take uniformly random actions at the beginning."""
    torso: TorsoConfig = TorsoConfig(hidden_sizes=(256, 256), activation="relu")
    """Network from observation to features; its MLP ends each critic."""
    optimizer: OptimizerConfig = OptimizerConfig(max_grad_norm=0.0, epsilon=1e-8)
    """From gradient to update; each part of the networks has its own."""
    replay: ReplayConfig = ReplayConfig(capacity=1_000_000, batch_size=256)
    """What is kept, what is drawn of it, and how often."""
    target: TargetConfig = TargetConfig(rate=0.005)
    """How the target critics follow."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self)
        require_actor_critic(self)
        rate = self.temperature_learning_rate
        require_positive("temperature_learning_rate", rate, "use 1e-3")
        require_positive("initial_temperature", self.initial_temperature, "use 1")
        require(
            self.target_entropy is None or math.isfinite(self.target_entropy),
            "target_entropy",
            self.target_entropy,
            "must be a finite number",
            "use None for minus the number of components",
        )

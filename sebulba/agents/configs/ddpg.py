"""Hyper-parameters of DDPG."""

from __future__ import annotations

import dataclasses
import math

from sebulba.agents.configs.actor_critic import require_actor_critic
from sebulba.agents.configs.checks import require_number, require_size
from sebulba.agents.configs.replay import ReplayConfig, TargetConfig
from sebulba.agents.configs.shared import OptimizerConfig, TorsoConfig
from sebulba.checks import check_types


@dataclasses.dataclass(frozen=True)
class DDPGConfig:
    """Hyper-parameters of DDPG (Lillicrap et al. 2015, arXiv 1509.02971) and its refinements.

    Raises:
      UsageError: A field is out of its range.
    """

    learning_rate: float = 3e-4
    """Step size of the actor's optimizer."""
    critic_learning_rate: float = 1e-3
    """Step size of the critics' optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before anything else."""
    num_steps: int = 1
    """Rewards in a target before it bootstraps (n)."""
    num_critics: int = 1
    """1, or 2 of which the smaller value counts (Fujimoto et al. 2018, arXiv 1802.09477)."""
    target_noise: float = 0.0
    """Standard deviation of the noise on the action of a target, in units of half the range of
    an action, clipped at 2.5 of it (Fujimoto et al. 2018, section 5.3)."""
    noise_scale: float = 0.1
    """Standard deviation of the noise on actions, in units of half their range; in the first
    environment, with a ladder."""
    noise_exponent: float = 0.0
    """A ladder: environment i of N has noise_scale ** (1 + noise_exponent * i / (N - 1))
    (as epsilon in Horgan et al. 2018, arXiv 1803.00933); 0 has all the same."""
    random_env_steps: int = 0
    """Environment steps of all Inferencers that take uniformly random actions at the beginning."""
    torso: TorsoConfig = TorsoConfig(hidden_sizes=(256, 256), activation="relu")
    """Network from observation to features; its MLP ends each critic."""
    optimizer: OptimizerConfig = OptimizerConfig(max_grad_norm=0.0, epsilon=1e-8)
    """From gradient to update; actor and critics have each their own."""
    replay: ReplayConfig = ReplayConfig(capacity=1_000_000, batch_size=256)
    """What is kept, what is drawn of it, and how often."""
    target: TargetConfig = TargetConfig(rate=0.005)
    """How target actor and target critics follow."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self)
        require_actor_critic(self)
        require_size("num_steps", self.num_steps, 1, "use 1 or 5")
        require_size("num_critics", self.num_critics, 1, "use 1 or 2")
        require_number("target_noise", self.target_noise, 0, math.inf, "use 0.2, or 0")
        require_number("noise_scale", self.noise_scale, 0, 1, "use 0.1")
        require_number("noise_exponent", self.noise_exponent, 0, math.inf, "use 2, or 0")

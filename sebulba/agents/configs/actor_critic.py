"""What the hyper-parameters of agents with actor and critics have in common."""

from __future__ import annotations

from typing import Protocol

from sebulba.agents.configs.checks import require_number, require_positive, require_size


class ActorCriticConfig(Protocol):
    """The fields that are checked here; each config describes its own."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def critic_learning_rate(self) -> float: ...
    @property
    def discount(self) -> float: ...
    @property
    def reward_scale(self) -> float: ...
    @property
    def random_env_steps(self) -> int: ...


def require_actor_critic(config: ActorCriticConfig) -> None:
    """Raise UsageError unless all of them are in range."""
    require_positive("learning_rate", config.learning_rate, "use 3e-4")
    require_positive("critic_learning_rate", config.critic_learning_rate, "use 1e-3")
    require_number("discount", config.discount, 0, 1, "use 0.99")
    require_positive("reward_scale", config.reward_scale, "use 1")
    require_size("random_env_steps", config.random_env_steps, 0, "use 1000, or 0")

"""Hyper-parameters of the agents: frozen dataclasses, checked on construction.

JAX is not imported here: a command line can parse and refuse options before any device starts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from sebulba.errors import UsageError


def _require(ok: bool, name: str, value: Any, rule: str, remedy: str) -> None:
    if not ok:
        raise UsageError(f"{name}={value!r} {rule}; {remedy}")


def _require_number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    bound = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
    _require(ok, name, value, f"must be a number {bound}", remedy)


def _require_positive(name: str, value: Any, remedy: str) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    _require(ok, name, value, "must be a positive number", remedy)


def _require_size(name: str, value: Any, low: int, remedy: str) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
    _require(ok, name, value, f"must be a whole number of at least {low}", remedy)


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    _require(value in choices, name, value, "is not known", f"use one of {', '.join(choices)}")


@dataclasses.dataclass(frozen=True)
class TorsoConfig:
    """What turns an observation into features.

    Raises:
      UsageError: A field is out of its range.
    """

    kind: Literal["auto", "mlp", "nature_cnn", "impala_resnet"] = "auto"
    """Network for images; "auto" takes nature_cnn from 36 x 36 pixels on, else impala_resnet, and
    "mlp" flattens them. Vectors always go through the MLP."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of each hidden layer of the MLP."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Non-linearity of the MLP; the image networks use relu."""
    image_features: int = 512
    """Units of the layer that ends an image network."""
    resnet_channels: tuple[int, ...] = (16, 32, 32)
    """Channels of each section of impala_resnet."""
    scale_bounded_observations: bool = False
    """Map observation components with finite bounds to [-1, 1]."""

    def __post_init__(self) -> None:
        """Check every field."""
        _require_choice("torso.kind", self.kind, ("auto", "mlp", "nature_cnn", "impala_resnet"))
        _require_choice("torso.activation", self.activation, ("tanh", "relu"))
        _require_size("torso.image_features", self.image_features, 1, "use 512")
        for size in self.hidden_sizes:
            _require_size("torso.hidden_sizes", size, 1, "use sizes such as 64 64")
        for size in self.resnet_channels:
            _require_size("torso.resnet_channels", size, 1, "use channels such as 16 32 32")
        _require(
            len(self.resnet_channels) > 0,
            "torso.resnet_channels",
            self.resnet_channels,
            "must not be empty",
            "use channels such as 16 32 32",
        )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates; the learning rate is a field of the agent's own config.

    Raises:
      UsageError: A field is out of its range.
    """

    kind: Literal["adam", "rmsprop", "sgd"] = "adam"
    """The optimizer."""
    max_grad_norm: float = 0.5
    """Global norm to which gradients are clipped; 0 does not clip."""
    epsilon: float = 1e-5
    """Added to the denominator of adam and rmsprop."""
    decay: float = 0.99
    """Decay of the second moment in rmsprop."""
    schedule: Literal["constant", "linear"] = "constant"
    """Learning rate over updates; "linear" falls to 0 at ``schedule_updates``."""
    schedule_updates: int = 0
    """Updates after which a linear schedule is at 0."""

    def __post_init__(self) -> None:
        """Check every field."""
        _require_choice("optimizer.kind", self.kind, ("adam", "rmsprop", "sgd"))
        _require_choice("optimizer.schedule", self.schedule, ("constant", "linear"))
        norm_remedy = "use 0.5, or 0 for no clipping"
        _require_number("optimizer.max_grad_norm", self.max_grad_norm, 0, math.inf, norm_remedy)
        _require_positive("optimizer.epsilon", self.epsilon, "use 1e-5")
        _require_number("optimizer.decay", self.decay, 0, 1, "use 0.99")
        least = 1 if self.schedule == "linear" else 0
        _require_size(
            "optimizer.schedule_updates",
            self.schedule_updates,
            least,
            "use the number of updates of the run",
        )


@dataclasses.dataclass(frozen=True)
class SimplePolicyGradientConfig:
    """Hyper-parameters of REINFORCE.

    Raises:
      UsageError: A field is out of its range.
    """

    learning_rate: float = 1e-3
    """Step size of the optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before anything else."""
    normalize_returns: bool = True
    """Subtract the mean return of the same row over all environments and divide by the standard
    deviation over the batch."""
    initial_std: float = 0.5
    """Standard deviation of continuous actions before training, in units of half the range where
    the action is bounded."""
    torso: TorsoConfig = TorsoConfig(hidden_sizes=(200,) * 5)
    """Network from observation to features."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """From gradient to update."""

    def __post_init__(self) -> None:
        """Check every field."""
        _require_shared(self)


@dataclasses.dataclass(frozen=True)
class ImpalaConfig:
    """Hyper-parameters of IMPALA (Espeholt et al. 2018, arXiv 1802.01561).

    Raises:
      UsageError: A field is out of its range.
    """

    learning_rate: float = 1e-3
    """Step size of the optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    entropy_coefficient: float = 0.01
    """Weight of the entropy bonus."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    trace_decay: float = 1.0
    """Lambda: multiplies the trace coefficients c; 1 is the paper's V-trace."""
    max_rho: float = 1.0
    """Clip of the importance weight of a temporal difference (rho-bar)."""
    max_c: float = 1.0
    """Clip of the trace coefficient (c-bar)."""
    max_policy_rho: float = 1.0
    """Clip of the importance weight of the policy gradient."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before anything else."""
    lstm_size: int = 0
    """Units of an LSTM between torso and heads; 0 has none."""
    separate_value_torso: bool = False
    """Give the value its own torso instead of sharing the policy's."""
    initial_std: float = 0.5
    """Standard deviation of continuous actions before training, in units of half the range where
    the action is bounded."""
    torso: TorsoConfig = TorsoConfig()
    """Network from observation to features."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """From gradient to update."""

    def __post_init__(self) -> None:
        """Check every field."""
        _require_shared(self)
        _require_number("value_coefficient", self.value_coefficient, 0, math.inf, "use 0.5")
        _require_number("trace_decay", self.trace_decay, 0, 1, "use 1")
        for name in ("max_rho", "max_c", "max_policy_rho"):
            _require_positive(name, getattr(self, name), "use 1")
        _require_size("lstm_size", self.lstm_size, 0, "use 256, or 0 for no LSTM")
        _require(
            not (self.separate_value_torso and self.lstm_size),
            "separate_value_torso",
            self.separate_value_torso,
            f"cannot go with lstm_size={self.lstm_size}, which policy and value share",
            "set one of them to False or 0",
        )


AgentConfig = SimplePolicyGradientConfig | ImpalaConfig
"""The hyper-parameters of any agent that comes with Sebulba."""


def _require_shared(config: AgentConfig) -> None:
    _require_positive("learning_rate", config.learning_rate, "use 1e-3")
    _require_number("discount", config.discount, 0, 1, "use 0.99")
    _require_number("entropy_coefficient", config.entropy_coefficient, 0, math.inf, "use 0.01")
    _require_positive("reward_scale", config.reward_scale, "use 1")
    _require_positive("initial_std", config.initial_std, "use 0.5")

"""Hyper-parameters that every agent of this package has; networks and optimizer among them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from sebulba.agents.configs.agent_config import AgentConfig
from sebulba.support.checks import check_positive, check_ranges, check_types, require, require_size
from sebulba.support.user_code import is_attribute

TorsoKind = Literal["auto", "mlp", "small_cnn", "board_cnn", "nature_cnn", "impala_resnet"]
"""Networks of this package from an observation to features."""
TORSOS: tuple[str, ...] = get_args(TorsoKind)


@dataclasses.dataclass(frozen=True)
class TorsoConfig:
    """What turns an observation into features."""

    kind: TorsoKind | str = "auto"
    """Network for images. auto: nature_cnn from 36 x 36 pixels on, small_cnn up to
    small_image_pixels, impala_resnet between them. mlp: flatten them. Vectors always use the MLP.
    board_cnn: for boards, MultiBinary of 3 dimensions, which all others flatten.
    module:attribute: your own flax module, which takes the whole observation."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of each hidden layer of the MLP."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Non-linearity of the MLP; the image networks use relu."""
    initial_kernels: Literal["orthogonal", "lecun_normal"] = "orthogonal"
    """Initial kernels of the MLP, and of the last layers of SAC and DDPG: orthogonal (times the
    square root of 2), or normal with variance 1 / inputs, as in flax."""
    image_features: int = 512
    """Units of the last layer of an image network."""
    resnet_channels: tuple[int, ...] = (16, 32, 32)
    """Channels of each section of impala_resnet."""
    small_image_pixels: int = 256
    """Most pixels (height times width) of an image that auto gives to small_cnn."""
    normalize_small_images: bool = True
    """Where observations are normalised, images of bytes of up to small_image_pixels are as well.
    They are codes: divided by 255, as pixels are, those of MiniGrid are almost equal."""
    layer_norm: bool = False
    """Normalise the inputs of each activation over the units of a layer (Ba et al. 2016)."""
    residual: bool = False
    """Of an MLP: a residual block with layer normalisation for each hidden size, which are then
    alike (SimBa; Lee et al. 2024, arXiv 2410.09754). Its activation is relu; activation,
    initial_kernels and layer_norm do not apply to it."""
    scale_bounded_observations: bool = False
    """Map observation components with finite bounds to [-1, 1]."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the layers; parameters, heads, losses and optimizer stay float32. bfloat16
    is for accelerators: it halves the activations' memory."""

    def __post_init__(self) -> None:
        check_types(self, "torso.")
        require(
            self.kind in TORSOS or self.is_own,
            "torso.kind",
            self.kind,
            f"must be one of {', '.join(TORSOS)}, or module:attribute of a flax module",
            "use auto",
        )
        for name, plain in (("dtype", "float32"), ("layer_norm", False), ("residual", False)):
            value = getattr(self, name)
            require(
                not self.is_own or value == plain,
                f"torso.{name}",
                value,
                f"cannot be applied to your own network, {self.kind!r}",
                f"do it in its layers, and use {plain} here",
            )
        check_ranges(self, "torso.", image_features=1, small_image_pixels=0)
        for size in self.hidden_sizes:
            require_size("torso.hidden_sizes", size, 1, "use sizes such as 64 64")
        require(
            not self.residual or len(set(self.hidden_sizes)) == 1,
            "torso.hidden_sizes",
            self.hidden_sizes,
            "must be alike for torso.residual=True, which adds up what its blocks put out",
            "use sizes such as 256 256",
        )
        for size in self.resnet_channels:
            require_size("torso.resnet_channels", size, 1, "use channels such as 16 32 32")
        require(
            len(self.resnet_channels) > 0,
            "torso.resnet_channels",
            self.resnet_channels,
            "must not be empty",
            "use channels such as 16 32 32",
        )

    @staticmethod
    def of_record(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a record; an older one keeps its networks and its scaling."""
        older = {"small_image_pixels": 0, "normalize_small_images": False}
        return {**older, **fields} if "resnet_channels" in fields else fields

    @property
    def is_own(self) -> bool:
        """The network is one that ``kind`` names as ``module:attribute``."""
        return is_attribute(self.kind)


def own_torsos(config: Any) -> list[str]:
    """Return the networks of one's own that hyper-parameters name, as ``module:attribute``."""
    if isinstance(config, TorsoConfig):
        return [config.kind] if config.is_own else []
    if not dataclasses.is_dataclass(config):
        parts = list(config.values()) if isinstance(config, Mapping) else []
    else:
        parts = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return [name for part in parts for name in own_torsos(part)]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates; the learning rate is a field of the agent's own config."""

    kind: Literal["adam", "radam", "rmsprop", "sgd"] = "adam"
    """The optimizer."""
    max_grad_norm: float = 0.5
    """Clip gradients to this global norm; 0: no clipping."""
    epsilon: float = 1e-5
    """Added to the denominator of adam, radam and rmsprop."""
    epsilon_in_root: bool = True
    """rmsprop: add epsilon to the mean of squares, inside the root, as TensorFlow; False: to the
    root, as PyTorch."""
    decay: float = 0.99
    """Decay of the second moment in rmsprop."""
    schedule: Literal["constant", "linear"] = "constant"
    """Learning rate over updates; linear falls to 0 at schedule_updates."""
    schedule_updates: int = 0
    """Updates after which a linear schedule is at 0."""
    share_after_schedule: float = 0.0
    """Learning rate after a linear schedule, as a share of the initial one."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        check_positive(self, "epsilon", prefix="optimizer.")
        check_ranges(self, "optimizer.", max_grad_norm=(0, math.inf), decay=(0, 1))
        check_ranges(self, "optimizer.", share_after_schedule=(0, math.inf))
        least = 1 if self.schedule == "linear" else 0
        require_size(
            "optimizer.schedule_updates",
            self.schedule_updates,
            least,
            "use the number of updates of the run",
        )


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """Hyper-parameters of an agent that may have a memory; it goes before a base."""

    memory: Literal["lstm", "gru", "lru", "gtrxl"] | None = None
    """Between torso and heads: a recurrent network, which in lru is linear, or gtrxl: attention to
    the last 64 steps. What does not go with a memory is adapted: policy and value share the torso,
    and minibatches are of whole environments. None: lstm, if lstm_size is above 0."""
    lstm_size: int = 0
    """Units of the memory; 0: no memory, or 64 units where memory names one."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        check_ranges(self, lstm_size=0)
        if self.memory and not self.lstm_size:
            object.__setattr__(self, "lstm_size", 64)


def check_normalization(normalize_observations: bool, torso: TorsoConfig) -> None:
    """Raise UsageError if observations would be scaled twice."""
    require(
        not (normalize_observations and torso.scale_bounded_observations),
        "normalize_observations",
        normalize_observations,
        "cannot be combined with torso.scale_bounded_observations=True, which scales by the bounds",
        "set one of them to False",
    )


@dataclasses.dataclass(frozen=True)
class CommonConfig(AgentConfig):
    """Hyper-parameters that all agents have; a subclass has its own defaults and more fields."""

    learning_rate: float = 1e-3
    """Step size of the optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before anything else."""
    torso: TorsoConfig = TorsoConfig()
    """Network from observation to features."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """From gradient to update."""

    def __post_init__(self) -> None:
        """Check types of all fields, and the ranges of these."""
        check_types(self)
        check_positive(self, "learning_rate", "reward_scale")
        check_ranges(self, discount=(0, 1))

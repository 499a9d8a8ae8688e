"""Hyper-parameters of R2D2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from sebulba.agents.configs.network_and_optimizer import MemoryConfig, OptimizerConfig
from sebulba.agents.configs.off_policy import ValueBasedConfig
from sebulba.agents.configs.replay import ReplayConfig, TargetConfig
from sebulba.support.checks import check_ranges


@dataclasses.dataclass(frozen=True)
class R2D2Config(MemoryConfig, ValueBasedConfig):
    """Hyper-parameters of R2D2 (Kapturowski et al. 2019, openreview.net/forum?id=r1lyTjAqYX).

    The defaults are the paper's (table 2), but for the size of the replay. A batch is of sequences;
    one begins at the first row of every trajectory, where the recurrent state is stored, so that
    ``steps_per_cycle`` is the paper's replay period.
    """

    agent_class: ClassVar[str] = "sebulba.agents.r2d2:R2D2"

    learning_rate: float = 1e-4
    discount: float = 0.997
    num_steps: int = 5
    sequence_length: int = 80
    """Rows of a sequence that the loss uses (m)."""
    burn_in: int = 40
    """Rows before them, which only compute the recurrent state (l)."""
    stored_state: bool = True
    """Begin sequences with the recurrent state of acting; False: with zeros."""
    rescale_values: bool = True
    """Learn values that a function compresses, so that large rewards need no clipping."""
    priority_max_share: float = 0.9
    """Weight of a sequence's largest error in its priority; the rest is the mean (eta)."""
    epsilon: float = 0.4
    """Probability of a random action in the first environment."""
    epsilon_exponent: float = 7.0
    lstm_size: int = 512
    """Units of the memory, which also sees the last action and reward; 0: no memory."""
    seen_reward: Literal["tanh", "raw"] = "tanh"
    """Last reward that the LSTM sees, times reward_scale: its tanh, as in Acme
    (acme/jax/networks/embedding.py), or raw, which saturates units if rewards are large."""
    dueling: bool = True
    head_hidden_sizes: tuple[int, ...] = (512,)
    """Units of each hidden layer between LSTM and values; with dueling, of both streams."""
    optimizer: OptimizerConfig = OptimizerConfig(epsilon=1e-3, max_grad_norm=40.0)
    replay: ReplayConfig = ReplayConfig(
        prioritized=True, priority_exponent=0.9, importance_exponent=0.6
    )
    target: TargetConfig = TargetConfig(period=2500)

    @staticmethod
    def of_record(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a record; one from before ``seen_reward`` keeps raw rewards."""
        is_older = "stored_state" in fields and "seen_reward" not in fields
        return {**fields, "seen_reward": "raw"} if is_older else fields

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, sequence_length=1, burn_in=0)
        check_ranges(self, priority_max_share=(0, 1), epsilon=(0, 1))

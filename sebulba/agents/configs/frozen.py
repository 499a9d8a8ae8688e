"""Fixed strategies: who acts and does not learn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from sebulba.errors import UsageError, shown


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    """A fixed strategy. It is no ``AgentConfig``: no file of a policy can name one.

    Raises:
      UsageError: The strategy is nothing that can act.
    """

    agent_class: ClassVar[str] = "sebulba.policies.frozen:Frozen"

    strategy: Any
    """The folder of a policy, as a ``Path``; a ``sebulba.Policy``; or a function of JAX, ``(obs
    [N, ...], key) -> action [N, ...]``."""

    def __post_init__(self) -> None:
        # A text is refused, so that JSON cannot make one.
        if isinstance(self.strategy, Path):
            return
        if not callable(self.strategy) or isinstance(self.strategy, type):
            raise UsageError(
                f"a frozen strategy={shown(self.strategy)} must be the folder of a policy, such as "
                "'runs/x/policy/agent', the result of sebulba.load_policy, or a function (obs, "
                "key) -> action"
            )

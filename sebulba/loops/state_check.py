"""Whether an agent state fits a loop."""

from __future__ import annotations

import jax

from sebulba.agent import AgentState
from sebulba.errors import UsageError


def check_state(state: AgentState, expected: AgentState) -> None:
    """Raise unless ``state`` has the structure and shapes that this run's agent makes."""
    remedy = (
        "use state = loop.new_state(key, steps_per_cycle) of this loop, with this steps_per_cycle"
    )
    if jax.tree.structure(state) != jax.tree.structure(expected):  # type: ignore[operator]
        raise UsageError(
            f"the agent state has another structure than this agent's in this loop "
            f"({len(state.step)} step states, {len(expected.step)} Inferencers); {remedy}"
        )
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        if jax.numpy.shape(leaf) != other.shape:
            raise UsageError(
                f"state{jax.tree_util.keystr(path)} has shape {jax.numpy.shape(leaf)}, but this "
                f"run makes {other.shape}; {remedy}"
            )

"""What an update draws of a replay that is elsewhere: in trajectory managers.

``Drawn`` takes the place of the replay as the experience of an agent on the update devices, and
``DrawnLayout`` the place of its layout. It has the methods that a loss calls, so a loss does not
know where the replay is.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.replay.frame_stack import StackState
from sebulba.agents.replay.store import Draw, Replay, ReplayLayout
from sebulba.types import PyTree, RunSpec, Trajectory


class Drawn(NamedTuple):
    """A batch of N starts; on the update devices split over them."""

    draw: Draw
    """Where they are, ``[N]``; Inferencers are counted from the first one of their manager."""
    batch: PyTree
    """``Transition`` or ``Sequence`` of N."""
    priority: jax.Array | np.ndarray
    """``[N]``: what ``set_priority`` was given in the update; NaN before it."""
    size: jax.Array | np.ndarray
    """Scalar: starts in the replay when this was drawn."""
    inserted: jax.Array | np.ndarray
    """Scalar: rows inserted into it until then."""
    trajectories: jax.Array | np.ndarray
    """``[J]`` int32: trajectories inserted until then, by Inferencer."""
    stack: StackState | tuple[()]
    """Frame stacks lost until then, in ``lost``; ``()`` where frames are not stacked."""
    statistics: PyTree = ()
    """``Replay.statistics`` then."""


def drawn_of(
    layout: ReplayLayout, replay: Replay, key: jax.Array, batch_size: int, discount: float
) -> Drawn:
    """Draw a batch and gather it.

    Args:
      layout: Of ``replay``.
      replay: Read only.
      key: Typed key with which the loss would draw.
      batch_size: N.
      discount: Factor of the rewards of a transition, per environment step.
    """
    draw = layout.draw(replay, key, batch_size)
    stack = replay.stack
    if isinstance(stack, StackState):
        stack = StackState((), (), stack.lost)  # type: ignore[arg-type]
    return Drawn(
        draw=draw,
        batch=layout.gathered(replay, draw, discount),
        priority=jnp.full(draw.row.shape, jnp.nan, jnp.float32),
        size=layout.size(replay),
        inserted=layout.inserted(replay),
        trajectories=replay.trajectories,
        stack=stack,
        statistics=replay.statistics,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnLayout:
    """Stands in for a layout whose replay is in trajectory managers; see ``ReplayLayout``."""

    of: ReplayLayout
    """The layout there."""
    batch_size: int
    """N, of all update devices together."""
    discount: float
    """Factor of the rewards of a transition, per environment step."""

    @property
    def rows_of_start(self) -> int:
        return self.of.rows_of_start

    @property
    def length(self) -> int:
        return self.of.length  # type: ignore[attr-defined]

    def check_run(self, run: RunSpec, batch_size: int) -> None:
        self.of.check_run(run, batch_size)

    def new(self, trajectory: Trajectory, core: PyTree, run: RunSpec) -> Drawn:
        """Return zeros laid out as what is drawn, and statistics without samples.

        The arguments are those of ``ReplayLayout.new``.
        """

        def draw(trajectory: Trajectory, core: PyTree) -> Drawn:
            replay = self.of.new(trajectory, core, run)
            return drawn_of(self.of, replay, jax.random.key(0), self.batch_size, self.discount)

        # The axis over devices is that of a single one: shapes are those of all together.
        one = jax.vmap(draw, in_axes=None, axis_size=1, axis_name=LEARNER_AXIS)
        shapes = jax.eval_shape(one, trajectory, core)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), shapes)
        return zeros._replace(statistics=self.of.new_statistics())

    def spec(self) -> Drawn:
        """Return a prefix tree of PartitionSpecs: what is drawn is split, counts replicated."""
        split: PyTree = P(LEARNER_AXIS)
        same: PyTree = P()
        stack: PyTree = StackState((), (), same) if self.of.frame_stack else ()  # type: ignore[arg-type]
        return Drawn(split, self.of.gathered_spec(), split, same, same, same, stack, same)

    def insert(self, drawn: Drawn, trajectory: Trajectory, core: PyTree = ()) -> Drawn:
        """Return ``drawn``: trajectories go to the managers before any program runs."""
        return drawn

    # What a loss calls.

    def draw(self, drawn: Drawn, key: jax.Array, batch_size: int) -> Draw:
        """Return where this device's share of the batch is; the managers drew it by this key."""
        return drawn.draw

    def gathered(self, drawn: Drawn, draw: Draw, discount: float) -> PyTree:
        return drawn.batch

    def set_priority(self, drawn: Drawn, draw: Draw, priority: jax.Array) -> Drawn:
        """Note the priorities ``[N]``, which go to the managers after the update."""
        return drawn._replace(priority=jax.lax.stop_gradient(priority))

    def importance_weights(self, drawn: Drawn, draw: Draw, exponent: float) -> jax.Array:
        return ReplayLayout.importance_weights(self, drawn, draw, exponent)  # type: ignore[arg-type]

    def size(self, drawn: Drawn) -> jax.Array:
        return jnp.asarray(drawn.size)

    def inserted(self, drawn: Drawn) -> jax.Array:
        return jnp.asarray(drawn.inserted)

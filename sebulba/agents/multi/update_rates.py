"""Learners with different numbers of updates: who is not due in an update is left as it is.

The loop takes as many updates after a trajectory as the learner that has most. Update i of them is
one of a learner with n if i < n. ``Agent.optimize`` is told nothing but gradients, so that the
networks have one more number for each learner, a *mark*: it is 0 for ever, and its gradient is 1 in
an update in which its learner is due, and 0 in all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sebulba.agent import Loss
from sebulba.agents.configs.replay import Schedule
from sebulba.errors import UsageError
from sebulba.types import PyTree

MARKS = "*"
"""Where the networks have the marks, which is the name of no learner."""
MOST_TRAJECTORIES = 1_000_000
"""Trajectories after which a learner that has had no update counts as one that has none."""


class PacedExperience(NamedTuple):
    """The experience of learners with different numbers of updates."""

    of_each: dict[str, PyTree]
    """That of each."""
    cycle: jax.Array
    """Scalar int32: trajectories that have been taken in."""
    update: jax.Array
    """Scalar int32: updates since the last of them."""


class PacedOpt(NamedTuple):
    """Their optimizer states."""

    of_each: dict[str, PyTree]
    """That of each."""
    updates: dict[str, jax.Array]
    """Scalar int32: how many updates each has had."""


def schedule_of(name: str, due_after: Callable[[int], int]) -> Schedule:
    """Return the schedule that the numbers of updates of a learner follow.

    Args:
      name: Of the learner, for the message.
      due_after: Its ``num_off_policy_optims_per_cycle``.

    Raises:
      UsageError: It has no second update.
    """
    due = ((cycle, n) for cycle in range(1, MOST_TRAJECTORIES + 1) if (n := due_after(cycle)))
    first, second = (next(due, None) for _ in range(2))
    if first is None or second is None:
        raise UsageError(
            f"member {name!r} has {'no update' if first is None else 'one update only'} after "
            f"{MOST_TRAJECTORIES:,} trajectories; use fewer warm_up_cycles and cycles_per_update, "
            "or freeze it"
        )
    return Schedule(first[0], second[0] - first[0], second[1], first[1])


def loss_if(due: jax.Array, loss: Callable[..., Any], networks: PyTree, experience: PyTree) -> Loss:
    """Return ``loss(networks, experience)`` if ``due``; else 0, ``experience``, and zeros.

    What the loss does not change of the experience, such as the rows of a replay, does not go
    through the condition, where XLA might copy it.

    Args:
      due: Scalar bool, the same on all devices.
      loss: Returns what ``Agent.loss`` does.
      networks: The gradient is with respect to these.
      experience: Of the learner.
    """
    leaves, structure = jax.tree.flatten(experience)
    same: list[bool] = []

    def taken(networks: PyTree) -> tuple[jax.Array, list[jax.Array], dict[str, jax.Array]]:
        value, (new, metrics) = loss(networks, experience)
        new_leaves = jax.tree.leaves(new)
        same[:] = [one is other for one, other in zip(new_leaves, leaves, strict=True)]
        return value, changed(new_leaves), metrics

    def changed(leaves: list[jax.Array]) -> list[jax.Array]:
        return [leaf for leaf, is_same in zip(leaves, same, strict=True) if not is_same]

    shapes = jax.eval_shape(taken, networks)

    def left(_: PyTree) -> tuple[jax.Array, list[jax.Array], dict[str, jax.Array]]:
        value, _, metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return value, changed(leaves), metrics

    value, new, metrics = jax.lax.cond(due, taken, left, networks)
    rest = iter(new)
    merged = [old if is_same else next(rest) for old, is_same in zip(leaves, same, strict=True)]
    return value, (jax.tree.unflatten(structure, merged), metrics)


def means_when_due(means: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, float]:
    """Return means of the metrics of learners over the updates that they had.

    Args:
      means: Over all updates, with 0 for those that a learner had not: ``NAME/METRIC``.
      shares: Which share of the updates each learner had; one without any has no means.
    """
    reported = {}
    for metric, mean in means.items():
        owners = [name for name in shares if metric.startswith(f"{name}/")]
        share = shares[max(owners, key=len)] if owners else 1.0
        if share:
            reported[metric] = mean / share
    return reported

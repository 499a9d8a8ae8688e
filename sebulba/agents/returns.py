"""Returns and advantages of one stream of transitions, ``[T]``; the caller maps over streams.

Every kernel takes the three arrays that :func:`transitions` makes from the flags of a trajectory:
``discount = gamma * (1 - terminated)``, ``last = terminated | truncated``, which ends a trace after
bootstrapping, and ``valid``: a transition that is none has weight 0 and ends a trace too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sebulba.types import Trajectory


class Transitions(NamedTuple):
    """What follows each action, ``[T, B]``."""

    reward: jax.Array
    """Scaled reward of the action, float32."""
    discount: jax.Array
    """``gamma``, or 0 where the episode terminated, float32."""
    last: jax.Array
    """The episode ended, by termination or truncation, bool."""
    valid: jax.Array
    """False for a reset that an environment inserted: the action had no effect, bool."""


def transitions(trajectory: Trajectory, gamma: float, reward_scale: float = 1.0) -> Transitions:
    """Return the transitions of a trajectory; transition t ends in row t+1.

    Args:
      trajectory: ``env_step`` is ``[T+1, B, ...]``.
      gamma: Discount per environment step.
      reward_scale: Multiplies rewards.
    """
    row = trajectory.env_step
    terminated = jnp.asarray(row.terminated[1:])
    return Transitions(
        reward=reward_scale * jnp.asarray(row.reward[1:], jnp.float32),
        discount=gamma * (1.0 - terminated.astype(jnp.float32)),
        last=terminated | row.truncated[1:],
        valid=terminated | ~row.is_first[1:],
    )


class VTrace(NamedTuple):
    """Targets of V-trace, ``[T]``; both are constants to differentiation."""

    value_target: jax.Array
    """``v_s`` of equation 1; the value itself where the transition is not valid."""
    advantage: jax.Array
    """Importance-weighted advantage of the policy gradient; 0 where not valid."""


def vtrace(
    value: jax.Array,
    step: Transitions,
    rho: jax.Array,
    *,
    trace_decay: float = 1.0,
    max_rho: float = 1.0,
    max_c: float = 1.0,
    max_policy_rho: float = 1.0,
) -> VTrace:
    """Return V-trace targets and advantages of one stream.

    ``v_t = V_t + delta_t + discount_t c_t (v_{t+1} - V_{t+1})`` with
    ``delta_t = rho_t (r_t + discount_t V_{t+1} - V_t)``, both terms cut as the flags say.
    Source: Espeholt et al. 2018 (arXiv 1802.01561), equation 1 and remark 1, in the recursive form
    of remark 2; the advantage is that of section 4.2.

    Args:
      value: ``[T+1]``, ``V`` of every row, the bootstrap row included.
      step: Leaves ``[T]``.
      rho: ``[T]``, probability of the action now over that when it was taken.
      trace_decay: Lambda of remark 2, multiplies ``c``.
      max_rho: Clip of ``rho``.
      max_c: Clip of ``c``.
      max_policy_rho: Clip of ``rho`` in the advantage.
    """
    value, rho = jax.lax.stop_gradient((value, rho))
    value_now, value_next = value[:-1], value[1:]
    delta = jnp.minimum(rho, max_rho) * (step.reward + step.discount * value_next - value_now)
    delta = jnp.where(step.valid, delta, 0.0)
    goes_on = step.valid & ~step.last
    carry = jnp.where(goes_on, step.discount * trace_decay * jnp.minimum(rho, max_c), 0.0)

    def back(error: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta_t, carry_t = now
        error = delta_t + carry_t * error
        return error, error

    _, error = jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, carry), reverse=True)
    # Beyond an end, and beyond the last row, there is no target but the value itself.
    error_next = jnp.where(step.last, 0.0, jnp.append(error[1:], 0.0))
    bootstrap = value_next + trace_decay * error_next
    advantage = jnp.minimum(rho, max_policy_rho) * (
        step.reward + step.discount * bootstrap - value_now
    )
    return VTrace(value_now + error, jnp.where(step.valid, advantage, 0.0))


def n_step_returns(value: jax.Array, step: Transitions) -> jax.Array:
    """Return ``G_t = r_t + discount_t G_{t+1}``, bootstrapped at the end of episode or stream.

    Args:
      value: ``[T+1]``, what rows are worth; zeros for plain Monte-Carlo sums.
      step: Leaves ``[T]``.

    Returns:
      ``[T]``; the value itself where the transition is not valid.
    """

    def back(
        future: jax.Array, now: tuple[jax.Array, jax.Array, Transitions]
    ) -> tuple[jax.Array, jax.Array]:
        value_now, value_next, t = now
        future = jnp.where(t.last, value_next, future)
        future = jnp.where(t.valid, t.reward + t.discount * future, value_now)
        return future, future

    _, returns = jax.lax.scan(back, value[-1], (value[:-1], value[1:], step), reverse=True)
    return returns

"""Returns and advantages of one stream of transitions, ``[T]``; the caller maps over streams.

Every kernel takes the three arrays that :func:`transitions` makes from the flags of a trajectory:
``discount = gamma * (1 - terminated)``, ``last = terminated | truncated``, which ends a trace after
bootstrapping, and ``valid``. A transition that is not valid has weight 0 and ends a trace too.
Where the environment resets in the step that ends an episode, ``V_{t+1}`` of that step is the value
of ``EnvStep.final``, and not of the row, which shows the next episode.

For the values ``[T+1, B]`` of a trajectory::

    step = transitions(trajectory, discount)  # [T, B]
    returns = jax.vmap(n_step_returns, in_axes=1, out_axes=1)(value, step)  # [T, B]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from sebulba.errors import UsageError
from sebulba.types import FinalObs, Trajectory


class FinalValue(NamedTuple):
    """Values of last observations that share a row with the next episode's first, ``[T, B]``."""

    value: jax.Array
    """``V`` of ``EnvStep.final.obs``."""
    given: jax.Array
    """``EnvStep.final.given``: bootstrap from ``value`` and not from that of the row, bool."""


class Transitions(NamedTuple):
    """What follows each action, ``[T, B]``."""

    reward: jax.Array
    """Scaled reward of the action, float32."""
    discount: jax.Array
    """``gamma``, or 0 where the episode terminated, float32."""
    last: jax.Array
    """The episode ended, by termination or truncation, bool."""
    valid: jax.Array
    """``EnvStep.valid``: False for instance for a reset, where the action had no effect, bool."""
    final: FinalValue | tuple[()] = ()
    """What to bootstrap from where rows have ``EnvStep.final``; ``()`` elsewhere."""


def transitions(
    trajectory: Trajectory,
    gamma: float,
    reward_scale: float = 1.0,
    final_value: jax.Array | tuple[()] = (),
) -> Transitions:
    """Return the transitions of a trajectory; transition t ends in row t+1.

    Args:
      trajectory: ``env_step`` is ``[T+1, B, ...]``.
      gamma: Discount per environment step.
      reward_scale: Multiplies rewards.
      final_value: ``[T+1, B]``, value of ``env_step.final.obs`` where rows have that.

    Raises:
      UsageError: Rows have last observations, and their values are missing.
    """
    final: Any = trajectory.env_step.final
    if isinstance(final, FinalObs):
        final = final._replace(obs=())
    flags = trajectory.env_step._replace(obs=(), prev_action=(), final=final)  # type: ignore[arg-type]
    after = jax.tree.map(lambda x: jnp.asarray(x)[1:], flags)
    if isinstance(final, FinalObs):
        if isinstance(final_value, tuple):
            raise UsageError(
                "transitions(...) lacks final_value, the values of env_step.final.obs; give them, "
                "or leave the agent's uses_final_obs at False, which masks these transitions"
            )
        final = FinalValue(jax.lax.stop_gradient(final_value)[1:], after.final.given)
    return Transitions(
        reward=reward_scale * after.reward.astype(jnp.float32),
        discount=gamma * (1.0 - after.terminated.astype(jnp.float32)),
        last=after.terminated | after.truncated,
        valid=after.valid,
        final=final,
    )


def _next_value(value: jax.Array, step: Transitions) -> jax.Array:
    """Return the value ``[T]`` that each transition bootstraps from, of values ``[T+1]``."""
    if not isinstance(step.final, FinalValue):
        return value[1:]
    return jnp.where(step.final.given, step.final.value, value[1:])


def _check_streams(value: jax.Array, step: Transitions, *of_steps: jax.Array) -> None:
    """Raise AssertionError unless ``value`` is ``[T+1]`` and all others are ``[T]``.

    Batches ``[T, B]`` would broadcast without an error, and wrongly: the caller maps over B.
    """
    leaves = jax.tree.leaves(step)
    chex.assert_rank((value, *leaves, *of_steps), 1)
    chex.assert_equal_shape((value[1:], *leaves, *of_steps))


def _backward_sum(x: jax.Array, carry: jax.Array, beyond: jax.typing.ArrayLike) -> jax.Array:
    """Return ``y_t = x_t + carry_t y_{t+1}``, ``[T]``, with ``y_T = beyond``."""
    # Unrolled: on a CPU the overhead of a loop iteration exceeds its computation.
    _, y = jax.lax.scan(add_up, jnp.asarray(beyond, x.dtype), (x, carry), reverse=True, unroll=8)
    return y


def add_up(y: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return ``x_t + carry_t y`` twice, as ``jax.lax.scan`` wants it; now is ``x_t, carry_t``."""
    x_t, carry_t = now
    y = x_t + carry_t * y
    return y, y


def _carry(step: Transitions, trace: jax.typing.ArrayLike) -> jax.Array:
    """Return the factor from row t+1 to row t: ``discount_t trace_t``, 0 where a trace ends."""
    return jnp.where(step.valid & ~step.last, step.discount * trace, 0.0)


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
    _check_streams(value, step, rho)
    value, rho = jax.lax.stop_gradient((value, rho))
    value_now, value_next = value[:-1], _next_value(value, step)
    delta = jnp.minimum(rho, max_rho) * (step.reward + step.discount * value_next - value_now)
    delta = jnp.where(step.valid, delta, 0.0)
    error = _backward_sum(delta, _carry(step, trace_decay * jnp.minimum(rho, max_c)), 0.0)
    # Beyond an end, and beyond the last row, there is no target but the value itself.
    error_next = jnp.where(step.last, 0.0, jnp.append(error[1:], 0.0))
    bootstrap = value_next + trace_decay * error_next
    advantage = jnp.minimum(rho, max_policy_rho) * (
        step.reward + step.discount * bootstrap - value_now
    )
    return VTrace(value_now + error, jnp.where(step.valid, advantage, 0.0))


def n_step_returns(value: jax.Array, step: Transitions, num_steps: int | None = None) -> jax.Array:
    """Return sums of discounted rewards, bootstrapped after ``num_steps`` or at an end before.

    ``G_t = r_t + discount_t G_{t+1}``, where the last ``G`` is ``V`` of the row that the sum
    reaches: the end of the episode, the end of the stream, or row t + num_steps.
    Source: Sutton and Barto 2018, equation 7.1.

    Args:
      value: ``[T+1]``, ``V`` of every row; zeros for plain Monte-Carlo sums.
      step: Leaves ``[T]``.
      num_steps: n, at least 1; None sums to the end of the episode or the stream.

    Returns:
      ``[T]``, constant to differentiation; the value itself where the transition is not valid.
    """
    _check_streams(value, step)
    if num_steps is None:
        return lambda_returns(value, step, 1.0)
    value = jax.lax.stop_gradient(value)
    returns = value[:-1]
    for _ in range(num_steps):
        bootstrap = _next_value(value, step)
        future = jnp.where(step.last, bootstrap, jnp.append(returns[1:], value[-1]))
        returns = jnp.where(step.valid, step.reward + step.discount * future, value[:-1])
    return returns


def lambda_returns(value: jax.Array, step: Transitions, trace_decay: float) -> jax.Array:
    """Return ``G_t = r_t + discount_t ((1 - lambda) V_{t+1} + lambda G_{t+1})``.

    An episode's or the stream's last ``G_{t+1}`` is ``V_{t+1}``.
    Source: Sutton and Barto 2018, equation 12.2 in its recursive form.

    Args:
      value: ``[T+1]``, ``V`` of every row, the bootstrap row included.
      step: Leaves ``[T]``.
      trace_decay: Lambda; 1 sums all rewards to the end, 0 looks one step ahead.

    Returns:
      ``[T]``, constant to differentiation; the value itself where the transition is not valid.
    """
    _check_streams(value, step)
    value = jax.lax.stop_gradient(value)
    share = jnp.where(step.last, 1.0, 1.0 - trace_decay)
    bootstrap = step.discount * share * _next_value(value, step)
    known = jnp.where(step.valid, step.reward + bootstrap, value[:-1])
    return _backward_sum(known, _carry(step, trace_decay), value[-1])


def gae(value: jax.Array, step: Transitions, trace_decay: float) -> jax.Array:
    """Return generalized advantage estimates of one stream.

    ``A_t = delta_t + discount_t lambda A_{t+1}`` with ``delta_t = r_t + discount_t V_{t+1} - V_t``;
    ``A_t + V_t`` is the lambda return.
    Source: Schulman et al. 2016 (arXiv 1506.02438), equation 16.

    Args:
      value: ``[T+1]``, ``V`` of every row, the bootstrap row included.
      step: Leaves ``[T]``.
      trace_decay: Lambda.

    Returns:
      ``[T]``, constant to differentiation; 0 where the transition is not valid.
    """
    _check_streams(value, step)
    value = jax.lax.stop_gradient(value)
    delta = step.reward + step.discount * _next_value(value, step) - value[:-1]
    return _backward_sum(jnp.where(step.valid, delta, 0.0), _carry(step, trace_decay), 0.0)


def retrace(
    q_taken: jax.Array,
    value: jax.Array,
    step: Transitions,
    rho: jax.Array,
    *,
    trace_decay: float = 1.0,
) -> jax.Array:
    """Return Retrace targets for the values of the actions taken, ``[T]``.

    ``G_t = r_t + discount_t (V_{t+1} + c_{t+1} (G_{t+1} - Q_{t+1}))`` with
    ``c = lambda min(1, rho)``; beyond an end, a transition that is not valid or the stream there
    is no correction, only ``V_{t+1}``.
    Source: Munos et al. 2016 (arXiv 1606.02647), equations 3 and 4 with the c of section 3.

    Args:
      q_taken: ``[T]``, Q of the action taken in each row.
      value: ``[T+1]``, expected Q of every row under the target policy.
      step: Leaves ``[T]``.
      rho: ``[T]``, probability of the action now over that when it was taken.
      trace_decay: Lambda.

    Returns:
      ``[T]``, constant to differentiation; ``q_taken`` itself where the transition is not valid.
    """
    _check_streams(value, step, q_taken, rho)
    q_taken, value, rho = jax.lax.stop_gradient((q_taken, value, rho))
    delta = step.reward + step.discount * _next_value(value, step) - q_taken
    # Of the next row: the action of row t is given, so only later ones are weighted.
    trace = jnp.where(step.valid, trace_decay * jnp.minimum(rho, 1.0), 0.0)
    carry = _carry(step, jnp.append(trace[1:], 0.0))
    return q_taken + _backward_sum(jnp.where(step.valid, delta, 0.0), carry, 0.0)


def double_q_values(q_target: jax.Array, q_online: jax.Array) -> jax.Array:
    """Return ``Q_target`` of the action with the greatest ``Q_online``, ``[...]``.

    With ``reward + discount * it`` this is the one-step target, as ``value`` of
    :func:`n_step_returns` the n-step one.
    Source: van Hasselt et al. 2016 (arXiv 1509.06461), equation 4.

    Args:
      q_target: ``[..., A]``.
      q_online: ``[..., A]``.
    """
    q_target, q_online = jax.lax.stop_gradient((q_target, q_online))
    return value_of(q_target, jnp.argmax(q_online, axis=-1))


def value_of(values: jax.Array, index: jax.Array) -> jax.Array:
    """Return ``values[..., index]``, ``[...]`` of ``[..., A]``."""
    # A one-hot product: gathers and their gradient (a scatter) are slow on CPU.
    return jnp.sum(values * jax.nn.one_hot(index, values.shape[-1], dtype=values.dtype), axis=-1)


RESCALING_EPSILON = 1e-3
"""Epsilon of value rescaling in Kapturowski et al. 2019 (R2D2), section 2.3."""


def rescale_value(x: jax.Array, epsilon: float = RESCALING_EPSILON) -> jax.Array:
    """Return ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x``, which shrinks large values.

    Source: Pohlen et al. 2018 (arXiv 1805.11593), section 3.2.
    """
    size = jnp.abs(x)
    # sqrt(|x| + 1) - 1 without the difference of two almost equal numbers near 0.
    return jnp.sign(x) * size / (jnp.sqrt(size + 1.0) + 1.0) + epsilon * x


def restore_value(x: jax.Array, epsilon: float = RESCALING_EPSILON) -> jax.Array:
    """Return the inverse of :func:`rescale_value`.

    ``sign(x) (((sqrt(1 + 4 epsilon (|x| + 1 + epsilon)) - 1) / (2 epsilon))^2 - 1)``.
    Source: Pohlen et al. 2018 (arXiv 1805.11593), proposition A.2.

    Args:
      x: Rescaled values.
      epsilon: 0 is allowed.
    """
    shifted = jnp.abs(x) + 1.0 + epsilon
    # The root of the formula, times and over its conjugate: no cancellation in float32.
    root = 2.0 * shifted / (jnp.sqrt(1.0 + 4.0 * epsilon * shifted) + 1.0)
    return jnp.sign(x) * (root - 1.0) * (root + 1.0)

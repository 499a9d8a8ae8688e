"""Kernels of returns: by hand, against rlax, and by the identities that they must satisfy."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.returns import Transitions, n_step_returns, transitions, vtrace
from sebulba.types import EnvStep, Trajectory


def stream(
    reward: Any, terminated: Any = (), truncated: Any = (), inserted: Any = (), gamma: float = 0.9
) -> Transitions:
    """Return transitions of one stream; the last three arguments are lists of times."""
    steps = len(reward)
    at = {name: np.isin(np.arange(steps), t) for name, t in
          (("ter", terminated), ("tru", truncated), ("ins", inserted))}  # fmt: skip
    return Transitions(
        jnp.asarray(reward, jnp.float32),
        jnp.asarray(gamma * ~at["ter"], jnp.float32),
        jnp.asarray(at["ter"] | at["tru"]),
        jnp.asarray(~at["ins"]),
    )


def random_stream(seed: int, steps: int = 23, **flags: Any) -> tuple[jax.Array, Transitions, Any]:
    """Return (value [T+1], transitions, rho [T])."""
    rng = np.random.default_rng(seed)
    rho = jnp.asarray(np.exp(rng.normal(size=steps)), jnp.float32)
    value = jnp.asarray(rng.normal(size=steps + 1), jnp.float32)
    return value, stream(rng.normal(size=steps), **flags), rho


def test_transitions_take_consequences_from_the_next_row() -> None:
    flag = lambda *times: jnp.asarray(np.isin(np.arange(6), times))[:, None]  # noqa: E731
    row = EnvStep(
        obs=jnp.zeros((6, 1, 2)),
        prev_action=jnp.zeros((6, 1), jnp.int32),
        reward=jnp.arange(6.0)[:, None],
        terminated=flag(2),
        truncated=flag(4),
        is_first=flag(0, 3, 5),
    )
    zero = jnp.int32(0)
    t = transitions(Trajectory(row, row.prev_action[1:], (), zero, zero, zero), 0.5, 10.0)
    np.testing.assert_array_equal(t.reward[:, 0], [10, 20, 30, 40, 50])
    np.testing.assert_array_equal(t.discount[:, 0], [0.5, 0, 0.5, 0.5, 0.5])
    np.testing.assert_array_equal(t.last[:, 0], [False, True, False, True, False])
    # Transitions 2 and 4 go from the end of an episode to the observation after its reset.
    np.testing.assert_array_equal(t.valid[:, 0], [True, True, False, True, False])


def test_a_termination_that_arrives_with_the_reset_observation_stays_usable() -> None:
    yes, no = jnp.asarray([[False], [True]]), jnp.asarray([[False], [False]])
    zero = jnp.int32(0)

    def valid(terminated: jax.Array, truncated: jax.Array) -> bool:
        row = EnvStep(no, no, jnp.ones((2, 1)), terminated, truncated, is_first=yes)
        return bool(transitions(Trajectory(row, no[1:], (), zero, zero, zero), 0.9).valid[0, 0])

    assert valid(yes, no)
    assert not valid(no, yes)


def test_vtrace_by_hand() -> None:
    # t=0 and 1 are on the way, 1 truncates, 2 is the inserted reset, 3 terminates, 4 is inserted,
    # 5 runs into the bootstrap row. gamma = 1/2, V = 1, 2, 3, 4, 5, 6, 7.
    step = stream([1, 2, 99, 4, 99, 6], terminated=[3], truncated=[1], inserted=[2, 4], gamma=0.5)
    rho = jnp.asarray([0.5, 4.0, 4.0, 0.25, 4.0, 1.0])
    out = vtrace(jnp.arange(1.0, 8.0), step, rho, max_rho=1.0, max_c=2.0, max_policy_rho=3.0)
    # delta = 1/2 (1 + 1 - 1), 1 (2 + 3/2 - 2), 0, 1/4 (4 - 4), 0, 1 (6 + 7/2 - 6)
    # carry of row 0: discount 1/2 times c 1/2
    np.testing.assert_allclose(out.value_target, [1 + 0.5 + 0.25 * 1.5, 3.5, 3, 4, 5, 9.5])
    advantage = [0.5 * (1 + 0.5 * 3.5 - 1), 3 * (2 + 1.5 - 2), 0, 0.25 * (4 - 4), 0, 3.5]
    np.testing.assert_allclose(out.advantage, advantage)


@pytest.mark.parametrize("trace_decay", [1.0, 0.7])
def test_vtrace_is_that_of_rlax(trace_decay: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rlax
    value, step, rho = random_stream(0, terminated=[4, 11, 12])
    mine = vtrace(value, step, rho, trace_decay=trace_decay, max_policy_rho=1.3)
    theirs = rlax.vtrace_td_error_and_advantage(
        value[:-1], value[1:], step.reward, step.discount, rho,
        lambda_=trace_decay, clip_pg_rho_threshold=1.3,
    )  # fmt: skip
    np.testing.assert_allclose(mine.value_target - value[:-1], theirs.errors, atol=1e-5)
    np.testing.assert_allclose(mine.advantage, theirs.pg_advantage, atol=1e-5)


def test_vtrace_between_ends_is_that_of_rlax_on_each_episode() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rlax
    value, step, rho = random_stream(1, truncated=[6, 15], inserted=[7, 16])
    mine = vtrace(value, step, rho)
    for begin, end in ((0, 7), (8, 16), (17, 23)):
        part = slice(begin, end)
        theirs = rlax.vtrace_td_error_and_advantage(
            value[begin:end], value[begin + 1 : end + 1], step.reward[part],
            step.discount[part], rho[part],
        )  # fmt: skip
        np.testing.assert_allclose(mine.value_target[part] - value[part], theirs.errors, atol=1e-5)
        np.testing.assert_allclose(mine.advantage[part], theirs.pg_advantage, atol=1e-5)


def test_on_policy_vtrace_is_the_n_step_return() -> None:
    flags = {"terminated": [3, 17], "truncated": [9], "inserted": [4, 10, 18]}
    value, step, _ = random_stream(2, **flags)
    target = vtrace(value, step, jnp.ones(23)).value_target
    np.testing.assert_allclose(target, n_step_returns(value, step), atol=1e-5)


def test_trace_decay_of_zero_is_one_step() -> None:
    value, step, rho = random_stream(3, terminated=[5], truncated=[8], inserted=[6, 9])
    out = vtrace(value, step, rho, trace_decay=0.0)
    delta = np.minimum(rho, 1) * (step.reward + step.discount * value[1:] - value[:-1])
    np.testing.assert_allclose(
        out.value_target - value[:-1], np.where(step.valid, delta, 0), atol=1e-5
    )
    np.testing.assert_allclose(out.advantage, np.where(step.valid, delta, 0), atol=1e-5)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_nothing_beyond_an_end_reaches_back(end: str) -> None:
    value, step, rho = random_stream(4, **{end: [7]})
    other = step._replace(reward=step.reward.at[8:].set(50.0))
    a, b = vtrace(value, step, rho), vtrace(value.at[9:].set(-70.0), other, rho)
    np.testing.assert_array_equal(a.value_target[:8], b.value_target[:8])
    np.testing.assert_array_equal(a.advantage[:8], b.advantage[:8])


@pytest.mark.parametrize(("end", "counts"), [("terminated", False), ("truncated", True)])
def test_bootstraps_through_truncation_only(end: str, counts: bool) -> None:
    value, step, rho = random_stream(5, **{end: [7]})
    other = value.at[8].add(3.0)
    a, b = vtrace(value, step, rho), vtrace(other, step, rho)
    assert (not np.allclose(a.value_target[7], b.value_target[7])) == counts
    assert (not np.allclose(a.advantage[7], b.advantage[7])) == counts
    c, d = n_step_returns(value, step), n_step_returns(other, step)
    assert (not np.allclose(c[7], d[7])) == counts


def test_inserted_rows_have_no_weight_whatever_they_hold() -> None:
    value, step, rho = random_stream(6, truncated=[7], inserted=[8])
    wild = step._replace(reward=step.reward.at[8].set(jnp.nan))
    a, b = vtrace(value, step, rho), vtrace(value, wild, rho.at[8].set(jnp.inf))
    np.testing.assert_array_equal(a.value_target, b.value_target)
    np.testing.assert_array_equal(a.advantage, b.advantage)
    assert a.advantage[8] == 0 and a.value_target[8] == value[8]


def test_targets_are_constants_to_differentiation() -> None:
    value, step, rho = random_stream(7, terminated=[5])

    def total(value: jax.Array, rho: jax.Array) -> jax.Array:
        return sum(jnp.sum(x) for x in vtrace(value, step, rho))  # type: ignore[return-value]

    for grad in jax.grad(total, argnums=(0, 1))(value, rho):
        np.testing.assert_array_equal(grad, 0)


def test_monte_carlo_returns_by_hand() -> None:
    step = stream([1, 2, 4, 99, 8, 16], terminated=[2], inserted=[3], gamma=0.5)
    np.testing.assert_allclose(n_step_returns(jnp.zeros(7), step), [3, 4, 4, 0, 16, 16])

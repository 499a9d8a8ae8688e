"""Kernels of returns: by hand, against rlax, and by the identities that they must satisfy."""

from __future__ import annotations

import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.kernels.returns import (
    Transitions,
    double_q_values,
    gae,
    lambda_returns,
    n_step_returns,
    rescale_value,
    restore_value,
    retrace,
    transitions,
    vtrace,
)
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


def import_rlax() -> Any:
    """Return rlax, whose import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rlax
    return rlax


@pytest.mark.parametrize("library", [np, jnp])
def test_a_row_says_what_kind_of_transition_ended_there(library: Any) -> None:
    is_first, terminated, truncated = np.indices((2, 2, 2)).reshape(3, 8).astype(bool)
    row = EnvStep((), (), (), *map(library.asarray, (terminated, truncated, is_first)))  # type: ignore[arg-type]
    # Of the last four, which begin an episode, the ends are: none, truncated, terminated, both.
    np.testing.assert_array_equal(row.valid, [True, True, True, True, False, False, True, True])
    np.testing.assert_array_equal(row.inserted, [False] * 4 + [True, False, False, False])
    np.testing.assert_array_equal(row.masked_truncation, [False] * 5 + [True, False, False])


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
    rlax = import_rlax()
    value, step, rho = random_stream(0, terminated=[4, 11, 12])
    mine = vtrace(value, step, rho, trace_decay=trace_decay, max_policy_rho=1.3)
    theirs = rlax.vtrace_td_error_and_advantage(
        value[:-1], value[1:], step.reward, step.discount, rho,
        lambda_=trace_decay, clip_pg_rho_threshold=1.3,
    )  # fmt: skip
    np.testing.assert_allclose(mine.value_target - value[:-1], theirs.errors, atol=1e-5)
    np.testing.assert_allclose(mine.advantage, theirs.pg_advantage, atol=1e-5)


def test_vtrace_between_ends_is_that_of_rlax_on_each_episode() -> None:
    rlax = import_rlax()
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


# The other kernels. One stream by hand for all of them: 0 and 1 are on the way, 1 truncates, 2 is
# the inserted reset, 3 is on the way, 4 terminates, 5 is inserted, 6 and 7 run into the bootstrap
# row. gamma = 1/2.

BY_HAND = stream(
    [1, 2, 99, 3, 4, 99, 6, 8], terminated=[4], truncated=[1], inserted=[2, 5], gamma=0.5
)
ROW_VALUE = jnp.asarray([1.0, 2, 4, 6, 8, 10, 12, 14, 16])
FLAGS = {"terminated": [3, 17], "truncated": [9], "inserted": [4, 10, 18]}


def test_lambda_returns_by_hand() -> None:
    # G_7 = 8 + 16/2; G_6 = 6 + (14/2 + 16/2)/2; G_3 = 3 + (8/2 + 4/2)/2; G_1 = 2 + 4/2;
    # G_0 = 1 + (2/2 + 4/2)/2; rows 2 and 5 keep their value.
    expected = [1 + 1.5, 4, 4, 3 + 3, 4, 10, 6 + 7.5, 16]
    np.testing.assert_allclose(lambda_returns(ROW_VALUE, BY_HAND, 0.5), expected)


def test_gae_by_hand() -> None:
    # delta = 1, 2, -, 1, -4, -, 1, 2 and the trace decays by 1/4.
    expected = [1 + 0.5, 2, 0, 1 - 1, -4, 0, 1 + 0.5, 2]
    np.testing.assert_allclose(gae(ROW_VALUE, BY_HAND, 0.5), expected)


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (1, [1 + 1, 2 + 2, 4, 3 + 4, 4, 10, 6 + 7, 8 + 8]),
        (2, [1 + 2, 2 + 2, 4, 3 + 2, 4, 10, 6 + 8, 8 + 8]),
    ],
)
def test_n_step_returns_by_hand(num_steps: int, expected: list[float]) -> None:
    np.testing.assert_allclose(n_step_returns(ROW_VALUE, BY_HAND, num_steps), expected)


def test_retrace_by_hand() -> None:
    q = jnp.asarray([1.0, 3, 5, 7, 9, 11, 13, 15])
    rho = jnp.asarray([9.0, 4, 4, 1, 0.5, 4, 2, 0.5])
    # error = G - Q: delta = 1, 1, -, 0, -5, -, 0, 1 and c = lambda min(1, rho) of the next row.
    error = [1 + 0.5 * 0.5 * 1, 1, 0, 0 + 0.5 * 0.25 * -5, -5, 0, 0 + 0.5 * 0.25 * 1, 1]
    target = retrace(q, ROW_VALUE, BY_HAND, rho, trace_decay=0.5)
    np.testing.assert_allclose(target, q + np.asarray(error))


def test_double_q_values_by_hand() -> None:
    online = jnp.asarray([[1.0, 5.0, 2.0], [7.0, 0.0, 6.0]])
    target = jnp.asarray([[30.0, 10.0, 40.0], [50.0, 90.0, 60.0]])
    np.testing.assert_array_equal(double_q_values(target, online), [10, 50])


def test_rescaled_values_by_hand() -> None:
    x = jnp.asarray([0.0, 3.0, -8.0, 99.0])
    np.testing.assert_allclose(rescale_value(x, 0.5), [0, 1 + 1.5, -2 - 4, 9 + 49.5])


def episodes() -> list[slice]:
    """Return the parts of a stream with ``FLAGS`` between inserted rows."""
    return [slice(0, 4), slice(5, 10), slice(11, 18), slice(19, 23)]


@pytest.mark.parametrize("kernel", ["gae", "lambda", "n-step", "retrace"])
def test_kernels_are_those_of_rlax_on_each_episode(kernel: str) -> None:
    rlax = import_rlax()
    value, step, rho = random_stream(8, **FLAGS)
    q = jnp.asarray(np.random.default_rng(9).normal(size=23), jnp.float32)
    mine = {
        "gae": lambda: gae(value, step, 0.8),
        "lambda": lambda: lambda_returns(value, step, 0.8),
        "n-step": lambda: n_step_returns(value, step, 3),
        "retrace": lambda: retrace(q, value, step, rho, trace_decay=0.8),
    }[kernel]()
    for part in episodes():
        rows, tail = value[part.start : part.stop + 1], slice(part.start + 1, part.stop)
        outcome = step.reward[part], step.discount[part]
        if kernel == "gae":
            theirs = rlax.truncated_generalized_advantage_estimation(*outcome, 0.8, rows)
        elif kernel == "lambda":
            theirs = rlax.lambda_returns(*outcome, rows[1:], 0.8)
        elif kernel == "n-step":
            theirs = rlax.n_step_bootstrapped_returns(*outcome, rows[1:], 3)
        else:
            now, later, log_rho = q[part], q[tail], jnp.log(rho[tail])
            theirs = now + rlax.retrace_continuous(now, later, rows[1:], *outcome, log_rho, 0.8)
        np.testing.assert_allclose(mine[part], theirs, atol=1e-5)
    inserted = FLAGS["inserted"]
    kept = {"gae": jnp.zeros(23), "retrace": q}.get(kernel, value)
    np.testing.assert_array_equal(mine[jnp.asarray(inserted)], kept[jnp.asarray(inserted)])


def test_double_q_target_is_that_of_rlax() -> None:
    rlax = import_rlax()
    rng = np.random.default_rng(10)
    q, target, online = (jnp.asarray(rng.normal(size=5), jnp.float32) for _ in range(3))
    theirs = rlax.double_q_learning(q, 3, 0.7, 0.9, target, online)
    np.testing.assert_allclose(0.7 + 0.9 * double_q_values(target, online) - q[3], theirs, 1e-6)


def test_value_rescaling_is_that_of_rlax() -> None:
    rlax = import_rlax()
    x = jnp.linspace(-300, 300, 41)
    np.testing.assert_allclose(rescale_value(x), rlax.signed_hyperbolic(x), rtol=1e-5)
    h = rescale_value(x)
    np.testing.assert_allclose(restore_value(h), rlax.signed_parabolic(h), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2])
def test_rescaled_values_are_restored(epsilon: float) -> None:
    x = jnp.asarray([-1e5, -7.0, -1e-3, 0.0, 1e-4, 0.5, 3.0, 1e4])
    np.testing.assert_allclose(
        restore_value(rescale_value(x, epsilon), epsilon), x, rtol=1e-5, atol=1e-6
    )


def test_gae_with_a_whole_trace_is_the_return_minus_the_value() -> None:
    value, step, _ = random_stream(11, **FLAGS)
    returns = n_step_returns(value, step)
    np.testing.assert_allclose(gae(value, step, 1.0), returns - value[:-1], atol=1e-5)


@pytest.mark.parametrize("trace_decay", [0.0, 0.6, 1.0])
def test_gae_plus_the_value_is_the_lambda_return(trace_decay: float) -> None:
    value, step, _ = random_stream(12, **FLAGS)
    advantage = gae(value, step, trace_decay)
    expected = lambda_returns(value, step, trace_decay)
    np.testing.assert_allclose(advantage + value[:-1], expected, atol=1e-5)


def test_lambda_returns_between_one_step_and_all_steps() -> None:
    value, step, _ = random_stream(13, **FLAGS)
    one, all_steps = n_step_returns(value, step, 1), n_step_returns(value, step, 23)
    np.testing.assert_allclose(lambda_returns(value, step, 0.0), one, atol=1e-5)
    np.testing.assert_allclose(lambda_returns(value, step, 1.0), all_steps, atol=1e-5)
    assert not np.allclose(one, all_steps)


def test_on_policy_retrace_of_values_is_the_n_step_return() -> None:
    value, step, _ = random_stream(14, **FLAGS)
    target = retrace(value[:-1], value, step, jnp.ones(23))
    np.testing.assert_allclose(target, n_step_returns(value, step), atol=1e-5)


def test_retrace_without_trace_or_ratio_is_one_step() -> None:
    value, step, rho = random_stream(15, **FLAGS)
    one = n_step_returns(value, step, 1)
    for target in (
        retrace(value[:-1], value, step, rho, trace_decay=0.0),
        retrace(value[:-1], value, step, jnp.zeros(23)),
    ):
        np.testing.assert_allclose(target, one, atol=1e-5)


KERNELS = {
    "gae": lambda value, step: gae(value, step, 0.9),
    "lambda": lambda value, step: lambda_returns(value, step, 0.9),
    "n-step": lambda value, step: n_step_returns(value, step, 4),
    "retrace": lambda value, step: retrace(value[:-1], value, step, jnp.full(23, 0.9)),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_flags_cut_what_reaches_back(kernel: str) -> None:
    run = KERNELS[kernel]
    value, step, _ = random_stream(16, terminated=[6], truncated=[14], inserted=[7, 15])
    # The observation after a termination is worth nothing, the last before a truncation something.
    after_end, at_cut = run(value.at[7].add(3.0), step), run(value.at[15].add(3.0), step)
    before = run(value, step)
    np.testing.assert_array_equal(before[:7], after_end[:7])
    assert abs(before[14] - at_cut[14]) > 1
    # Nothing beyond either end, and nothing in an inserted row, not even NaN.
    reward = step.reward.at[jnp.asarray([7, 15])].set(jnp.nan).at[16:].add(50.0)
    wild = step._replace(reward=reward)
    np.testing.assert_array_equal(before[:15], run(value.at[16:].add(50.0), wild)[:15])
    grad = jax.grad(lambda value: jnp.sum(run(value, step)))(value)
    np.testing.assert_array_equal(grad, 0.0)


# As they are called: compiled or not, on the host's arrays or a device's; one stream at a time.

STREAM_KERNELS = {
    "vtrace": lambda value, step, rho: vtrace(value, step, rho).value_target,
    "n_step": lambda value, step, rho: n_step_returns(value, step, 3),
    "lambda": lambda value, step, rho: lambda_returns(value, step, 0.9),
    "gae": lambda value, step, rho: gae(value, step, 0.9),
    "retrace": lambda value, step, rho: retrace(value[:-1], value, step, rho),
}


class KernelVariants(chex.TestCase):
    """Every kernel returns the same, however it is called."""

    @chex.all_variants(with_pmap=False)
    def test_compiled_or_not_and_wherever_arrays_are(self) -> None:
        value, step, rho = random_stream(7, terminated=[5], truncated=[11], inserted=[12])
        for name, kernel in STREAM_KERNELS.items():
            called = self.variant(kernel)(value, step, rho)
            np.testing.assert_allclose(called, kernel(value, step, rho), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kernel", STREAM_KERNELS)
def test_a_batch_of_streams_is_refused_where_one_is_meant(kernel: str) -> None:
    value, step, rho = random_stream(7)
    batch = jax.tree.map(lambda x: jnp.stack([x, x], axis=1), (value, step, rho))
    with pytest.raises(AssertionError, match="rank"):
        STREAM_KERNELS[kernel](*batch)
    mapped = jax.vmap(STREAM_KERNELS[kernel], in_axes=1, out_axes=1)(*batch)
    chex.assert_trees_all_close(mapped[:, 0], STREAM_KERNELS[kernel](value, step, rho), rtol=1e-5)
    with pytest.raises(AssertionError, match="shape"):
        STREAM_KERNELS[kernel](value[:-1], step, rho)

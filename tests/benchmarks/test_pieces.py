"""Staging, queue, timer, episode statistics, devices, donation: each alone."""

from __future__ import annotations

import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sebulba.errors import UsageError
from sebulba.inference.episodes import EpisodeStatistics
from sebulba.inference.fused_cycle import equal_chunks
from sebulba.learning.update import DEBUGGING, DonatingProgram
from sebulba.loops import devices
from sebulba.loops.devices import choose_devices
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.trees import is_finite, owned_copy
from sebulba.transport.staging import Staged, Staging
from sebulba.transport.trajectory_queue import TrajectoryQueue

DEADLINE_S = 300.0
"""Ten times what a stop or a failure promises."""


def in_thread(target, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(target(*args)), daemon=True)
    thread.start()
    return thread, results


def test_staging_keeps_only_the_newest():
    staging = Staging()
    for version in range(3):
        staging.publish(Staged(version, f"networks {version}"))
    assert staging.take(threading.Event()) == (2, "networks 2")
    assert staging.take(threading.Event()) == (2, "networks 2"), "taking leaves it for others"


def test_staging_take_waits_for_its_version_and_no_longer_than_a_stop():
    staging, stop = Staging(), threading.Event()
    staging.publish(Staged(0, "old"))
    thread, results = in_thread(staging.take, stop, 1)
    thread.join(0.1)
    assert thread.is_alive()
    staging.publish(Staged(1, "new"))
    thread.join(DEADLINE_S)
    assert results == [(1, "new")]
    thread, results = in_thread(staging.take, stop, 2)
    stop.set()
    thread.join(DEADLINE_S)
    assert results == [None]


def test_queue_is_first_in_first_out_and_bounded():
    queue, stop = TrajectoryQueue(2), threading.Event()
    assert queue.put("a", stop)
    assert queue.put("b", stop)
    thread, results = in_thread(queue.put, "c", stop)
    thread.join(0.1)
    assert thread.is_alive(), "a full queue must block"
    assert [queue.get(), queue.get(DEADLINE_S)] == ["a", "b"]
    thread.join(DEADLINE_S)
    assert results == [True]
    assert queue.get() == "c"


def test_queue_put_does_not_hang_after_stop():
    queue, stop = TrajectoryQueue(1), threading.Event()
    queue.put("a", stop)
    thread, results = in_thread(queue.put, "b", stop)
    stop.set()
    thread.join(DEADLINE_S)
    assert results == [False]
    assert queue.drain() == ["a"]


def test_queue_lets_a_failure_through_when_full_and_keeps_the_first():
    queue, stop = TrajectoryQueue(1), threading.Event()
    queue.put("a", stop)
    first = ValueError("first")
    queue.fail(first)
    queue.fail(ValueError("second"))
    with pytest.raises(ValueError) as caught:
        queue.get()
    assert caught.value is first


def test_queue_get_wakes_up_on_a_failure():
    queue = TrajectoryQueue(1)
    caught = []

    def get():
        try:
            queue.get(timeout_s=10 * DEADLINE_S)
        except ValueError as error:
            caught.append(error)

    thread, _ = in_thread(get)
    queue.fail(ValueError("planted"))
    thread.join(DEADLINE_S)
    assert caught


def test_timer_adds_up_and_refuses_unknown_phases():
    timer = PhaseTimer("a", "b")
    for _ in range(2):
        with timer.phase("a"):
            time.sleep(0.01)
    assert timer.seconds()["a"] >= 0.02
    assert timer.seconds()["b"] == 0.0
    with pytest.raises(KeyError):
        timer.phase("c")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9))
def test_episode_statistics_equal_a_loop_over_cells(seed, num_envs, num_rows):
    rng = np.random.default_rng(seed)
    statistics = EpisodeStatistics(num_envs)
    returns, lengths = np.zeros(num_envs), np.zeros(num_envs, int)
    for _ in range(3):
        reward = rng.integers(-3, 4, (num_rows, num_envs)).astype(np.float32)
        end = rng.random((num_rows, num_envs)) < 0.3
        inserted = rng.random((num_rows, num_envs)) < 0.2
        infos = statistics.add(reward, end, inserted, np.zeros_like(end))
        expected = []
        for t, b in np.ndindex(num_rows, num_envs):
            returns[b] += 0 if inserted[t, b] else reward[t, b]
            lengths[b] += not inserted[t, b]
            if end[t, b]:
                expected.append((returns[b], lengths[b]))
                returns[b] = lengths[b] = 0
        assert list(zip(infos.episode_returns, infos.episode_lengths, strict=True)) == expected


@given(st.integers(1, 300), st.floats(0.1, 400))
def test_equal_chunks_divide_and_respect_the_most(length, most):
    chunks = equal_chunks(length, most)
    assert length % chunks == 0
    assert length / chunks <= max(most, 1)


def fits_all(num_update, num_inference):
    return True


def test_devices_that_do_not_exist_or_repeat_are_refused_by_number():
    count = len(jax.local_devices())
    with pytest.raises(UsageError, match=rf"device {count}, but there are {count}"):
        choose_devices([count], None, fits_all)
    with pytest.raises(UsageError, match="twice"):
        choose_devices(None, [0, 0], fits_all)
    with pytest.raises(UsageError, match="at least one"):
        choose_devices([], None, fits_all)


def test_devices_default_to_a_quarter_that_infers_and_the_rest_that_updates():
    inference, update = choose_devices(None, None, fits_all)
    count = len(jax.local_devices())
    assert len(inference) == max(1, count // 4)
    assert not set(inference) & set(update)
    assert choose_devices([0], None, fits_all)[1] == jax.local_devices()[1:]


def test_as_many_devices_update_as_fit_and_the_rest_infers(monkeypatch):
    divides = lambda num_update, num_inference: 32 % num_update == 0  # noqa: E731
    for count, num_updating in ((1, 1), (2, 1), (3, 2), (4, 2), (6, 4), (8, 4), (16, 8)):
        everywhere = [f"device {i}" for i in range(count)]
        monkeypatch.setattr(devices, "local_devices", lambda everywhere=everywhere: everywhere)
        inference, update = choose_devices(None, None, divides)
        assert len(update) == num_updating
        assert sorted({*inference, *update}) == sorted(everywhere)
        assert count == 1 or not {*inference} & {*update}


def test_owned_copy_survives_a_donation_of_the_copy():
    original = jnp.arange(5.0)
    copy = owned_copy({"x": original}, jax.local_devices()[0])
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(copy)
    assert copy["x"].is_deleted()
    np.testing.assert_array_equal(original, np.arange(5.0))


def test_owned_copy_does_not_alias_host_memory():
    host = np.zeros(4096, np.float32)
    copy = owned_copy(host, jax.local_devices()[0])
    host[:] = 1
    np.testing.assert_array_equal(copy, 0)


def add(a, b, c):
    return a + b.sum() + c


def test_donation_takes_only_leaves_that_an_output_can_use():
    used, unused = jnp.zeros((3, 2)), jnp.zeros((5,))
    function = DonatingProgram(add, None, used, unused, np.float32(1), donated=2)
    result = function(used, unused, np.float32(1))  # a warning about donation would be an error
    assert result.shape == (3, 2)
    assert used.is_deleted()
    assert not unused.is_deleted()


def test_to_compile_does_not_undo_what_other_threads_do_to_filters_of_warnings():
    inside, compiles = threading.Event(), threading.Event()

    def make_env():
        with warnings.catch_warnings(action="ignore"):  # as factories of environments do
            inside.set()
            compiles.wait(300)

    thread = threading.Thread(target=make_env)

    def function(a):
        compiles.set()
        thread.join()
        return a + 1

    thread.start()
    inside.wait(300)
    DonatingProgram(function, None, jnp.zeros(3), donated=1)
    with pytest.warns(RuntimeWarning, match="seen"):
        warnings.warn("seen", RuntimeWarning, stacklevel=1)
    assert ("ignore", None, Warning, None, 0) not in warnings.filters


def test_arrays_of_numpy_in_place_of_those_it_was_compiled_for_compile_it_again():
    function = DonatingProgram(lambda a: a + 1, None, jnp.zeros(3, jnp.float32), donated=1)
    assert (function(np.zeros(3, np.int32)) == 1).all()


@pytest.mark.parametrize(("number", "expected"), [(1, True), (np.nan, False), (np.inf, False)])
def test_whether_numbers_are_finite_is_seen_without_a_view_that_stays(number, expected):
    array = jnp.zeros((64, 64)).at[3, 4].set(number)
    assert is_finite({"x": array, "n": jnp.int32(3)}) == expected
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()


@pytest.mark.parametrize("option", DEBUGGING)
def test_a_donating_program_is_not_compiled_ahead_where_jax_looks_for_the_operation(option):
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        function = DonatingProgram(add, None, np.float32(0), np.float32(0), 1, donated=2)
        assert function._compiled is None
    finally:
        jax.config.update(option, before)
    assert DonatingProgram(add, None, np.float32(0), np.float32(0), 1, donated=2)._compiled


def test_a_donating_program_can_be_compiled_ahead_also_for_shapes_that_it_is_not_given():
    example = jax.ShapeDtypeStruct((3, 2), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.float32)
    function = DonatingProgram(add, None, *example, np.float32(0), donated=2)
    function._jitted, jitted = None, function._jitted
    np.testing.assert_array_equal(function(jnp.zeros((3, 2)), jnp.ones(5), np.float32(1)), 6)
    function._jitted = jitted
    used, unused = jnp.zeros((3, 4)), jnp.ones(7)
    np.testing.assert_array_equal(function(used, unused, np.float32(1)), 8)
    assert used.is_deleted() and not unused.is_deleted()

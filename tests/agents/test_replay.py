"""The replay against a plain model of it, on one device and on four."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sebulba.agents.replay.sampling import draw_in_proportion, pick, pick_in_rows
from sebulba.agents.replay.transitions_and_sequences import Draw, SequenceReplay, TransitionReplay
from sebulba.errors import UsageError
from sebulba.types import RunSpec
from tests.support.replay_world import Kept, Streams, inserter, mapped, mesh_of

RUN = RunSpec(num_envs=4, num_inferencers=2, steps_per_cycle=3, num_update_devices=4)
NUM_PLACES = 5
CAPACITY = NUM_PLACES * 3 * 2 * 4 + 11  # rounded down to whole trajectories
GAMMA = 0.9
DRAWN = P("learner")

TRANSITIONS = TransitionReplay(capacity=CAPACITY, num_steps=4, priority_exponent=0.5)
SEQUENCES = SequenceReplay(capacity=CAPACITY, length=5, priority_exponent=0.5)


def weights(replay: Any) -> np.ndarray:
    return np.asarray(replay.weight)


def filled(layout: Any, num_devices: int, seed: int = 0, num_cycles: int = 16) -> Any:
    """Yield (model, replay) after every insert."""
    streams = Streams(seed, RUN, num_cycles)
    model = Kept(streams, NUM_PLACES)
    is_sequence = isinstance(layout, SequenceReplay)
    core = lambda j, c: streams.core(j, c) if is_sequence else ()  # noqa: E731
    replay = layout.new(streams.trajectory(0, 0), core(0, 0), RUN)
    insert = inserter(layout, mesh_of(num_devices))
    for j, cycle in streams.orders(seed, num_cycles):
        replay = insert(replay, streams.trajectory(j, cycle), core(j, cycle))
        model.arrived[j].append(cycle)
        yield model, replay


def last(layout: Any, num_devices: int) -> tuple[Kept, Any]:
    *_, (model, replay) = filled(layout, num_devices)
    return model, replay


@pytest.mark.parametrize("seed", [0, 1])
def test_transitions_start_exactly_where_all_their_rows_are_and_are_valid(seed: int) -> None:
    for model, replay in filled(TRANSITIONS, 4, seed):
        for j in range(RUN.num_inferencers):
            expected = model.can_start(j, 5, transitions=True)
            np.testing.assert_array_equal(weights(replay)[j] > 0, expected)
    assert set(np.unique(weights(replay))) == {0.0, 1.0}


@pytest.mark.parametrize("length", [2, 5, 6])
def test_sequences_start_exactly_where_all_their_rows_follow_each_other(length: int) -> None:
    layout = SequenceReplay(capacity=CAPACITY, length=length)
    num_starts = 0
    for model, replay in filled(layout, 4, seed=length):
        for j in range(RUN.num_inferencers):
            expected = model.can_start(j, length + 1, transitions=False)
            assert not expected.reshape(NUM_PLACES, 3, 4)[:, 1:].any()
            np.testing.assert_array_equal(weights(replay)[j] > 0, expected[::3])
            num_starts += int(expected.sum())
    assert num_starts > 50


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TRANSITIONS, SEQUENCES], ids=["transitions", "sequences"])
def test_one_device_and_four_hold_the_same(layout: Any) -> None:
    (_, one), (_, four) = last(layout, 1), last(layout, 4)
    jax.tree.map(np.testing.assert_array_equal, one, four)


def test_drawn_transitions_are_those_of_the_stream() -> None:
    model, replay = last(TRANSITIONS, 4)

    def read(replay: Any, seed: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("learner"))
        draw = TRANSITIONS.draw(replay, key, 4 * 150)
        return draw, TRANSITIONS.gathered(replay, draw, GAMMA)

    program = mapped(mesh_of(4), read, (TRANSITIONS.spec(), P()), DRAWN)
    draw, batch = jax.tree.map(np.asarray, program(replay, np.uint32(0)))
    assert draw.row.shape == (600,)
    streams, outcomes = model.streams, set()
    for i, (j, b, time) in enumerate(batch.obs.astype(int)):
        assert j == draw.inferencer[i] and draw.row[i] == model.rows(j)[time]
        reward, discount, end, outcome = n_step(streams, j, b, time)
        outcomes.add(outcome)
        np.testing.assert_array_equal(batch.next_obs[i], [j, b, end])
        np.testing.assert_allclose(batch.reward[i], reward, rtol=1e-5)
        np.testing.assert_allclose(batch.discount[i], discount, rtol=1e-5)
        assert batch.action[i] == streams.action[j, time, b]
        assert batch.extras["time"][i] == time
    assert outcomes == {"terminated", "truncated", "cut", "full"}


def n_step(streams: Streams, j: int, b: int, time: int) -> tuple[float, float, int, str]:
    """Return (sum, discount, time of the last observation, why it ended) step by step."""
    total = 0.0
    for k in range(TRANSITIONS.num_steps):
        row = (j, time + k + 1, b)
        terminated, truncated = streams.terminated[row], streams.truncated[row]
        if streams.is_first[row] and not terminated:  # nothing but the reset is to be seen
            return total, GAMMA**k, time + k, "cut"
        total += GAMMA**k * streams.reward[row]
        if terminated:
            return total, 0.0, time + k + 1, "terminated"
        if truncated:
            return total, GAMMA ** (k + 1), time + k + 1, "truncated"
    return total, GAMMA**TRANSITIONS.num_steps, time + TRANSITIONS.num_steps, "full"


def test_drawn_sequences_are_those_of_the_stream_with_the_state_before_them() -> None:
    model, replay = last(SEQUENCES, 4)

    def read(replay: Any, seed: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("learner"))
        sequence = SEQUENCES.gathered(replay, SEQUENCES.draw(replay, key, 4 * 10), GAMMA)
        return sequence._replace(core=()), sequence.core

    specs = (P(None, "learner"), P("learner"))
    program = mapped(mesh_of(4), read, (SEQUENCES.spec(), P()), specs)
    sequence, core = jax.tree.map(np.asarray, program(replay, np.uint32(0)))
    assert sequence.env_step.reward.shape == (6, 40) and sequence.action.shape == (5, 40)
    streams = model.streams
    for i, (j, b, time) in enumerate(sequence.env_step.obs[0].astype(int)):
        np.testing.assert_array_equal(core[i], [j + 0.5, b + 0.5, time + 0.5])
        rows = (j, np.arange(time, time + 6), b)
        before = np.where(rows[1] > 0, streams.action[j, rows[1] - 1, b], 0)
        np.testing.assert_array_equal(sequence.env_step.prev_action[:, i], before)
        np.testing.assert_array_equal(sequence.action[:, i], streams.action[rows][:-1])
        np.testing.assert_array_equal(sequence.extras["time"][:, i], rows[1][:-1])
        for name in ("obs", "reward", "terminated", "truncated", "is_first"):
            expected = getattr(streams, name)[rows]
            np.testing.assert_array_equal(getattr(sequence.env_step, name)[:, i], expected)


@pytest.mark.parametrize("num", [13, 60, 1024])
def test_draws_follow_the_weights_and_never_take_a_weight_of_zero(num: int) -> None:
    rng = np.random.default_rng(num)
    weight = np.where(rng.random(num) < 0.3, 0, rng.gamma(0.7, size=num)).astype(np.float32)
    weight[-1] = 0
    draws = 200_000
    index, total = jax.jit(draw_in_proportion, static_argnums=2)(jax.random.key(1), weight, draws)
    count = np.bincount(np.asarray(index), minlength=num)
    np.testing.assert_allclose(total, weight.sum(), rtol=1e-5)
    assert count[weight == 0].sum() == 0
    expected = draws * weight / weight.sum()
    often = expected > 5
    chi_square = ((count - expected)[often] ** 2 / expected[often]).sum()
    assert abs(chi_square - often.sum()) < 5 * np.sqrt(2 * often.sum())


@pytest.mark.slow
def test_no_weight_of_zero_is_picked_where_rounding_would_pick_it() -> None:
    rng = np.random.default_rng(0)
    weight = np.where(rng.random(1009) < 0.5, 0, rng.gamma(0.7, size=1009)).astype(np.float32)
    weight[-40:] = 0
    sums = np.asarray(jax.jit(jnp.cumsum)(weight))
    assert ((np.diff(sums) > 0) & (weight[1:] == 0)).any()  # parallel sums are not monotone
    share = np.minimum(sums / sums.max(), np.float32(1 - 2**-24))
    uniform = np.concatenate([np.nextafter(share, np.float32(0)), share])
    rows = np.broadcast_to(weight, (len(uniform), len(weight)))
    for index in (jax.jit(pick)(weight, uniform), jax.jit(pick_in_rows)(rows, uniform)):
        assert (weight[np.asarray(index)] > 0).all()


@pytest.mark.slow
def test_draws_tell_neighbours_apart_among_a_million() -> None:
    # The 23 bits of one uniform number give each of these 8 values, or 7, or 9.
    weight = np.ones(1_000_000, np.float32)
    index, _ = jax.jit(draw_in_proportion, static_argnums=2)(jax.random.key(0), weight, 20_000)
    last_digits = np.bincount(np.asarray(index) % 1000, minlength=1000)
    assert ((last_digits - 20) ** 2 / 20).sum() < 1000 + 5 * np.sqrt(2000)
    assert len(np.unique(index)) > 19_000


def draw_of(replay: Any, layout: Any, starts: np.ndarray) -> Draw:
    """Return a Draw of ``starts [N, 3]``, indices into ``weight``."""
    j, start, env = starts.T.astype(np.int32)
    row = start * layout.rows_between_starts(RUN.steps_per_cycle)
    cycle = np.asarray(replay.cycle)[j, row // RUN.steps_per_cycle]
    return Draw(j, row, env, cycle, np.full(len(j), 0.1, np.float32))


@pytest.mark.parametrize("layout", [TRANSITIONS, SEQUENCES], ids=["transitions", "sequences"])
def test_priorities_reach_only_starts_that_are_still_there(layout: Any) -> None:
    states = filled(layout, 1)
    for _ in range(14):
        _, replay = next(states)
    starts = tuple(np.indices(weights(replay).shape).reshape(3, -1))  # also what cannot be drawn
    draw = draw_of(replay, layout, np.stack(starts, axis=1))
    nines = np.full(len(draw.row), 9.0, np.float32)
    set_priority = mapped(mesh_of(1), layout.set_priority, (layout.spec(), P(), P()), layout.spec())
    for num_inserts in (3, 20):
        *_, (_, replay) = itertools.islice(states, num_inserts)
        before = weights(replay).copy()
        cycle_now = np.asarray(replay.cycle)[draw.inferencer, draw.row // RUN.steps_per_cycle]
        is_there = cycle_now == draw.cycle
        assert is_there.any() == (num_inserts == 3) and not is_there.all()
        assert (before[starts][~is_there] > 0).any()
        is_there &= before[starts] > 0
        after = set_priority(replay, draw, nines)
        expected = before.copy()
        expected[starts] = np.where(is_there, 3.0, before[starts])
        np.testing.assert_array_equal(weights(after), expected)
        assert float(after.max_priority) == (9.0 if is_there.any() else 1.0)


def test_what_was_drawn_twice_gets_the_larger_priority() -> None:
    _, replay = last(TRANSITIONS, 1)
    one = np.argwhere(weights(replay) > 0)[5]
    draw = draw_of(replay, TRANSITIONS, np.stack([one, one, one]))
    set_priority = mapped(
        mesh_of(1), TRANSITIONS.set_priority, (TRANSITIONS.spec(), P(), P()), TRANSITIONS.spec()
    )
    after = set_priority(replay, draw, np.array([0.25, 16.0, 4.0], np.float32))
    assert weights(after)[tuple(one)] == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TRANSITIONS, SEQUENCES], ids=["transitions", "sequences"])
def test_a_replay_works_with_64_bits_enabled(layout: Any) -> None:
    with jax.enable_x64(True):
        _, replay = last(layout, 1)

        def drawn(replay: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            draw = layout.draw(replay, key, 4)
            weight = layout.importance_weights(replay, draw, 0.5)
            return layout.gathered(replay, draw, GAMMA), weight

        batch, weight = mapped(mesh_of(1), drawn, (layout.spec(), P()), P())(
            replay, jax.random.key(0)
        )
        assert {x.dtype for x in jax.tree.leaves(batch)} & {np.dtype("float64")} == set()
        assert weight.dtype == np.float32


def test_new_starts_get_the_largest_priority_of_all_devices() -> None:
    streams = Streams(3, RUN, 3)
    mesh = mesh_of(4)
    insert = inserter(TRANSITIONS, mesh)
    replay = TRANSITIONS.new(streams.trajectory(0, 0), (), RUN)
    for cycle in range(2):
        replay = insert(replay, streams.trajectory(0, cycle), ())
    row = weights(replay)[0].argmax(axis=0)  # a start of each environment, one a device
    starts = np.stack([np.zeros(4, int), row, np.arange(4)], axis=1)
    draw = draw_of(replay, TRANSITIONS, starts)._replace(env=np.zeros(4, np.int32))
    set_priority = mapped(
        mesh, TRANSITIONS.set_priority, (TRANSITIONS.spec(), DRAWN, DRAWN), TRANSITIONS.spec()
    )
    replay = set_priority(replay, draw, np.array([4.0, 0.0, 16.0, 0.25], np.float32))
    np.testing.assert_allclose(weights(replay)[tuple(starts.T)], [2.0, 1e-3, 4.0, 0.5], rtol=1e-6)
    shards = [float(shard.data) for shard in replay.max_priority.addressable_shards]
    assert shards == [16.0] * 4
    replay = insert(replay, streams.trajectory(0, 2), ())
    new = weights(replay)[0, 2:5]
    assert new.max() == 4.0 and set(np.unique(new)) <= {0.0, 4.0}


def test_importance_weights_undo_what_priorities_favour() -> None:
    mesh = mesh_of(4)
    *_, (_, replay) = filled(TRANSITIONS, 4)
    factors = np.random.default_rng(0).uniform(0.1, 3, weights(replay).shape).astype(np.float32)
    replay = replay._replace(weight=weights(replay) * factors)

    def read(replay: Any, key_data: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(key_data), jax.lax.axis_index("learner"))
        draw = TRANSITIONS.draw(replay, key, 400)
        weighted = [TRANSITIONS.importance_weights(replay, draw, beta) for beta in (0.0, 0.4)]
        sizes = TRANSITIONS.size(replay), TRANSITIONS.inserted(replay)
        return (draw, weighted), sizes

    program = mapped(mesh, read, (TRANSITIONS.spec(), P()), (DRAWN, P()))
    (draw, (ones, weighted)), (size, inserted) = program(replay, np.uint32(5))
    weight = weights(replay)
    assert float(size) == (weight > 0).sum()
    env = np.asarray(draw.env) + np.repeat(np.arange(4), 100)  # one environment a device
    of_device = weight.sum(axis=(0, 1))
    probability = weight[draw.inferencer, draw.row, env] / (4 * of_device[env])
    np.testing.assert_allclose(draw.probability, probability, rtol=1e-5)
    expected = (float(size) * probability) ** -0.4
    np.testing.assert_allclose(weighted, expected / expected.max(), rtol=1e-5)
    np.testing.assert_array_equal(ones, 1.0)
    assert float(inserted) == np.asarray(replay.trajectories).sum() * 3 * 4


def test_an_empty_store_gives_draws_of_weight_zero() -> None:
    replay = TRANSITIONS.new(Streams(0, RUN, 1).trajectory(0, 0), (), RUN)

    def read(replay: Any) -> Any:
        draw = TRANSITIONS.draw(replay, jax.random.key(0), 3)
        return draw.probability, TRANSITIONS.importance_weights(replay, draw, 0.4)

    for x in mapped(mesh_of(1), read, (TRANSITIONS.spec(),), P())(replay):
        np.testing.assert_array_equal(x, np.zeros(3))


def test_uniform_replay_has_no_priorities() -> None:
    layout = TransitionReplay(capacity=CAPACITY)
    *_, (_, replay) = filled(layout, 1, num_cycles=3)
    draw = draw_of(replay, layout, np.argwhere(weights(replay) > 0)[:3])
    assert layout.set_priority(replay, draw, jnp.full(3, 7.0)) is replay


@pytest.mark.parametrize("layout", [TRANSITIONS, SEQUENCES], ids=["transitions", "sequences"])
def test_rows_are_written_in_place(layout: Any) -> None:
    streams = Streams(0, RUN, 2)
    core = streams.core(0, 0) if layout is SEQUENCES else ()
    insert = inserter(layout, mesh_of(1))
    replay = insert(layout.new(streams.trajectory(0, 0), core, RUN), streams.trajectory(0, 0), core)
    at = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(replay.rows)]
    replay = insert(replay, streams.trajectory(0, 1), core)
    assert at == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(replay.rows)]


def test_a_capacity_that_holds_no_start_is_refused_with_one_that_does() -> None:
    # 3 rows and 4 before them are 9 in whole trajectories, of 2 Inferencers x 4 environments.
    assert TransitionReplay(capacity=72, num_steps=4).check_run(RUN, 8) is None
    with pytest.raises(UsageError, match=r"capacity=71 .*at least 72 .*5 rows"):
        TransitionReplay(capacity=71, num_steps=4).check_run(RUN, 8)
    with pytest.raises(UsageError, match=r"capacity=95 .*at least 96 .*9 rows"):
        SequenceReplay(capacity=95, length=8).check_run(RUN, 8)


def test_a_batch_that_does_not_divide_over_the_devices_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch_size=10 .*4 update devices; use 8 or 12"):
        TRANSITIONS.check_run(RUN, 10)
    with pytest.raises(UsageError, match=r"batch_size=3 .*4 update devices; use 4"):
        TRANSITIONS.check_run(RUN, 3)

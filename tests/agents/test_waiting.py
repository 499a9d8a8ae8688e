"""Agents that wait: what they learn from is what a definition in NumPy says, row by row."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.bases.on_policy import Experience
from sebulba.agents.configs import ImpalaConfig, TorsoConfig
from sebulba.agents.impala import Impala
from sebulba.agents.multi import waiting_agents
from sebulba.types import EnvStep, RunSpec, Trajectory
from tests.support.agent_driver import SPEC, quick_state

N, ROWS = 3, 105
LENGTHS = (1, 3, 7, 50)


class Stream(NamedTuple):
    """What an environment says to N slots, ``[rows, N]``."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_first: np.ndarray
    acting: np.ndarray


def random_stream(seed: int) -> Stream:
    """Return episodes in which slots wait, die, come back, and are told of the end or not."""
    rng = np.random.default_rng(seed)
    share = rng.uniform(0.1, 1.0)
    stream = Stream(*(np.zeros((ROWS, N), dtype) for dtype in (np.float32, *[np.bool_] * 4)))
    begins = True
    for t in range(ROWS):
        stream.is_first[t] = begins
        if begins:
            begins = False
        else:
            stream.reward[t] = rng.integers(-3, 4, N)
            ended = rng.random(N) < 0.05
            if begins := bool(rng.random() < 0.1):
                ended = rng.random(N) < 0.7
            kind = np.bool_(rng.random() < 0.5)
            stream.terminated[t], stream.truncated[t] = ended & kind, ended & ~kind
        stream.acting[t] = rng.random(N) < share
    return stream


def defined(stream: Stream) -> tuple[list[list[tuple]], np.ndarray]:
    """Return the transitions of each slot, in words of one row after the other; and the lost."""
    found: list[list[tuple]] = [[] for _ in range(N)]
    uncredited = np.zeros(N)
    for slot in range(N):
        last, total = None, 0.0
        for t in range(ROWS):
            reward, terminated, truncated, is_first, acting = (x[t, slot] for x in stream)
            if is_first:
                last, total = None, 0.0
            if last is None:
                uncredited[slot] += abs(reward)
            else:
                total += float(reward)
            ended = terminated or truncated
            if last is not None and (ended or acting):
                found[slot].append((*last, total, bool(terminated), bool(truncated), t))
            if ended:
                last = None
            elif acting:
                last, total = (t, 10 * t + slot), 0.0
    return found, uncredited


def rows_of(stream: Stream, begin: int, end: int) -> EnvStep:
    """Return the rows ``[begin, end)``; what is observed is the number of the row."""
    number = np.broadcast_to(np.arange(begin, end, dtype=np.float32)[:, None], (end - begin, N))
    return EnvStep(number, np.zeros_like(number, np.int32), *(x[begin:end] for x in stream[:4]))


def actions_at(begin: int, end: int) -> np.ndarray:
    return (10 * np.arange(begin, end)[:, None] + np.arange(N)).astype(np.int32)


def one_row(state: Any, x: Any) -> Any:
    row, acting, action = x
    shown = waiting_agents.show(state, row, acting)
    pending = waiting_agents.Pending(shown.row, action, action.astype(jnp.float32), [row.obs])
    return waiting_agents.advance(state, row, shown, pending), None


@functools.partial(jax.jit, static_argnames="joins")
def cycle(state: Any, trajectory: Trajectory, acting: jax.Array, *, joins: bool) -> Any:
    """Return the state after a cycle, and what its trajectory is packed to."""
    rows = jax.tree.map(lambda x: x[:-1], (trajectory.env_step, acting))
    after, _ = jax.lax.scan(one_row, state, (*rows, trajectory.action))
    return after, waiting_agents.pack(state, trajectory, acting, joins=joins)


def packed(stream: Stream, length: int, *, joins: bool) -> tuple[list[Any], Any]:
    """Return the packed trajectories of cycles of ``length`` rows, and the last state."""
    example = jax.tree.map(lambda x: jnp.asarray(x[0]), rows_of(stream, 0, 1))
    state = waiting_agents.new_turns(example, example.prev_action, jnp.zeros(N), [jnp.zeros(N)])
    found = []
    for begin in range(0, ROWS - length, length):
        end = begin + length
        actions = actions_at(begin, end)
        rows = rows_of(stream, begin, end + 1)
        trajectory = Trajectory(rows, actions, actions.astype(np.float32), 0, 0, 0)
        acting = stream.acting[begin : end + 1]
        state, (done, before) = cycle(state, trajectory, acting, joins=joins)
        found.append((jax.tree.map(np.asarray, done), np.asarray(before[0])))
    return found, state


def transitions_of(rows: EnvStep, action: np.ndarray) -> list[list[tuple]]:
    """Return the valid transitions of every slot of rows ``[T+1, N]``, actions ``[>= T, N]``."""
    found: list[list[tuple]] = [[] for _ in range(N)]
    valid = rows.valid
    for t in range(len(rows.reward) - 1):
        for slot in np.flatnonzero(valid[t + 1]):
            after = (x[t + 1, slot] for x in (rows.reward, rows.terminated, rows.truncated))
            reward, terminated, truncated = after
            found[slot].append(
                (
                    int(rows.obs[t, slot]),
                    int(action[t, slot]),
                    float(reward),
                    bool(terminated),
                    bool(truncated),
                    int(rows.obs[t + 1, slot]),
                )
            )
    return found


def defined_until(stream: Stream, row: int) -> list[list[tuple]]:
    return [[one for one in slot if one[-1] < row] for slot in defined(stream)[0]]


@pytest.mark.parametrize("length", LENGTHS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_each_trajectory_has_the_transitions_that_are_defined(length, seed):
    stream = random_stream(seed)
    found, state = packed(stream, length, joins=False)
    expected = defined_until(stream, len(found) * length)
    each = [transitions_of(done.env_step, done.action) for done, _ in found]
    assert [list(itertools.chain(*(one[slot] for one in each))) for slot in range(N)] == expected
    for done, before in found:
        # What the loss needs from acting, and the state before row 0, are those of its row.
        np.testing.assert_array_equal(done.extras, done.action.astype(np.float32))
        acted = done.action[0] > 0
        np.testing.assert_array_equal(before[acted], done.env_step.obs[0][acted])
    whole = stream._replace(**{n: x[: len(found) * length] for n, x in stream._asdict().items()})
    np.testing.assert_allclose(state.uncredited, _uncredited(whole))


def _uncredited(stream: Stream) -> np.ndarray:
    """Return ``defined(stream)[1]`` of a stream of any length."""
    rows = len(stream.reward)
    padding = [np.zeros((ROWS - rows, N), x.dtype) for x in stream]
    longer = Stream(*(np.concatenate(pair) for pair in zip(stream, padding, strict=True)))
    return defined(longer)[1]


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_trajectories_that_are_joined_have_them_too(length, seed):
    """A replay keeps rows 0 to T-1 of each; the row after them is row 0 of the next."""
    stream = random_stream(seed)
    found, _ = packed(stream, length, joins=True)
    rows = jax.tree.map(
        lambda *x: np.concatenate(x),
        *(jax.tree.map(lambda x: x[:-1], done.env_step) for done, _ in found),
    )
    action = np.concatenate([done.action for done, _ in found])
    expected = defined_until(stream, (len(found) - 1) * length)
    joined = transitions_of(rows, action)
    for slot in range(N):
        # The last transition of the last but one may not be complete before the last.
        assert joined[slot][: len(expected[slot])] == expected[slot]
        assert joined[slot] == defined_until(stream, len(found) * length)[slot][: len(joined[slot])]


def test_left_over_rows_repeat_an_observation_that_was_made():
    stream = random_stream(3)
    stream.acting[:] = False
    stream.acting[::10] = True
    found, _ = packed(stream, 50, joins=False)
    rows = found[1][0].env_step
    assert set(np.unique(rows.obs)) <= set(np.arange(ROWS, dtype=np.float32))
    assert not rows.valid[1:][rows.obs[1:] == rows.obs[0]].any()


def test_a_reward_before_the_first_action_is_nobodys_and_counted():
    zeros = np.zeros((ROWS, N))
    stream = Stream(zeros.astype(np.float32), *(zeros.astype(np.bool_) for _ in range(4)))
    stream.is_first[0] = stream.acting[5] = stream.acting[9] = True
    stream.reward[3], stream.reward[7] = -4.0, 2.0
    found, state = packed(stream, 50, joins=False)
    assert transitions_of(found[0][0].env_step, found[0][0].action)[0] == [
        (5, 50, 2.0, False, False, 9)
    ]
    np.testing.assert_array_equal(state.uncredited, [4.0] * N)


# What is learned.


def gradient_of(agent: Any, networks: Any, trajectory: Trajectory) -> Any:
    """Return the gradient of a loss on a trajectory that is there as a whole, on one device."""

    @jax.jit
    @functools.partial(jax.vmap, axis_name=LEARNER_AXIS)
    def gradient(trajectory: Trajectory) -> Any:
        experience = Experience(trajectory, (), ())
        loss = lambda networks: agent.loss(networks, (), experience, jax.random.key(0))[0]  # noqa: E731
        return jax.grad(loss)(networks)

    return jax.device_get(gradient(jax.tree.map(lambda x: jnp.asarray(x)[None], trajectory)))


@pytest.mark.slow
def test_gradients_with_dead_slots_are_those_of_a_mask_by_hand():
    """Slot 1 dies after two decisions. By hand: its other rows, and the last one, do not count."""
    rows, dies = 8, 2
    agent = Impala(SPEC, ImpalaConfig(torso=TorsoConfig(hidden_sizes=(8,))))
    networks = quick_state(agent, RunSpec(N, 1, rows, 1)).networks
    rng = np.random.default_rng(5)
    none = np.zeros((rows + 1, N), np.bool_)
    acting, first, dead, terminated = ~none, none.copy(), none.copy(), none.copy()
    acting[dies:, 1] = False
    first[0], terminated[dies, 1], dead[dies + 1 :, 1] = True, True, True
    obs = rng.normal(size=(rows + 1, N, 3)).astype(np.float32)
    obs[dead] = 1e3  # nobody may look at it
    reward = rng.normal(size=(rows + 1, N)).astype(np.float32)
    reward[first | dead] = 0.0
    action = rng.integers(2, 7, (rows, N)).astype(np.int32)
    extras = jax.eval_shape(lambda: agent.empty_trajectory(networks, RunSpec(N, 1, rows, 1))).extras
    extras = extras._replace(raw=action - 2, log_prob=np.full((rows, N), -1.6, np.float32))
    step = EnvStep(obs, np.zeros((rows + 1, N), np.int32), reward, terminated, none, first)
    trajectory = Trajectory(step, action, extras, *[np.int32(0)] * 3)

    example = jax.tree.map(lambda x: jnp.asarray(x[0]), (step, action, extras))
    packed, _ = waiting_agents.pack(
        waiting_agents.new_turns(*example, ()), trajectory, acting, joins=False
    )
    by_hand = step._replace(is_first=first | dead | (np.arange(rows + 1) == rows)[:, None])
    for one in (packed.env_step, by_hand):
        assert one.valid[1:].sum() == 2 * (rows - 1) + dies
    gradients = [
        gradient_of(agent, networks, one) for one in (packed, trajectory._replace(env_step=by_hand))
    ]
    assert max(np.abs(x).max() for x in jax.tree.leaves(gradients[0])) > 1e-2
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)

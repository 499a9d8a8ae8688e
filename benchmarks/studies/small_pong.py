"""A Pong of 10 x 10 cells, which presets for Atari learn on a CPU within minutes.

    sebulba train atari-ppo --env.id benchmarks.studies.small_pong:small_pong \
        --agent.torso small_cnn

Points, returns from -21 to 21, and what scores are those of Atari's game. The opponent follows the
ball at four fifths of its speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

SIZE = 10
POINTS = 21
MOST_STEPS = 3000
OPPONENT_MOVES = 0.8
"""Probability that the opponent's paddle follows the ball in a step."""


class State(NamedTuple):
    """Where a game stands; positions are column, row."""

    ball: jax.Array
    before: jax.Array
    """Where the ball was a step ago."""
    speed: jax.Array
    paddles: jax.Array
    """Rows of the middles of both paddles: the opponent's on the left, the player's."""
    points: jax.Array
    """Of the opponent and the player."""
    num_steps: jax.Array


class SmallPong:
    """A JAX environment: 0 stays, 1 goes up, 2 goes down."""

    observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, key: jax.Array) -> tuple[jax.Array, State]:
        """Begin a game."""
        ball, speed = _served(key)
        zeros = jnp.zeros(2, jnp.int32)
        state = State(ball, ball, speed, jnp.full(2, 4), zeros, jnp.int32(0))
        return _picture(state), state

    def step(
        self, key: jax.Array, state: State, action: jax.Array
    ) -> tuple[jax.Array, State, Any, Any, Any]:
        """Move the paddles, then the ball; whoever misses it gives a point."""
        serve_key, move_key = jax.random.split(key)
        follows = jax.random.bernoulli(move_key, OPPONENT_MOVES)
        goal = jnp.sign(state.ball[1] - state.paddles[0]) * follows
        moved = state.paddles + jnp.stack([goal, jnp.array([0, -1, 1])[action]])
        paddles = jnp.clip(moved, 1, SIZE - 2)
        speed = state.speed
        row = state.ball[1] + speed[1]
        speed = speed.at[1].set(jnp.where((row < 0) | (row >= SIZE), -speed[1], speed[1]))
        ball = state.ball + speed
        at_player, at_opponent = ball[0] == SIZE - 1, ball[0] == 0
        offset = ball[1] - jnp.where(at_player, paddles[1], paddles[0])
        is_hit = (at_player | at_opponent) & (jnp.abs(offset) <= 1)
        is_point = (at_player | at_opponent) & ~is_hit
        off_edge = jnp.where(offset == 0, speed[1], jnp.sign(offset))
        hit = jnp.stack([-speed[0], off_edge])
        served = _served(serve_key)
        speed = jnp.where(is_point, served[1], jnp.where(is_hit, hit, speed))
        scored = jnp.stack([is_point & at_player, is_point & at_opponent])
        points = state.points + scored
        before = jnp.where(is_point, served[0], state.ball)
        ball = jnp.where(is_point, served[0], ball)
        after = State(ball, before, speed, paddles, points, state.num_steps + 1)
        reward = scored[1].astype(jnp.float32) - scored[0]
        truncated = after.num_steps >= MOST_STEPS
        return _picture(after), after, reward, jnp.max(points) >= POINTS, truncated


def small_pong(
    episodic_life: Any = None,
    reward_clip: Any = None,
    noop_max: Any = None,
    frame_skip: Any = None,
    stack_num: Any = None,
) -> SmallPong:
    """Return the game; options of presets for Atari change nothing in it.

    It has no lives, its rewards are signs already, serves are random, and an observation shows
    where the ball was a step ago.
    """
    return SmallPong()


def _served(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a ball in the middle, and its speed."""
    row_key, speed_key = jax.random.split(key)
    row = jax.random.randint(row_key, (), 2, SIZE - 2)
    return jnp.stack([jnp.int32(SIZE // 2), row]), 2 * jax.random.bernoulli(
        speed_key, shape=(2,)
    ).astype(jnp.int32) - 1


def _picture(state: State) -> jax.Array:
    """Return paddles, ball, and the ball of a step ago in a channel each."""
    rows = jnp.arange(SIZE)[:, None]
    columns = jnp.arange(SIZE)[None]
    left, right = (jnp.abs(rows - middle) <= 1 for middle in state.paddles)
    paddles = (left & (columns == 0)) | (right & (columns == SIZE - 1))
    balls = [(rows == one[1]) & (columns == one[0]) for one in (state.ball, state.before)]
    return 255 * jnp.stack([paddles, *balls], axis=-1).astype(jnp.uint8)

"""Level replay beside uniform levels in mazes: ``python -m benchmarks.studies.mazes``.

It prints after how many env steps a policy solves 80 % of 1000 solvable mazes that training did not
draw, by seed; and the share that it solves at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import sebulba
from benchmarks.studies.tables import table
from sebulba.agents.configs import PPOConfig, TorsoConfig, make_agent
from sebulba.envs import make_env_factory
from sebulba.policies.policy import Policy

MOST_STEPS, WALLS = 40, 0.3
"""Steps of an episode, and the share of walls."""
NEAR, LEAST_DISTANCE = 1, 4
"""Steps to the goal of a trivial level, and at least of a solvable one."""
MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Maze:
    """A grid with walls, a player and a goal, all of which are observed; the goal pays 1.

    A level, the key of a reset, is trivial (the goal is beside the player), or unsolvable (it is
    walled in), or solvable (it is at least ``LEAST_DISTANCE`` steps away).
    """

    action_space = spaces.Discrete(len(MOVES))

    def __init__(self, trivial: float = 0.0, unsolvable: float = 0.0, size: int = 7) -> None:
        self.size = size
        self.observation_space = spaces.Box(0, 1, (3 * size * size,), np.float32)
        self.shares = np.array([trivial, unsolvable, 1.0 - trivial - unsolvable])

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Draw a level."""
        size = self.size
        of_kind, of_walls, of_start, of_goal = jax.random.split(key, 4)
        kind = jax.random.choice(of_kind, 3, p=jnp.asarray(self.shares))
        start = jax.random.randint(of_start, (2,), 0, size)
        free = (jax.random.uniform(of_walls, (size, size)) > WALLS).at[tuple(start)].set(True)
        far = distances(free, start)
        fits = jnp.stack([far == NEAR, far > NEAR, far >= LEAST_DISTANCE])[kind]
        goal = _one_of(of_goal, fits & jnp.isfinite(far), far)
        around = goal[None] + MOVES
        inside = ((around >= 0) & (around < size)).all(axis=1)
        around = jnp.where(inside[:, None], around, size)
        walled = free.at[around[:, 0], around[:, 1]].set(False, mode="drop")
        walled = walled.at[tuple(start)].set(True)
        state = jnp.where(kind == 1, walled, free), start, goal, jnp.int32(0)
        return self._seen(state), state

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Any:
        """Go to the next cell, unless there is a wall."""
        free, at, goal, t = state
        there = at + jnp.asarray(MOVES)[action]
        inside = ((there >= 0) & (there < self.size)).all()
        at = jnp.where(inside & free[tuple(jnp.clip(there, 0, self.size - 1))], there, at)
        state, found = (free, at, goal, t + 1), (at == goal).all()
        return self._seen(state), state, found.astype(jnp.float32), found, t + 1 == MOST_STEPS

    def _seen(self, state: Any) -> jax.Array:
        free, at, goal, _ = state
        zeros = jnp.zeros((self.size, self.size))
        planes = [~free, zeros.at[tuple(at)].set(1), zeros.at[tuple(goal)].set(1)]
        return jnp.stack(planes).astype(jnp.float32).ravel()


def _one_of(key: jax.Array, fits: jax.Array, far: jax.Array) -> jax.Array:
    """Return a cell that ``fits``, or else the farthest that can be reached."""
    reached = jnp.where(jnp.isfinite(far), far, -1.0)
    fits = jnp.where(fits.any(), fits, reached == reached.max())
    logits = jnp.where(fits, 0.0, -jnp.inf).ravel()
    return jnp.stack(jnp.divmod(jax.random.categorical(key, logits), len(far)))


def distances(free: jax.Array, start: jax.Array) -> jax.Array:
    """Return the steps from ``start`` to each cell, infinity where none leads."""
    size = len(free)
    far = jnp.full((size + 2, size + 2), jnp.inf).at[start[0] + 1, start[1] + 1].set(0.0)

    def wider(_: int, far: jax.Array) -> jax.Array:
        near = jnp.minimum(
            jnp.minimum(far[2:, 1:-1], far[:-2, 1:-1]), jnp.minimum(far[1:-1, 2:], far[1:-1, :-2])
        )
        inner = jnp.where(free, jnp.minimum(far[1:-1, 1:-1], near + 1), jnp.inf)
        return far.at[1:-1, 1:-1].set(inner)

    return jax.lax.fori_loop(0, 3 * size, wider, far)[1:-1, 1:-1]


def few_solvable(size: int) -> Maze:
    """Return mazes of which 45 % are trivial and 45 % unsolvable."""
    return Maze(0.45, 0.45, size)


def curve(
    kind: Callable[..., Maze], size: int, seed: int, env_steps: int, every: int, **options: Any
) -> list[tuple[int, float]]:
    """Return env steps and the share of solved mazes, every so many env steps."""
    env: Any = partial(kind, size=size)
    if options:
        env = make_env_factory("sets:levels", levels=env, **options)
    config = PPOConfig(
        learning_rate=5e-4, discount=0.97, entropy_coefficient=0.01, epochs=4, minibatches=8,
        torso=TorsoConfig(hidden_sizes=(128, 128), activation="relu"), separate_value_torso=True,
    )  # fmt: skip
    agent = make_agent(sebulba.env_spec(env), config)
    points: list[tuple[int, float]] = []
    with sebulba.GymnasiumLoop(
        env, agent, 128, schedule="lockstep", seed=seed, num_inferencers_per_device=1
    ) as loop:
        state = loop.new_state(seed, 32)
        while loop.counters.env_steps < env_steps:
            result = loop.run(state, every // (128 * 32), 32)
            state = result.state
            policy = Policy(agent, result.acting_networks, explore=True)
            found = sebulba.evaluate(
                policy, partial(Maze, size=size), num_episodes=1000, num_envs=250
            )
            points.append((loop.counters.env_steps, found.episode_return_mean))
            print(seed, options, *points[-1], flush=True)
    return points


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--env-steps", type=int, default=3_000_000)
    parser.add_argument("--every", type=int, default=100_000)
    parser.add_argument("--replay", type=float, default=0.8)
    parser.add_argument("--buffer", type=int, default=1024)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--mazes", nargs="+", default=["few", "all"])
    parser.add_argument("--size", type=int, default=7, help="cells of a side")
    given = parser.parse_args(argv)
    lines = []
    for name, kind in (("few", few_solvable), ("all", Maze)):
        if name not in given.mazes:
            continue
        for levels, options in (
            ("replayed", {"replay": given.replay, "buffer": given.buffer}),
            ("uniform", {}),
        ):
            curves = [
                curve(kind, given.size, seed, given.env_steps, given.every, **options)
                for seed in range(given.seeds)
            ]
            first = [next((x for x, y in one if y >= given.share), None) for one in curves]
            shown = ", ".join("never" if x is None else f"{x:,}" for x in first)
            lines.append(
                [
                    f"{name} solvable, {levels}",
                    shown,
                    ", ".join(f"{one[-1][1]:.3f}" for one in curves),
                ]
            )
            print(lines[-1], flush=True)
    print(table(["mazes", f"env steps to {given.share:g}", "at the end"], lines))


if __name__ == "__main__":
    main()

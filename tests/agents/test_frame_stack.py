"""Frames kept once: stacks come back bit for bit, or cannot be drawn."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sebulba.agent import TRAJECTORY_SPEC
from sebulba.agents.replay.transitions_and_sequences import Draw, SequenceReplay, TransitionReplay
from sebulba.envs import make_env_factory
from sebulba.types import EnvSpec, EnvStep, RunSpec, Trajectory, empty_env_step
from tests.support.oracle import rollout
from tests.support.replay_world import inserter, mapped, mesh_of


def cut(steps: EnvStep, action: np.ndarray, cycle: int, num_steps: int) -> Trajectory:
    """Return a trajectory of a long rollout ``[.., B, ...]``."""
    rows = slice(cycle * num_steps, (cycle + 1) * num_steps + 1)
    return Trajectory(
        env_step=jax.tree.map(lambda x: x[rows], steps),
        action=action[rows][:-1],
        extras=(),
        policy_version=np.int32(0),
        inferencer=np.int32(0),
        cycle=np.int32(cycle),
    )


class Pair:
    """A replay that keeps frames once, beside the same one that keeps whole stacks."""

    def __init__(self, run: RunSpec, example: Trajectory, depth: int, layout: Any) -> None:
        self.layouts = [layout(frame_stack=k) for k in (depth, 0)]
        core = np.zeros((run.num_envs, 1), np.float32)
        self._core = core if isinstance(self.layouts[0], SequenceReplay) else ()
        mesh = mesh_of(run.num_update_devices)
        self._insert = [inserter(layout, mesh) for layout in self.layouts]
        self.replays = [layout.new(example, self._core, run) for layout in self.layouts]
        self._read = [
            mapped(mesh, self._reader(layout), (layout.spec(), P()), P()) for layout in self.layouts
        ]

    @staticmethod
    def _reader(layout: Any) -> Any:
        def read(replay: Any, draw: Draw) -> Any:
            if isinstance(layout, SequenceReplay):
                return layout.gathered(replay, draw, 0.9).env_step.obs.swapaxes(0, 1)
            batch = layout.gathered(replay, draw, 0.9)
            return batch.obs, batch.next_obs

        return read

    def insert(self, trajectory: Trajectory) -> None:
        self.replays = [
            insert(replay, trajectory, self._core)
            for insert, replay in zip(self._insert, self.replays, strict=True)
        ]

    def can_start(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where the two can be drawn."""
        once, whole = (np.asarray(replay.weight) > 0 for replay in self.replays)
        assert not (once & ~whole).any()
        return once, whole

    def num_different(self) -> int:
        """Return how many of all possible draws differ between the two in any bit."""
        once, _ = self.can_start()
        j, start, env = np.indices(once.shape).reshape(3, -1).astype(np.int32)
        steps = self.replays[0].steps_per_cycle
        row = start * self.layouts[0].rows_between_starts(steps)
        draw = Draw(j, row, env, j, np.ones(len(j), np.float32))
        one, other = (
            np.stack(jax.tree.leaves(read(replay, draw)), axis=1)
            for read, replay in zip(self._read, self.replays, strict=True)
        )
        assert one.dtype == np.uint8 and one.shape == other.shape
        same = (one == other).reshape(once.size, -1).all(axis=1)
        return int((~same & once.reshape(-1)).sum())


# Real games.

STEPS, PLACES = 5, 4
ATARI = RunSpec(num_envs=3, num_inferencers=1, steps_per_cycle=STEPS, num_update_devices=1)
CAPACITY = STEPS * PLACES * ATARI.num_envs


@pytest.mark.slow
@pytest.mark.parametrize("episodic_life", [True, False])
@pytest.mark.parametrize("game", ["Pong-v5", "Breakout-v5"])
def test_stacks_of_games_come_back_bit_for_bit(game: str, episodic_life: bool) -> None:
    cycles = 24
    # Some games are cut short, so that Pong too begins anew.
    factory = make_env_factory(game, episodic_life=episodic_life, max_episode_steps=50)
    env = factory(ATARI.num_envs, [1, 2, 3])
    action = np.random.default_rng(0).integers(
        env.spec.action_space.n, size=(cycles * STEPS + 1, ATARI.num_envs), dtype=np.int32
    )
    steps = rollout(env, action)
    env.close()
    lost_lives = steps.is_first[1:] & ~(steps.obs[1:] == steps.obs[1:, :, -1:]).all((2, 3, 4))
    assert lost_lives.any() == (episodic_life and game == "Breakout-v5")
    assert (steps.is_first[1:].sum(axis=0) > lost_lives.sum(axis=0)).all()

    example = cut(steps, action, 0, STEPS)
    for layout in (
        lambda **k: TransitionReplay(capacity=CAPACITY, num_steps=3, **k),
        lambda **k: SequenceReplay(capacity=CAPACITY, length=7, **k),
    ):
        pair = Pair(ATARI, example, env.spec.frame_stack, layout)
        missing = 0
        for cycle in range(cycles):
            pair.insert(cut(steps, action, cycle, STEPS))
            once, whole = pair.can_start()
            missing += (whole & ~once).sum()
            if cycle % 4 == 3:
                assert pair.num_different() == 0
            # The oldest trajectory is one that follows what was overwritten.
            oldest = np.roll(whole & ~once, -((cycle + 1) % PLACES) * (once.shape[1] // PLACES), 1)
            assert not oldest[:, 3 if once.shape[1] > PLACES else 1 :].any()
        assert missing > 0
        assert int(pair.replays[0].stack.lost) == 0


# Stacks that no game gives.

DEPTH = 4
TINY = RunSpec(num_envs=2, num_inferencers=1, steps_per_cycle=2, num_update_devices=1)


def stacks_of(frames: np.ndarray, restarts: dict[int, str]) -> np.ndarray:
    """Return ``[T, 2, DEPTH, 1, 3]`` of frames ``[T]``; both environments see the same."""
    rows, stack = [], [frames[0]] * DEPTH
    for time, frame in enumerate(frames):
        kind = restarts.get(time)
        older = {"repeat": [frame] * 3, "zeros": [0] * 3, "unseen": [201, 202, 203]}
        stack = (older[kind] if kind else stack[1:]) + [frame]
        rows.append(stack)
    image = np.array(rows, np.uint8)[:, None, :, None, None]
    return np.broadcast_to(image, (len(frames), 2, DEPTH, 1, 3)).copy()


def tiny(restarts: dict[int, str], num_rows: int = 60) -> tuple[EnvStep, np.ndarray]:
    obs = stacks_of(np.arange(1, num_rows + 1), restarts)
    spec = EnvSpec(
        gymnasium.spaces.Box(0, 255, obs.shape[2:], np.uint8), gymnasium.spaces.Discrete(2)
    )
    row = empty_env_step(spec, TINY.num_envs)
    steps = jax.tree.map(lambda x: np.broadcast_to(x, (num_rows, *x.shape)).copy(), row)
    return steps._replace(obs=obs), np.zeros((num_rows, 2), np.int32)


def tiny_pair(example: Trajectory, layout: Any = TransitionReplay, **more: Any) -> Pair:
    return Pair(TINY, example, DEPTH, lambda **k: layout(capacity=2 * 2 * 5, **more, **k))


@pytest.mark.slow
def test_a_restart_that_repeats_no_frame_is_counted_and_never_drawn() -> None:
    steps, action = tiny({9: "repeat", 16: "zeros", 23: "unseen", 25: "zeros", 35: "repeat"})
    pair = tiny_pair(cut(steps, action, 0, 2))
    never = set()
    for cycle in range(22):
        pair.insert(cut(steps, action, cycle, 2))
        assert pair.num_different() == 0
        once, whole = pair.can_start()
        newest_time = 2 * cycle + 1
        if cycle >= 5:  # the oldest rows stand after the head
            row_of = [t % 10 for t in range(newest_time - 9 + 3, newest_time)]
            times = np.arange(newest_time - 6, newest_time)
            never |= set(times[~once[0, row_of, 0] & whole[0, row_of, 0]])
    # Of each such restart the three rows whose stack holds what was never seen, and the row before,
    # whose next observation is one of them.
    assert never == {15, 16, 17, 18, 22, 23, 24, 25, 26, 27}
    assert int(pair.replays[0].stack.lost) == 3 * TINY.num_envs


@pytest.mark.slow
def test_no_sequence_holds_a_stack_that_cannot_be_rebuilt() -> None:
    steps, action = tiny({9: "repeat", 16: "zeros", 23: "unseen", 35: "repeat"})
    pair = tiny_pair(cut(steps, action, 0, 2), SequenceReplay, length=3)
    never = set()
    for cycle in range(20):
        pair.insert(cut(steps, action, cycle, 2))
        assert pair.num_different() == 0
        once, whole = pair.can_start()
        newest = cycle - 1  # of two trajectories each
        if cycle > 3:
            assert whole[0, newest % 5, 0]
            never |= set() if once[0, newest % 5, 0] else {2 * newest}
    # The first rows of sequences of 4 rows, one of which is one of the three that cannot.
    assert never == {14, 16, 18, 20, 22, 24}


def test_a_stream_that_begins_in_mid_game_waits_until_its_stacks_are_whole() -> None:
    steps, action = tiny({0: "unseen", 9: "repeat"})
    pair = tiny_pair(cut(steps, action, 0, 2))
    for cycle in (0, 1, 2, 4, 5):  # 3 is missing
        pair.insert(cut(steps, action, cycle, 2))
    times = np.array([0, 1, 2, 3, 4, 5, 8, 9, 10, 11])
    once, whole = (times[can[0, :, 0]].tolist() for can in pair.can_start())
    assert whole == [0, 1, 2, 3, 4, 8, 9, 10]
    assert once == [3, 4, 9, 10]
    assert pair.num_different() == 0
    assert int(pair.replays[0].stack.lost) == 0


# Size.


@pytest.mark.slow
def test_a_million_frames_take_less_than_8_gigabytes_and_are_not_copied() -> None:
    run = RunSpec(num_envs=64, num_inferencers=2, steps_per_cycle=20, num_update_devices=1)
    layout = TransitionReplay(
        capacity=1_000_000, num_steps=3, priority_exponent=0.6, frame_stack=DEPTH
    )
    spec = EnvSpec(
        gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8),
        gymnasium.spaces.Discrete(4, dtype=np.int32),
    )
    row = empty_env_step(spec, run.num_envs)
    rows = lambda n: jax.tree.map(  # noqa: E731
        lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), row
    )
    scalar = jax.ShapeDtypeStruct((), np.int32)
    trajectory = Trajectory(rows(21), rows(20).prev_action, (), scalar, scalar, scalar)
    replay = jax.eval_shape(lambda t: layout.new(t, (), run), trajectory)
    assert replay.rows.reward.size == 1_000_000 // (20 * 128) * (20 * 128)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(replay))
    assert num_bytes < 8e9

    def learn(replay: Any, key_data: jax.Array) -> Any:
        draw = layout.draw(replay, jax.random.wrap_key_data(key_data), 32)
        batch = layout.gathered(replay, draw, 0.99)
        return layout.set_priority(replay, draw, batch.reward), batch

    mesh = mesh_of(1)
    insert = mapped(
        mesh, layout.insert, (layout.spec(), TRAJECTORY_SPEC), layout.spec(), donate_argnums=0
    )
    key_data = jax.ShapeDtypeStruct((2,), np.uint32)
    update = mapped(mesh, learn, (layout.spec(), P()), (layout.spec(), P()), donate_argnums=0)
    for lowered in (insert.lower(replay, trajectory), update.lower(replay, key_data)):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= num_bytes
        assert memory.temp_size_in_bytes < 0.05 * num_bytes

"""Environments that are put back go on as if nothing had happened; what cannot be says why."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils import EzPickle
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from sebulba.envs import make_env_factory
from sebulba.envs.saving import saved_env
from sebulba.errors import EnvError
from tests.support.oracle import DictOracleEnv, OracleEnv, ready_made

SEEDS = [11, 12, 13]
OTHER_SEEDS = [21, 22, 23]


class WalkEnv(gymnasium.Env):
    """A random walk to which chance belongs in steps and resets; ends where it leaves the road."""

    observation_space = spaces.Box(-9, 9, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._where = self.np_random.normal(size=2)
        return self._where.copy(), {}

    def step(self, action):
        self._where += self.np_random.normal(size=2) + (action - 1)
        left = bool(np.abs(self._where).max() > 3)
        self._where = self._where.clip(-9, 9)
        return self._where.copy(), float(self._where[0]), left, False, {}


class OfferingEnv(WalkEnv):
    """Offers its state and cannot be pickled; its state leaves out the random generator."""

    def __init__(self):
        self._lock = threading.Lock()

    def get_state(self):
        return self._where

    def set_state(self, state):
        self._where = state


class LambdaEnv(WalkEnv):
    """Cannot be pickled by pickle, only by cloudpickle."""

    def __init__(self):
        self._function = lambda x: x


def limited(env_class):
    """Make the environment under a wrapper with a state of its own."""
    return gymnasium.wrappers.TimeLimit(env_class(), 5)


def make_vec_walk(num_envs, seeds):
    return SyncVectorEnv([WalkEnv] * num_envs)


def make_vec_cartpole(num_envs, seeds):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs)


CAN_BE_PUT_BACK: dict[str, tuple[Any, dict[str, Any]]] = {
    "sync": (WalkEnv, {}),
    "wrapped": (functools.partial(limited, WalkEnv), {}),
    "offering": (OfferingEnv, {}),
    "offering_wrapped": (functools.partial(limited, OfferingEnv), {}),
    "lambda": (LambdaEnv, {}),
    "dict": (DictOracleEnv, {}),
    "cartpole": ("CartPole-v1", {"backend": "gymnasium", "max_episode_steps": 9}),
    "pendulum": ("Pendulum-v1", {"backend": "gymnasium", "max_episode_steps": 9}),
    "vector": (make_vec_walk, {}),
    "vector_cartpole": (make_vec_cartpole, {}),
    "vector_disabled": (ready_made(AutoresetMode.DISABLED), {}),
    "vector_same_step": (ready_made(AutoresetMode.SAME_STEP), {}),
    "repeat": ("sebulba.envs.memory_tasks:RepeatObservation", {"episode_length": 9}),
}


def actions_for(adapter, num_steps):
    adapter.spec.action_space.seed(0)
    return [
        np.stack([adapter.spec.action_space.sample() for _ in range(adapter.num_envs)])
        for _ in range(num_steps)
    ]


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("name", CAN_BE_PUT_BACK)
def test_an_environment_that_was_put_back_goes_on_as_before(name):
    env, options = CAN_BE_PUT_BACK[name]
    factory = make_env_factory(env, **options)
    adapter, back = factory(3, SEEDS), factory(3, OTHER_SEEDS)
    actions = actions_for(adapter, 80)
    adapter.reset()
    # From every kind of place: in mid-episode, where one has just ended, where one begins.
    ends = 0
    for begin in range(0, 40, 8):
        for action in actions[begin : begin + 8]:
            output = adapter.step(action)
            ends += output.episode_end.sum()
            state = adapter.state()
            assert isinstance(state, bytes), state
            if output.episode_end.any() or output.is_first.any():
                break
        expected = [adapter.step(action) for action in actions[40:]]
        back.put_back(state)
        assert_same([back.step(action) for action in actions[40:]], expected)
    assert ends and any(output.is_first.any() for output in expected)
    adapter.close()
    back.close()


@pytest.mark.parametrize("name", ["sync", "vector", "repeat"])
def test_one_that_was_never_reset_is_put_back_with_its_seeds(name):
    env, options = CAN_BE_PUT_BACK[name]
    factory = make_env_factory(env, **options)
    adapter, back = factory(3, SEEDS), factory(3, OTHER_SEEDS)
    back.put_back(adapter.state())
    assert_same(back.reset(), adapter.reset())
    adapter.close()
    back.close()


def test_taking_the_state_changes_nothing():
    factory = make_env_factory(WalkEnv)
    looked_at, other = factory(3, SEEDS), factory(3, SEEDS)
    assert_same(looked_at.reset(), other.reset())
    for action in actions_for(other, 30):
        assert isinstance(looked_at.state(), bytes)
        assert_same(looked_at.step(action), other.step(action))


def test_what_was_put_back_can_be_saved_at_once():
    factory = make_env_factory(WalkEnv)
    adapter, once, twice = (factory(3, SEEDS) for _ in range(3))
    adapter.reset()
    action = np.zeros(3, np.int32)
    while not adapter.step(action).episode_end.any():
        pass
    once.put_back(adapter.state())
    twice.put_back(once.state())
    for _ in range(20):
        assert_same(twice.step(action), adapter.step(action))


def test_every_reset_of_the_repeat_task_plays_new_episodes():
    adapter = make_env_factory("sebulba.envs.memory_tasks:RepeatObservation")(2, [3, 4])
    fused = adapter.fused()

    def play():
        obs = [adapter.reset().obs]
        first = np.array(fused.state[0])  # what a fused cycle begins with
        obs.extend(adapter.step(np.zeros(2, np.int32)).obs for _ in range(40))
        return np.stack(obs), first

    games = [play() for _ in range(3)]
    assert len({obs.tobytes() for obs, _ in games}) == 3
    assert len({first.tobytes() for _, first in games}) == 3


# What cannot be put back.


class ThreadedEnv(WalkEnv):
    """Holds what cannot be pickled."""

    def __init__(self):
        self._lock = threading.Lock()


class RebuiltEnv(WalkEnv, EzPickle):
    """Is pickled without an error, as nothing but the arguments of its constructor."""

    def __init__(self):
        EzPickle.__init__(self)


class ForgetfulEnv(WalkEnv):
    """Is pickled without an error and without the half of its state."""

    def __getstate__(self):
        return {**self.__dict__, "_where": np.zeros(2)}


class OutsideEnv(WalkEnv):
    """Draws from a generator that is not in it."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward + np.random.random(), *rest


class RefusingEnv(OfferingEnv):
    def get_state(self):
        raise RuntimeError("not today")


class NativeEnv(WalkEnv):
    """Its ``set_state`` is something else, as that of MuJoCo environments is."""

    def __init__(self):
        self._lock = threading.Lock()

    def get_state(self, flag):
        return None

    def set_state(self, qpos, qvel):
        raise AssertionError("called")


@pytest.mark.parametrize(
    ("env", "options", "reason"),
    [
        (ThreadedEnv, {}, "environment 0: ThreadedEnv could not be pickled .*lock"),
        (
            functools.partial(limited, RebuiltEnv),
            {},
            "RebuiltEnv could .*RebuiltEnv, an EzPickle, .* get_state",
        ),
        (ForgetfulEnv, {}, "environment 0: a copy by pickle goes on differently after 1 steps"),
        (OutsideEnv, {}, "a copy by pickle goes on differently"),
        (RefusingEnv, {}, r"RefusingEnv gave no state \(RuntimeError: not today"),
        (NativeEnv, {}, "NativeEnv could not be pickled"),
        ("CartPole-v1", {}, "envpool cannot save its environments"),
        ("sebulba.envs.memory_tasks:cartpole_without_velocities", {}, "envpool cannot save"),
        (
            lambda num_envs, seeds: SyncVectorEnv([RebuiltEnv] * num_envs),
            {},
            "SyncVectorEnv could not be pickled .*EzPickle",
        ),
        (
            lambda num_envs, seeds: SyncVectorEnv([OutsideEnv] * num_envs),
            {},
            "a copy by pickle goes on differently",
        ),
    ],
)
def test_what_cannot_be_saved_says_why_and_goes_on(env, options, reason):
    adapter = make_env_factory(env, **options)(3, SEEDS)
    adapter.reset()
    for _ in range(2):
        state = adapter.state()
        assert isinstance(state, str)
        assert re.search(reason, state), state
        adapter.step(np.zeros(3, np.int32))
    with pytest.raises(EnvError):
        adapter.put_back(b"")
    adapter.close()


def state_of(env, num_envs=3, **options):
    adapter = make_env_factory(env, **options)(num_envs, SEEDS[:num_envs])
    adapter.reset()
    state = adapter.state()
    adapter.close()
    assert isinstance(state, bytes)
    return state


@pytest.mark.parametrize("env", [WalkEnv, "sebulba.envs.memory_tasks:RepeatObservation"])
def test_a_damaged_state_is_refused_and_new_episodes_begin(env):
    good = state_of(env)
    factory = make_env_factory(env)
    adapter = factory(3, SEEDS)
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(good)
        damaged[rng.integers(len(good))] ^= 1 << rng.integers(8)
        with pytest.raises(EnvError, match="state"):
            adapter.put_back(bytes(damaged))
    for wrong in (b"", good[:-1], good[:20], good + b"x", None, "reason"):
        with pytest.raises(EnvError, match="state"):
            adapter.put_back(wrong)
    assert_same(adapter.reset(), factory(3, SEEDS).reset())


def bounded(bound=9.0):
    env = WalkEnv()
    env.observation_space = spaces.Box(-bound, bound, (2,), np.float64)
    return env


class NowOfferingEnv(OfferingEnv):
    __qualname__ = "WalkEnv"


class SulkingEnv(OfferingEnv):
    __qualname__ = "OfferingEnv"

    def set_state(self, state):
        raise KeyError("sulking")


@pytest.mark.parametrize(
    ("saved", "factory", "message"),
    [
        (functools.partial(state_of, OracleEnv), WalkEnv, "is of environment 'OracleEnv'"),
        (functools.partial(state_of, WalkEnv, 2), WalkEnv, "num_envs=2, not of 3"),
        (functools.partial(state_of, WalkEnv), NowOfferingEnv, "no get_state.. when it was saved"),
        (functools.partial(state_of, OfferingEnv), SulkingEnv, "restored: KeyError: 'sulking'"),
    ],
)
def test_the_state_of_another_environment_is_refused(saved, factory, message):
    adapter, fresh = (make_env_factory(factory)(3, SEEDS) for _ in range(2))
    with pytest.raises(EnvError, match=message):
        adapter.put_back(saved())
    # From the seeds that it was made with, whatever it was put through.
    assert_same(adapter.reset(), fresh.reset())


def test_other_spaces_are_refused():
    state = state_of(bounded)
    adapter = make_env_factory(bounded, bound=10.0)(3, SEEDS)
    with pytest.raises(EnvError, match=r"observation_space=.*was saved, it is now .*"):
        adapter.put_back(state)


def test_a_state_of_another_version_is_refused(monkeypatch):
    from sebulba.envs.saving import sealed

    monkeypatch.setattr(sealed, "VERSION", 7)
    state = state_of(WalkEnv)
    monkeypatch.undo()
    with pytest.raises(EnvError, match="version b'7', not 2"):
        make_env_factory(WalkEnv)(3, SEEDS).put_back(state)


# In worker processes.


@pytest.mark.slow
def test_environments_in_worker_processes_are_put_back_there_and_elsewhere():
    make_env = functools.partial(limited, OfferingEnv)
    workers = make_env_factory(make_env, vectorization="async")(2, SEEDS[:2])
    here = make_env_factory(make_env)(2, OTHER_SEEDS[:2])
    actions = actions_for(workers, 40)
    workers.reset()
    for action in actions:
        if workers.step(action).episode_end.any():
            break
    state = workers.state()
    expected = [workers.step(action) for action in actions]
    assert expected[0].is_first.any()
    here.put_back(state)
    assert_same([here.step(action) for action in actions], expected)
    while not workers.step(actions[0]).episode_end.all():  # what the workers know of is forgotten
        pass
    workers.put_back(state)
    assert_same([workers.step(action) for action in actions], expected)
    workers.close()


@pytest.mark.slow
def test_worker_processes_say_why_not_and_live_on():
    workers = make_env_factory(SulkingEnv, vectorization="async")(2, SEEDS[:2])
    with pytest.raises(EnvError, match=r"environment 0 could not be restored: KeyError: 'sulking'"):
        workers.put_back(state_of(OfferingEnv, 2))
    workers.reset()
    workers.close()


@pytest.mark.slow
def test_a_worker_that_dies_while_it_is_asked_is_an_environment_error():
    adapter = make_env_factory(ThreadedEnv, vectorization="async")(2, SEEDS[:2])
    adapter.reset()
    assert "environment 0: ThreadedEnv could not be pickled" in adapter.state()
    process = adapter._vector_env.processes[1]
    process.kill()
    process.join()
    with pytest.raises(EnvError, match=r"worker process of environment 1 .*died"):
        adapter.state()
    adapter.close()


@pytest.mark.slow
def test_a_ready_made_async_vector_environment_says_what_to_do():
    def make(num_envs, seeds):
        envs = AsyncVectorEnv([WalkEnv] * num_envs, context="forkserver")
        return gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)

    adapter = make_env_factory(make)(1, [1])
    assert "vectorization='async'" in adapter.state()
    adapter.close()


class SpaceEnv(OfferingEnv):
    """Draws from a space of its own."""

    def reset(self, *, seed=None, options=None):
        self.noise = spaces.Dict({"deep": spaces.Tuple([spaces.Discrete(1000, seed=seed)])})
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + self.noise["deep"].sample()[0], *rest


class RandomStateEnv(OfferingEnv):
    """Draws from NumPy's older generator."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        self._np_random = np.random.RandomState(seed)
        return obs, info

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.float32(self._np_random.rand()), *rest


class SharedGenerator(gymnasium.Wrapper):
    """Draws from the generator of the environment."""

    def reset(self, **arguments):
        result = self.env.reset(**arguments)
        self.generator = self.unwrapped.np_random
        return result

    def step(self, action):
        obs, *rest = self.env.step(action)
        return obs + np.float32(self.generator.random() + self.unwrapped.np_random.random()), *rest


class Slotted(gymnasium.Wrapper):
    __slots__ = ("count",)

    def __init__(self, env):
        super().__init__(env)
        self.count = 0

    def step(self, action):
        self.count += 1
        obs, *rest = self.env.step(action)
        return obs + self.count, *rest


class Counts(gymnasium.Wrapper):
    """Counts in a list that the wrapper around it has too, and in a bytearray."""

    def __init__(self, env):
        super().__init__(env)
        self.counts, self.bytes, self.word = [], bytearray(), np.str_("")

    def step(self, action):
        self.counts.append(1)
        self.bytes.append(1)
        return self.env.step(action)


class ReadsCounts(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.counts = env.counts

    def step(self, action):
        obs, *rest = self.env.step(action)
        return obs + len(self.counts) + len(self.env.bytes), *rest


@pytest.mark.parametrize(
    "make",
    [
        SpaceEnv,
        RandomStateEnv,
        lambda: SharedGenerator(OfferingEnv()),
        lambda: Slotted(OfferingEnv()),
        lambda: ReadsCounts(Counts(OfferingEnv())),
    ],
    ids=["space", "random state", "shared generator", "slots", "shared list"],
)
def test_odd_wrappers_go_on_as_before(make):
    one, other = make(), make()
    one.reset(seed=3)
    other.reset(seed=7)
    for _ in range(5):
        one.step(1)
    data = saved_env.save(one)
    assert isinstance(data, bytes), data
    other = saved_env.restore(data, other)
    for _ in range(10):
        assert np.array_equal(one.step(1)[0], other.step(1)[0])

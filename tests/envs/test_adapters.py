"""What adapters deliver: dtypes, spaces, games, fused equality, ownership, silence."""

from __future__ import annotations

import subprocess
import sys
import types

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from sebulba.envs import env_source, env_spec, make_env_factory
from sebulba.envs.envpool_adapter import (
    MOST_COMPARED,
    _places,
    _places_by_comparison,
    native_step,
)
from sebulba.envs.valid_actions import clamp
from sebulba.errors import UsageError
from sebulba.types import EnvOutput
from tests.support.needs import needs_mujoco
from tests.support.oracle import ORACLES, DictOracleEnv, OracleEnv, pool_adapter, ready_made


def make_vec_cartpole(num_envs, seeds):
    """Gymnasium's own vectorised CartPole, which takes one seed."""
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs)


class SpaceEnv(gymnasium.Env):
    """Samples of any space."""

    def __init__(self, observation_space, action_space=spaces.Discrete(3)):  # noqa: B008
        self.observation_space = observation_space
        self.action_space = action_space
        self.actions = []

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} of {type(action)}"
        self.actions.append(action)
        return self.observation_space.sample(), 1, False, False, {}


OBSERVATION_SPACES = [
    spaces.Box(-3, 3, (2, 3), np.float64),
    spaces.Box(-3, 3, (), np.float32),
    spaces.Box(0, 255, (4, 5, 6), np.uint8),
    spaces.Box(-9, 9, (2,), np.int64),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary((2, 3)),
    spaces.Dict(
        b=spaces.Discrete(3), a=spaces.Box(-1, 1, (2,), np.float64), c=spaces.MultiBinary(4)
    ),
]


def leaves_of(space):
    return [space[key] for key in space.spaces] if isinstance(space, spaces.Dict) else [space]


@pytest.mark.parametrize("space", OBSERVATION_SPACES, ids=str)
@pytest.mark.parametrize("form", ["single", "vector"])
def test_observations_have_the_canonical_dtypes_and_shapes_of_the_spec(space, form):
    def one():
        return SpaceEnv(space)

    def vector(num_envs, seeds):
        return SyncVectorEnv([one] * num_envs)

    adapter = make_env_factory(one if form == "single" else vector)(3, [1, 2, 3])
    outputs = [adapter.reset(), adapter.step(np.zeros(3, np.int32))]
    adapter.close()
    expected = [(3, *leaf.shape) for leaf in leaves_of(adapter.spec.observation_space)]
    for output in outputs:
        obs = jax.tree.leaves(output.obs)
        assert [leaf.shape for leaf in obs] == expected
        for leaf, one_space in zip(obs, leaves_of(adapter.spec.observation_space), strict=True):
            assert leaf.dtype == one_space.dtype
            assert leaf.dtype.itemsize < 8
            assert all(one_space.contains(np.asarray(row)) for row in leaf)
        assert output.reward.dtype == output.unclipped_reward.dtype == np.float32
        for flag in (output.terminated, output.truncated, output.is_first, output.episode_end):
            assert flag.dtype == np.bool_


@pytest.mark.slow
@pytest.mark.parametrize(
    ("space", "vectorization"),
    [
        (spaces.Discrete(3, start=4), "sync"),
        (spaces.MultiDiscrete([2, 3], start=[1, -1]), "sync"),
        (spaces.Box(-0.1, 0.1, (2,), np.float64), "sync"),
        (spaces.Box(-0.1, 0.1, (2,), np.float64), "async"),
        (spaces.Box(-2, 2, (1, 3), np.float32), "sync"),
        (spaces.Box(-2, 2, (), np.float32), "sync"),
    ],
    ids=str,
)
def test_actions_arrive_as_the_environment_declared_them(space, vectorization):
    env = SpaceEnvFactory(space)
    adapter = make_env_factory(env, vectorization=vectorization)(2, [1, 2])
    adapter.reset()
    action_space = adapter.spec.action_space
    action_space.seed(0)
    for bound in ("low", "high", None):  # the bounds, rounded to float32, are inside as well
        if bound and not isinstance(space, spaces.Box):
            continue
        one = getattr(action_space, bound) if bound else action_space.sample()
        adapter.step(np.stack([one, one]).astype(action_space.dtype))
    adapter.close()


class SpaceEnvFactory:
    """Picklable, for worker processes."""

    def __init__(self, action_space):
        self._action_space = action_space

    def __call__(self):
        return SpaceEnv(spaces.Box(-1, 1, (2,), np.float32), self._action_space)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_absurd_bounds_are_no_bounds(dtype):
    tiny, largest = np.finfo(dtype).tiny, np.finfo(dtype).max
    low, high = np.array([tiny, -largest, -1], dtype), np.array([largest, 1e31, 1], dtype)
    space = env_spec(SpaceEnv(spaces.Box(low, high, dtype=dtype))).observation_space
    np.testing.assert_array_equal(space.low, [-np.inf, -np.inf, -1])
    np.testing.assert_array_equal(space.high, [np.inf, np.inf, 1])


def test_specs_of_ids():
    pong = env_spec("ALE/Pong-v5")
    assert (pong.frame_stack, pong.frame_skip, pong.name) == (4, 4, "Pong-v5")
    assert pong == env_spec(make_env_factory("ALE/Pong-v5"))
    assert env_spec("Pong-v5", stack_num=3, frame_skip=2).frame_stack == 3
    pendulum = env_spec("Pendulum-v1")
    assert pendulum.observation_space.dtype == np.float32
    assert (pendulum.frame_stack, pendulum.frame_skip) == (0, 1)
    assert env_spec("CartPole-v1", backend="gymnasium").action_space == (
        env_spec("CartPole-v1").action_space
    )


PICTURE, MAP = spaces.Box(0, 255, (4, 20, 20), np.uint8), spaces.Box(0, 1, (4, 5, 26))


def test_a_spec_with_images_says_where_their_channels_are():
    assert env_spec("CartPole-v1").channels_first is None, "it has no images"
    assert env_spec("Pong-v5").channels_first is True
    # Colours of 4 frames; too small for the rule of pixels.
    assert env_spec("Pong-v5", gray_scale=False, img_height=14, img_width=14).channels_first is True
    for space, first in ((PICTURE, True), (MAP, False)):
        env = SpaceEnv(space)
        factory = make_env_factory(lambda env=env: env)
        adapter = factory(1, [0])
        assert env_spec(factory).channels_first is env_spec(env).channels_first is first
        assert adapter.spec.channels_first is first
        adapter.close()
    both = env_spec(
        SpaceEnv(spaces.Dict({"picture": PICTURE, "map": MAP, "n": spaces.Discrete(2)}))
    )
    assert both.channels_first == ("picture",)
    assert both.has_channels_first("picture") and not both.has_channels_first("map")


def test_a_user_says_where_channels_are():
    for space, first in ((PICTURE, False), (MAP, True)):
        factory = make_env_factory(lambda space=space: SpaceEnv(space), channels_first=first)
        assert env_spec(factory).channels_first is first
        adapter = factory(1, [0])
        assert adapter.spec.channels_first is first
        adapter.close()
    with pytest.raises(UsageError, match=r"channels_first=False .* 'Pong-v5'.* 4 frames"):
        env_spec("Pong-v5", channels_first=False)
    with pytest.raises(UsageError, match="channels_first='no' must be True or False or None"):
        make_env_factory("CartPole-v1", channels_first="no")
    with pytest.raises(UsageError, match=r"already a factory .* channels_first"):
        make_env_factory(make_env_factory("CartPole-v1"), channels_first=True)


@pytest.mark.parametrize("name", [name for name in ORACLES if not name.startswith("async")])
def test_specs_of_every_form_agree_with_the_adapter(name):
    env, options, _ = ORACLES[name]
    adapter = make_env_factory(env, **{**options, "vectorization": "sync"})(2, [1, 2])
    assert env_spec(env, **options).observation_space == adapter.spec.observation_space
    assert env_spec(adapter) == adapter.spec
    adapter.close()


def test_specs_of_instances():
    expected = env_spec(OracleEnv)
    for env in (OracleEnv(), SyncVectorEnv([OracleEnv] * 2)):
        spec = env_spec(env)
        assert spec.observation_space == expected.observation_space
        assert spec.action_space == expected.action_space


def played(adapter, actions) -> list[EnvOutput]:
    outputs = [adapter.reset()]
    outputs.extend(adapter.step(action) for action in actions)
    adapter.close()
    return outputs


def breakout_games():
    adapter = make_env_factory(
        "Breakout-v5", episodic_life=True, reward_clip=True, img_height=21, img_width=20
    )(3, [4, 5, 6])
    lives = []
    raw_step = adapter._step

    def step(action):
        result = raw_step(action)
        lives.append(result[4]["lives"].copy())
        return result

    adapter._step = step
    rng = np.random.default_rng(0)
    outputs = played(adapter, rng.integers(4, size=(1200, 3), dtype=np.int32))[1:]
    return jax.tree.map(lambda *x: np.stack(x), *outputs), np.stack(lives)


@pytest.mark.slow
def test_a_lost_life_is_terminated_and_only_the_last_one_ends_the_game():
    steps, lives = breakout_games()
    lost = (np.diff(lives, axis=0) < 0)[..., :]
    np.testing.assert_array_equal(steps.terminated[1:], lost)
    # Five lives a game.
    np.testing.assert_array_equal(steps.episode_end[1:], lost & (lives[1:] == 0))
    assert steps.episode_end.sum() >= 6
    assert steps.terminated.sum() >= 5 * steps.episode_end.sum()
    # After each lost life, and not only after each game, a row is inserted.
    np.testing.assert_array_equal(steps.is_first[1:], steps.terminated[:-1])
    inserted = steps.is_first & ~steps.terminated & ~steps.truncated
    assert not steps.reward[inserted].any() and not steps.unclipped_reward[inserted].any()
    assert not (steps.terminated & steps.is_first).any()


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        "Pendulum-v1",
        pytest.param("HalfCheetah-v4", marks=needs_mujoco),
        "Breakout-v5",
    ],
)
def test_the_native_step_is_the_step_of_envpool(env):
    factory = make_env_factory(env, max_episode_steps=9)
    native, public = factory(3, [4, 5, 6]), factory(3, [4, 5, 6])
    assert native._step.__name__ == "step" and native._step != native._pool.step
    public._step = public._pool.step
    native.spec.action_space.seed(7)
    actions = [np.stack([native.spec.action_space.sample() for _ in range(3)]) for _ in range(25)]
    for action in actions:
        action.flags.writeable = False  # as arrays of JAX are
    outputs = played(native, actions), played(public, actions)
    for one, other in zip(*outputs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert any(output.truncated.any() for output in outputs[0])


def test_the_native_step_keeps_apart_ends_that_fall_together():
    state = {
        "info:env_id": np.arange(3, dtype=np.int32),
        "obs": np.zeros((3, 2), np.float32),
        "reward": np.zeros(3, np.float32),
        "done": np.array([True, True, False]),
        "trunc": np.array([True, True, False]),
    }
    both = {**state, "terminated": np.array([True, False, False])}
    for arrays, expected in ((both, [True, False, False]), (state, [False, False, False])):
        pool = FakePool(arrays)
        _, _, terminated, truncated, _ = native_step(pool)(np.zeros(3, np.int32))
        np.testing.assert_array_equal(terminated, expected)
        np.testing.assert_array_equal(truncated, [True, True, False])
    pool.step = lambda action: None  # somebody's own
    assert native_step(pool) is None


class FakePool:
    """The native side of a pool, by names of arrays."""

    def __init__(self, arrays):
        self._arrays = arrays
        self._state_keys = list(arrays)
        self._spec = types.SimpleNamespace(_action_keys=["env_id", "players.env_id", "action"])
        self.config = {"num_envs": 3}

    def _send(self, actions):
        assert len(actions) == 3

    def _recv(self):
        return list(self._arrays.values())

    def step(self, action): ...

    def send(self, action): ...

    def recv(self): ...

    for method in (step, send, recv):
        method.__module__ = "envpool.python.envpool"


@needs_mujoco
def test_a_pool_with_observations_of_several_arrays_has_no_native_step():
    adapter = make_env_factory("CheetahRun-v1")(3, [4, 5, 6])
    assert adapter._step == adapter._pool.step
    adapter.close()


def test_the_unclipped_reward_is_not_clipped():
    # A seed and actions are not needed to score above 1 here: one brick of Atlantis is worth 100.
    adapter = make_env_factory("Atlantis-v5", reward_clip=True, img_height=21, img_width=20)(
        2, [1, 2]
    )
    rng = np.random.default_rng(0)
    outputs = played(adapter, rng.integers(4, size=(300, 2), dtype=np.int32))
    reward = np.stack([output.reward for output in outputs])
    unclipped_reward = np.stack([output.unclipped_reward for output in outputs])
    assert unclipped_reward.max() > 1
    np.testing.assert_array_equal(reward, np.sign(unclipped_reward))


FUSED = {
    "CartPole-v1": ({}, lambda rng, n: rng.integers(2, size=(n, 3), dtype=np.int32)),
    "Pendulum-v1": ({}, lambda rng, n: rng.uniform(-2, 2, (n, 3, 1)).astype(np.float32)),
    "Pong-v5": (
        {"img_height": 21, "img_width": 20},
        lambda rng, n: rng.integers(6, size=(n, 3), dtype=np.int32),
    ),
    "Breakout-v5": (
        {"img_height": 21, "img_width": 20, "episodic_life": True, "reward_clip": True},
        lambda rng, n: rng.integers(4, size=(n, 3), dtype=np.int32),
    ),
    # Arrays of 64 bits, and a bound of 0.4 that float32 rounds up.
    "HalfCheetah-v4": (
        {"max_episode_steps": 150},
        lambda rng, n: rng.uniform(-1, 1, (n, 3, 6)).astype(np.float32),
    ),
    "Humanoid-v4": ({}, lambda rng, n: rng.choice(np.float32([-0.4, 0.1, 0.4]), (n, 3, 17))),
}


def run_fused(adapter, actions):
    adapter.reset()
    fused = adapter.fused()
    assert not isinstance(fused, str), fused

    def body(state, action):
        state, output, num_invalid = fused.step(state, action)
        return state, (output, num_invalid)

    scan = jax.jit(lambda state, actions: jax.lax.scan(body, state, actions)[1])
    outputs, num_invalid = jax.device_get(scan(jax.tree.map(jnp.array, fused.state), actions))
    adapter.close()
    return outputs, num_invalid


@pytest.mark.slow
@pytest.mark.parametrize("env", FUSED)
def test_fused_and_stepped_environments_are_the_same(env):
    options, make_actions = FUSED[env]
    actions = make_actions(np.random.default_rng(0), 600)
    factory = make_env_factory(env, **options)
    stepped = jax.tree.map(lambda *x: np.stack(x), *played(factory(3, [1, 2, 3]), actions)[1:])
    fused, num_invalid = run_fused(factory(3, [1, 2, 3]), actions)
    jax.tree.map(np.testing.assert_array_equal, fused, stepped)
    jax.tree.map(lambda x, y: x.dtype == y.dtype or pytest.fail(), fused, stepped)
    assert not num_invalid.any()
    assert env == "Pong-v5" or (stepped.terminated | stepped.truncated).any()


@pytest.mark.parametrize(
    ("env", "wrong", "clamped"),
    [
        (
            "CartPole-v1",
            np.array([[-1, 0, 7], [2**31 - 1, -(2**31), 1]], np.int32),
            np.array([[0, 0, 1], [1, 0, 1]], np.int32),
        ),
        (
            "Pendulum-v1",
            np.array([[np.nan, 9, 1], [-np.inf, np.inf, -2]], np.float32)[..., None],
            np.array([[0, 2, 1], [-2, 2, -2]], np.float32)[..., None],
        ),
    ],
)
def test_fused_environments_clamp_and_count_invalid_actions(env, wrong, clamped):
    factory = make_env_factory(env)
    outputs, num_invalid = run_fused(factory(3, [1, 2, 3]), wrong)
    expected, none_invalid = run_fused(factory(3, [1, 2, 3]), clamped)
    jax.tree.map(np.testing.assert_array_equal, outputs, expected)
    assert num_invalid.tolist() == [2, 2]
    assert none_invalid.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("space", "wrong", "clamped"),
    [
        (spaces.Discrete(3, start=-1, dtype=np.int32), [-5, 1, 9], [-1, 1, 1]),
        (
            spaces.MultiDiscrete([2, 3], dtype=np.int32, start=[5, -1]),
            [[5, 1], [7, -3], [4, 0]],
            [[5, 1], [6, -1], [5, 0]],
        ),
        (
            spaces.Box(np.float32([1, -np.inf]), np.float32([2, np.inf])),
            [[1.5, -7], [np.nan, np.nan], [3, np.inf]],
            [[1.5, -7], [1, 0], [2, np.finfo(np.float32).max]],
        ),
    ],
    ids=str,
)
def test_clamped_actions_are_the_nearest_inside(space, wrong, clamped):
    inside, num_invalid = clamp(jnp.asarray(wrong, space.dtype), space)
    assert inside.dtype == space.dtype
    np.testing.assert_array_equal(inside, np.asarray(clamped, space.dtype))
    assert num_invalid == 2


def test_an_environment_without_a_fused_form_says_why():
    adapter = make_env_factory(OracleEnv)(2, [1, 2])
    assert "Python code" in adapter.fused()
    adapter.close()


def test_environments_are_put_in_order_by_comparison_as_by_scatter():
    order = np.random.default_rng(0).permutation(37).astype(np.int32)
    places = _places(jax.numpy.asarray(order))
    np.testing.assert_array_equal(order[places], np.arange(37))
    np.testing.assert_array_equal(_places_by_comparison(jax.numpy.asarray(order)), places)


def test_a_fused_environment_has_no_effect_that_would_make_jax_dispatch_it_in_python():
    adapter = make_env_factory("CartPole-v1")(3, [1, 2, 3])
    adapter.reset()
    fused = adapter.fused()
    assert not jax.make_jaxpr(fused.step)(fused.state, np.zeros(3, np.int32)).effects
    adapter.close()


def test_many_fused_environments_are_the_same_as_stepped():
    num_envs = MOST_COMPARED + 3
    actions = np.random.default_rng(0).integers(0, 2, (30, num_envs)).astype(np.int32)
    factory = make_env_factory("CartPole-v1", num_threads=2)
    outputs, _ = run_fused(factory(num_envs, list(range(num_envs))), actions)
    stepped = played(factory(num_envs, list(range(num_envs))), actions)[1:]
    jax.tree.map(
        np.testing.assert_array_equal, outputs, jax.tree.map(lambda *x: np.stack(x), *stepped)
    )


X64 = """
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)
from tests.envs.test_adapters import make_env_factory, played, run_fused
actions = np.random.default_rng(0).uniform(-1, 1, (40, 2, 6)).astype(np.float32)
factory = make_env_factory("HalfCheetah-v4", max_episode_steps=15)
outputs, num_invalid = run_fused(factory(2, [1, 2]), actions)
stepped = jax.tree.map(lambda *x: np.stack(x), *played(factory(2, [1, 2]), actions)[1:])
jax.tree.map(np.testing.assert_array_equal, outputs, stepped)
assert outputs.obs.dtype == np.float32 and outputs.truncated.any() and not num_invalid.any()
"""


@pytest.mark.slow
def test_fused_mujoco_where_jax_has_64_bits_is_the_same_as_stepped():
    done = subprocess.run([sys.executable, "-c", X64], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        OracleEnv,
        DictOracleEnv,
        ready_made(AutoresetMode.DISABLED),
        lambda num_envs, seeds: AsyncVectorEnv([OracleEnv] * 2, copy=False, context="forkserver"),
        pool_adapter,
    ],
)
def test_what_was_handed_out_is_not_written_again(env):
    adapter = make_env_factory(env)(2, [1, 2])
    outputs = [adapter.reset()]
    copies = [jax.tree.map(np.copy, outputs[0])]
    for _ in range(40):
        outputs.append(adapter.step(np.ones(2, np.int32)))
        copies.append(jax.tree.map(np.copy, outputs[-1]))
    adapter.close()
    for output, copy in zip(outputs, copies, strict=True):
        jax.tree.map(np.testing.assert_array_equal, output, copy)


class Scribbler(OracleEnv):
    """Writes into the action it is given and into the observation it gave."""

    def __init__(self):
        super().__init__()
        self.action_space = spaces.MultiDiscrete([4, 4])
        self._out = np.zeros(5, np.float32)

    def step(self, action):
        last = int(action[0])
        action[:] = 77
        self._out[:], *rest = super().step(last)
        return self._out, *rest


def test_environments_may_write_into_what_they_get_and_gave():
    adapter = make_env_factory(Scribbler)(2, [1, 2])
    adapter.reset()
    action = np.array([[1, 2], [3, 0]], np.int32)
    action.setflags(write=False)  # as np.asarray of a JAX array is
    first = adapter.step(action)
    kept = first.obs.copy()
    adapter.step(action)
    np.testing.assert_array_equal(first.obs, kept)
    np.testing.assert_array_equal(action, [[1, 2], [3, 0]])
    adapter.close()


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        "Pong-v5",
        pytest.param("HalfCheetah-v4", marks=needs_mujoco),
        pytest.param("AcrobotSwingup-v1", marks=needs_mujoco),
    ],
)
def test_environments_are_silent(env, capfd):
    adapter = make_env_factory(env)(2, [1, 2])
    adapter.reset()
    adapter.step(np.zeros((2, *adapter.spec.action_space.shape), adapter.spec.action_space.dtype))
    adapter.close()
    assert capfd.readouterr() == ("", "")


def test_a_ready_made_envpool_goes_through_its_own_adapter():
    import envpool

    def make(num_envs, seeds):
        return envpool.make(
            "Catch-v0", env_type="gymnasium", num_envs=num_envs, num_threads=1, seed=list(seeds)
        )

    adapter = make_env_factory(make)(3, [1, 2, 3])
    assert not isinstance(adapter.fused(), str)
    assert env_spec(make).observation_space.shape == (10, 5)
    adapter.close()


@pytest.mark.parametrize(
    ("env", "backend", "source"),
    [
        ("ALE/Pong-v5", None, ("Pong-v5", "envpool", ["envpool"])),
        ("CartPole-v1", "gymnasium", ("CartPole-v1", "gymnasium", ["gymnasium"])),
        ("Hopper-v2", None, ("Hopper-v2", "gymnasium", ["gymnasium"])),
        (
            "tests.support.oracle:OracleEnv",
            None,
            ("tests.support.oracle:OracleEnv", None, ["gymnasium"]),
        ),
        ("sebulba.envs:x", None, ("sebulba.envs:x", None, ["sebulba", "gymnasium"])),
    ],
    ids=str,
)
def test_the_source_of_an_environment_names_backend_and_versions(env, backend, source):
    found = env_source(env, backend)
    assert (found.id, found.backend, list(found.versions)) == source
    if source[1] == "gymnasium":
        assert str(found) == f"{found.id} (gymnasium {gymnasium.__version__})"


def test_an_environment_that_another_package_registered_is_named_with_its_version(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Tested-v3", entry_point="optax.nowhere:Env")
    monkeypatch.setitem(gymnasium.registry, "Tested-v3", spec)
    assert list(env_source("Tested-v3").versions) == ["gymnasium", "optax"]
    spec.entry_point = OracleEnv  # of no package
    assert list(env_source("Tested-v3").versions) == ["gymnasium"]


def test_factories_pass_through():
    factory = make_env_factory(OracleEnv)
    assert make_env_factory(factory) is factory
    adapter = make_env_factory(pool_adapter)(2, [1, 2])
    assert type(adapter).__name__ == "EnvpoolAdapter"
    with pytest.raises(ValueError, match="already a factory"):
        make_env_factory(factory, size=3)


def test_options_reach_the_environment():
    def make(width, height=2):
        return SpaceEnv(spaces.Box(-1, 1, (width, height)))

    assert env_spec(make, width=3, height=4).observation_space.shape == (3, 4)
    stacked = env_spec("Pong-v5", img_height=30, img_width=31)
    assert stacked.observation_space.shape == (4, 30, 31)
    seven = make_env_factory("CartPole-v1", backend="gymnasium", max_episode_steps=7)
    outputs = played(seven(2, [1, 2]), [np.array([t % 2] * 2, np.int32) for t in range(7)])
    assert outputs[-1].truncated.all()


def test_an_id_without_a_version_that_a_module_registers_is_found(tmp_path, monkeypatch):
    (tmp_path / "registers_trading.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('PlainTrading', entry_point=CartPoleEnv)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert env_spec("registers_trading:PlainTrading").observation_space.shape == (4,)
    with pytest.raises(UsageError, match="no attribute 'PlainTradin'"):
        env_spec("registers_trading:PlainTradin")

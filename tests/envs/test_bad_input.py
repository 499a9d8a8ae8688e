"""What bad input gets: an error that names the value and the rule, and never an aborted process."""

from __future__ import annotations

import errno
import os
import time
import types

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from sebulba.envs import env_spec, make_env_factory
from sebulba.envs.spaces import make_action_check
from sebulba.envs.vectorize import POLL_S, SafeAsyncVectorEnv
from sebulba.errors import ActionError, EnvError, UsageError, text_of
from tests.support.oracle import OracleEnv, OraclePool, pool_adapter, ready_made

NAN = float("nan")


class Broken(gymnasium.Env):
    """Does ``break_step`` instead of its third step."""

    observation_space: gymnasium.Space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._num_steps = 0

    def obs(self):
        return np.zeros(3, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.obs(), {}

    def step(self, action):
        self._num_steps += 1
        if self._num_steps == 3:
            return self.break_step()
        return self.obs(), 1.0, False, False, {}

    def break_step(self):
        return self.obs(), 1.0, False, False, {}


def returning(result, space=None):
    """Return a Broken class whose third step returns ``result``."""
    members = {"break_step": lambda self: result}
    if space is not None:
        members["observation_space"] = space
        members["obs"] = lambda self: space.sample()
    return type("Returning", (Broken,), members)


def three_steps(adapter):
    adapter.reset()
    for _ in range(3):
        adapter.step(np.zeros(adapter.num_envs, np.int32))


OBS = np.zeros(3, np.float32)
DICT = spaces.Dict(a=spaces.Box(-1, 1, (3,), np.float32), b=spaces.Discrete(4))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (returning((OBS, 1.0, False, {})), "tuple of 5 .*got a tuple of 4"),
        (returning((OBS[:2], 1.0, False, False, {})), r"obs must be .*\(3,\).*got shape \(2,\)"),
        (returning((OBS > 0, 1.0, False, False, {})), None),
        (returning((OBS * 1j, 1.0, False, False, {})), "dtype float32; got .*complex64"),
        (
            returning((OBS + NAN, 1.0, False, False, {})),
            "obs must be finite numbers as float32; got nan",
        ),
        (
            returning((OBS - np.inf, 1.0, False, False, {})),
            "obs must be finite numbers as float32; got -inf",
        ),
        (
            returning((OBS, NAN, False, False, {})),
            "reward must be a finite number as float32; got nan",
        ),
        (
            returning((OBS, None, False, False, {})),
            "reward must be a finite number as float32; got None",
        ),
        (returning((OBS, 1.0, 1, False, {})), r"terminated must be a bool; got 1 \(int\)"),
        (returning((OBS, 1.0, False, "no", {})), "truncated must be a bool; got 'no'"),
        (returning(({"a": OBS}, 1.0, False, False, {}), DICT), r"keys \['a', 'b'\]; got .*'a'"),
        (
            returning(({"a": OBS, "b": 4}, 1.0, False, False, {}), DICT),
            r"obs\['b'\] must be inside",
        ),
        (returning((OBS, 1.0, False, False, {}), DICT), "obs must be a dict"),
    ],
)
def test_broken_steps_are_named_with_environment_and_step(env, expected):
    adapter = make_env_factory(env)(2, [1, 2])
    if expected is None:  # what numpy casts without loss is no error
        three_steps(adapter)
    else:
        with pytest.raises(EnvError, match=f"environment 0, step 3: .*{expected}"):
            three_steps(adapter)
    adapter.close()


class RaisingError(Exception):
    """Does not survive a pickle: its arguments are not those of its constructor."""

    def __init__(self, one, two) -> None:
        super().__init__(f"{one} and {two}")


class Raising(Broken):
    def break_step(self):
        raise KeyError("planted 100%")


class RaisingOwn(Broken):
    def break_step(self):
        raise RaisingError(1, 2)


class Dying(Broken):
    def break_step(self):
        os._exit(3)


class Hanging(Broken):
    def break_step(self):
        time.sleep(60)


@pytest.mark.parametrize(("silent", "answered"), [(0, True), (59, True), (60, False)])
def test_workers_are_waited_for_in_pieces_which_pass_only_while_the_process_runs(silent, answered):
    class Pipe:
        closed = False
        polls = 0

        def poll(self, seconds):
            assert seconds == POLL_S == 1
            self.polls += 1
            return self.polls > silent

    env = types.SimpleNamespace(parent_pipes=[Pipe(), Pipe()], _assert_is_running=lambda: None)
    env.parent_pipes[1].polls = silent
    assert SafeAsyncVectorEnv._poll_pipe_envs(env, 60.0) == answered


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_exception_of_an_environment_keeps_its_type_and_says_where(vectorization):
    adapter = make_env_factory(Raising, vectorization=vectorization)(2, [1, 2])
    with pytest.raises(KeyError, match="planted") as caught:
        three_steps(adapter)
    notes = "\n".join(caught.value.__notes__)
    assert "raised by environment 0, step 3" in notes
    assert vectorization == "sync" or "break_step" in notes
    adapter.close()


def test_an_exception_that_cannot_be_pickled_does_not_hang():
    adapter = make_env_factory(RaisingOwn, vectorization="async")(1, [1])
    with pytest.raises(EnvError, match="RaisingError: 1 and 2"):
        three_steps(adapter)
    adapter.close()


def test_a_dead_worker_is_named():
    adapter = make_env_factory(Dying, vectorization="async")(1, [1])
    with pytest.raises(EnvError, match=r"worker process of environment 0 \(exit code 3\) died"):
        three_steps(adapter)
    adapter.close()
    adapter.close()


class HangingAtReset(Broken):
    def reset(self, *, seed=None, options=None):
        time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("env", [Hanging, HangingAtReset])
def test_a_hung_worker_is_named_and_ended(env):
    adapter = make_env_factory(env, vectorization="async", step_timeout_s=0.5)(1, [1])
    with pytest.raises(EnvError, match=r"environment 0 did not answer within 0.5 s"):
        three_steps(adapter)
    adapter.close()


ACTIONS = [
    (np.zeros(3, np.int64), "dtype int64"),
    (np.zeros(3, np.float32), "dtype float32"),
    (np.zeros(2, np.int32), r"shape \(2,\)"),
    (np.zeros((3, 1), np.int32), r"shape \(3, 1\)"),
    ([0, 0, 0], "a list"),
    (np.array([0, 2, 0], np.int32), "action 2 for environment 1 is outside Discrete"),
    (np.array([0, 1, -1], np.int32), "action -1 for environment 2 is outside Discrete"),
    (np.array([2**31 - 1, 1, 0], np.int32), "action 2147483647 for environment 0"),
]


@pytest.mark.parametrize("backend", ["envpool", "gymnasium"])
@pytest.mark.parametrize(("action", "expected"), ACTIONS)
def test_wrong_discrete_actions_do_not_get_through(backend, action, expected):
    adapter = make_env_factory("CartPole-v1", backend=backend)(3, [1, 2, 3])
    adapter.reset()
    with pytest.raises(ActionError, match=expected):
        adapter.step(action)
    adapter.close()


@pytest.mark.parametrize("backend", ["envpool", "gymnasium"])
@pytest.mark.parametrize("value", [NAN, np.inf, -np.inf, 2.001, -3.0])
def test_wrong_continuous_actions_do_not_get_through(backend, value):
    adapter = make_env_factory("Pendulum-v1", backend=backend)(3, [1, 2, 3])
    adapter.reset()
    action = np.array([[2.0], [value], [-2.0]], np.float32)
    with pytest.raises(ActionError, match="for environment 1 is outside Box"):
        adapter.step(action)
    adapter.close()


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Discrete(3, start=-1, dtype=np.int32), [-1, 1], [-2, 2, 2**31 - 1, -(2**31)]),
        (spaces.Discrete(2, start=2**31 - 2, dtype=np.int32), [2**31 - 1], [0, -(2**31)]),
        (
            spaces.MultiDiscrete([2, 3], dtype=np.int32, start=[5, -1]),
            [[5, -1], [6, 1]],
            [[4, 0], [7, 0], [5, 2], [5, -2]],
        ),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), [[1e38, -3]], [[0, np.inf], [NAN, 0]]),
    ],
)
def test_action_check_knows_both_ends(space, good, bad):
    check = make_action_check(space, 1)
    for action in good:
        check(np.array([action], space.dtype))
    for action in bad:
        with pytest.raises(ActionError):
            check(np.array([action], space.dtype))


@pytest.mark.parametrize(
    ("env", "options", "expected"),
    [
        ("CartPol-v1", {}, "'CartPol-v1' is not an id of envpool or gymnasium.*CartPole-v1"),
        ("ALE/Ponk-v5", {}, "nearest are Pong-v5"),
        ("Pong-v5", {"backend": "gymnasium"}, "not an id of gymnasium"),
        ("Acrobot-v1", {"backend": "envpol"}, "backend='envpol' must be"),
        ("CartPole-v1", {"vectorization": "threads"}, "'threads' must be one of 'sync', 'async'"),
        ("CartPole-v1", {"vectorization": "async"}, "'async' is for single environments"),
        (pool_adapter, {"vectorization": "async"}, "'async' is for single environments"),
        (pool_adapter, {"num_threads": 2}, "num_threads=2 is an option of envpool"),
        ("CartPole-v1", {"num_threads": -1}, "num_threads=-1 must be at least 1"),
        ("CartPole-v1", {"num_threads": 0}, "num_threads=0 must be at least 1"),
        ("CartPole-v1", {"num_threads": True}, "num_threads=True must be an integer"),
        ("CartPole-v1", {"frame_skp": 2}, "has no option 'frame_skp'"),
        ("CartPole-v1", {"num_envs": 2}, "'num_envs' of CartPole-v1 cannot be given"),
        ("CartPole-v1", {"env_seed": [2]}, "'env_seed' of CartPole-v1 cannot be given"),
        ("Pong-v5", {"noop_max": 0}, "noop_max=0 of Pong-v5 must be at least 1"),
        ("Pong-v5", {"stack_num": 0}, "stack_num=0 of Pong-v5 must be at least 1"),
        ("Pong-v5", {"img_height": 0}, "img_height=0 of Pong-v5 must be at least 1"),
        ("Pong-v5", {"img_width": 10**6}, "img_width=1000000 of Pong-v5 must be at most"),
        ("Pong-v5", {"frame_skip": 2.5}, "frame_skip=2.5 of Pong-v5 must be an integer"),
        ("Pong-v5", {"reward_clip": 1}, "reward_clip=1 of Pong-v5 must be True or False"),
        ("Pong-v5", {"repeat_action_probability": 1.5}, "must be at most 1"),
        ("Pong-v5", {"repeat_action_probability": NAN}, "must be a finite number"),
        ("FrozenLake-v1", {"size": -1}, "size=-1 of FrozenLake-v1 must be at least 1"),
        ("MiniGrid-Empty-8x8-v0", {"agent_start_dir": -1}, "must be at least 0"),
        ("Pong-v5", {"difficulty": -2}, "must be at least -1"),
        ("Pong-v5", {"stak_num": 4}, "has no option 'stak_num'; the nearest are stack_num"),
        ("tests.nothing:Env", {}, "module 'tests.nothing', which is not found"),
        (
            "tests.support.oracle:OracleEnvs",
            {},
            "no attribute 'OracleEnvs'; the nearest are OracleEnv",
        ),
        ("tests.support.oracle:NUM_ACTIONS", {}, "must be an id, .* not a int"),
        (
            "tests.support.broken_envs:NotAnEnv",
            {},
            "the class NotAnEnv, which has no reset and step",
        ),
        ("os:getcwd", {}, "posix.getcwd of Python's standard library"),
        ("functools:partial", {}, "functools.partial of Python's standard library"),
        ("tests.support.oracle:OracleEnv", {"size": 3}, "OracleEnv has no option 'size'"),
        (
            "tests.support.oracle:OracleEnv",
            {"num_threads": 3},
            "num_threads=3 is an option of envpool",
        ),
        ("tests.support.oracle:OracleEnv", {"backend": "envpool"}, "backend='envpool' takes ids"),
        (lambda size: OracleEnv(), {}, "it needs size"),
        (OracleEnv(), {}, "a callable that makes the environment"),
        (3, {}, "a callable that makes the environment"),
    ],
)
def test_wrong_environments_and_options_are_named(env, options, expected):
    with pytest.raises(UsageError, match=expected):
        make_env_factory(env, **options)


def test_a_module_of_environments_that_lacks_a_package_is_named_with_it(tmp_path, monkeypatch):
    (tmp_path / "robots_without.py").write_text(
        "import gymnasium\nraise gymnasium.error.DependencyNotInstalled('install mujoco')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="robots_without:Arm-v1' needs a package: install mujoco"):
        make_env_factory("robots_without:Arm-v1")


def test_gymnasium_options_are_checked_by_name():
    with pytest.raises(UsageError, match=r"no option 'sutton_bart.*sutton_barto_reward"):
        make_env_factory("CartPole-v1", backend="gymnasium", sutton_bart=True)
    make_env_factory("CartPole-v1", backend="gymnasium", sutton_barto_reward=True)
    make_env_factory("CartPole-v1", backend="gymnasium", max_episode_steps=7)


@pytest.mark.parametrize(
    ("num_envs", "seeds", "expected"),
    [
        (0, [], "num_envs=0 must be at least 1"),
        (2.0, [1, 2], "num_envs=2.0 must be an integer"),
        (2, [1], "seeds must be 2, one per environment; got 1"),
        (2, [1, 2.0], r"seeds\[1\]=2.0 must be an integer, not float"),
        (2, [True, 2], r"seeds\[0\]=True must be an integer, not bool"),
        (2, [1, 2**31], r"seeds\[1\]=2147483648 must fit 32 bits"),
    ],
)
@pytest.mark.parametrize("env", ["CartPole-v1", OracleEnv])
def test_wrong_numbers_of_environments_and_seeds_are_named(env, num_envs, seeds, expected):
    with pytest.raises(UsageError, match=expected):
        make_env_factory(env)(num_envs, seeds)


def test_negative_seeds_are_refused_where_gymnasium_would_not_take_them():
    with pytest.raises(UsageError, match=r"seeds\[1\]=-1 must not be negative"):
        make_env_factory(OracleEnv)(2, [1, -1])


GRAPH = spaces.Graph(spaces.Discrete(2), None)


def with_space(**members):
    return type("WithSpace", (Broken,), members)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"observation_space": spaces.Text(3)}, "observation_space=Text"),
        ({"observation_space": spaces.Tuple([])}, "observation_space=Tuple"),
        ({"observation_space": GRAPH}, "observation_space=Graph"),
        ({"observation_space": spaces.Dict(x=DICT, g=GRAPH)}, r"observation_space\['(g|x)'\]="),
        ({"observation_space": spaces.Dict(x=spaces.Text(3))}, r"observation_space\['x'\]=Text"),
        ({"observation_space": spaces.Dict()}, "a Dict without entries"),
        ({"observation_space": spaces.Box(0, 1, (2, 0))}, r"has shape \(2, 0\), without elements"),
        ({"observation_space": spaces.Discrete(2**40)}, "must have values that fit 32 bits"),
        (
            {"observation_space": spaces.Box(0, 2**40, (2,), np.int64)},
            "must have bounds that fit into 32 bits",
        ),
        ({"action_space": DICT}, "action_space=Dict.*must be Box of floats, Discrete or Multi"),
        ({"action_space": spaces.MultiBinary(3)}, "action_space=MultiBinary.*is not supported"),
        ({"action_space": spaces.Box(0, 5, (2,), np.int32)}, "action_space=Box.*not supported"),
    ],
)
def test_unsupported_spaces_are_refused_by_name(members, expected):
    env = with_space(**members)
    with pytest.raises(UsageError, match=expected):
        env_spec(env)
    with pytest.raises(UsageError, match=expected):
        make_env_factory(env)(2, [1, 2])
    with pytest.raises(UsageError, match=expected):
        make_env_factory(ready_made(AutoresetMode.NEXT_STEP, env))(2, [1, 2])


def test_a_vector_environment_must_say_how_it_resets():
    def silent(num_envs, seeds):
        env = SyncVectorEnv([OracleEnv] * num_envs)
        env.metadata = {}
        return env

    with pytest.raises(UsageError, match=r"metadata\['autoreset_mode'\]=None"):
        make_env_factory(silent)(2, [1, 2])


def test_factories_that_return_something_else_are_named():
    with pytest.raises(UsageError, match=r"returned a int; it must return a gymnasium\.Env"):
        make_env_factory(lambda: 3)(2, [1, 2])
    with pytest.raises(UsageError, match=r"returned a int; it must return a gymnasium\.vector"):
        make_env_factory(lambda num_envs, seeds: 3)(2, [1, 2])
    one = OracleEnv()
    with pytest.raises(UsageError, match="the same environment twice"):
        make_env_factory(lambda: one)(2, [1, 2])
    with pytest.raises(UsageError, match="made 3 environments; it must make the num_envs=2"):
        make_env_factory(lambda num_envs, seeds: pool_adapter(3, [1, 2, 3]))(2, [1, 2])


def test_multi_player_and_asynchronous_pools_are_refused():
    for name, value in (("max_num_players", 2), ("batch_size", 1)):
        pool = OraclePool([1, 2, 3])
        pool.config[name] = value
        with pytest.raises(UsageError, match=f"{name}={value}"):
            env_spec(lambda num_envs, seeds, pool=pool: _adapter_of(pool))


def _adapter_of(pool):
    from sebulba.envs.envpool_adapter import EnvpoolAdapter

    return EnvpoolAdapter(pool)


@pytest.mark.parametrize("env", ["CartPole-v1", OracleEnv])
def test_a_closed_environment_says_so(env):
    adapter = make_env_factory(env)(2, [1, 2])
    adapter.reset()
    adapter.close()
    adapter.close()
    with pytest.raises(EnvError, match="is closed"):
        adapter.step(np.zeros(2, np.int32))
    with pytest.raises(EnvError, match="is closed"):
        adapter.reset()


class BadVector(SyncVectorEnv):
    """A ready-made vector environment whose step returns what ``bad`` makes of it."""

    def __init__(self, num_envs, bad):
        super().__init__([Broken] * num_envs)
        self._bad = bad

    def step(self, actions):
        return self._bad(*super().step(actions))


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (lambda o, r, t, u, i: (o[:, :2], r, t, u, i), r"obs must be an array of shape \(3, 3\)"),
        (lambda o, r, t, u, i: ({"x": o}, r, t, u, i), r"obs must be an array of shape \(3, 3\)"),
        (lambda o, r, t, u, i: (o, r[:2], t, u, i), r"reward must be an array of shape \(3,\)"),
        (lambda o, r, t, u, i: (o, r * [1, NAN, 1], t, u, i), "environment 1: reward must be"),
        (lambda o, r, t, u, i: (o, r, t + 0, u, i), "dtype bool; got .*int64"),
    ],
)
def test_broken_vector_environments_are_named(bad, expected):
    adapter = make_env_factory(lambda num_envs, seeds: BadVector(num_envs, bad))(3, [1, 2, 3])
    with pytest.raises(EnvError, match=expected):
        three_steps(adapter)
    adapter.close()


def test_a_vector_environment_with_a_short_step_is_named():
    class Short(SyncVectorEnv):
        def step(self, actions):
            return super().step(actions)[:4]

    factory = make_env_factory(lambda num_envs, seeds: Short([OracleEnv] * num_envs))
    env = factory(2, [1, 2])
    env.reset()
    with pytest.raises(EnvError, match=r"step 1: step must return a tuple of 5 .* a tuple of 4"):
        env.step(np.zeros(2, np.int32))
    env.close()


def test_an_environment_without_spaces_is_named():
    class NoSpace(gymnasium.Env):
        pass

    with pytest.raises(UsageError, match="NoSpace must have an attribute observation_space"):
        env_spec(NoSpace)


def test_a_gymnasium_id_may_name_the_module_that_registers_it():
    env_id = "gymnasium.envs.classic_control:CartPole-v1"
    env = make_env_factory(env_id, backend="gymnasium")(2, [1, 2])
    assert env.reset().obs.shape == (2, 4)
    env.close()


@pytest.mark.parametrize(
    "make", [np.asarray, jnp.asarray, np.bool_], ids=["NumPy", "JAX", "scalar"]
)
def test_flags_and_rewards_may_be_arrays_without_dimensions(make):
    env = make_env_factory(returning((OBS, np.asarray(1.0), make(False), make(False), {})))(1, [0])
    env.reset()
    output = env.step(np.zeros(1, np.int32))
    assert output.reward.tolist() == [1.0] and not output.terminated.any()


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_beyond_32_bits_do_not_wrap(dtype):
    whole = np.iinfo(dtype)

    class Wide(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(whole.min, whole.max, (2,), dtype)
        action_space = gymnasium.spaces.Discrete(2)
        largest = 2**31 - 1

        def reset(self, *, seed=None, options=None):
            return np.array([3, self.largest], dtype), {}

    env = make_env_factory(Wide)(1, [0])
    assert env.reset().obs.tolist() == [[3, 2**31 - 1]]
    Wide.largest = 2**40 + 5
    with pytest.raises(EnvError, match=r"integers beyond the u?int32"):
        env.reset()


def test_more_workers_than_files_may_be_opened_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (150, 150))
    factory = make_env_factory("CartPole-v1", backend="gymnasium", vectorization="async")
    with pytest.raises(UsageError, match=r"num_envs=60 .* may open 150; .*ulimit -n 4096"):
        factory(60, list(range(60)))


def test_too_many_open_files_have_their_remedy_wherever_they_are_told():
    assert text_of(OSError(errno.EMFILE, "Too many open files")) == (
        "OSError: [Errno 24] Too many open files; raise the limit (ulimit -n 4096) in the shell "
        "that starts this"
    )

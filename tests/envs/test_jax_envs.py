"""Environments written in JAX: nothing misplaced, ends told apart, resumed bit for bit, fused."""

from __future__ import annotations

import functools
import types
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.envs import env_source
from sebulba.envs.jax_env import JaxEnv, TimeLimit
from sebulba.errors import EnvError, UsageError
from sebulba.inference.places import make_cycle
from tests.loops.test_alignment import TRANSITIONS, RandomAgent, run_random
from tests.support.loop_helpers import Recorder, leaves_equal, make_tiny_loop
from tests.support.oracle import rollout
from tests.support.value_of_ends import first_value

spaces = gymnasium.spaces
NUM_ACTIONS = 5


class EchoEnv:
    """Shows who it is, the episode's number in chance, the time and the last action.

    The episode's length, how it ends and its rewards are functions of these.
    """

    observation_space = spaces.Dict(
        where=spaces.Box(-1, 2**24, (2,), np.float32), last=spaces.Discrete(NUM_ACTIONS + 1)
    )
    action_space = spaces.Discrete(NUM_ACTIONS)

    def reset(self, key):
        episode = jax.random.randint(key, (), 1, 2**24)
        return self.observe(episode, 0, 0), {"episode": episode, "t": 0, "chance": key}

    def step(self, key, state, action):
        episode, t = state["episode"], state["t"] + 1
        ended = t == length_of(episode)
        state = {"episode": episode, "t": t, "chance": jax.random.fold_in(state["chance"], 1)}
        obs = self.observe(episode, t, action + 1)
        ends = ended & terminates(episode), ended & ~terminates(episode)
        return obs, state, reward_of(episode, t, action), *ends

    def observe(self, episode, t, last):
        return {"where": jnp.stack([episode, t]).astype(jnp.float32), "last": last}


def length_of(episode):
    return 1 + episode % 7


def terminates(episode):
    return episode % 3 > 0


def reward_of(episode, t, action):
    return (episode * 31 + t * 7 + action) % 11 - 5.0


def misplaced(env_step: Any, action: Any) -> int:
    """Count cells ``[T+1, B]`` of a trajectory of EchoEnvs that are not where they belong."""
    env_step, action = jax.tree.map(np.asarray, (env_step, action))
    episode, t = env_step.obs["where"].astype(np.int64).transpose(2, 0, 1)
    last = env_step.obs["last"].astype(np.int64)
    ended = t == length_of(episode)
    wrong = (env_step.is_first != (t == 0)) | ((t == 0) & (last != 0)) | (t > length_of(episode))
    wrong[1:] |= env_step.prev_action[1:] != action
    is_step = t[1:] > 0
    wrong[1:] |= ended[:-1] == is_step  # exactly the row after an end is a reset
    ends = ended[1:] & terminates(episode[1:]), ended[1:] & ~terminates(episode[1:])
    wrong[1:] |= (env_step.terminated[1:] != ends[0]) | (env_step.truncated[1:] != ends[1])
    wrong[1:] |= env_step.reward[1:] != np.where(is_step, reward_of(episode[1:], t[1:], action), 0)
    goes_on = (episode[1:] == episode[:-1]) & (t[1:] == t[:-1] + 1) & (last[1:] == action + 1)
    wrong[1:] |= is_step & ~goes_on
    return int(wrong.sum())


def adapter(env: Any, num_envs: int = 4, **options: Any) -> Any:
    return sebulba.make_env_factory(env, **options)(num_envs, list(range(10, 10 + num_envs)))


def actions_of(num_steps: int, num_envs: int = 4) -> np.ndarray:
    shape = num_steps, num_envs
    return np.random.default_rng(0).integers(NUM_ACTIONS, size=shape).astype(np.int32)


# What is shown.


@pytest.mark.slow
@pytest.mark.parametrize("update_devices", [[0], [1, 2, 3, 4]])
def test_everything_arrives_in_its_place_through_fused_cycles(update_devices):
    checker = run_random(
        EchoEnv, misplaced, TRANSITIONS, update_devices=update_devices, cycle="auto"
    )
    assert checker.wrong == 0 and checker.cells >= TRANSITIONS


@pytest.fixture(scope="module")
def played() -> tuple[Any, np.ndarray]:
    actions = actions_of(60)
    return rollout(adapter(EchoEnv), actions), actions


def test_stepped_and_fused_show_the_same(played):
    env = adapter(EchoEnv)
    env.reset()
    fused = env.fused()
    step, state, outputs = jax.jit(fused.step), fused.state, []
    for action in played[1]:
        state, output, num_invalid = step(state, action)
        outputs.append(jax.device_get(output))
        assert num_invalid == 0
    rows = jax.tree.map(lambda *x: np.stack(x), *outputs)
    assert misplaced(*played) == 0 and fused.is_pure
    assert leaves_equal((rows.obs, rows[1:5]), jax.tree.map(lambda x: x[1:], shown(played[0])))


def shown(env_step: Any) -> tuple:
    flags = env_step.reward, env_step.terminated, env_step.truncated, env_step.is_first
    return env_step.obs, flags


@pytest.mark.parametrize("field", ["obs", "reward", "terminated", "truncated", "is_first"])
@pytest.mark.parametrize("axis", [0, 1], ids=["late", "other env"])
def test_a_planted_shuffle_is_found(played, field, axis):
    env_step, actions = played
    rolled = jax.tree.map(lambda x: np.roll(x, 1, axis), getattr(env_step, field))
    assert misplaced(env_step._replace(**{field: rolled}), actions) > 0


def test_an_environment_shows_the_same_whoever_is_beside_it(played):
    alone = sebulba.make_env_factory(EchoEnv)(1, [12])
    actions = played[1]
    mine = jax.tree.map(lambda x: x[:, 2:3], shown(played[0]))
    assert leaves_equal(shown(rollout(alone, actions[:, 2:3])), mine)


def test_a_reset_begins_episodes_that_were_not_played():
    env = adapter(EchoEnv, 64)
    first, second = (env.reset().obs["where"][:, 0] for _ in range(2))
    assert len({*first, *second}) == 128


# Ends.


class OneState(JaxEnv):
    """Reward 1 for every step; five steps an episode if it terminates, no end of its own else."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, terminates: bool = False) -> None:
        self._terminates = terminates

    def reset(self, key):
        return jnp.zeros(1), 0

    def step(self, key, state, action):
        return jnp.zeros(1), state + 1, 1, self._terminates & (state + 1 == 5), False


def test_a_truncation_is_bootstrapped_from_and_a_termination_is_not():
    truncated = adapter(OneState, max_episode_steps=5)
    assert first_value(truncated) == pytest.approx(10.0, abs=1e-3)
    terminated = adapter(functools.partial(OneState, True)())
    assert first_value(terminated) == pytest.approx(4.0951, abs=1e-3)


# Resuming.


def loop_of(env: Any, recorder: Any = None, **options: Any) -> Any:
    options = {"schedule": "lockstep", "num_inferencers_per_device": 1} | options
    loop, _ = make_tiny_loop(env, agent_class=RandomAgent, observe_cycle=recorder, **options)
    return loop


@pytest.mark.slow
def test_a_fused_run_resumes_bit_for_bit(tmp_path):
    never, resumed = Recorder(), Recorder()
    with sebulba.Checkpointer(tmp_path) as saver, loop_of(EchoEnv, never) as loop:
        result = loop.run(loop.new_state(0, 6), 8, 6)
        with loop_of(EchoEnv, checkpointer=saver) as half:
            half.run(half.new_state(0, 6), 4, 6)
            assert "fused" in half.describe() and "written in JAX" in half.describe()
    with (
        sebulba.Checkpointer(tmp_path) as saver,
        loop_of(EchoEnv, resumed, checkpointer=saver) as loop,
    ):
        state = loop.restore(saver.load_newest())
        assert not loop.resume_notes
        assert loop.run(state, 4, 6).counters == result.counters
    assert leaves_equal(resumed.trajectories, never.trajectories[-4:])
    ended = [len(infos.episode_returns) for infos in never.step_infos[-4:]]
    assert ended == [len(infos.episode_returns) for infos in resumed.step_infos] and any(ended)


class Longer(EchoEnv):
    """Has more in its state."""

    def reset(self, key):
        obs, state = super().reset(key)
        return obs, state | {"more": jnp.zeros(3)}

    def step(self, key, state, action):
        obs, after, *rest = super().step(key, state, action)
        return obs, after | {"more": state["more"]}, *rest


def test_a_stepped_adapter_goes_on_from_its_saved_state_and_refuses_another():
    env, other = adapter(EchoEnv), adapter(EchoEnv)
    rollout(env, actions_of(9))
    saved = env.state()
    other.put_back(saved)
    for action in actions_of(20):
        assert leaves_equal(env.step(action), other.step(action))
    with pytest.raises(EnvError, match="use the environment that was saved"):
        adapter(named_echo(Longer)).put_back(saved)
    with pytest.raises(EnvError, match="damaged"):
        other.put_back(saved[:-1] + b"x")
    assert adapter(EchoEnv).state() == "no episode has begun"


def named_echo(cls: type) -> type:
    return type("EchoEnv", (cls,), {"__qualname__": "EchoEnv"})


# Always fused.


class OnAnAccelerator:
    """A device of another platform, as far as the rule that chooses a cycle can see."""

    platform = "gpu"


def test_a_jax_environment_is_fused_on_any_device(monkeypatch):
    made = {}
    monkeypatch.setattr(
        "sebulba.inference.places.FusedCycle", lambda *a, **k: made.setdefault("fused", a)
    )
    agent = types.SimpleNamespace(make_cycle=lambda *given: None)
    programs: Any = types.SimpleNamespace(agent=agent)
    device: Any = OnAnAccelerator()
    _, why = make_cycle("auto", adapter(EchoEnv), programs, device, None)  # type: ignore[arg-type]
    assert made and why == "the environment is written in JAX"


def test_an_action_outside_the_space_is_refused_before_the_environment_sees_it():
    env = adapter(EchoEnv)
    env.reset()
    with pytest.raises(sebulba.ActionError, match="action 5 for environment 1"):
        env.step(np.array([0, 5, 0, 0], np.int32))
    _, output, num_invalid = jax.jit(env.fused().step)(env.fused().state, np.full(4, 7, np.int32))
    assert num_invalid == 4 and (output.obs["last"] == NUM_ACTIONS).all()


# What is refused.


def broken(**changes: Any) -> type:
    return type("Broken", (OneState,), changes)


def returns(*values: Any) -> Any:
    return lambda self, key, state, action: values


@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        (
            broken(observation_space=None),
            UsageError,
            r"must have an attribute observation_space .*; got None",
        ),
        (broken(action_space=spaces.Text(3)), UsageError, "action_space=.* is not supported"),
        (
            broken(reset=lambda self, key: jnp.zeros(1)),
            EnvError,
            "reset must return a tuple of 2",
        ),
        (
            broken(step=returns(0, 0, 1)),
            EnvError,
            "tuple of 5 .*got a tuple of 3",
        ),
        (broken(reset=lambda self, key: (jnp.zeros(2), 0)), EnvError, "reset: obs .*shape .2,"),
        (
            broken(step=returns(jnp.zeros(1, complex), 0, 1.0, False, False)),
            EnvError,
            "step: obs must have .* dtype float32",
        ),
        (
            broken(step=returns(jnp.zeros(1), {"t": 0}, 1.0, False, False)),
            EnvError,
            "step: state must have the structure",
        ),
        (
            broken(step=returns(jnp.zeros(1), 0.5, 1.0, False, False)),
            EnvError,
            "step: state 0 must have .* dtype int32",
        ),
        (
            broken(step=returns(jnp.zeros(1), 0, jnp.zeros(1), False, False)),
            EnvError,
            "step: reward must have shape",
        ),
        (
            broken(step=returns(jnp.zeros(1), 0, 1.0, jnp.zeros(2, bool), False)),
            EnvError,
            "step: terminated must have shape",
        ),
        (EchoEnv, UsageError, "no option 'size'"),
    ],
    ids=range(11),
)
def test_what_is_wrong_is_named(env, error, words):
    options = {"size": 3} if error is UsageError and env is EchoEnv else {}
    with pytest.raises(error, match=words):
        adapter(env, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "gymnasium"}, "backend='gymnasium' does not go with"),
        ({"num_threads": 2}, "num_threads=2 is an option of envpool"),
        ({"vectorization": "async"}, "'async' is for single environments"),
        ({"max_episode_steps": 0}, "max_episode_steps=0 must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        adapter(EchoEnv, **options)


def makes_echo() -> EchoEnv:
    return EchoEnv()


@pytest.mark.parametrize(
    "env", [EchoEnv, EchoEnv(), makes_echo, f"{__name__}:EchoEnv"], ids=range(4)
)
def test_a_class_an_object_a_function_and_a_name_will_do(env):
    assert adapter(env).fused().is_pure
    spec = sebulba.env_spec(env)
    assert spec.action_space == spaces.Discrete(NUM_ACTIONS, dtype=np.int32)


# Ids of libraries.


def test_reserved_names_are_told_from_modules():
    with pytest.raises(UsageError, match=r"'nope' is not an id of pgx|needs pgx"):
        sebulba.make_env_factory("pgx:nope")
    with pytest.raises(UsageError, match="'nowhere', which is not found"):
        sebulba.make_env_factory("nowhere:ant")


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for make in (sebulba.make_env_factory, env_source):
        with pytest.raises(UsageError, match=r"needs brax, which is not .*pip install .*\[brax\]"):
            make("brax:ant")


def test_time_limits_nest():
    env = adapter(TimeLimit(TimeLimit(OneState(), 9), 3))
    env.reset()
    ends = [env.step(np.zeros(4, np.int32)).truncated.all() for _ in range(3)]
    assert ends == [False, False, True]

"""Generated bad input: never a crash or a hang, always an error that names what is wrong.

What is native runs in a process of its own, so that a crash there is seen and its input known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sebulba
from sebulba.agents import configs as agent_configs
from sebulba.agents.configs import ImpalaConfig, MultiAgentConfig, PPOConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.presets import PRESETS
from sebulba.envs import env_spec, make_env_factory, seed_block
from sebulba.envs.checked_env import CheckedEnv
from sebulba.errors import ActionError, EnvError, UsageError
from sebulba.options import CheckpointOptions, FaultOptions
from sebulba.runs.read_config import read_config
from tests.faults.bad_values import (
    ARRAYS,
    NUMBERS,
    ODD,
    WORDS,
    AwkwardError,
    TwoArguments,
    examples,
)
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

pytestmark = pytest.mark.timeout(3600)

# Configurations.

CONFIGS = {
    cls: {}
    for name in agent_configs.__all__
    if dataclasses.is_dataclass(cls := getattr(agent_configs, name)) and dataclasses.fields(cls)
} | {
    MultiAgentConfig: {"agents": {"*": PPOConfig()}},
    CheckpointOptions: {},
    FaultOptions: {},
    EnvConfig: {"id": "CartPole-v1"},
    ExperimentConfig: {
        "env": EnvConfig("CartPole-v1"),
        "agent": ImpalaConfig(),
        "total_env_steps": 1000,
    },
}


def assert_names(error: BaseException, names: Any) -> None:
    assert any(name in str(error) for name in names), f"{error} names none of {names}"
    assert len(str(error)) < 2000


@pytest.mark.slow
@examples(60, 3000)
@given(st.data())
def test_a_configuration_is_refused_by_the_name_of_the_field(data):
    cls = data.draw(st.sampled_from(sorted(CONFIGS, key=lambda cls: cls.__name__)))
    names = [field.name for field in dataclasses.fields(cls)]
    odd = {name: data.draw(ODD) for name in data.draw(st.sets(st.sampled_from(names), min_size=1))}
    try:
        config = cls(**{**CONFIGS[cls], **odd})
    except UsageError as error:
        assert_names(error, odd)
        return
    if not isinstance(config, ExperimentConfig):
        assert json.loads(json.dumps(dataclasses.asdict(config))) is not None


OPTIONS = st.sampled_from(
    [
        *("--num-envs", "--seed", "--total-env-steps", "--schedule", "--env.id", "--env.options"),
        *("--learning-rate", "--agent.torso.hidden-sizes", "--inference-devices", "--name"),
        *("--faults.on-env-failure", "--checkpoint.every-s", "--max-policy-lag", "--resume"),
        *("--metrics-interval-s", "--anneal-learning-rate", "--no-such-option", "--platform"),
    ]
)


@examples(8, 700)
@given(
    preset=st.one_of(st.sampled_from(sorted(PRESETS)), WORDS),
    options=st.lists(st.tuples(OPTIONS, st.lists(WORDS, max_size=2)), max_size=3),
)
def test_words_of_the_command_line_are_refused_by_the_name_of_the_option(preset, options):
    words = [word for option, values in options for word in (option, *values)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            _, config = read_config([preset, *words], "sebulba train")
    except UsageError as error:
        fields = [option.removeprefix("--").replace("-", "_") for option, _ in options]
        assert_names(error, ["configuration", *fields, *(f.split(".")[-1] for f in fields)])
    except SystemExit as exit_:
        assert exit_.code in (0, 2)  # a word may be -h
        text = said.getvalue()
        assert any(word.strip("- ") in text for word in words) and "Traceback" not in text
    else:
        assert isinstance(config, ExperimentConfig)


# What a loop is given.

LOOP_ARGUMENTS = [
    *("num_envs", "seed", "inference_devices", "update_devices", "num_inferencers_per_device"),
    *("inference_only", "schedule", "max_policy_lag", "cycle", "queue_size", "metrics_interval_s"),
    *("on_env_failure", "max_env_restarts", "on_not_finite"),
    *("hang_timeout_s", "pin_inferencers"),
]


@examples(30, 1500)
@given(
    odd=st.dictionaries(st.sampled_from(LOOP_ARGUMENTS), ODD, min_size=1, max_size=2),
    run=st.tuples(ODD, ODD),
)
def test_arguments_of_a_loop_are_refused_by_name(odd, run):
    # A number that is right is as many environments to be made.
    assume(not any(4 < odd.get(n, 0) < 2**40 for n in COUNTS if type(odd.get(n)) is int))
    options = {"num_envs": 4, "inference_devices": [0], "update_devices": [0], **odd}
    num_envs = options.pop("num_envs")
    try:
        odd["num_envs"] = num_envs  # which have to fit the devices
        with sebulba.GymnasiumLoop(CountingEnv, AGENT, num_envs, **options) as loop:
            state = STATES.setdefault(loop.num_inferencers, loop.new_state(0, 3))
            with pytest.raises(UsageError, match=r"num_cycles|steps_per_cycle|state"):
                loop.run(state, *(x if type(x) is not int or x < 1 else 0 for x in run))
    except UsageError as error:
        assert_names(error, odd)


AGENT = TinyAgent(env_spec(CountingEnv), TinyConfig())
STATES: dict[int, Any] = {}
COUNTS = ("num_envs", "num_inferencers_per_device")


# Actions.


class Boxes(CountingEnv):
    action_space: spaces.Space = spaces.Box(-2, 2, (2,), np.float32)


class Several(CountingEnv):
    action_space: spaces.Space = spaces.MultiDiscrete([2, 3])


ACTIONS = st.one_of(
    ODD,
    ARRAYS,
    hnp.arrays(np.int32, st.sampled_from([(2,), (3,), (2, 2), (0,)])),
    hnp.arrays(np.int32, (2,), elements=st.integers(-1, 3)),
    hnp.arrays(np.int32, (2, 2), elements=st.integers(-1, 3)),
    hnp.arrays(np.float32, (2, 2), elements=st.floats(-3, 3, width=32)),
    hnp.arrays(np.float32, (2, 2)),
    hnp.arrays(np.float32, (2, 1)),
)
LAYOUTS = st.sampled_from(["as it is", "read-only", "strided", "reversed", "Fortran", "subclass"])


def laid_out(action: Any, layout: str) -> Any:
    """Return the same action, in another memory layout."""
    if type(action) is not np.ndarray:
        return action
    if layout == "read-only":
        action = action.copy()
        action.flags.writeable = False
    if layout == "strided":
        wide = np.zeros((*action.shape, 2), action.dtype)
        wide[..., 0] = action
        return wide[..., 0]
    if layout == "reversed" and action.ndim:
        return np.ascontiguousarray(action[::-1])[::-1]
    if layout == "Fortran":
        return np.asfortranarray(action)
    return action.view(np.matrix) if layout == "subclass" and action.ndim == 2 else action


def is_valid(action: Any, space: spaces.Space, num_envs: int) -> bool:
    shape = (num_envs, *(space.shape or ()))
    if type(action) is not np.ndarray or action.shape != shape or action.dtype != space.dtype:
        return False
    return all(space.contains(row) for row in action)


@examples(30, 1500)
@given(
    env=st.sampled_from([CountingEnv, Boxes, Several]),
    actions=st.lists(st.tuples(ACTIONS, LAYOUTS), min_size=1, max_size=4),
)
def test_an_action_is_taken_as_it_is_meant_or_refused(env, actions):
    adapter = make_env_factory(env)(2, [1, 2])
    adapter.reset()
    for action, layout in actions:
        action = laid_out(action, layout)
        if is_valid(action, adapter.spec.action_space, 2):
            adapter.step(action)
            continue
        with pytest.raises(ActionError, match="action"):
            adapter.step(action)
    adapter.close()


@pytest.mark.slow
def test_no_bad_action_or_seed_or_option_reaches_native_code(tmp_path):
    """In a child: what is about to be tried is written down before, for the case of a crash."""
    trying = tmp_path / "trying"
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.native_child", str(trying)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    last = trying.read_text() if trying.exists() else "nothing"
    assert done.returncode == 0, f"{done.stderr}\nwhen it was given {last}"
    tried = json.loads(done.stdout)
    assert tried["actions"] > tried["valid"] > 0 and tried["pools"] > 0


# Seeds and environments.


@examples(20, 700)
@given(
    env=st.sampled_from([CountingEnv, "CartPole-v1"]),
    num_envs=st.one_of(st.integers(-2, 3), ODD),
    seeds=st.one_of(ODD, st.lists(ODD, max_size=3)),
)
def test_numbers_of_environments_and_seeds_are_refused_by_name(env, num_envs, seeds):
    assume(type(num_envs) not in (int, np.int64) or num_envs <= 3)
    try:
        make_env_factory(env)(num_envs, seeds).close()
    except UsageError as error:
        assert_names(error, ["num_envs", "seeds"])


@examples(20, 500)
@given(st.dictionaries(st.sampled_from(["seed", "host", "inferencer", "generation"]), NUMBERS))
def test_seed_blocks_are_refused_by_name(odd):
    arguments = {"seed": 0, "inferencer": 0, **odd}
    try:
        block = seed_block(arguments.pop("seed"), num_inferencers=2, num_envs=3, **arguments)
    except UsageError as error:
        assert_names(error, [*odd, "environments"])
    else:
        assert all(0 <= seed < 2**31 for seed in block)


@examples(20, 700)
@given(
    env=st.one_of(
        ODD, st.sampled_from(["CartPole-v1", "tests.support.tiny:CountingEnv", "a:b", "x.y:z.w"])
    ),
    options=st.dictionaries(
        st.sampled_from(["backend", "num_threads", "vectorization", "step_timeout_s", "length"]),
        ODD,
        max_size=2,
    ),
)
def test_environments_and_their_options_are_refused_by_name(env, options):
    try:
        make_env_factory(env, **options)
    except UsageError as error:
        assert_names(error, ["env=", *options])


# Spaces.

BOUNDS = st.one_of(
    NUMBERS, hnp.arrays(np.float64, st.sampled_from([(2,), (0,), (1, 2)])), st.just(2.2e-308)
)


def box(low: Any, high: Any, shape: Any, dtype: Any) -> spaces.Space:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        space = spaces.Box(low, high, shape, dtype)
        if space.dtype.kind == "f":  # NumPy refuses to draw a number between 0.0 and -0.0
            widths = space.high - space.low
            assume(not (np.signbit(widths) & (widths == 0)).any())
        return space


SHAPES = st.sampled_from([None, (), (0,), (2,), (2, 0), (1,) * 6, (3, 4)])
BOX_DTYPES = st.sampled_from(
    [np.float16, np.float32, np.float64, np.int8, np.int64, np.uint8, np.uint64, np.bool_]
)
SMALL_ARRAYS = hnp.arrays(np.int64, st.sampled_from([(2,), (0,), (2, 2)]))


def space_of(make: Any, *parts: Any) -> Any:
    """Return what ``make`` makes; a list of its arguments where Gymnasium refuses them itself."""

    def made(arguments: tuple) -> Any:
        try:
            return make(*arguments)
        except Exception:
            return list(arguments)

    return st.tuples(*parts).map(made)


LEAVES = st.one_of(
    space_of(box, BOUNDS, BOUNDS, SHAPES, BOX_DTYPES),
    space_of(lambda n, start: spaces.Discrete(n, start=start), NUMBERS, NUMBERS),
    space_of(spaces.MultiDiscrete, SMALL_ARRAYS),
    space_of(spaces.MultiBinary, st.one_of(st.integers(0, 4), st.just([2, 2]))),
    space_of(spaces.Text, st.integers(1, 4)),
    st.just(spaces.Graph(spaces.Discrete(2), None)),
    st.just(spaces.Sequence(spaces.Discrete(2))),
)
SPACES = st.one_of(
    LEAVES,
    ODD,
    space_of(spaces.Tuple, st.lists(LEAVES, max_size=2)),
    space_of(spaces.Dict, st.dictionaries(st.one_of(WORDS, st.integers(0, 2)), LEAVES, max_size=3)),
    space_of(spaces.Dict, st.dictionaries(WORDS, space_of(spaces.Dict, st.just({})), max_size=2)),
)


@examples(40, 1500)
@given(which=st.sampled_from(["observation_space", "action_space"]), space=SPACES)
def test_a_space_is_refused_by_name_or_works(which, space):
    class Env(CountingEnv):
        def _obs(self):
            return self.observation_space.sample()

    setattr(Env, which, space)
    try:
        spec = env_spec(Env)
    except UsageError as error:
        assert_names(error, [which])
        return
    assume(np.prod(spec.observation_space.shape or (1,)) < 1000)
    adapter = make_env_factory(Env)(2, [1, 2])
    try:
        adapter.reset()
        adapter.step(np.stack([np.asarray(spec.action_space.sample())] * 2))
    except EnvError as error:
        assert_names(error, ["obs", "action"])
    finally:
        adapter.close()


# What environments return.

OBS = np.zeros(2, np.float32)
FLAGS = st.one_of(st.booleans(), ODD)
STEPS = st.one_of(
    ODD,
    st.lists(ODD, max_size=6).map(tuple),
    st.tuples(st.one_of(st.just(OBS), ODD), st.one_of(st.just(1.0), ODD), FLAGS, FLAGS, ODD),
    st.tuples(st.just(OBS), NUMBERS, st.booleans(), st.booleans(), st.just({})),
)
RESETS = st.one_of(st.just((OBS, {})), st.tuples(ODD, ODD), ODD)
RAISED = st.sampled_from(
    [AwkwardError, lambda: TwoArguments(1, 2), StopIteration, lambda: KeyError("x"), MemoryError]
    + [lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), RecursionError]
)


class Returns(CountingEnv):
    results: tuple[Any, Any, Any] = (None, None, None)

    def reset(self, *, seed=None, options=None):
        return self.results[0]

    def step(self, action):
        if self.results[2] is not None:
            raise self.results[2]()
        return self.results[1]


@examples(60, 2000)
@given(reset=RESETS, step=STEPS, error=st.one_of(st.none(), st.none(), RAISED))
def test_what_an_environment_returns_is_refused_by_name(reset, step, error):
    env = type("Env", (Returns,), {"results": (reset, step, error)})
    adapter = make_env_factory(env)(1, [1])
    try:
        adapter.reset()
        output = adapter.step(np.zeros(1, np.int32))
    except EnvError as refused:
        assert_names(refused, ["environment 0, step"])
        names = ["obs", "reward", "terminated", "truncated", "step must", "reset must"]
        assert_names(refused, names)
    except Exception as raised:
        assert error is not None and type(raised) is type(error())
        assert "raised by environment 0" in "".join(raised.__notes__)
    else:
        assert output.obs.shape == (1, 2) and np.isfinite(output.obs).all()
        assert np.isfinite(output.reward).all()
    finally:
        adapter.close()


@examples(20, 500)
@given(RAISED)
def test_what_a_worker_raises_can_be_sent_and_says_where(error):
    env = type("Env", (Returns,), {"results": ((OBS, {}), None, error)})
    checked = CheckedEnv(env, 3, in_worker=True)
    with pytest.raises(Exception) as caught:
        checked.step(0)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert type(sent) in (type(error()), EnvError)
    assert "environment 3" in "".join(sent.__notes__)
    if type(sent) is EnvError:
        assert type(error()).__name__ in str(sent)


class ReturningVector(VectorEnv):
    """A ready-made vector environment."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, reset: Any, step: Any) -> None:
        self.num_envs = 2
        self.single_observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.results = reset, step

    def reset(self, *, seed=None, options=None):
        return self.results[0]

    def step(self, actions):
        return self.results[1]


ROWS = np.zeros((2, 2), np.float32)
NO_FLAGS = np.zeros(2, np.bool_)
VECTOR_STEPS = st.one_of(
    STEPS,
    st.tuples(
        st.one_of(st.just(ROWS), ODD),
        st.one_of(st.just(np.ones(2)), ODD),
        st.one_of(st.just(NO_FLAGS), ODD),
        st.one_of(st.just(NO_FLAGS), ODD),
        ODD,
    ),
)


@examples(40, 1500)
@given(reset=st.one_of(st.just((ROWS, {})), RESETS), step=VECTOR_STEPS)
def test_what_a_vector_environment_returns_is_refused_by_name(reset, step):
    adapter = make_env_factory(lambda num_envs, seeds: ReturningVector(reset, step))(2, [1, 2])
    try:
        adapter.reset()
        output = adapter.step(np.zeros(2, np.int32))
    except EnvError as refused:
        assert_names(refused, ["obs", "reward", "terminated", "reset must", "step must"])
    else:
        assert output.obs.shape == (2, 2) and output.obs.dtype == np.float32
        assert np.isfinite(output.reward).all() and output.terminated.dtype == np.bool_
    finally:
        adapter.close()

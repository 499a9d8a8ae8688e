"""Libraries of JAX environments, where they are installed: ids, options, and ends told apart."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import flax.struct
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.configs.experiment import EnvConfig
from sebulba.envs import env_source
from sebulba.envs.jax_libraries import IMPORTED
from sebulba.envs.jax_libraries.playground_env import PlaygroundEnv
from sebulba.errors import UsageError
from tests.envs.test_jax_populations import value_of_slots
from tests.support.value_of_ends import first_value

# Of gymnax 0.0.9 and brax with newer versions of JAX and MuJoCo, whenever they are traced.
pytestmark = [
    pytest.mark.filterwarnings("ignore:scatter inputs have:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

IDS = {
    "gymnax": ["gymnax:CartPole-v1", "gymnax:Breakout-MinAtar", "gymnax:Catch-bsuite"],
    "brax": ["brax:inverted_pendulum"],
    "playground": ["playground:CartpoleBalance"],
    "jumanji": ["jumanji:Snake-v1", "jumanji:Cleaner-v0"],
    "pgx": ["pgx:2048"],
}


def needs(library: str) -> None:
    if importlib.util.find_spec(IMPORTED.get(library, library)) is None:
        pytest.skip(f"{library} is not installed; pip install 'sebulba[{library}]'")


@pytest.fixture
def ranks_may_differ():
    """Allow what MJX does and the tests forbid: operands of fewer dimensions."""
    with jax.numpy_rank_promotion("allow"):
        yield


def adapter(env: Any, num_envs: int = 2, **options: Any) -> Any:
    return sebulba.make_env_factory(env, **options)(num_envs, list(range(num_envs)))


@pytest.mark.usefixtures("ranks_may_differ")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("env_id", [one for ids in IDS.values() for one in ids])
def test_an_id_makes_an_environment_that_keeps_its_contract(env_id):
    needs(env_id.partition(":")[0])
    env = adapter(env_id)
    space = env.spec.action_space
    space.seed(0)
    output = env.reset()
    for _ in range(30):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(output.obs))
        obs = jax.tree.map(lambda x: np.asarray(x[0]), output.obs)
        assert env.spec.observation_space.contains(obs), obs
        ended = output.terminated | output.truncated
        output = env.step(np.stack([np.asarray(space.sample(), space.dtype) for _ in range(2)]))
        np.testing.assert_array_equal(output.is_first, ended)
    source = env_source(env_id)
    library = env_id.partition(":")[0]
    assert source.backend == library and source.versions[library] in str(source)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("gymnax:Breakout", "'Breakout' is not an id of gymnax; the nearest are Breakout-MinAtar"),
        ("brax:antt", "'antt' is not an id of brax; the nearest are ant"),
        (
            "playground:CartpolBalance",
            "is not an id of playground; the nearest are CartpoleBalance",
        ),
        ("jumanji:Snak-v1", "'Snak-v1' is not an id of jumanji; the nearest are Snake-v1"),
        ("pgx:2047", "'2047' is not an id of pgx; the nearest are 2048"),
        ("jaxmarl:MPE_simple_spred_v3", "'MPE_simple_spred_v3' is not an id of jaxmarl; the"),
        ("jumanji:LevelBasedForaging-v0", "has several agents"),
    ],
)
def test_what_is_not_there_is_named_with_what_is_near(env_id, words):
    needs(env_id.partition(":")[0])
    with pytest.raises(UsageError, match=words):
        sebulba.make_env_factory(env_id)


@pytest.mark.usefixtures("ranks_may_differ")
@pytest.mark.parametrize(
    ("env_id", "options", "words"),
    [
        ("gymnax:CartPole-v1", {"gravty": 1.0}, "no option 'gravty'; the nearest are gravity"),
        ("gymnax:CartPole-v1", {"gravity": "low"}, "gravity='low' of .* must be a finite number"),
        ("gymnax:CartPole-v1", {"max_episode_steps": 0}, "must be at least 1"),
        ("brax:reacher", {"phisics": "spring"}, "no option 'phisics'; the nearest are physics"),
        ("brax:reacher", {"physics": "springs"}, "cannot be made"),
        ("playground:CartpoleBalance", {"ctrl_td": 1}, "no option 'ctrl_td'; the nearest are ctrl"),
        ("jumanji:Snake-v1", {"rows": 3}, "no option 'rows'"),
        ("pgx:2048", {"size": 3}, "no option 'size'"),
        ("pgx:tic_tac_toe", {"size": 3}, "no option 'size'"),
        ("jaxmarl:MPE_simple_spread_v3", {"size": 3}, "no option 'size'"),
    ],
)
def test_options_are_checked(env_id, options, words):
    needs(env_id.partition(":")[0])
    with pytest.raises(UsageError, match=words):
        sebulba.make_env_factory(env_id, **options)


def test_options_reach_the_environment():
    needs("gymnax")
    env = adapter("gymnax:Breakout-MinAtar", max_episode_steps=4, use_minimal_action_set=False)
    assert env.spec.action_space.n == 6
    env.reset()
    ends = [env.step(np.zeros(2, np.int32)).truncated.all() for _ in range(4)]
    assert ends == [False, False, False, True]


def test_ids_of_libraries_name_no_code():
    assert not EnvConfig("gymnax:Breakout-MinAtar").named_code()
    assert not EnvConfig("brax:ant").named_code()
    assert EnvConfig("my_env:Ant").named_code()


# Many agents.


def random_legal(output: Any, spec: Any, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random legal actions of every slot of every group."""
    actions = {}
    for name, group in spec.groups.items():
        shape = output.reward[name].shape
        mask = np.ones((*shape, group.spec.action_space.n))
        if group.spec.legal_actions:
            mask = output.obs[name][group.spec.legal_actions] + 1e-9
        draws = generator.uniform(size=mask.shape) * mask
        actions[name] = draws.argmax(axis=-1).astype(np.int32)
    return actions


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("game", ["tic_tac_toe", "kuhn_poker"])
def test_games_of_two_are_turns_with_legal_actions_and_add_up_to_zero(game):
    needs("pgx")
    env = adapter(f"pgx:{game}", num_envs=64)
    generator, output, games, moves = np.random.default_rng(0), env.reset(), 0, 0
    for _ in range(40):
        acting = output.acting["seat"]
        is_last = output.episode_end
        np.testing.assert_array_equal(acting.sum(axis=1), ~is_last)
        mask = output.obs["seat"]["action_mask"]
        assert mask[acting].any(axis=-1).all() and not mask[~acting & ~is_last[:, None]].any()
        moves += acting.sum()
        output = env.step(random_legal(output, env.spec, generator))
        games += output.episode_end.sum()
        np.testing.assert_array_equal(output.reward["seat"].sum(axis=1), 0)
        assert not output.reward["seat"][~output.episode_end].any()
        ended = output.terminated["seat"]
        np.testing.assert_array_equal(ended, np.tile(output.episode_end[:, None], 2))
    assert games > 64 and moves / games > 2


def test_a_move_that_is_not_legal_does_not_reach_the_game():
    needs("pgx")
    env = adapter("pgx:tic_tac_toe")
    env.reset()
    corner = {"seat": np.zeros((2, 2), np.int32)}
    env.step(corner)
    with pytest.raises(sebulba.ActionError, match=r"'seat_[01]' of environment 0 is not legal"):
        env.step(corner)


@pytest.mark.timeout(1200)
@jax.numpy_rank_promotion("allow")  # as outside of tests; jaxmarl needs it
def test_agents_of_jaxmarl_are_grouped_by_their_spaces_and_cut_at_the_limit():
    needs("jaxmarl")
    env = adapter("jaxmarl:MPE_simple_speaker_listener_v4", max_episode_steps=3)
    assert {name: group.slots for name, group in env.spec.groups.items()} == {
        "speaker": ("speaker_0",),
        "listener": ("listener_0",),
    }
    generator, output = np.random.default_rng(0), env.reset()
    for step in range(1, 9):
        output = env.step(random_legal(output, env.spec, generator))
        assert (output.truncated["speaker"] == (step % 4 == 3)).all()
        assert not output.terminated["listener"].any()


# A task with reward 1 in each library's own words: its time limit, or its end, after five steps.


def gymnax_task(terminates: bool) -> Any:
    from gymnax.environments import environment, spaces

    from sebulba.envs.jax_libraries.gymnax_env import GymnaxEnv

    reports_limits = hasattr(environment.Environment, "is_truncated")

    class Task(environment.Environment):
        def step_env(self, key, state, action, params):
            state = state.replace(time=state.time + 1)
            done = self.is_terminal(state, params)
            return jnp.zeros(1), state, jnp.float32(1), done, {}

        def reset_env(self, key, params):
            return jnp.zeros(1), environment.EnvState(time=0)

        def is_terminated(self, state, params):
            return terminates & (state.time >= 5)

        def is_terminal(self, state, params):
            limit = state.time >= params.max_steps_in_episode
            return self.is_terminated(state, params) | (limit & (not reports_limits))

        def observation_space(self, params):
            return spaces.Box(0, 1, (1,))

        def action_space(self, params):
            return spaces.Discrete(2)

    limit = 100 if terminates else 5
    return GymnaxEnv(Task(), environment.EnvParams(max_steps_in_episode=limit))


def brax_task(terminates: bool) -> Any:
    from brax.envs import base

    from sebulba.envs.jax_env import TimeLimit
    from sebulba.envs.jax_libraries.brax_env import BraxEnv

    class Task(base.Env):
        observation_size, action_size, backend = 1, 1, "none"

        def reset(self, rng):
            zero = jnp.zeros(())
            return base.State(jnp.int32(0), jnp.zeros(1), zero, zero)

        def step(self, state, action):
            t = state.pipeline_state + 1
            done = jnp.float32(terminates) * (t >= 5)
            return state.replace(pipeline_state=t, reward=jnp.ones(()), done=done)

    return TimeLimit(BraxEnv(Task()), 100 if terminates else 5)


def jumanji_task(terminates: bool) -> Any:
    from jumanji import env as jumanji_env
    from jumanji import specs, types

    from sebulba.envs.jax_libraries.jumanji_env import JumanjiEnv

    class Task(jumanji_env.Environment):
        """Says ``termination`` at its time limit, as most of jumanji's environments do."""

        time_limit = 100 if terminates else 5
        observation_spec = specs.Array((1,), jnp.float32)
        action_spec = specs.DiscreteArray(2)

        def reset(self, key):
            return jnp.int32(0), types.restart(jnp.zeros(1))

        def step(self, state, action):
            t = state + 1
            done = (terminates & (t >= 5)) | (t >= self.time_limit)
            arguments = jnp.float32(1), jnp.zeros(1)
            return t, jax.lax.cond(done, types.termination, types.transition, *arguments)

    return JumanjiEnv(Task())


def pgx_task(terminates: bool) -> Any:
    import pgx
    from pgx import play2048

    from sebulba.envs.jax_env import TimeLimit
    from sebulba.envs.jax_libraries.pgx_env import PgxEnv

    class Task(play2048.Play2048):
        def step(self, state, action, key=None):
            count = state._step_count + 1
            ones = jnp.ones_like(state.rewards)
            done = terminates & (count >= 5)
            return state.replace(_step_count=count, rewards=ones, terminated=jnp.bool_(done))

    assert isinstance(Task(), pgx.Env)
    return TimeLimit(PgxEnv(Task()), 100 if terminates else 5)


def jaxmarl_task(terminates: bool) -> Any:
    from jaxmarl.environments import multi_agent_env, spaces

    from sebulba.envs.jax_libraries.jaxmarl_env import JaxmarlEnv

    class Task(multi_agent_env.MultiAgentEnv):
        max_steps = 100 if terminates else 5

        def __init__(self):
            super().__init__(2)
            self.observation_spaces = dict.fromkeys(self.agents, spaces.Box(0, 1, (1,)))
            self.action_spaces = dict.fromkeys(self.agents, spaces.Discrete(2))

        def reset(self, key):
            return dict.fromkeys(self.agents, jnp.zeros(1)), jnp.int32(0)

        def step_env(self, key, state, actions):
            t = state + 1
            done = (terminates & (t >= 5)) | (t >= self.max_steps)
            of_all = dict.fromkeys(self.agents, done) | {"__all__": done}
            obs = dict.fromkeys(self.agents, jnp.zeros(1))
            return obs, t, dict.fromkeys(self.agents, jnp.float32(1)), of_all, {}

    return JaxmarlEnv(Task())


@pytest.mark.parametrize(("terminates", "value"), [(False, 10.0), (True, 4.0951)])
def test_a_time_limit_of_jaxmarl_is_bootstrapped_from(terminates, value):
    needs("jaxmarl")
    found = value_of_slots(adapter(jaxmarl_task(terminates)), "agent")
    np.testing.assert_allclose(found, value, atol=1e-2)


TASKS = {"gymnax": gymnax_task, "brax": brax_task, "jumanji": jumanji_task, "pgx": pgx_task}


@pytest.mark.slow
@pytest.mark.parametrize("library", TASKS)
@pytest.mark.parametrize(("terminates", "value"), [(False, 10.0), (True, 4.0951)])
def test_a_time_limit_is_bootstrapped_from_and_a_termination_is_not(library, terminates, value):
    needs(library)
    assert first_value(adapter(TASKS[library](terminates))) == pytest.approx(value, abs=1e-3)


def test_what_ends_and_reaches_the_limit_at_once_has_terminated():
    needs("gymnax")
    env = gymnax_task(True)
    env._params = env._params.replace(max_steps_in_episode=5)
    assert first_value(adapter(env)) == pytest.approx(4.0951, abs=1e-3)


@pytest.mark.slow
def test_the_bare_prototype_trains_on_the_same_environment():
    needs("gymnax")
    from benchmarks.studies.prototype_case import make_prototype_case
    from sebulba.configs.presets import PRESETS

    config = dataclasses.replace(
        PRESETS["breakout-minatar"].make(), num_envs=4, steps_per_cycle=16, total_env_steps=640
    )
    case = make_prototype_case(config, None)  # type: ignore[arg-type]
    case.warm_up(0.0)
    assert case.measure() > 0


# MuJoCo Playground, by a double with its interface: it needs mujoco, mjx and brax.


@flax.struct.dataclass
class Standing:
    """As ``mujoco_playground.State``."""

    data: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict[str, Any]
    info: dict[str, Any]


class Robot:
    """Counts its steps; ``data`` is ``[steps, sum of actions]``."""

    action_size = 2

    def __init__(self, ends: str = "") -> None:
        self.ends = ends

    def reset(self, rng):
        zero = jnp.float32(0)
        return Standing(jnp.zeros(2), self.obs(jnp.zeros(2)), zero, zero, {}, {"time_out": zero})

    def obs(self, data):
        return {"state": data, "privileged_state": jnp.concatenate([data, data])}

    def step(self, state, action):
        data = state.data + jnp.array([1.0, action.sum()])
        is_last = (data[0] >= 6).astype(jnp.float32)
        broken = jnp.where(is_last > 0, jnp.nan, data) if self.ends == "broken" else data
        time_out = is_last if self.ends == "time" else jnp.float32(0)
        done = is_last if self.ends else jnp.float32(0)
        info = {"time_out": time_out}
        obs = self.obs(broken)
        return state.replace(data=data, obs=obs, reward=broken[0], done=done, info=info)


@pytest.fixture
def playground(monkeypatch):
    """Put a double in the place of ``mujoco_playground``; return what it was asked to load."""
    loaded = []

    def load(env_id, config_overrides=None):
        loaded.append((env_id, config_overrides))
        return Robot()

    config = {"impl": "warp", "episode_length": 9, "action_repeat": 2, "ctrl_dt": 0.01}
    registry = types.ModuleType("registry")
    registry.ALL_ENVS = ("Robot",)
    registry.get_default_config, registry.load = lambda env_id: dict(config), load
    module = types.ModuleType("mujoco_playground")
    module.registry = registry
    module.__spec__ = importlib.machinery.ModuleSpec("mujoco_playground", None)
    monkeypatch.setitem(sys.modules, "mujoco_playground", module)
    return loaded


def test_playground_is_loaded_with_its_options_and_hides_what_is_privileged(playground):
    env = adapter("playground:Robot", ctrl_dt=0.02)
    assert playground[-1] == ("Robot", {"ctrl_dt": 0.02, "impl": "jax"})  # a CPU has no Warp
    assert env.spec.eval_only == ("privileged_state",)
    assert set(env.spec.policy_spec.observation_space) == {"state"}
    assert env.spec.action_space == gymnasium.spaces.Box(-1.0, 1.0, (2,))
    env.reset()
    rows = [env.step(np.full((2, 2), 0.25, np.float32)) for _ in range(6)]
    # Two steps of the robot in each: 9 of them are 5.
    np.testing.assert_array_equal(rows[0].reward, [3, 3])
    np.testing.assert_array_equal(rows[0].obs["state"], [[2, 1], [2, 1]])
    assert [bool(row.truncated[0]) for row in rows] == [False] * 4 + [True, False]
    assert not any(row.terminated.any() for row in rows) and rows[5].is_first.all()
    adapter("playground:Robot", impl="warp", max_episode_steps=3)
    assert playground[-1] == ("Robot", {"impl": "warp"})
    with pytest.raises(UsageError, match="no option 'ctrl_td'; the nearest are ctrl_dt"):
        adapter("playground:Robot", ctrl_td=1)


@pytest.mark.parametrize("ends", ["time", "broken", "fallen"])
def test_playground_says_why_an_episode_ends(ends):
    env = adapter(PlaygroundEnv(Robot(ends)))
    env.reset()
    rows = [env.step(np.zeros((2, 2), np.float32)) for _ in range(6)]
    assert not any((row.terminated | row.truncated).any() for row in rows[:5])
    assert rows[5].truncated.all() == (ends == "time")
    assert rows[5].terminated.all() == (ends != "time")
    expected = 0 if ends == "broken" else 6  # NaN would end the run
    assert rows[5].reward[0] == expected and rows[5].obs["state"][0, 0] == expected

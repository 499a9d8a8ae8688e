"""Environments of many agents in JAX: nothing misplaced, turns, ends, legal actions, resuming.

``ECHO_TRANSITIONS=1000000 pytest THIS_FILE --timeout 0`` runs the long counts.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba import Act, ActionError, AgentNode, EnvError, Obs, Population, Repeat, UsageError
from sebulba.agents.configs import (
    DQNConfig,
    PPOConfig,
    ReplayConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.kernels.returns import lambda_returns, transitions
from sebulba.agents.multi import waiting_agents
from sebulba.envs.jax_env import MultiAgentJaxEnv, TimeLimit
from sebulba.types import EnvStep, Trajectory, empty_env_step
from tests.support.loop_helpers import Recorder, leaves_equal

SMALL = TorsoConfig(hidden_sizes=(16,))
PPO_SMALL = PPOConfig(torso=SMALL, epochs=1, minibatches=1)
DQN_SMALL = DQNConfig(torso=SMALL, replay=ReplayConfig(2000, 16))
NUM_ENVS = 4
TRANSITIONS = int(os.environ.get("ECHO_TRANSITIONS", "6000"))


class Echo:
    """Every slot is shown who it is, the episode's number in chance, the time and its last action.

    A guide is always there; of three visitors, some wait in each step and one of them ends before
    the others. Actions are paid in the slot that chose them.
    """

    visitor = AgentNode(
        {
            "where": Obs(spaces.Box(-1, 2**24, (4,), np.float32)),
            "secret": Obs(spaces.Discrete(7), eval_only=True),
            "legal": Obs(spaces.MultiBinary(3), legal_actions=True),
        },
        Act(spaces.Discrete(3)),
    )
    tree = Population(
        {
            "guide": AgentNode(
                Obs(spaces.Box(-1, 2**24, (4,), np.float32)), Act(spaces.MultiDiscrete([4, 2]))
            ),
            "visitors": Population(Repeat(visitor, most=3)),
        },
        common=Obs(spaces.Box(0, 2**24, (2,), np.float32)),
    )

    def reset(self, key):
        episode = jax.random.randint(key, (), 1, 2**24)
        last = {"guide": -jnp.ones((1,), jnp.int32), "visitors": -jnp.ones(3, jnp.int32)}
        state = {"episode": episode, "t": 0, "last": last, "chance": key}
        return self.observe(state), state

    def step(self, key, state, actions):
        last = {"guide": actions["guide"] @ jnp.array([2, 1]), "visitors": actions["visitors"]}
        acted = self.acting(state)
        last = jax.tree.map(lambda a, w: jnp.where(w, a, -1).astype(jnp.int32), last, acted)
        state = {**state, "t": state["t"] + 1, "last": last}
        state["chance"] = jax.random.fold_in(state["chance"], 1)
        reward = {
            name: jnp.where(acted[name], paid(state["episode"], state["t"], last[name]), 0)
            for name in last
        }
        over = state["t"] == length_of(state["episode"])
        first_leaves = (state["t"] == 2) & (jnp.arange(3) == 0)
        terminated = {"guide": over[None] & (state["episode"] % 3 > 0), "visitors": first_leaves}
        truncated = {
            "guide": over[None] & (state["episode"] % 3 == 0),
            "visitors": jnp.zeros(3, bool),
        }
        return self.observe(state), state, reward, terminated, truncated

    def acting(self, state):
        t = state["t"]
        over = t == length_of(state["episode"])
        here = ((t + jnp.arange(3)) % 3 > 0) & ~((t >= 2) & (jnp.arange(3) == 0))
        return {"guide": ~over[None], "visitors": here & ~over}

    def observe(self, state):
        def where(name, size):
            slots = jnp.arange(size)
            same = [jnp.full(size, x) for x in (state["episode"], state["t"])]
            return jnp.stack([slots, *same, state["last"][name]], axis=1).astype(jnp.float32)

        t = state["t"]
        legal = jnp.arange(3) != (t % 3)
        visitors = {
            "where": where("visitors", 3),
            "secret": jnp.full(3, state["episode"] % 7),
            "legal": jnp.tile(legal, (3, 1)),
        }
        common = jnp.stack([state["episode"], t]).astype(jnp.float32)
        return {"guide": where("guide", 1), "visitors": visitors, "common": common}


def length_of(episode):
    return 3 + episode % 5


def paid(episode, t, action):
    return (episode * 31 + t * 7 + action) % 11 - 5.0


def acts(episode, t):
    """Return which visitors act, ``[..., 3]``, in NumPy."""
    slots = np.arange(3)
    here = ((t[..., None] + slots) % 3 > 0) & ~((t[..., None] >= 2) & (slots == 0))
    return here & (t < length_of(episode))[..., None]


def misplaced(env_step: Any, action: Any) -> int:
    """Count cells of rows ``[T+1, B, ...]`` of Echo that are not where they belong."""
    env_step, action = jax.tree.map(np.asarray, (env_step, action))
    common = env_step.obs["common"].astype(np.int64)
    episode, t = common[..., 0], common[..., 1]
    over, began = t == length_of(episode), t == 0
    wrong = 0
    acting = {"guide": ~over[..., None], "visitors": acts(episode, t)}
    sent = {"guide": action["guide"] @ np.array([2, 1]), "visitors": action["visitors"]}
    obs = {
        "guide": env_step.obs["guide"]["observation"],
        "visitors": env_step.obs["visitors"]["where"],
    }
    goes_on = ~began[1:]
    wrong += ((episode[1:] == episode[:-1]) != goes_on).sum()
    wrong += (goes_on & (t[1:] != t[:-1] + 1)).sum() + (over[:-1] == goes_on).sum()
    for name, size in (("guide", 1), ("visitors", 3)):
        seen = obs[name].astype(np.int64)
        wrong += (seen[..., 0] != np.arange(size)).sum()
        wrong += (seen[..., 1] != episode[..., None]).sum() + (seen[..., 2] != t[..., None]).sum()
        last = np.where(acting[name][:-1] & goes_on[..., None], sent[name], -1)
        wrong += (seen[1:, ..., 3] != last).sum()
        reward = np.where(last >= 0, paid(episode[1:, :, None], t[1:, :, None], last), 0)
        wrong += (env_step.reward[name][1:] != reward).sum()
        wrong += (env_step.acting[name] != acting[name]).sum()
        wrong += (env_step.is_first[name] != began[..., None]).sum()
        prev = np.asarray(env_step.prev_action[name][1:] != action[name])
        wrong += prev.sum()
    left = t[..., None] >= 2
    leaves = np.concatenate([left, np.zeros_like(left), np.zeros_like(left)], axis=-1)
    terminates = (over & (episode % 3 > 0))[..., None]
    ends = {
        "guide": (terminates, over[..., None] & ~terminates),
        "visitors": (
            (terminates & ~leaves) | (leaves & (t == 2)[..., None]),
            over[..., None] & ~terminates & ~leaves,
        ),
    }
    for name, (terminated, truncated) in ends.items():
        wrong += (env_step.terminated[name] != terminated).sum()
        wrong += (env_step.truncated[name] != truncated).sum()
    wrong += (env_step.obs["visitors"]["secret"] != (episode % 7)[..., None]).sum()
    return int(wrong)


def adapter(env: Any, num_envs: int = NUM_ENVS, **options: Any) -> Any:
    return sebulba.make_env_factory(env, **options)(num_envs, list(range(10, 10 + num_envs)))


def played(env: Any, num_steps: int, choose: Any) -> tuple[Any, Any]:
    """Return rows ``[T+1, B, ...]`` and actions of ``env``, stepped."""
    before = empty_env_step(env.spec, env.num_envs).prev_action
    rows, actions, output = [], [], env.reset()
    for _ in range(num_steps + 1):
        flags = output.terminated, output.truncated, output.is_first
        rows.append(EnvStep(output.obs, before, output.reward, *flags, (), output.acting))
        if len(rows) <= num_steps:
            before = choose(output)
            actions.append(before)
            output = env.step(before)
    return jax.tree.map(lambda *x: np.stack(x), *rows), jax.tree.map(
        lambda *x: np.stack(x), *actions
    )


def legal_choice(generator: np.random.Generator) -> Any:
    def choose(output: Any) -> Any:
        legal = output.obs["visitors"]["legal"] * generator.uniform(0.1, 1, (NUM_ENVS, 3, 3))
        guide = generator.integers([4, 2], size=(NUM_ENVS, 1, 2)).astype(np.int32)
        return {"guide": guide, "visitors": legal.argmax(-1).astype(np.int32)}

    return choose


@pytest.fixture(scope="module")
def rows() -> tuple[Any, Any]:
    return played(adapter(Echo), 80, legal_choice(np.random.default_rng(0)))


def test_the_tree_is_described():
    text = sebulba.describe(sebulba.env_spec(Echo))
    assert "4 agents in 2 groups" in text and "secret" in text and "the learner only" in text


def test_everything_is_in_its_place_where_agents_wait_leave_and_share(rows):
    env_step, _ = rows
    assert misplaced(*rows) == 0
    assert env_step.truncated["guide"].any() and env_step.terminated["guide"].any()


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["late", "other env", "other slot"])
@pytest.mark.parametrize("field", ["obs", "reward", "terminated", "acting"])
def test_a_planted_shuffle_is_found(rows, field, axis):
    env_step, actions = rows
    group = dict(getattr(env_step, field))
    group["visitors"] = jax.tree.map(lambda x: np.roll(x, 1, axis), group["visitors"])
    assert misplaced(env_step._replace(**{field: group}), actions) > 0


def run_loop(env: Any, config: Any, *, cycles: int, steps: int = 16, **options: Any) -> Any:
    recorder = Recorder()
    agent = make_agent(sebulba.env_spec(env), config)
    options = {"schedule": "lockstep", "num_inferencers_per_device": 1, "seed": 1} | options
    options = {"inference_devices": [0], "update_devices": [0]} | options
    with sebulba.GymnasiumLoop(env, agent, NUM_ENVS, observe_cycle=recorder, **options) as loop:
        saver = options.get("checkpointer")
        saved = saver.load_newest() if saver else None
        state = loop.restore(saved) if saved else loop.new_state(0, steps)
        assert not loop.resume_notes
        result = loop.run(state, cycles, steps)
        about = loop.describe()
    return result, recorder, about


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_everything_is_in_its_place_through_fused_cycles_and_shards():
    cycles = -(-TRANSITIONS // (16 * NUM_ENVS))
    _, recorder, about = run_loop(Echo, PPO_SMALL, cycles=cycles, update_devices=[1, 2])
    assert "fused" in about and "written in JAX" in about
    assert sum(misplaced(one.env_step, one.action) for one in recorder.trajectories) == 0


# Ends.


class Duel:
    """Two seats take turns; the mover is paid 1. Over after ten moves, five of each."""

    tree = Population(
        {
            f"seat_{i}": AgentNode(Obs(spaces.Box(0, 1, (1,), np.float32)), Act(spaces.Discrete(2)))
            for i in range(2)
        }
    )

    def __init__(self, terminates: bool = True) -> None:
        self._terminates = terminates

    def reset(self, key):
        return {"seat": jnp.zeros((2, 1))}, 0

    def step(self, key, state, actions):
        reward = {"seat": jnp.float32(jnp.arange(2) == state % 2)}
        over = self._terminates & (state + 1 == 10)
        return {"seat": jnp.zeros((2, 1))}, state + 1, reward, over, False

    def acting(self, state):
        return {"seat": jnp.arange(2) == state % 2}


class Together(Duel):
    """Two agents who act in every step, each paid 1; five steps."""

    def step(self, key, state, actions):
        over = self._terminates & (state + 1 == 5)
        return {"seat": jnp.zeros((2, 1))}, state + 1, 1.0, over, False

    acting = None  # type: ignore[assignment]


def value_of_slots(env: Any, group: str = "seat") -> np.ndarray:
    """Return the value of each slot's first decision with discount 0.9, as PPO would learn it."""
    nothing = empty_env_step(env.spec, env.num_envs).prev_action
    env_step, action = played(env, 44, lambda output: nothing)
    waits = bool(env_step.acting)

    def flat(x: Any) -> Any:
        return x[group].reshape(len(x[group]), -1, *x[group].shape[3:])

    fields = [jnp.asarray(flat(field)) for field in env_step[:6]]
    row = EnvStep(*fields)  # type: ignore[arg-type]
    scalar = np.int32(0)
    trajectory = Trajectory(row, jnp.asarray(flat(action)), (), scalar, scalar, scalar)
    if waits:
        example = jax.tree.map(lambda x: x[0], row)
        state = waiting_agents.new_turns(example, example.prev_action, (), ())
        trajectory, _ = waiting_agents.pack(
            state, trajectory, jnp.asarray(flat(env_step.acting)), joins=False
        )
    steps = transitions(trajectory, 0.9)
    value = jnp.zeros(trajectory.env_step.reward.shape[1])

    @jax.jit
    def improved(value: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(value, trajectory.env_step.reward.shape)
        returns = jax.vmap(lambda v, s: lambda_returns(v, s, 1.0), 1, 1)(rows, steps)
        return returns[1 if waits else 0]

    for _ in range(60):
        value = improved(value)
    return np.asarray(value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit"), [(Duel, 10), (Together, 5)])
def test_a_time_limit_is_bootstrapped_from_and_a_termination_is_not(kind, limit):
    np.testing.assert_allclose(value_of_slots(adapter(kind())), 4.0951, atol=1e-3)
    cut = adapter(kind(False), max_episode_steps=limit)
    np.testing.assert_allclose(value_of_slots(cut), 10.0, atol=1e-2)


def test_time_limits_cut_those_who_have_not_ended():
    env_step, _ = played(adapter(TimeLimit(Echo(), 2)), 12, legal_choice(np.random.default_rng(0)))
    cut = env_step.truncated["guide"][..., 0]
    assert cut.any() and not env_step.terminated["guide"].any()
    np.testing.assert_array_equal(env_step.truncated["visitors"][cut][:, 1:], True)
    np.testing.assert_array_equal(env_step.terminated["visitors"][cut][:, 0], True)


class Late(Duel):
    """The second seat ends at once and comes back in the fourth step."""

    def step(self, key, state, actions):
        obs, after, reward, over, _ = super().step(key, state, actions)
        gone = jnp.array([False, True]) & (after == 1)
        return obs, after, reward, {"seat": gone | over}, {"seat": jnp.zeros(2, bool)}

    def acting(self, state):
        return {"seat": jnp.stack([jnp.bool_(True), state >= 4]) & (state < 10)}


def test_who_comes_back_begins_anew():
    nothing = np.zeros((NUM_ENVS, 2), np.int32)
    env_step, _ = played(adapter(Late), 12, lambda output: {"seat": nothing})
    first = env_step.is_first["seat"][:, 0]
    np.testing.assert_array_equal(np.flatnonzero(first[:, 1]), [0, 4, 11])
    np.testing.assert_array_equal(np.flatnonzero(first[:, 0]), [0, 11])
    np.testing.assert_array_equal(np.flatnonzero(env_step.terminated["seat"][:, 0, 1]), [1, 10, 12])


# Resuming.


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("env", "config"), [(Echo, PPO_SMALL), (Duel, DQN_SMALL)], ids=["ppo", "dqn"]
)
def test_a_fused_run_resumes_bit_for_bit(env, config, tmp_path):
    never, trajectories, _ = run_loop(env, config, cycles=4)
    with sebulba.Checkpointer(tmp_path) as saver:
        run_loop(env, config, cycles=2, checkpointer=saver)
    with sebulba.Checkpointer(tmp_path) as saver:
        resumed, after, _ = run_loop(env, config, cycles=2, checkpointer=saver)
    assert leaves_equal(after.trajectories, trajectories.trajectories[-2:])
    assert leaves_equal(resumed.state.networks, never.state.networks)
    assert resumed.counters == never.counters


# Actions.


def test_illegal_actions_are_refused_stepped_and_fused():
    env = adapter(Echo)
    env.reset()
    actions = {"guide": np.zeros((4, 1, 2), np.int32), "visitors": np.ones((4, 3), np.int32)}
    env.step(actions)  # at time 0, action 0 is not legal
    with pytest.raises(ActionError, match=r"agent 'visitors\.[02]' of environment 0 is not legal"):
        env.step(actions)
    with pytest.raises(ActionError, match="actions must be a dict of guide, visitors"):
        env.step(actions["guide"])
    step, state = jax.jit(env.fused().step), env.fused().state
    state, _, num_invalid = step(state, actions)
    assert num_invalid == 0
    _, output, num_invalid = step(state, actions)
    acting = acts(np.array([4]), np.array([1])).sum()
    assert num_invalid == NUM_ENVS * acting
    here = acts(np.array([4]), np.array([1]))[0]
    np.testing.assert_array_equal(output.obs["visitors"]["where"][:, here, 3], 0)


# What is refused.


def broken(base: type = Duel, **changes: Any) -> Any:
    return type("Broken", (base,), changes)


def says(*values: Any) -> Any:
    return lambda self, key, state, actions: ({"seat": jnp.zeros((2, 1))}, state, *values)


NODE = AgentNode(Obs(spaces.Discrete(2)), Act(spaces.Discrete(2)))


@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        (broken(tree=NODE), UsageError, "is one AgentNode, a single agent"),
        (broken(tree=Population({})), UsageError, "has no members"),
        (
            broken(acting=None, tree=Population(Repeat(NODE, 2))),
            UsageError,
            "may have to wait .* give it a method acting",
        ),
        (
            broken(reset=lambda self, key: (jnp.zeros((2, 1)), 0)),
            EnvError,
            r"reset: obs must be a dict with keys \['seat'\]",
        ),
        (
            broken(reset=lambda self, key: ({"seat": jnp.zeros((3, 1))}, 0)),
            EnvError,
            r"reset: obs\['seat'\] must have shape \(2, 1\)",
        ),
        (
            broken(step=says({"seats": 0}, False, False)),
            EnvError,
            "reward must be a dict with",
        ),
        (
            broken(step=says({"seat": jnp.zeros(3)}, False, False)),
            EnvError,
            r"reward\['seat'\] must have shape \(2,\)",
        ),
        (
            broken(step=says(0.0, {"seat": jnp.zeros((), bool)}, False)),
            EnvError,
            r"terminated\['seat'\] must have shape \(2,\)",
        ),
        (
            broken(Together, step=says(0.0, False, {"seat": jnp.zeros(2, bool)})),
            EnvError,
            "truncated must be one scalar for all agents",
        ),
        (
            broken(acting=lambda self, state: jnp.ones(2)),
            EnvError,
            "acting must be a dict with",
        ),
        (
            broken(acting=lambda self, state: {"seat": jnp.ones(3, bool)}),
            EnvError,
            r"acting\['seat'\] must have shape",
        ),
    ],
    ids=range(11),
)
def test_what_is_wrong_is_named(env, error, words):
    with pytest.raises(error, match=words):
        adapter(env)


def makes_duel() -> MultiAgentJaxEnv:
    return Duel()


@pytest.mark.parametrize("env", [Duel, Duel(), makes_duel, f"{__name__}:Duel"], ids=range(4))
def test_a_class_an_object_a_function_and_a_name_will_do(env):
    assert list(sebulba.env_spec(env).groups) == ["seat"]
    assert adapter(env).fused().is_pure


def test_the_game_of_the_guide_is_played(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "jax-environments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "my_jax_game.py").write_text(next(b for b in blocks if "my_jax_game.py" in b))
    monkeypatch.syspath_prepend(tmp_path)
    env = adapter("my_jax_game:Nim")
    one = {"seat": np.zeros((NUM_ENVS, 2), np.int32)}
    _, ends = env.reset(), 0
    for _ in range(22):
        output = env.step(one)
        ends += output.episode_end
        assert (output.reward["seat"].sum(axis=1) == 0).all()
    assert (ends >= 1).all()
    sys.modules.pop("my_jax_game")

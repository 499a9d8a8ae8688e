"""Parts of observations that only the learner sees, and critics that see more than policies."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba import Act, AgentNode, Obs, Population, UsageError
from sebulba.agents.configs import (
    DQNConfig,
    ImpalaConfig,
    MultiAgentConfig,
    PPOConfig,
    ReplayConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.multi.central_critic import critic_spec
from sebulba.agents.ppo import PPO
from sebulba.policies.policy import Policy
from sebulba.types import COMMON, EnvSpec, MultiAgentSpec, RunSpec, empty_env_step, policy_row
from tests.support.alone import alone
from tests.support.loop_helpers import Recorder, leaves_equal
from tests.support.masked_envs import InfoMask, TreeMask
from tests.support.populations import Turns, Visitors

SMALL = TorsoConfig(hidden_sizes=(16,))
PPO_SMALL = PPOConfig(torso=SMALL, epochs=1, minibatches=1)
PRIVILEGED = {"privileged": ("hidden",)}
LEARNING_RATE = 1e-2


class HiddenBit:
    """A JAX environment whose next reward is a bit that the policy does not see."""

    observation_space = spaces.Dict(
        seen=spaces.Box(-1, 1, (2,), np.float32),
        hidden=spaces.Box(-100, 100, (3,), np.float32),
    )
    action_space = spaces.Discrete(2)

    def reset(self, key):
        bit_key, seen_key = jax.random.split(key)
        bit = jax.random.bernoulli(bit_key).astype(jnp.float32)
        seen = jax.random.uniform(seen_key, (2,), minval=-1.0)
        return {"seen": seen, "hidden": jnp.stack([100 * bit, 0.0, 0.0])}, bit

    def step(self, key, state, action):
        obs, new = self.reset(key)
        return obs, new, 2 * state - 1, True, False


def run_loop(env: Any, config: Any, *, cycles: int = 4, steps: int = 8, **options: Any) -> Any:
    env = sebulba.make_env_factory(env, **options.pop("of_env", {}))
    recorder = Recorder()
    agent = make_agent(sebulba.env_spec(env), config)
    options = {"inference_devices": [0], "update_devices": [0], "seed": 1} | options
    num_envs = options.pop("num_envs", 4)
    with sebulba.GymnasiumLoop(env, agent, num_envs, observe_cycle=recorder, **options) as loop:
        result = loop.run(loop.new_state(0, steps), cycles, steps)
    return agent, result, recorder


# Parts that only the learner sees.


def test_privileged_parts_are_named_by_option_and_by_tree():
    spec = sebulba.env_spec(HiddenBit, **PRIVILEGED)
    assert spec.eval_only == ("hidden",)
    assert spec.policy_spec.observation_space.spaces.keys() == {"seen"}
    assert spec.policy_spec.eval_only == ()
    tree = sebulba.env_spec(TreeMask)
    assert tree.eval_only == ("time",) and tree.legal_actions == "ok"
    assert "time: Discrete(6, dtype=int32) (the learner only)" in sebulba.describe(tree)


@pytest.mark.slow
@pytest.mark.parametrize("cycle", ["fused", "stepped"])
def test_an_agent_that_does_not_use_them_never_gets_them(cycle):
    config = DQNConfig(torso=SMALL, replay=ReplayConfig(2000, 16))
    agent, _, recorder = run_loop(HiddenBit, config, of_env=PRIVILEGED, cycle=cycle)
    assert recorder.trajectories[0].env_step.obs.keys() == {"seen"}
    assert agent.spec.observation_space.spaces.keys() == {"seen"}


@pytest.mark.slow
@pytest.mark.parametrize("config", [PPO_SMALL, dataclasses.replace(PPO_SMALL, central_critic=True)])
def test_a_tree_of_one_node_is_trained(config):
    _, result, recorder = run_loop(TreeMask, config)
    seen = {"seen.x", "ok"} | ({"time"} if config.central_critic else set())
    assert recorder.trajectories[0].env_step.obs.keys() == seen
    assert np.isfinite(result.metrics["value_loss"])


class Choices(gymnasium.Env):
    """Takes a dict of actions, and observes one thing, as its tree says."""

    tree = AgentNode(
        Obs(spaces.Discrete(3)),
        Act({"left": spaces.Discrete(2), "right": spaces.Discrete(3, start=1)}),
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 1, {}

    def step(self, action):
        assert action["left"] in (0, 1) and action["right"] in (1, 2, 3)
        return 2, 0.0, True, False, {}


@pytest.mark.slow
def test_a_tree_may_have_a_dict_of_actions():
    _, _, recorder = run_loop(Choices, PPO_SMALL, cycles=2)
    assert recorder.trajectories[0].action.shape == (8, 4, 2)
    assert sebulba.env_spec(Choices()).action_space.nvec.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("env", "privileged", "words"),
    [
        (HiddenBit, ("hiden",), "'hiden' is not one of its parts; use hidden, seen"),
        (HiddenBit, ("seen", "hidden"), "leaves nothing that the policy sees"),
        (HiddenBit, "hidden", "privileged='hidden' must be a tuple, each of it text"),
        (HiddenBit, (1,), "must be a tuple, each of it text"),
        ("CartPole-v1", ("x",), "names parts of a Dict"),
        (TreeMask, ("time",), "whose tree declares eval_only parts"),
        (Visitors, ("secret",), "is for one agent"),
    ],
)
def test_what_cannot_be_privileged_is_refused(env, privileged, words):
    with pytest.raises(UsageError, match=words):
        sebulba.env_spec(env, privileged=privileged)


def test_the_mask_of_legal_actions_is_not_privileged():
    with pytest.raises(UsageError, match="'action_mask' is not one of its parts"):
        sebulba.env_spec(InfoMask, action_mask="info", privileged=("action_mask",))


def test_an_agent_is_not_built_of_parts_that_it_does_not_use():
    spec = sebulba.env_spec(HiddenBit, **PRIVILEGED)
    with pytest.raises(UsageError, match=r"PPO does not use .* \(hidden\); set central_critic"):
        PPO(spec, PPO_SMALL)
    assert PPO(spec.policy_spec, PPO_SMALL).spec.eval_only == ()


def test_a_policy_of_everything_is_refused_where_parts_are_privileged():
    agent = make_agent(sebulba.env_spec(HiddenBit), PPO_SMALL)
    env = sebulba.make_env_factory(HiddenBit, **PRIVILEGED)
    with pytest.raises(UsageError, match=r"is not the agent's"):
        sebulba.GymnasiumLoop(env, agent, 4, update_devices=[0])


def test_a_central_critic_with_an_lstm_is_refused():
    with pytest.raises(UsageError, match="central_critic=True cannot be combined with lstm_size=8"):
        PPOConfig(lstm_size=8, central_critic=True)


# The critic of a single agent.


def error_of_critic(config: Any, **options: Any) -> Any:
    """Return the mean square of the critic's last error, whose reward has a variance of 1."""
    options = {"num_envs": 32, "of_env": PRIVILEGED} | options
    agent, result, _ = run_loop(HiddenBit, config, cycles=60, steps=8, **options)
    return agent, result, 2 * result.metrics["value_loss"]


CONFIGS = {
    "ppo": PPOConfig(torso=SMALL, epochs=4, minibatches=2, learning_rate=LEARNING_RATE),
    "impala": ImpalaConfig(torso=SMALL, epochs=4, learning_rate=LEARNING_RATE, discount=0.9),
    "normalized": PPOConfig(
        torso=SMALL,
        epochs=4,
        minibatches=2,
        learning_rate=LEARNING_RATE,
        normalize_observations=True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"cycle": "stepped"}),
        ("impala", {"cycle": "fused"}),
        ("normalized", {"cycle": "fused"}),
    ],
)
def test_a_hidden_bit_is_known_to_the_critic_alone(name, options):
    config = dataclasses.replace(CONFIGS[name], central_critic=True)
    _, result, error = error_of_critic(config, **options)
    assert error < 0.02
    parts = result.acting_networks
    parts = parts.networks if hasattr(parts, "networks") else parts
    assert not {"value", "value_torso"} & parts.keys()
    assert parts["torso"]["MLP_0"]["Dense_0"]["kernel"].shape[0] == 2


@pytest.mark.slow
def test_without_it_the_bit_stays_unknown():
    _, _, error = error_of_critic(CONFIGS["ppo"])
    assert error > 0.7


@pytest.fixture(scope="module")
def trained() -> Any:
    config = dataclasses.replace(
        CONFIGS["normalized"], central_critic=True, normalize_rewards=True, epochs=1, minibatches=1
    )
    return run_loop(HiddenBit, config, of_env=PRIVILEGED)


@pytest.mark.slow
def test_the_saved_policy_has_no_such_input(trained, tmp_path):
    agent, result, _ = trained
    sebulba.save_policy(tmp_path, agent, result.acting_networks, RunSpec(4, 2, 8, 1))
    assert '"hidden"' not in (tmp_path / "config.json").read_text()
    policy = sebulba.load_policy(tmp_path)
    assert policy.spec.observation_space.spaces.keys() == {"seen"} and not policy.spec.eval_only
    state = policy.new_state(2)
    row = empty_env_step(policy.spec, 2)
    jaxpr = jax.make_jaxpr(policy.agent.act)(policy.acting_networks, state.step, row)
    sizes = {size for one in jaxpr.in_avals for size in one.shape}
    assert 3 not in sizes and 2 in sizes  # the hidden part has 3 numbers
    seen = {"seen": np.zeros((4, 2), np.float32)}
    direct = Policy(agent, result.acting_networks, policy.run)
    np.testing.assert_array_equal(policy(seen)[0], direct(seen)[0])
    np.testing.assert_array_equal(policy.distribution(seen), direct.distribution(seen))
    with pytest.raises(UsageError, match="with a central critic has no values"):
        policy.value(seen)
    env = sebulba.make_env_factory(HiddenBit, **PRIVILEGED)
    assert len(sebulba.evaluate(policy, env, num_episodes=3, num_envs=2).returns) == 3


@pytest.mark.slow
def test_no_step_depends_on_what_is_hidden(trained):
    agent, result, _ = trained
    state = agent.new_step_state(jax.random.key(0), RunSpec(2, 1, 8, 1), 0)
    row = jax.tree.map(jnp.asarray, empty_env_step(agent.spec, 2))
    other = row._replace(obs={**row.obs, "hidden": row.obs["hidden"] + 7})
    one, two = (agent.act(result.acting_networks, state, x)[0].action for x in (row, other))
    np.testing.assert_array_equal(one, two)
    assert policy_row(agent.spec, row).obs.keys() == {"seen"}
    with pytest.raises(KeyError):  # of what step is given, nothing is hidden
        policy_row(agent.spec, row).obs["hidden"]


def test_hidden_parts_are_normalized_apart(trained):
    _, result, recorder = trained
    statistics = result.state.experience.statistics
    ((mean, _),) = result.acting_networks.scaling
    assert mean.shape == (1, 2)
    seen = np.concatenate([t.env_step.obs["hidden"][:-1] for t in recorder.trajectories])
    np.testing.assert_allclose(statistics.hidden[0].mean, seen.mean((0, 1)), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_one_device_and_four_agree():
    config = ImpalaConfig(torso=SMALL, central_critic=True)
    options = {"of_env": PRIVILEGED, "schedule": "lockstep"}
    one, four = (
        run_loop(HiddenBit, config, update_devices=devices, **options)[1].state.networks
        for devices in ([0], range(4))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6), one, four)


# Critics of many agents.


class Guess(sebulba.MultiAgentEnv):
    """Each is paid by the bit that the other sees; a third one, of another group, sees nothing."""

    all_act = True
    tree = Population(
        {
            "a": AgentNode(Obs(spaces.Box(0, 1, (1,), np.float32)), Act(spaces.Discrete(2))),
            "b": AgentNode(Obs(spaces.Box(0, 1, (1,), np.float32)), Act(spaces.Discrete(2))),
            "c": AgentNode(Obs(spaces.Discrete(2)), Act(spaces.Discrete(3))),
        }
    )

    def reset(self, *, seed=None):
        return self.observe()

    def observe(self):
        self.bits = self.np_random.integers(2, size=2).astype(np.float32)
        return {"a": self.bits[:1], "b": self.bits[1:], "c": 0}

    def step(self, actions):
        a, b = (2 * self.bits - 1).tolist()
        return self.observe(), {"a": b, "b": a, "c": a * b}, True, False


@pytest.mark.slow
def test_a_critic_sees_what_all_others_observe():
    config = PPOConfig(torso=SMALL, epochs=4, minibatches=2, learning_rate=LEARNING_RATE)
    central = dataclasses.replace(config, central_critic=True)
    members = MultiAgentConfig({"agents": central, "c": config})
    agent, result, _ = run_loop(Guess, members, cycles=80, steps=8, num_envs=16)
    errors = {name: 2 * result.metrics[f"{name}/value_loss"] for name in agent.members}
    assert errors["agents"] < 0.05 and errors["c"] > 0.6


def test_what_a_critic_of_many_sees_is_named():
    spec = sebulba.env_spec(Visitors)
    assert isinstance(spec, MultiAgentSpec)
    seen = critic_spec(spec, "visitors")
    assert seen.policy_spec.observation_space.spaces.keys() == {"said", COMMON}
    others = set(seen.eval_only) - {"secret"}
    assert "others/guide/0/observation" in others and "others/visitors/2/secret" in others
    assert "others/visitors/1" in others  # whether it acts
    assert not any("visitors/0" in name or COMMON in name for name in others)
    assert seen.observation_space["others/visitors/1"] == spaces.MultiBinary(1)


def test_rows_of_others_are_those_of_the_slots_after_ones_own():
    agent = make_agent(
        sebulba.env_spec(Visitors), dataclasses.replace(PPO_SMALL, central_critic=True)
    )
    row = jax.tree.map(jnp.asarray, empty_env_step(agent.population, 2))
    said = jnp.array([[1, 2, 3], [3, 1, 2]], jnp.int32)
    row.obs["visitors"]["said"] = said
    row = row._replace(acting={**row.acting, "visitors": said > 1})
    seen = agent._view(agent.members["visitors"], row, 0).obs
    np.testing.assert_array_equal(seen["said"], said.ravel())
    after = np.stack([np.roll(said, -k, axis=1).ravel() for k in (1, 2)])
    for k in (1, 2):
        np.testing.assert_array_equal(seen[f"others/visitors/{k}/said"], after[k - 1])
        np.testing.assert_array_equal(seen[f"others/visitors/{k}"][:, 0], after[k - 1] > 1)
    guide = agent._view(agent.members["guide"], row, 0).obs
    np.testing.assert_array_equal(guide["others/visitors/2/said"], said[:, 2])


@pytest.mark.slow
@pytest.mark.parametrize("env", [Turns, Visitors])
def test_agents_that_wait_may_have_central_critics(env, tmp_path):
    config = dataclasses.replace(PPO_SMALL, central_critic=True)
    agent, result, _ = run_loop(env, config)
    losses = [value for name, value in result.metrics.items() if name.endswith("value_loss")]
    assert len(losses) == len(agent.members) and np.isfinite(losses).all()
    sebulba.save_policy(tmp_path, agent, result.acting_networks, RunSpec(4, 2, 8, 1))
    for name in agent.members:
        policy = sebulba.load_policy(tmp_path / name)
        assert not any("others" in part for part in policy.spec.observation_space.spaces)
    every = sebulba.load_policy(tmp_path)
    assert len(sebulba.evaluate(every, env, num_episodes=3, num_envs=2).returns) == 3


@pytest.mark.slow
def test_a_group_of_one_has_the_critic_of_a_single_agent():
    config = dataclasses.replace(PPO_SMALL, central_critic=True)
    options = {"cycle": "stepped", "schedule": "lockstep"}
    single, lone = (
        run_loop(env, config, **options)[1].state.networks
        for env in ("CartPole-v1", alone("CartPole-v1"))
    )
    assert leaves_equal(single, lone)


def test_images_of_others_are_told_by_their_channels():
    image = spaces.Box(0, 255, (3, 40, 40), np.uint8)
    node = AgentNode(Obs(image), Act(spaces.Discrete(2)))
    spec = sebulba.envs.tree.compile_tree(Population({"a": node, "b": node}))
    seen = critic_spec(spec, next(iter(spec.groups)))
    assert isinstance(seen, EnvSpec)
    first = [name for name in seen.observation_space.spaces if seen.has_channels_first(name)]
    assert first == ["observation", "others/agents/1/observation"]

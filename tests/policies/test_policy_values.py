"""What a saved policy says of an observation: its value and the distribution of its actions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from sebulba.agents.configs import (
    DDPGConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    SACConfig,
    SimplePolicyGradientConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.kernels.distributions import Gaussian
from sebulba.agents.kernels.returns import rescale_value
from sebulba.commands import cli
from sebulba.errors import UsageError
from sebulba.policies.policy import Policy, load_policy, save_policy
from sebulba.types import EnvSpec, RunSpec
from tests.support.contract_agents import TargetConfig, TargetNetworkAgent

RUN = RunSpec(num_envs=4, num_inferencers=1, steps_per_cycle=5, num_update_devices=1)
VECTOR = spaces.Box(-2.0, 3.0, (4,), np.float32)
DISCRETE = spaces.Discrete(3, start=2, dtype=np.int32)
BOX = spaces.Box(np.array([-1, 10], np.float32), np.array([1, 30], np.float32))
TORSO = TorsoConfig(hidden_sizes=(8,))
OBS = np.random.default_rng(0).uniform(-2, 3, (5, 4)).astype(np.float32)


def make(config, action_space=DISCRETE, **spec):
    """Return agent, networks and experience of a configuration with a small torso."""
    config = dataclasses.replace(config, torso=TORSO)
    agent = make_agent(EnvSpec(VECTOR, action_space, name="test", **spec), config)
    key = jax.random.key(1)
    networks = agent.new_networks(key)
    return agent, networks, agent.new_experience(key, networks, RUN)


def saved(folder, agent, networks, experience, *, with_values=True) -> Policy:
    values = agent.value_networks(networks, experience) if with_values else ()
    acting = agent.acting_networks(networks, experience)
    save_policy(folder, agent, acting, RUN, value_networks=values)
    return load_policy(folder)


def biased(networks, name: str, bias):
    """Return networks whose head ``name`` says ``bias`` of every observation."""
    networks = jax.tree.map(lambda x: x, networks)
    head = networks.get("head", networks)
    head[name] = {"kernel": 0 * head[name]["kernel"], "bias": jnp.asarray(bias, jnp.float32)}
    return networks


@pytest.mark.parametrize("config", [ImpalaConfig(reward_scale=0.1), PPOConfig(reward_scale=0.1)])
def test_the_value_of_an_on_policy_agent_is_in_the_units_of_the_environment(tmp_path, config):
    agent, networks, experience = make(config)
    policy = saved(tmp_path, agent, biased(networks, "value", [2.0]), experience)
    np.testing.assert_allclose(policy.value(OBS), np.full(5, 20.0), rtol=1e-6)
    assert policy.value(OBS[0]).shape == () and policy.value(OBS).dtype == np.float32


def test_running_normalisation_of_rewards_is_undone(tmp_path):
    config = PPOConfig(normalize_rewards=True, normalize_observations=True, reward_scale=0.5)
    agent, networks, experience = make(config)
    rewards = experience.statistics.rewards
    moments = rewards.moments._replace(variance=jnp.float32(9.0))
    statistics = experience.statistics._replace(rewards=rewards._replace(moments=moments))
    experience = experience._replace(statistics=statistics)
    networks = biased(networks, "value", [2.0])
    policy = saved(tmp_path / "new", agent, networks, experience)
    np.testing.assert_allclose(policy.value(OBS), np.full(5, 12.0), rtol=1e-5)
    old = saved(tmp_path / "old", agent, networks, experience, with_values=False)
    assert old.distribution(OBS).shape == (5, 3)
    with pytest.raises(UsageError, match="no value networks, which PPO needs for values"):
        old.value(OBS)


@pytest.mark.slow
def test_values_and_probabilities_are_those_of_the_network(tmp_path):
    agent, networks, experience = make(ImpalaConfig(lstm_size=6))
    policy = saved(tmp_path, agent, networks, experience)
    core, state = agent.new_step_state(jax.random.key(0), RUN, 0).core, None
    core = jax.tree.map(lambda x: jnp.zeros((5, *x.shape[1:])), core)
    for row in (OBS, OBS[::-1]):
        out = agent.evaluate(networks, row[None], core, np.full((1, 5), state is None))
        np.testing.assert_allclose(policy.value(row, state), out.value[0], atol=1e-6)
        expected = jax.nn.softmax(out.params[0])
        np.testing.assert_allclose(policy.distribution(row, state), expected, atol=1e-6)
        (_, state), core = policy(row, state), out.core
    with pytest.raises(UsageError, match="batch of 2, but state is of 5"):
        policy.value(OBS[:2], state)


def test_probabilities_are_those_of_what_is_sampled():
    space = spaces.MultiDiscrete([3, 2], dtype=np.int32)
    agent, networks, _ = make(ImpalaConfig(), space)
    networks = biased(networks, "policy", [0.0, 1.0, 2.0, 0.5, -0.5])
    policy = Policy(agent, networks, RUN, explore=True)
    actions, _ = policy(np.repeat(OBS[:1], 20000, axis=0))
    parts = policy.distribution(OBS[0])
    for entry, part in enumerate(parts):
        seen = np.bincount(actions[:, entry], minlength=len(part)) / len(actions)
        np.testing.assert_allclose(part, seen, atol=0.02)


def test_illegal_actions_have_probability_0():
    both = spaces.Dict({"x": VECTOR, "mask": spaces.MultiBinary(3)})
    config = ImpalaConfig(torso=TORSO)
    agent = make_agent(EnvSpec(both, DISCRETE, name="test", legal_actions="mask"), config)
    policy = Policy(agent, agent.new_networks(jax.random.key(0)), RUN)
    found = policy.distribution({"x": OBS[0], "mask": np.array([1, 0, 1], np.int8)})
    assert found[1] == 0 and found.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "space",
    [
        BOX,
        spaces.Box(np.array([-np.inf, 0], np.float32), np.array([np.inf, np.inf], np.float32)),
        spaces.Box(-1, 1, (2, 1), np.float32),
    ],
)
@pytest.mark.parametrize("log_std", [-3.0, 0.0, 1.5])
def test_moments_are_those_of_the_actions_that_the_environment_receives(space, log_std):
    gaussian = Gaussian(space)
    params = jnp.array([[0.3, -1.0, log_std, log_std]])
    found = gaussian.of_actions(params)
    raw = gaussian.sample(jnp.repeat(params, 200_000, axis=0), jax.random.key(0))
    actions = np.asarray(gaussian.action(raw), np.float64)
    assert found.mean.shape == (1, *space.shape)
    spread = actions.std(axis=0)
    np.testing.assert_allclose(found.mean[0], actions.mean(axis=0), atol=0.02 * spread.max())
    np.testing.assert_allclose(found.std[0], spread, rtol=0.02)


def test_asking_changes_no_action_that_is_drawn():
    agent, networks, _ = make(ImpalaConfig())
    quiet, asked = (Policy(agent, networks, RUN, explore=True, seed=3) for _ in range(2))
    rows = np.repeat(OBS, 40, axis=0)
    asked.value(rows), asked.distribution(rows)
    np.testing.assert_array_equal(quiet(rows)[0], asked(rows)[0])


@pytest.mark.parametrize("dueling", [False, True])
def test_the_value_of_dqn_is_that_of_its_best_action(tmp_path, dueling):
    agent, networks, experience = make(DQNConfig(reward_scale=0.5, dueling=dueling))
    networks = biased(networks, "advantage", [0.0, 3.0, 1.5])
    if dueling:
        networks = biased(networks, "value", [2.0])
    policy = saved(tmp_path, agent, networks, experience)
    best = 2.0 + 3.0 - 1.5 if dueling else 3.0
    np.testing.assert_allclose(policy.value(OBS), np.full(5, 2 * best), rtol=1e-6)
    np.testing.assert_array_equal(policy.distribution(OBS), np.tile([0.0, 1.0, 0.0], (5, 1)))
    assert policy(OBS[0])[0] == 3  # the space begins at 2


@pytest.mark.slow
@pytest.mark.parametrize("rescale", [False, True])
def test_the_value_of_r2d2_is_not_rescaled(tmp_path, rescale):
    config = R2D2Config(reward_scale=0.5, rescale_values=rescale, lstm_size=6, dueling=False)
    config = dataclasses.replace(config, burn_in=5, sequence_length=5)
    agent, networks, experience = make(config)
    wanted = jnp.array([-70.0, 40.0, 10.0])
    networks = biased(networks, "advantage", rescale_value(wanted) if rescale else wanted)
    policy = saved(tmp_path, agent, networks, experience)
    np.testing.assert_allclose(policy.value(OBS), np.full(5, 80.0), rtol=1e-4)
    _, state = policy(OBS)
    np.testing.assert_array_equal(policy.distribution(OBS, state, reward=1.0)[:, 1], np.ones(5))


@pytest.mark.parametrize(
    "config", [SACConfig(reward_scale=4.0), DDPGConfig(reward_scale=4.0, num_critics=2)]
)
def test_the_value_of_sac_and_ddpg_is_the_smaller_critics_of_the_action_taken(tmp_path, config):
    agent, networks, experience = make(config, BOX)
    policy = saved(tmp_path / "new", agent, networks, experience)
    action = jnp.asarray(policy(OBS)[0])
    encoded = agent.encode(OBS, num_leading=1)
    both = agent.values(networks["critics"], encoded, agent.squashing.unit_of(action))
    assert both.shape == (2, 5) and not np.allclose(*both)
    np.testing.assert_allclose(policy.value(OBS), both.min(axis=0) / 4, rtol=1e-4, atol=1e-6)
    moments = policy.distribution(OBS[0])
    assert moments.mean.shape == moments.std.shape == (2,)
    assert (moments.std > 0).all() == isinstance(config, SACConfig)
    old = saved(tmp_path / "old", agent, networks, experience, with_values=False)
    np.testing.assert_array_equal(old(OBS)[0], action)
    assert not (tmp_path / "old" / "value_arrays.npz").exists()
    with pytest.raises(UsageError, match=f"no value networks, .* {type(agent).__name__} need"):
        old.value(OBS)
    with pytest.raises(UsageError, match="no value networks"):
        Policy(agent, networks["actor"]).value(OBS)


@pytest.mark.slow
def test_a_run_saves_what_values_need_at_its_end_and_the_best_policy_says_that_it_lacks_it(
    tmp_path,
):
    sizes = "--num-envs 4 --steps-per-cycle 5 --total-env-steps 60 --num-inferencers-per-device 1"
    play = "--eval-every-env-steps 40 --eval-episodes 2 --eval-num-envs 2"
    where = f"--inference-devices 0 --update-devices 0 --compile-cache off --run-dir {tmp_path}"
    words = f"{sizes} {play} {where} --agent.normalize-rewards --agent.torso.hidden-sizes 8"
    assert cli.main(["train", "cartpole", *words.split()]) == 0
    end, best = load_policy(tmp_path), load_policy(tmp_path / "best_policy")
    assert end.agent.config.normalize_rewards and np.isfinite(end.value(OBS)).all()
    assert float(end.value_networks) > 0
    with pytest.raises(UsageError, match=r"not in best_policy/"):
        best.value(OBS)
    assert best.distribution(OBS).shape == (5, 2)


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_damaged_value_networks_are_named(tmp_path, damage):
    agent, networks, experience = make(SACConfig(), BOX)
    saved(tmp_path, agent, networks, experience)
    file = tmp_path / "value_arrays.npz"
    data = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "other":
        other = jax.tree.map(lambda x: x + 1, networks)
        saved(tmp_path / "other", agent, other, experience)
        file.write_bytes((tmp_path / "other" / "value_arrays.npz").read_bytes())
    with pytest.raises(UsageError, match=r"value_arrays\.npz"):
        load_policy(tmp_path)


def test_agents_that_do_not_say_it_are_named_with_the_method_to_write():
    agent, networks, _ = make(SimplePolicyGradientConfig())
    policy = Policy(agent, networks, RUN)
    assert policy.distribution(OBS).shape == (5, 3)
    with pytest.raises(UsageError, match="SimplePolicyGradient has no values"):
        policy.value(OBS)
    spec = EnvSpec(VECTOR, DISCRETE, name="test")
    own = TargetNetworkAgent(spec, TargetConfig())
    policy = Policy(own, own.new_networks(jax.random.key(0)), RUN)
    for ask, method in ((policy.value, "acting_value"), (policy.distribution, "acting_dist")):
        with pytest.raises(UsageError, match=rf"define TargetNetworkAgent\.{method}"):
            ask(OBS)

"""Legal actions of a single agent: where they are found, who heeds them, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import sebulba
from sebulba import ActionError, EnvError, UsageError
from sebulba.agents.configs import (
    DDPGConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    ReplayConfig,
    SACConfig,
    SimplePolicyGradientConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.kernels.legal_actions import ILLEGAL
from sebulba.configs.experiment import EnvConfig
from sebulba.envs.spaces import legal_action
from sebulba.tools.check.checks import Finding, Level, run_checks
from sebulba.tools.check.env_checks import suite
from sebulba.tools.check.env_under_test import Subject
from sebulba.types import FinalObs, RunSpec
from tests.support import masked_envs
from tests.support.loop_helpers import Recorder, leaves_equal
from tests.support.masked_envs import InfoMask, JaxMask, ObsMask, Parts, Stuck, TreeMask
from tests.support.populations import Turns

SMALL = TorsoConfig(hidden_sizes=(16,))
REPLAY = ReplayConfig(2000, 16)
SEQUENCES = ReplayConfig(2000, 16, warm_up_cycles=4)
AGENTS = {
    "impala": ImpalaConfig(torso=SMALL),
    "ppo": PPOConfig(torso=SMALL, epochs=1, minibatches=1),
    "reinforce": SimplePolicyGradientConfig(torso=SMALL),
    "dqn": DQNConfig(torso=SMALL, replay=REPLAY),
    "sac": SACConfig(torso=SMALL, replay=REPLAY),
    "r2d2": R2D2Config(
        torso=SMALL,
        replay=SEQUENCES,
        lstm_size=8,
        burn_in=0,
        sequence_length=8,
        head_hidden_sizes=(),
    ),
}


def run_loop(env: Any, config: Any, *, cycles: int = 6, steps: int = 8, **options: Any) -> Any:
    env = sebulba.make_env_factory(env, **options.pop("of_env", {}))
    recorder = Recorder()
    agent = make_agent(sebulba.env_spec(env), config)
    options = {"inference_devices": [0], "update_devices": [0], "seed": 1} | options
    with sebulba.GymnasiumLoop(env, agent, 4, observe_cycle=recorder, **options) as loop:
        result = loop.run(loop.new_state(0, steps), cycles, steps)
    return agent, result, recorder


def adapter(env: Any, num_envs: int = 3, **options: Any) -> Any:
    return sebulba.make_env_factory(env, **options)(num_envs, list(range(num_envs)))


# Where the mask is.


@pytest.mark.parametrize(
    ("env", "place", "parts"),
    [
        (InfoMask, "info", {"observation", "action_mask"}),
        (ObsMask, "observation", {"x", "action_mask"}),
        (TreeMask, None, {"seen.x", "ok", "time"}),
        (JaxMask, "observation", {"x", "action_mask"}),
    ],
)
def test_the_spec_and_the_adapter_have_the_mask(env, place, parts):
    spec = sebulba.env_spec(env, action_mask=place)
    assert spec.observation_space.spaces.keys() == parts
    mask = spec.legal_actions
    assert spec.observation_space[mask] == spaces.MultiBinary(4)
    made = adapter(env, action_mask=place)
    assert made.spec == spec
    obs = made.reset().obs
    assert obs[mask].shape == (3, 4) and obs[mask].dtype == np.int8
    assert (obs[mask].sum(axis=1) == 2).all()
    made.close()


def test_without_the_option_nothing_changes():
    assert sebulba.env_spec(InfoMask).observation_space == InfoMask.observation_space
    with pytest.warns(UserWarning, match="part 'action_mask'.*use --env.action-mask observation"):
        spec = sebulba.env_spec(ObsMask)
    assert spec.legal_actions is None
    assert spec.observation_space["action_mask"] == ObsMask.observation_space["action_mask"]


class MethodMask(InfoMask):
    def action_masks(self):
        return np.ones(4, bool)


def test_a_method_of_masks_that_is_not_used_is_said():
    with pytest.warns(UserWarning, match=r"action_masks\(\), but no option uses it.*-mask info"):
        sebulba.env_spec(MethodMask)
    sebulba.env_spec(MethodMask, action_mask="info")


def test_taxi_says_in_its_infos_which_moves_do_something():
    made = adapter("Taxi-v4", action_mask="info", backend="gymnasium")
    mask = made.reset().obs["action_mask"]
    assert mask.shape == (3, 6) and 0 < mask.sum() < mask.size
    first_illegal = np.argmin(mask, axis=1).astype(np.int32)
    with pytest.raises(ActionError, match=r"of environment \d is not legal"):
        made.step(first_illegal)
    made.close()


@pytest.mark.slow
def test_masks_of_the_entries_of_an_action_are_side_by_side():
    _, _, recorder = run_loop(Parts, AGENTS["ppo"], cycles=2, of_env={"action_mask": "info"})
    row = recorder.trajectories[0].env_step
    np.testing.assert_array_equal(row.obs["action_mask"][0, 0], [1, 0, 0, 1, 1])
    assert set(np.unique(recorder.trajectories[0].action[..., 0])) == {0}


def test_the_command_line_has_it():
    config = EnvConfig("Taxi-v4", action_mask="info", privileged=("a", "b"))
    assert config.factory_arguments()["action_mask"] == "info"
    assert "privileged" not in EnvConfig("Taxi-v4").factory_arguments()


# Nobody acts illegally: the environment raises if one does.


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_no_agent_acts_or_explores_illegally(name):
    env, place = (InfoMask, "info") if name in ("ppo", "dqn") else (ObsMask, "observation")
    _, _, recorder = run_loop(env, AGENTS[name], of_env={"action_mask": place})
    assert len(recorder.trajectories) == 6
    assert len(np.unique([t.action for t in recorder.trajectories])) == 4


@pytest.mark.slow
def test_worker_processes_have_masks_too():
    options = {"action_mask": "info", "vectorization": "async"}
    _, _, recorder = run_loop(InfoMask, AGENTS["ppo"], cycles=2, of_env=options)
    assert (recorder.trajectories[0].env_step.obs["action_mask"].sum(axis=-1) == 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("cycle", ["fused", "stepped"])
def test_jax_environments_have_masks_too(cycle):
    options = {"action_mask": "observation"}
    _, _, recorder = run_loop(JaxMask, AGENTS["ppo"], cycles=2, of_env=options, cycle=cycle)
    rewards = [t.env_step.reward[1:] for t in recorder.trajectories]
    assert np.min(rewards) >= 0


@pytest.mark.slow
def test_the_legal_action_that_pays_is_learned():
    config = PPOConfig(torso=SMALL, learning_rate=1e-2, epochs=4, minibatches=2, discount=0.0)
    options = {"action_mask": "info"}
    _, result, _ = run_loop(InfoMask, config, cycles=40, steps=64, of_env=options)
    assert result.metrics["episode_return_mean"] > 3.5  # chance pays 2.5 of 5


def test_values_of_illegal_actions_are_no_target():
    spec = sebulba.env_spec(ObsMask, action_mask="observation")
    agent = make_agent(spec, AGENTS["dqn"])
    networks = agent.new_networks(jax.random.key(0))
    obs = {"x": jnp.zeros((2, 4)), "action_mask": jnp.array([[1, 0, 0, 1], [0, 0, 0, 0]])}
    values = agent.values(networks, obs)
    np.testing.assert_array_equal(values[0] == ILLEGAL, [False, True, True, False])
    assert (values[1] > ILLEGAL).all()  # of a last observation nothing may be legal


@pytest.mark.slow
def test_values_of_last_observations_are_masked_too():
    vector = functools.partial(same_step, ObsMask)
    spec = sebulba.env_spec(vector, action_mask="observation")
    agent = make_agent(spec, AGENTS["r2d2"])
    row = jax.tree.map(lambda x: jnp.asarray(x)[None], agent.empty_env_step(2))
    assert isinstance(row.final, FinalObs)
    mask = jnp.array([[[1, 0, 1, 1], [1, 1, 1, 0]]], jnp.int8)
    row.final.obs["action_mask"] = mask
    networks = agent.new_networks(jax.random.key(0))
    core = agent.new_step_state(jax.random.key(0), RunSpec(2, 1, 8, 1), 0).core
    output = agent.evaluate(networks, row, core)
    np.testing.assert_array_equal(output.final_values == ILLEGAL, mask == 0)
    assert (output.values > ILLEGAL).all()


def same_step(env: Any, num_envs: int, seeds: list[int]) -> Any:
    return SyncVectorEnv([env] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.slow
def test_a_saved_policy_heeds_the_mask(tmp_path):
    agent, result, _ = run_loop(InfoMask, AGENTS["ppo"], cycles=2, of_env={"action_mask": "info"})
    sebulba.save_policy(tmp_path, agent, result.acting_networks)
    policy = sebulba.load_policy(tmp_path, explore=True)
    mask = np.tile(np.array([0, 1, 1, 0], np.int8), (100, 1))
    obs = {"observation": np.zeros((100, 4), np.float32), "action_mask": mask}
    actions, _ = policy(obs)
    assert set(np.unique(actions)) == {1, 2}
    np.testing.assert_array_equal(policy.distribution(obs)[:, [0, 3]], 0.0)
    env = sebulba.make_env_factory(InfoMask, action_mask="info")
    assert len(sebulba.evaluate(policy, env, num_episodes=3, num_envs=2).returns) == 3


# Resuming.


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_masked_environment_is_put_back_exactly(vectorization):
    options = {"action_mask": "info", "vectorization": vectorization}
    one, other = adapter(InfoMask, **options), adapter(InfoMask, **options)
    obs = one.reset().obs
    for _ in range(3):
        obs = one.step(chosen(obs)).obs
    state = one.state()
    assert isinstance(state, bytes), state
    other.put_back(state)
    for _ in range(8):
        outputs = [env.step(chosen(obs)) for env in (one, other)]
        assert leaves_equal(*outputs)
        obs = outputs[0].obs
    one.close(), other.close()


def chosen(obs: dict) -> np.ndarray:
    return np.argmax(obs["action_mask"], axis=1).astype(np.int32)


def test_random_actions_are_made_legal():
    four = spaces.Discrete(4, start=2)
    assert [int(legal_action(a, np.array([0, 1, 0, 1]), four)) for a in (2, 3, 4, 5)] == [
        3,
        3,
        3,
        5,
    ]
    two = spaces.MultiDiscrete([2, 3])
    np.testing.assert_array_equal(legal_action([0, 1], np.array([0, 1, 1, 0, 0]), two), [1, 0])
    assert int(legal_action(3, np.zeros(4), spaces.Discrete(4))) == 3


# What is wrong is said.


@pytest.mark.parametrize(("env", "place"), [(ObsMask, "observation"), (JaxMask, "observation")])
def test_an_illegal_action_is_refused(env, place):
    made = adapter(env, action_mask=place)
    action = chosen(made.reset().obs)
    mask = made.step(action).obs["action_mask"]
    action = np.argmax(mask, axis=1).astype(np.int32)
    action[1] = np.argmin(mask[1])
    with pytest.raises(ActionError, match=f"action {action[1]} of environment 1 is not legal"):
        made.step(action)
    made.close()


def test_a_mask_that_allows_nothing_is_an_error():
    made = adapter(Stuck, action_mask="observation")
    obs = made.reset().obs
    for _ in range(2):
        obs = made.step(chosen(obs)).obs
    with pytest.raises(EnvError, match="environment 0, step 3: action_mask allows no action"):
        made.step(chosen(obs))


def test_at_the_end_of_an_episode_a_mask_may_allow_nothing():
    made = adapter(functools.partial(Stuck, at=masked_envs.LENGTH), action_mask="observation")
    obs = made.reset().obs
    for _ in range(12):
        obs = made.step(chosen(obs)).obs


class NoMask(InfoMask):
    def shown(self):
        return self.x.copy(), {} if self.t else {"action_mask": self.mask}


class TwoForMask(NoMask):
    def shown(self):
        return self.x.copy(), {"action_mask": self.mask * (2 if self.t else 1)}


class LongMask(NoMask):
    def shown(self):
        return self.x.copy(), {"action_mask": np.ones(5 if self.t else 4)}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (NoMask, "info of step must have 'action_mask'"),
        (TwoForMask, "action_mask in the info of step must be 4 numbers 0 or 1"),
        (LongMask, "action_mask in the info of step must be 4 numbers 0 or 1"),
    ],
)
def test_a_wrong_mask_is_named_with_its_environment(env, words):
    made = adapter(env, action_mask="info")
    with pytest.raises(EnvError, match=words) as caught:
        made.step(chosen(made.reset().obs))
    assert "raised by environment 0, step 1" in caught.value.__notes__[0]


class OnlyMask(ObsMask):
    observation_space = spaces.Dict(action_mask=spaces.MultiBinary(4))


class WrongSize(ObsMask):
    observation_space = spaces.Dict(x=spaces.Discrete(2), action_mask=spaces.MultiBinary(5))


class Continuous(InfoMask):
    action_space = spaces.Box(-1, 1, (2,), np.float32)


class WideMask(JaxMask):
    observation_space = spaces.Dict(
        x=spaces.Box(0, 1, (2,), np.float32), action_mask=spaces.Box(0, 1, (4,), np.int32)
    )


@pytest.mark.parametrize(
    ("env", "options", "words"),
    [
        (InfoMask, {"action_mask": "infos"}, "'infos' must be one of 'observation', 'info'"),
        (InfoMask, {"action_mask": "observation"}, "the observation must be a Dict with"),
        (ObsMask, {"action_mask": "info"}, "use action_mask='observation'"),
        (OnlyMask, {"action_mask": "observation"}, "observes only its action_mask"),
        (WrongSize, {"action_mask": "observation"}, r"MultiBinary\(4\) .* it is MultiBinary\(5\)"),
        (Continuous, {"action_mask": "info"}, "is for Discrete and MultiDiscrete actions"),
        (JaxMask, {"action_mask": "info"}, "give the mask in the observation"),
        (WideMask, {"action_mask": "observation"}, "use MultiBinary"),
        ("CartPole-v1", {"action_mask": "info"}, "or pass backend='gymnasium'"),
        ("CartPole-v1", {"action_mask": "observation"}, "there is none"),
        (functools.partial(same_step, InfoMask), {"action_mask": "info"}, "is a vector"),
        (Turns, {"action_mask": "info"}, "is for a single agent"),
        (Turns, {"action_mask": "observation"}, "is for a single agent"),
    ],
)
def test_a_mask_that_cannot_be_found_is_refused(env, options, words):
    with pytest.raises(UsageError, match=words):
        sebulba.env_spec(env, **options)


def test_continuous_agents_have_no_use_for_masks():
    with pytest.raises(UsageError, match="Discrete"):
        make_agent(sebulba.env_spec(InfoMask, action_mask="info"), DDPGConfig(torso=SMALL))


# check-env.


@pytest.mark.slow
def test_check_env_plays_legal_actions_only():
    options = {"action_mask": "info"}
    subject = Subject(InfoMask, num_envs=2, num_steps=60, seed=1, timeout_s=60.0, options=options)
    events = run_checks(suite(subject), {"speed": True})
    found = [event for event in events if isinstance(event, Finding)]
    assert [one for one in found if one.level is not Level.OK] == []
    assert {"vector", "workers", "resume"} <= {one.name for one in found}

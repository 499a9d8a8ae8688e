"""Agents that learn from a data set: what they read, what they draw, and what they learn."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sebulba_offline.cloning import BC
from sebulba_offline.configs import BCConfig, IQLConfig, SACWithDataConfig, TD3BCConfig
from sebulba_offline.cycle import DataCycle, num_trajectories
from sebulba_offline.dataset import Dataset, load
from sebulba_offline.learning import DATA, ONLINE

import sebulba
from sebulba.agents.configs import ReplayConfig, TorsoConfig, make_agent
from sebulba.envs.gymnasium_adapter import GymnasiumAdapter
from sebulba.errors import EnvError, UsageError
from sebulba.inference.cycle import CyclePrograms
from sebulba.inference.inferencer import INFERENCER_PHASES
from sebulba.metrics.timer import PhaseTimer
from sebulba.types import RunSpec
from tests.support import recorded
from tests.support.loop_helpers import leaves_equal
from tests.support.replay_world import inserter, mapped, mesh_of

TORSO = TorsoConfig(hidden_sizes=(32, 32), activation="relu")
REPLAY = ReplayConfig(batch_size=64, updates_per_cycle=8, capacity=20_000)
COMMON: dict[str, Any] = {"learning_rate": 3e-3, "torso": TORSO, "replay": REPLAY}
SIZES = {"num_envs": 4, "steps_per_cycle": 16}


def cart_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=200)


@pytest.fixture(scope="module")
def poles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded.cart_pole(tmp_path_factory.mktemp("poles"))


@pytest.fixture(scope="module")
def aims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded.aim(tmp_path_factory.mktemp("aims"))


def loop_of(env: Any, config: Any, num_envs: int = 4, **options: Any) -> Any:
    agent = make_agent(sebulba.env_spec(env), config)
    options = {
        "num_inferencers_per_device": 1,
        "inference_devices": [0],
        "update_devices": [0],
        "schedule": "lockstep",
    } | options
    return sebulba.GymnasiumLoop(env, agent, num_envs, **options), agent


def trained(env: Any, config: Any, cycles: int, **options: Any) -> Any:
    loop, agent = loop_of(env, config, **options)
    with loop:
        result = loop.train(total_env_steps=cycles * 64, steps_per_cycle=16)
    return result, agent


def mean_return(result: Any, agent: Any, env: Any, **options: Any) -> float:
    policy = sebulba.Policy(agent, result.acting_networks)
    return sebulba.evaluate(policy, env, num_episodes=20, num_envs=10, **options).mean_return


# What is read.


def cycle_of(dataset: Dataset, env: Any, config: Any, run: RunSpec) -> tuple[DataCycle, Any]:
    agent = make_agent(sebulba.env_spec(env), config)
    networks = agent.new_networks(jax.random.key(0))
    experience = agent.new_experience(jax.random.key(0), networks, run)
    acting = agent.acting_networks(networks, experience)
    state = agent.new_step_state(jax.random.key(1), run, 0)
    programs = CyclePrograms(agent, acting, state, run)
    timer, device = PhaseTimer(*INFERENCER_PHASES), jax.devices()[0]
    adapter: Any = None
    return DataCycle(dataset, adapter, programs, device, timer, online_after=None), agent


def test_a_replay_holds_every_transition_once_and_no_other(aims: Path) -> None:
    """The draws from a replay that was filled are the transitions of the data."""
    dataset, run = load(aims), RunSpec(4, 1, 16, 4)
    config = BCConfig(dataset=str(aims), **COMMON)
    cycle, agent = cycle_of(dataset, recorded.Aim, config, run)
    count = num_trajectories(dataset.rows.num_rows, 64)
    networks = agent.new_networks(jax.random.key(0))
    replay = agent.new_experience(jax.random.key(0), networks, run)
    assert replay.num_rows == count * 16
    insert = inserter(agent.replay, mesh_of(4))
    for number in range(count + 3):  # some of the data come again
        trajectory = cycle._trajectory(number)
        numbers = [np.array(x, np.int32) for x in (0, 0, number)]
        replay = insert(replay, type(trajectory)(*trajectory[:3], *numbers), ())

    def read(replay: Any, seed: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("learner"))
        draw = agent.replay.draw(replay, key, 4 * 5000)
        return draw, agent.replay.gathered(replay, draw, 1.0)

    program = mapped(mesh_of(4), read, (agent.replay.spec(), P()), P("learner"))
    draw, drawn = jax.device_get(program(replay, 0))
    assert (draw.probability > 0).mean() > 0.99
    rows = dataset.rows
    acts = np.flatnonzero(~(rows.terminated | rows.truncated))
    row_of = {rows.obs[row].tobytes(): row for row in acts}
    assert len(row_of) == len(acts)  # observations tell them apart
    kept = draw.probability > 0
    at = np.array([row_of[obs.tobytes()] for obs in drawn.obs[kept]])
    np.testing.assert_array_equal(drawn.action[kept], rows.action[at])
    np.testing.assert_array_equal(drawn.reward[kept], rows.reward[at + 1])
    np.testing.assert_array_equal(drawn.discount[kept], ~rows.terminated[at + 1])
    goes_on = ~rows.terminated[at + 1]
    np.testing.assert_array_equal(drawn.next_obs[kept][goes_on], rows.obs[at + 1][goes_on])
    missing = len(acts) - len(set(at))
    assert missing <= 2 * run.num_envs + 3  # a seam a column, the newest row, and chance
    counts = np.bincount(at, minlength=rows.num_rows)[acts]
    assert counts.max() < 12 * counts.mean()


def test_the_position_leads_to_the_same_rows_and_no_other_data(aims: Path, tmp_path: Path) -> None:
    run = RunSpec(4, 1, 16, 1)
    config = BCConfig(dataset=str(aims), **COMMON)
    cycle, agent = cycle_of(load(aims), recorded.Aim, config, run)
    state, stop = agent.new_step_state(jax.random.key(1), run, 0), threading.Event()
    for _ in range(5):
        cycle.run((), state, stop)
    position = cycle.position()
    expected, _ = cycle.run((), state, stop)
    again, _ = cycle_of(load(aims), recorded.Aim, config, run)
    again.put_back(position)
    got, _ = again.run((), state, stop)
    assert leaves_equal(expected.trajectory, got.trajectory)
    other, _ = cycle_of(load(recorded.aim(tmp_path, 3)), recorded.Aim, config, run)
    with pytest.raises(EnvError, match="of the data set"):
        other.put_back(position)


# What is learned.


def test_a_clone_holds_the_pole_as_long_as_the_player(poles: Path) -> None:
    result, agent = trained(cart_pole, BCConfig(dataset=str(poles), **COMMON), 100)
    assert mean_return(result, agent, cart_pole) > 190
    assert result.metrics["cloning_loss"] < 0.3


@pytest.mark.slow
def test_a_clone_of_continuous_actions_is_their_mean(tmp_path: Path) -> None:
    folder = recorded.aim(tmp_path, 400, noise=0.1)
    result, agent = trained(recorded.Aim, BCConfig(dataset=str(folder), **COMMON), 150)
    policy = sebulba.Policy(agent, result.acting_networks)
    obs = np.random.default_rng(0).uniform(-0.8, 0.8, (100, 2)).astype(np.float32)
    action, _ = policy(obs)
    np.testing.assert_allclose(action, obs + 0.5, atol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        IQLConfig(**COMMON, critic_learning_rate=3e-3, value_learning_rate=3e-3, discount=0.5),
        TD3BCConfig(**COMMON, critic_learning_rate=3e-3, discount=0.5, actor_penalty=0.1),
        TD3BCConfig(
            **COMMON,
            critic_learning_rate=3e-3,
            discount=0.5,
            actor_penalty=0.1,
            critic_penalty=0.1,
            normalize_observations=True,
        ),
    ],
    ids=["iql", "td3-bc", "rebrac"],
)
def test_values_lead_to_better_actions_than_those_of_the_data(config: Any, aims: Path) -> None:
    """The data's actions are half a unit off on average: a clone returns -5 (0.5^2) = -1.25."""
    clone = trained(recorded.Aim, BCConfig(dataset=str(aims), **COMMON), 150)
    of_clone = mean_return(*clone, recorded.Aim)
    assert of_clone == pytest.approx(-1.25, abs=0.5)
    config = dataclasses.replace(config, dataset=str(aims))
    of_values = mean_return(*trained(recorded.Aim, config, 150), recorded.Aim)
    assert of_values > of_clone + 0.5


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(poles: Path, tmp_path: Path) -> None:
    config = BCConfig(dataset=str(poles), normalize_observations=True, **COMMON)
    whole, _ = trained(cart_pole, config, 60)
    for cycles in (45, 60):
        with sebulba.Checkpointer(tmp_path, every_s=600) as saver:
            result, _ = trained(cart_pole, config, cycles, checkpointer=saver)
    assert leaves_equal(whole.state.networks, result.state.networks)
    assert leaves_equal(whole.state.opt, result.state.opt)


# From offline to online.


@pytest.mark.slow
def test_each_batch_has_its_share_of_data_once_the_environment_is_stepped(aims: Path) -> None:
    config = SACWithDataConfig(dataset=str(aims), data_share=0.25, **COMMON)
    seen: list[np.ndarray] = []

    def observe(trajectory: Any, infos: Any) -> None:
        seen.append(np.asarray(trajectory.extras))

    count = num_trajectories(load(aims).rows.num_rows, 64)
    result, agent = trained(recorded.Aim, config, count + 4, observe_cycle=observe)
    flags = np.array([flag.mean() for flag in seen])
    assert flags.tolist() == [1.0] * count + [0.0] * 4
    replay = result.state.experience
    assert np.asarray(replay.trajectories).tolist() == [count, 4]

    def rings(replay: Any, seed: jax.Array) -> Any:
        return agent.replay.draw(replay, jax.random.key(seed), 64)

    program = mapped(mesh_of(1), rings, (agent.replay.spec(), P()), P("learner"))
    draw = jax.device_get(program(replay, 0))
    assert np.bincount(draw.inferencer).tolist() == [16, 48]
    online = draw.inferencer == ONLINE
    assert draw.row[online].max() < 4 * 16 and draw.row[draw.inferencer == DATA].max() >= 4 * 16
    assert result.counters.updates == 8 * 5  # from the trajectory on that completes the data


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_run_that_is_resumed_online_does_not_read_the_data_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    if not is_saved:
        monkeypatch.setattr(GymnasiumAdapter, "state", lambda self: "it cannot be saved")
    data = recorded.aim(tmp_path / "data", 30)
    config = SACWithDataConfig(dataset=str(data), **COMMON)
    count = num_trajectories(load(data).rows.num_rows, 64)
    seen: list[float] = []
    for cycles in (count + 2, count + 4):
        with sebulba.Checkpointer(tmp_path / "saved", every_s=600) as saver:
            observe = lambda trajectory, infos: seen.append(np.mean(trajectory.extras))  # noqa: E731
            trained(recorded.Aim, config, cycles, checkpointer=saver, observe_cycle=observe)
    assert seen == [1.0] * count + [0.0] * 4


@pytest.mark.slow
def test_the_environment_is_not_stepped_without_being_asked(poles: Path) -> None:
    class Unplayable(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            raise AssertionError("stepped")

    result, _ = trained(lambda: Unplayable(cart_pole()), BCConfig(dataset=str(poles), **COMMON), 40)
    assert result.counters.updates > 0 and result.counters.episodes == 0


# What is refused.


def test_wrong_use_is_refused_in_words(poles: Path, tmp_path: Path) -> None:
    spec = sebulba.env_spec(cart_pole)
    run = RunSpec(4, 1, 16, 1)

    def state(config: Any, run: RunSpec = run) -> Any:
        return jax.eval_shape(lambda key: BC(spec, config).new_state(key, run), jax.random.key(0))

    with pytest.raises(UsageError, match=r"agent\.dataset='' must be the folder of a data set"):
        state(BCConfig(**COMMON))
    with pytest.raises(UsageError, match="holds no data set"):
        state(BCConfig(dataset=str(tmp_path), **COMMON))
    with pytest.raises(UsageError, match="2 Inferencers cannot read one data set"):
        state(BCConfig(dataset=str(poles), **COMMON), RunSpec(4, 2, 16, 1))
    with pytest.raises(UsageError, match=r"replay.prioritized=True is not for agents"):
        BCConfig(replay=ReplayConfig(prioritized=True))
    with pytest.raises(UsageError, match="online_after_env_steps=-1 must not be negative"):
        IQLConfig(online_after_env_steps=-1)
    with pytest.raises(UsageError, match="num_steps=3 must be 1"):
        TD3BCConfig(num_steps=3)
    loop, _ = loop_of(recorded.Aim, BCConfig(dataset=str(poles), **COMMON))
    with loop, pytest.raises(UsageError, match=r"of the data set .* is not the environment's"):
        loop.train(total_env_steps=64, steps_per_cycle=16)


def test_a_policy_is_loaded_without_its_data(poles: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    recorded.cart_pole(folder, 2)
    result, agent = trained(cart_pole, BCConfig(dataset=str(folder), **COMMON), 8)
    sebulba.save_policy(tmp_path / "policy", agent, result.acting_networks)
    for file in folder.iterdir():
        file.unlink()
    policy = sebulba.load_policy(tmp_path / "policy", trust=True)
    obs = np.zeros((3, 4), np.float32)
    expected, _ = sebulba.Policy(agent, result.acting_networks)(obs)
    assert policy(obs)[0].tolist() == expected.tolist()
    assert policy.distribution(obs).shape == (3, 2)

"""Actors: with the policy in the client, with the trainer's, and with a strategy."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from sebulba_external import protocol, seats
from sebulba_external.actor import Actor, Begin, End, Step
from sebulba_external.desk import Acting, Desk
from sebulba_external.program import Program
from sebulba_external.seats import Seats
from sebulba_external.serve import PolicyServer
from sebulba_external.traced import traced

import sebulba
from sebulba.agents.configs import (
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    ReplayConfig,
    SACConfig,
    TorsoConfig,
)
from sebulba.agents.configs.agent_config import make_agent
from sebulba.types import RunSpec
from tests.external.telling import (
    ONE,
    SPEC,
    B,
    Checker,
    T,
    in_threads,
    reward_of,
    training,
)

TORSO = TorsoConfig(hidden_sizes=(16, 16))
OBSERVATIONS = spaces.Box(-1, 1, (3,), np.float32)
BOUNDED = spaces.Box(np.float32([-1, 0]), np.float32([2, 5]))
AGENTS = {
    "impala": (ImpalaConfig(torso=TORSO), spaces.Discrete(5, start=2)),
    "impala-lstm": (ImpalaConfig(torso=TORSO, lstm_size=8), spaces.Discrete(3)),
    "impala-scaled": (ImpalaConfig(torso=TORSO, normalize_observations=True), BOUNDED),
    "ppo-many": (PPOConfig(torso=TORSO), spaces.MultiDiscrete([2, 3])),
    "dqn": (DQNConfig(torso=TORSO, dueling=True), spaces.Discrete(4)),
    "sac": (SACConfig(torso=TORSO), BOUNDED),
    "sac-discrete": (SACConfig(torso=TORSO), spaces.Discrete(3)),
}


def made(name: str) -> Any:
    config, actions = AGENTS[name]
    return make_agent(sebulba.EnvSpec(OBSERVATIONS, actions), config)


def acting_parts(agent: Any, rows: int) -> tuple[Any, Any, Any]:
    """Return acting networks that are not those of the beginning, a step state, and a row."""
    run = RunSpec(rows, 1, 1, 1)

    @jax.jit
    def parts() -> tuple[Any, Any]:
        networks = agent.new_networks(jax.random.key(0))
        wave = lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)  # noqa: E731
        networks = jax.tree.map(wave, networks)
        experience = agent.new_experience(jax.random.key(1), networks, run)
        acting = agent.acting_networks(networks, experience)
        return acting, agent.new_step_state(jax.random.key(2), run, 0)

    return *parts(), agent.empty_env_step(rows)


@pytest.mark.parametrize("name", AGENTS)
def test_a_client_acts_as_the_trainer_does(name: str) -> None:
    agent, rows = made(name), 4
    networks, state, row = acting_parts(agent, rows)
    rng = np.random.default_rng(0)
    description = {"type": "program", **traced(agent, networks, state, row, explore=False)}
    travelled = protocol.unpack(protocol.pack(description)[4:], longest=1 << 20)
    program = Program(travelled, rng)
    act = jax.jit(lambda n, s, r: agent.act(n, s, r, explore=False))
    mine: list[Any] = [
        np.zeros((), np.uint32) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    for step in range(6):
        row = row._replace(
            obs=rng.uniform(-1, 1, (rows, 3)).astype(np.float32),
            is_first=np.full(rows, step in (0, 4)),
            reward=rng.normal(size=rows).astype(np.float32),
        )
        output, state = act(networks, state, row)
        leaves = [*jax.tree.leaves(networks), *mine, *jax.tree.leaves(row)]
        action, *rest = program(*leaves)
        assert action.dtype == output.action.dtype
        np.testing.assert_allclose(action, output.action, atol=1e-5)
        extras = jax.tree.leaves(output.extras)
        for one, expected in zip(rest, extras, strict=False):
            np.testing.assert_allclose(one, expected, atol=2e-5)
        mine = rest[len(extras) :]
        for one, expected in zip(mine, jax.tree.leaves(state), strict=True):
            if not jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(one, expected, atol=1e-5)
        row = row._replace(prev_action=np.asarray(output.action))


def test_a_client_draws_as_often_as_the_policy_says() -> None:
    agent, rows = made("impala"), 4000
    networks, state, row = acting_parts(agent, rows)
    obs = np.broadcast_to(np.float32([0.3, -0.2, 0.9]), (rows, 3))
    row = row._replace(obs=obs)
    program = Program(traced(agent, networks, state, row, explore=True), np.random.default_rng(3))
    leaves = [
        np.zeros((), np.uint32) if i == 0 else x for i, x in enumerate(jax.tree.leaves(state))
    ]
    action, raw, log_prob, *_ = program(*jax.tree.leaves(networks), *leaves, *jax.tree.leaves(row))
    expected = np.asarray(agent.acting_distribution(networks, state, row)[0])
    found = np.bincount(action - 2, minlength=5) / rows
    assert np.abs(found - expected).max() < 4 * 0.5 / rows**0.5
    np.testing.assert_allclose(np.exp(log_prob), expected[raw], atol=1e-5)
    assert np.array_equal(raw, action - 2)
    assert len(set(action.tolist())) > 1


def test_a_client_draws_the_discrete_actions_of_sac_as_often_as_the_trainer() -> None:
    agent, rows = made("sac-discrete"), 4000
    networks, state, row = acting_parts(agent, rows)
    program = Program(traced(agent, networks, state, row, explore=True), np.random.default_rng(3))
    leaves = [
        np.zeros((), np.uint32) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    action, *_ = program(*jax.tree.leaves(networks), *leaves, *jax.tree.leaves(row))
    output, _ = agent.act(networks, state, row)
    mine, other = (np.bincount(x, minlength=3) / rows for x in (action, np.asarray(output.action)))
    assert np.abs(mine - other).max() < 4 * 0.5 * (2 / rows) ** 0.5


def test_a_client_draws_the_noise_of_a_gaussian() -> None:
    agent, rows = made("impala-scaled"), 4000
    networks, state, row = acting_parts(agent, rows)
    program = Program(traced(agent, networks, state, row, explore=True), np.random.default_rng(3))
    leaves = [
        np.zeros((), np.uint32) if i == 0 else x for i, x in enumerate(jax.tree.leaves(state))
    ]
    inputs = (*jax.tree.leaves(networks), *leaves, *jax.tree.leaves(row))
    action, raw, log_prob, *_ = program(*inputs)
    output, _ = agent.act(networks, state, row)
    other = np.asarray(output.extras.raw)
    for one, two in ((raw, other), (raw**2, other**2), (action, np.asarray(output.action))):
        spread = two.std(axis=0) * (2 / rows) ** 0.5
        assert (np.abs(one.mean(axis=0) - two.mean(axis=0)) < 5 * spread).all()
    assert np.all((action >= BOUNDED.low) & (action <= BOUNDED.high))
    both = np.asarray(output.extras.log_prob)
    assert abs(log_prob.mean() - both.mean()) < 5 * both.std() * (2 / rows) ** 0.5


def test_what_numpy_cannot_do_is_refused_in_words() -> None:
    space = spaces.Box(0, 255, (8, 8, 1), np.uint8)
    spec = sebulba.EnvSpec(space, spaces.Discrete(2))
    agent = make_agent(spec, ImpalaConfig())
    networks, state, row = acting_parts(agent, 1)
    with pytest.raises(sebulba.UsageError, match=r"Impala acts with the operation 'conv.*local=F"):
        traced(agent, networks, state, row, explore=True)


def play(
    number: int,
    address: str,
    token: str,
    stop: threading.Event,
    problems: list[Exception],
    **how: Any,
) -> None:
    """Play episodes whose rows say whose they are, in two streams, until stopped."""
    rng = np.random.default_rng(number)
    streams = ("a", "b")
    try:
        with Actor(address, token, streams=2, seed=number, **how) as actor:
            episode, at, last = -1, dict.fromkeys(streams, -1), {}
            numbers = dict.fromkeys(streams, 0)
            while not stop.is_set():
                reports: dict[Any, Any] = {}
                for k, name in enumerate(streams):
                    if at[name] < 0 or rng.random() < 0.03:  # some episodes are never ended
                        episode += 1
                        at[name], numbers[name] = 0, episode
                        obs = np.float32([2 * number + k, episode, 0])
                        reports[name] = Begin(obs)
                    else:
                        reward = reward_of(last[name][0], int(last[name][1]))
                        at[name] += 1
                        obs = np.float32([2 * number + k, numbers[name], at[name]])
                        if rng.random() < 0.15:
                            reports[name] = End(reward, obs, bool(rng.random() < 0.5))
                            at[name] = -1
                        else:
                            reports[name] = Step(reward, obs)
                actions = actor.act(reports)
                last = {name: (reports[name].observation, a) for name, a in actions.items()}
                if rng.random() < 0.1:
                    actor.sync()
                    stop.wait(0.001)
    except (ConnectionError, TimeoutError, BrokenPipeError) as error:
        if not stop.is_set():
            problems.append(error)


@pytest.mark.parametrize("local", [False, True], ids=["served", "local"])
@pytest.mark.parametrize(
    "env_steps", [4096, pytest.param(163_840, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_every_transition_is_one_that_an_actor_made(
    tmp_path: Path, local: bool, env_steps: int
) -> None:
    checker, stop, versions, problems = Checker(), threading.Event(), [], []

    def observed(trajectory: Any, infos: Any) -> None:
        checker(trajectory, infos)
        versions.append(int(trajectory.policy_version))

    with training(f"unix:{tmp_path}/s", observe_cycle=observed) as (given, loop):
        playing = in_threads(
            lambda number: play(number, given.address, given.token, stop, problems, local=local),
            (0,), (1,),
        )  # fmt: skip
        result = loop.train(total_env_steps=env_steps, steps_per_cycle=T)
        stop.set()
        for thread in playing:
            thread.join(60)
    assert not problems
    assert checker.valid > 0.611 * env_steps
    assert checker.ends > env_steps / 20
    assert checker.clients == {0, 1, 2, 3}
    assert (given.counts["rows"] > 0.611 * env_steps) == local
    lags = np.arange(len(versions)) - versions
    assert (lags >= 0).all()
    assert len(set(versions)) > 10
    assert result.counters.env_steps == env_steps


@pytest.mark.slow
@pytest.mark.parametrize("lstm_size", [0, 8])
def test_log_probabilities_are_those_of_the_version_that_acted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lstm_size: int
) -> None:
    stop, differences, run, problems = threading.Event(), [], seats.ServedCycle.run, []
    config = ImpalaConfig(learning_rate=1e-30, lstm_size=lstm_size, torso=TORSO)
    agent = make_agent(SPEC, config)
    evaluate = jax.jit(agent.evaluate)

    def checked(self: Any, networks: Any, *arguments: Any) -> Any:
        item, step_state = run(self, networks, *arguments)
        if item is not None:
            rows, action = item.trajectory.env_step, item.trajectory.action
            output = evaluate(networks, rows.obs, item.initial_step_state.core, rows.is_first)
            log_prob = agent.distribution.log_prob(
                output.params[:-1], agent.distribution.index(action)
            )
            difference = np.abs(np.asarray(log_prob - item.trajectory.extras.log_prob))
            differences.append(difference[rows.valid[1:]].max())
        return item, step_state

    monkeypatch.setattr(seats.ServedCycle, "run", checked)
    with training(f"unix:{tmp_path}/s", config) as (given, loop):
        in_threads(
            lambda number: play(number, given.address, given.token, stop, problems, local=True),
            (0,), (1,),
        )  # fmt: skip
        loop.train(total_env_steps=2048, steps_per_cycle=T)
        stop.set()
    assert not problems
    assert len(differences) == 2048 // (B * T)
    # Observations are numbers of clients, episodes and steps: large, so that rounding shows.
    assert max(differences) < 1e-3


@pytest.mark.slow
def test_ppo_refuses_what_is_too_old_in_words(tmp_path: Path) -> None:
    from sebulba.agents.ppo import PPO

    stop, problems, cycles = threading.Event(), [], []
    config = PPOConfig(torso=TORSO, minibatches=1, epochs=1)

    def observed(trajectory: Any, infos: Any) -> None:
        cycles.append(trajectory)

    training_with = training(f"unix:{tmp_path}/s", config, PPO, observe_cycle=observed)
    with training_with as (given, loop):
        trained = in_threads(lambda: loop.train(total_env_steps=200_000, steps_per_cycle=T), ())
        actor = Actor(given.address, given.token, local=True, seed=0)
        in_threads(lambda: play(9, given.address, given.token, stop, problems), ())
        old, deadline = actor.version, time.monotonic() + 60
        observation = np.float32([30, 0, 0])
        action = int(actor.act({"a": Begin(observation)})["a"])
        while len(cycles) < 40:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.warns(UserWarning, match=r"PPO takes those that are at most 2 old.*sync\(\)"):
            actor.sync()
        assert actor.refused == 1
        assert actor.version > old + 2
        # What comes after begins anew, in the middle of the episode.
        for step in range(1, 3 * T):
            reward = reward_of(observation, action)
            observation = np.float32([30, 0, step])
            action = int(actor.act({"a": Step(reward, observation)})["a"])
            actor.sync()
        actor.close()
        assert given.counts["rows_refused"] >= 1
        stop.set()
        loop.stop()
        trained[0].join(300)
    assert not problems


@pytest.mark.slow
def test_what_was_played_before_a_new_run_is_not_learned_from(tmp_path: Path) -> None:
    stop, problems, firsts = threading.Event(), [], []
    marks = [0.0]

    def observed(trajectory: Any, infos: Any) -> None:
        firsts.append(float(np.asarray(trajectory.env_step.obs)[..., 1].min()))

    def playing(address: str, token: str) -> None:
        with contextlib.suppress(OSError), Actor(address, token, streams=B) as actor:
            for episode in range(1 << 30):
                if stop.is_set():
                    return
                marks[0] = float(episode)
                for step in range(4):
                    kind = Begin if step == 0 else Step if step < 3 else End
                    row = np.float32([0, episode, step])
                    report = kind(row) if kind is Begin else kind(0.0, row)
                    actor.act({k: report for k in range(B)})

    with training(f"unix:{tmp_path}/s", observe_cycle=observed) as (given, loop):
        in_threads(playing, (given.address, given.token))
        for _ in range(3):
            begun = len(firsts)
            mark = marks[0]
            loop.run(loop.new_state(0, T), 16, T)
            assert firsts[begun] >= mark - 1
            time.sleep(0.3)  # columns gather
            assert marks[0] > mark
        stop.set()
    assert not problems


@pytest.fixture(scope="module")
def server() -> Any:
    with PolicyServer("pretrained:cartpole", "127.0.0.1:0", token="t", num_seats=4) as one:
        yield one


@pytest.mark.parametrize("local", [False, True])
def test_evaluation_actors_act_as_the_loaded_policy(server: PolicyServer, local: bool) -> None:
    rows = np.random.default_rng(0).normal(0, 0.5, (20, 4)).astype(np.float32)
    expected, _ = sebulba.load_policy("pretrained:cartpole")(rows)
    address = server.listener.address
    with Actor(address, "t", local=local, explore=False, streams=2) as actor:
        got = []
        for one, two in zip(rows[::2], rows[1::2], strict=True):
            actions = actor.act({"one": Begin(one), 2: Begin(two)})
            got += [int(actions["one"]), int(actions[2])]
        assert got == expected.tolist()
        if local:
            version, acting = actor.version, server.desk.acting
            opposite = dict(acting.networks)
            opposite["policy"] = jax.tree.map(lambda x: -x, opposite["policy"])
            server.desk.acting = Acting(acting.version + 1, opposite)
            actor.sync()
            assert actor.version == version + 1
            actions = actor.act({"one": Begin(rows[0]), 2: Begin(rows[1])})
            assert [int(x) for x in actions.values()] == [1 - x for x in expected[:2].tolist()]
            server.desk.acting = acting._replace(version=acting.version + 2)


@pytest.mark.parametrize("local", [False, True])
def test_an_actor_refuses_observations_that_do_not_fit_before_it_acts(
    server: PolicyServer, local: bool
) -> None:
    fits, asked = Begin(np.zeros(4, np.float32)), server.listener.counts["asked"]
    with Actor(server.listener.address, "t", local=local, explore=False, streams=2) as actor:
        with pytest.raises(ValueError, match=r"shape \(\); the welcome says \(4,\)"):
            actor.act({0: fits, 1: Begin(np.float32(0))})
        actor.act({0: fits, 1: fits})
    assert server.listener.counts["asked"] - asked <= (0 if local else 2)


def test_a_served_policy_learns_nothing(server: PolicyServer) -> None:
    with Actor(server.listener.address, "t", local=True) as actor:
        actor.act({0: Begin(np.zeros(4, np.float32))})
        with pytest.warns(UserWarning, match="nothing is learned here"):
            actor.sync()


@pytest.mark.slow
def test_a_replay_learns_from_a_fixed_strategy_and_impala_asks_for_more(tmp_path: Path) -> None:
    from sebulba.agents.dqn import DQN

    stop, problems = threading.Event(), []
    replay = ReplayConfig(capacity=512, batch_size=16, updates_per_cycle=1, warm_up_cycles=2)
    config = DQNConfig(replay=replay, torso=TORSO)
    how = {"strategy": lambda observation: np.int32(2 + int(observation[2]) % 5)}
    with training(f"unix:{tmp_path}/s", config, DQN) as (given, loop):
        in_threads(
            lambda number: play(number, given.address, given.token, stop, problems, **how),
            (0,), (1,),
        )  # fmt: skip
        result = loop.train(total_env_steps=1024, steps_per_cycle=T)
        stop.set()
    assert not problems
    rows = jax.tree.map(np.asarray, result.state.experience).rows
    steps = rows.obs[..., 2].astype(int)
    acted = rows.action.ravel() > 0
    assert acted.sum() > 100
    assert (rows.action.ravel() == 2 + steps.ravel() % 5)[acted].all()

    with training(f"unix:{tmp_path}/t") as (given, loop):
        trained = in_threads(lambda: loop.train(total_env_steps=1024, steps_per_cycle=T), ())
        with (
            Actor(given.address, given.token, **how) as actor,
            pytest.raises(ValueError, match=r"returned 0 extras; .* learns from 2"),
        ):
            actor.act({0: Begin(np.zeros(3, np.float32))})
        loop.stop()
        trained[0].join(300)


def test_an_actor_says_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="name the trainer"):
        Actor()
    with pytest.raises(ValueError, match="streams=0 must be"):
        Actor("127.0.0.1:1", streams=0)
    with Actor(strategy=lambda observation: 7) as actor:
        assert actor.act({"x": Begin(0.0)}) == {"x": 7}
        assert actor.act({"x": Step(1.0, 0.0)}) == {"x": 7}
        assert actor.act({"x": End(2.0, 0.0)}) == {}
        assert actor.returns == [3.0]
        with pytest.raises(ValueError, match="one more than streams=1"):
            actor.act({"y": Begin(0.0)})


def test_exploration_of_local_actors_falls_as_that_of_served_ones() -> None:
    agent = made("dqn")
    networks, state, _ = acting_parts(agent, B)
    desk = Desk(agent, B, state, explore=True)
    desk.acting = Acting(1, networks)
    desk.count(3 * B + 1)
    desk.count(B - 1)
    answer = desk.local.policy({"seats": [2, 0], "explore": True, "want": "program"})
    leaves, _ = desk.of_seats([2, 0])
    assert int(leaves.epsilon.steps) == 4
    own = [x for x, is_own in zip(answer["state"], answer["own"], strict=True) if is_own]
    assert [x[1] for x in own] == [[2]]


def test_the_actor_imports_no_jax() -> None:
    code = (
        "import sys, sebulba_external.actor, sebulba_external.godot; "
        "print([x for x in ('jax', 'sebulba', 'gymnasium') if x in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_actors_train_cartpole(tmp_path: Path, local: bool) -> None:
    from sebulba.configs.impala_presets import PRESETS

    stop, problems = threading.Event(), []

    def playing(address: str, token: str) -> None:
        worlds = [gymnasium.make("CartPole-v1") for _ in range(8)]
        seeds = iter(range(1 << 30))
        try:
            with Actor(address, token, streams=8, local=local, seed=0) as actor:
                reports: dict[Any, Any] = {
                    k: Begin(world.reset(seed=next(seeds))[0]) for k, world in enumerate(worlds)
                }
                for step in range(1, 1 << 30):
                    if stop.is_set():
                        return
                    actions, reports, over = actor.act(reports), {}, {}
                    for k, action in actions.items():
                        obs, reward, dead, cut, _ = worlds[k].step(int(action))
                        reports[k] = Step(float(reward), obs)
                        if dead or cut:
                            over[k] = End(float(reward), obs, not dead)
                            reports[k] = Begin(worlds[k].reset(seed=next(seeds))[0])
                    if over:
                        actor.act(over)
                    if step % 16 == 0:
                        actor.sync()
        except OSError as error:
            if not stop.is_set():
                problems.append(error)

    config: Any = PRESETS["cartpole"].make().agent
    with (
        Seats("CartPole-v1", f"unix:{tmp_path}/s") as given,
        sebulba.GymnasiumLoop(given, make_agent(given.spec, config), num_envs=8, **ONE) as loop,
    ):
        in_threads(playing, (given.address, given.token))
        result = loop.train(total_env_steps=150_000, steps_per_cycle=32)
        stop.set()
    assert not problems
    assert result.metrics["episode_return_mean"] > 400

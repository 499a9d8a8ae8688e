"""The last observation of an episode where the environment resets in the step that ends it."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import sebulba
from sebulba.agents.bases.on_policy import Extras
from sebulba.agents.configs import (
    DQNConfig,
    ImpalaConfig,
    OptimizerConfig,
    PPOConfig,
    R2D2Config,
    ReplayConfig,
    SACConfig,
    SimplePolicyGradientConfig,
    TargetConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.impala import Impala
from sebulba.agents.kernels import returns
from sebulba.agents.replay.transitions_and_sequences import Draw, Sequence, TransitionReplay
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.policies.policy import Policy
from sebulba.types import EnvStep, FinalObs, Trajectory
from tests.support import broken_envs
from tests.support.agent_driver import quick_state

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]
DISCOUNT, LENGTH, SCALE = 0.9, 5, 0.1
KINDS = ["cut", "over", "pays"]
FIRST = {"cut": 0, "over": 1, "pays": 6}
"""Index of the first observation of an episode of each kind."""


class Asks(gymnasium.Env):
    """Three tasks in one, told apart by what is observed (one-hot).

    "cut" pays 1 at each of five steps, shows always the same and is truncated; "over" pays the
    same, shows the time and terminates; "pays" pays for the right action in its second step, which
    is its last, and truncated.
    """

    observation_space = spaces.Box(0, 1, (8,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        self.kind, self.t = KINDS[self.np_random.integers(3)], 0
        return self.observe(), {}

    def observe(self) -> np.ndarray:
        time = {"cut": 0, "over": min(self.t, LENGTH - 1), "pays": self.t % 2}[self.kind]
        return np.eye(8, dtype=np.float32)[FIRST[self.kind] + time]

    def right(self, action: Any) -> float:
        return float(action)

    def step(self, action: Any) -> tuple:
        self.t += 1
        length = 2 if self.kind == "pays" else LENGTH
        reward = 1.0 if self.kind != "pays" else self.right(action) * (self.t == length)
        ended = self.t == length
        is_over = self.kind == "over"
        return self.observe(), reward, ended and is_over, ended and not is_over, {}


class AsksForNumbers(Asks):
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def right(self, action: Any) -> float:
        return 0.5 + 0.5 * float(action[0])


def vector(mode: AutoresetMode, cls: Any, num_envs: int, seeds: list[int]) -> SyncVectorEnv:
    return SyncVectorEnv([cls] * num_envs, autoreset_mode=mode)


TORSO = TorsoConfig(hidden_sizes=(16,))
ADAM = OptimizerConfig("adam", max_grad_norm=10.0)
REPLAY = ReplayConfig(capacity=4000, batch_size=64, warm_up_cycles=8, updates_per_cycle=4)
ON_POLICY: Any = {
    "learning_rate": 1e-2, "discount": DISCOUNT, "torso": TORSO, "optimizer": ADAM,
    "reward_scale": SCALE,
}  # fmt: skip
VALUES: Any = ON_POLICY | {
    "learning_rate": 5e-3, "num_steps": 3, "replay": REPLAY, "target": TargetConfig(period=20),
}  # fmt: skip
CRITICS: Any = {
    "discount": DISCOUNT, "torso": TORSO, "replay": REPLAY, "learning_rate": 6e-3,
    "critic_learning_rate": 1e-2, "target": TargetConfig(rate=0.1), "reward_scale": SCALE,
}  # fmt: skip
AGENTS: dict[str, Any] = {
    "impala": ImpalaConfig(**ON_POLICY),
    "ppo": PPOConfig(**ON_POLICY, epochs=2, minibatches=2),
    "dqn": DQNConfig(**VALUES, exploration_env_steps=1000, final_epsilon=0.5),
    "r2d2": R2D2Config(
        **VALUES, burn_in=0, sequence_length=8, lstm_size=8, head_hidden_sizes=(), epsilon=0.5,
        epsilon_exponent=0.0, rescale_values=False, dueling=False,
    ),
    "sac": SACConfig(
        **CRITICS, initial_temperature=1e-3, temperature_learning_rate=1e-6, random_env_steps=1000
    ),
}  # fmt: skip


def inline_loop(env: Any, agent: Any, num_envs: int) -> sebulba.GymnasiumLoop:
    return sebulba.GymnasiumLoop(
        env, agent, num_envs, num_inferencers_per_device=0, inference_devices=[0],
        update_devices=[0],
    )  # fmt: skip


def trained(name: str, mode: AutoresetMode, num_cycles: int) -> tuple[Any, Any, Any]:
    config = AGENTS[name]
    cls = AsksForNumbers if isinstance(config, SACConfig) else Asks
    env = sebulba.make_env_factory(functools.partial(vector, mode, cls))
    agent: Any = make_agent(sebulba.env_spec(env), config)
    with inline_loop(env, agent, 16) as loop:
        result = loop.run(loop.new_state(0, 8), num_cycles, 8)
    assert result.counters.masked_truncations == 0
    return agent, result


def values_of(agent: Any, networks: Any, obs: np.ndarray) -> np.ndarray:
    num = len(obs)
    if isinstance(agent.config, SACConfig):
        encoded = agent.encode(obs, 1)
        unit = agent.squashing.unit(agent.policy(networks["actor"], encoded)[:, :1])
        return np.asarray(agent.values(networks["critics"], encoded, unit)[0])
    core = agent.new_step_state(jax.random.key(0), sebulba.RunSpec(num, 1, 8, 1), 0).core
    row = agent.empty_env_step(num)._replace(obs=obs, is_first=np.ones(num, bool), final=())
    rows = jax.tree.map(lambda x: np.asarray(x)[None], row)
    if hasattr(agent, "replay"):
        return np.asarray(agent.evaluate(networks, rows, core).values[0].max(-1))
    return np.asarray(agent.evaluate(networks, rows.obs, core, rows.is_first).value[0])


CYCLES = 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, AutoresetMode.SAME_STEP) for name in AGENTS]
    + [("ppo", AutoresetMode.NEXT_STEP), ("ppo", AutoresetMode.DISABLED)],
)
def test_learns_what_the_truncating_step_pays_and_values_through_it(name, mode):
    agent, result = trained(name, mode, CYCLES)
    obs = np.eye(8, dtype=np.float32)
    value = values_of(agent, result.state.networks, obs) / SCALE
    action = Policy(agent, result.acting_networks)(obs[[FIRST["pays"] + 1]])[0]
    assert float(np.squeeze(action)) > 0.8
    np.testing.assert_allclose(value[0], 10.0, atol=0.7)
    np.testing.assert_allclose(value[1], 4.0951, atol=0.5)


# Exactly: the same experience, delivered with next-step and with same-step resets.

NUM_STEPS, NUM_ENVS, SIZE = 9, 3, 2
ENDS = [[2, 6], [4, 5], [3, 8]]
"""Transitions that end an episode, of each environment."""
SPEC = sebulba.EnvSpec(
    spaces.Box(-9, 9, (SIZE,)), spaces.Discrete(3, dtype=np.int32), final_obs=True
)
ZERO = jnp.int32(0)


class Told(NamedTuple):
    """Steps of one environment."""

    obs: np.ndarray
    """``[T, SIZE]``, in which actions were taken."""
    action: np.ndarray
    reward: np.ndarray
    next_obs: np.ndarray
    """What followed, before any reset."""
    terminated: np.ndarray
    ended: np.ndarray


def told(env: int) -> Told:
    rng = np.random.default_rng(env)
    obs, next_obs = rng.normal(size=(2, NUM_STEPS, SIZE)).astype(np.float32)
    ended = np.isin(np.arange(NUM_STEPS), ENDS[env])
    next_obs[:-1][~ended[:-1]] = obs[1:][~ended[:-1]]
    terminated = ended & (np.arange(NUM_STEPS) == ENDS[env][env % 2])
    action = rng.integers(0, 3, NUM_STEPS).astype(np.int32)
    reward = rng.normal(size=NUM_STEPS).astype(np.float32)
    return Told(obs, action, reward, next_obs, terminated, ended)


def trajectory_of(same_step: bool) -> Trajectory:
    """Return the steps of all environments as rows; those of next-step resets are two more."""
    columns = [rows_of(told(env), same_step) for env in range(NUM_ENVS)]
    rows, log_prob = jax.tree.map(lambda *x: np.stack(x, axis=1), *columns)
    action = rows.prev_action[1:]
    return Trajectory(rows, action, Extras(action, log_prob[1:]), ZERO, ZERO, ZERO)


def rows_of(steps: Told, same_step: bool) -> tuple[EnvStep, np.ndarray]:
    none = FinalObs(np.zeros(SIZE, np.float32), False) if same_step else ()
    first = EnvStep(steps.obs[0], np.int32(0), np.float32(0), False, False, False, none)
    rows, log_probs = [first], [np.float32(0)]
    for t in range(NUM_STEPS):
        truncated = steps.ended[t] and not steps.terminated[t]
        row = EnvStep(
            steps.next_obs[t], steps.action[t], steps.reward[t], steps.terminated[t], truncated,
            False, none,
        )  # fmt: skip
        log_prob = np.float32(-1.0 - 0.1 * t)
        begins = steps.obs[t + 1] if t + 1 < NUM_STEPS else np.ones(SIZE, np.float32)
        inserted = EnvStep(begins, np.int32(1), np.float32(0), False, False, True, none)
        if steps.ended[t] and same_step:
            final = FinalObs(steps.next_obs[t], True)
            rows.append(row._replace(obs=begins, is_first=True, final=final))
        else:
            rows += [row, inserted] if steps.ended[t] else [row]
        log_probs += [log_prob] * (1 + (steps.ended[t] and not same_step))
    return jax.tree.map(lambda *x: np.stack(x), *rows), np.stack(log_probs)


def on_one_device(function: Any) -> Any:
    mapped = jax.vmap(function, axis_name="learner", axis_size=1, in_axes=None)
    return jax.jit(lambda *args: jax.tree.map(lambda x: x[0], mapped(*args)))


def of_agent(config: Any) -> tuple[Any, Any, Any]:
    agent: Any = make_agent(SPEC, config)
    run = sebulba.RunSpec(NUM_ENVS, 1, NUM_STEPS, 1)
    state = quick_state(agent, run)
    core = jax.tree.map(lambda x: x + 0.3, state.step[0].core)
    return agent, state, core


def assert_equal_trees(one: Any, two: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), one, two)


def kept(array: Any, trajectory: Trajectory) -> np.ndarray:
    """Return the cells of ``[T, B]`` that are transitions, in the order of environments."""
    array, inserted = np.asarray(array).T, np.asarray(trajectory.env_step.inserted)[1:].T
    return array[~inserted]


KERNELS = {
    "n-step": lambda v, s, rho: returns.n_step_returns(v, s, 3),
    "gae": lambda v, s, rho: returns.gae(v, s, 0.9),
    "lambda": lambda v, s, rho: returns.lambda_returns(v, s, 0.8),
    "v-trace": lambda v, s, rho: returns.vtrace(v, s, rho, trace_decay=0.9),
    "retrace": lambda v, s, rho: returns.retrace(v[:-1], v, s, rho),
}


@pytest.mark.parametrize("name", KERNELS)
def test_returns_are_those_of_next_step_resets(name):
    found = []
    for same_step in (False, True):
        trajectory = trajectory_of(same_step)
        row = trajectory.env_step
        final = jnp.asarray(row.final.obs[..., 0]) if same_step else ()
        step = returns.transitions(trajectory, DISCOUNT, final_value=final)
        assert kept(step.valid, trajectory).all()
        rho = jnp.exp(jnp.asarray(trajectory.action) * 0.3 - 0.2)
        over_envs = jax.jit(jax.vmap(KERNELS[name], in_axes=1, out_axes=1))
        result = over_envs(jnp.asarray(row.obs[..., 0]), step, rho)
        found.append([kept(leaf, trajectory) for leaf in jax.tree.leaves(result)])
    assert_equal_trees(*found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["impala", "ppo"])
def test_losses_are_those_of_next_step_resets(name):
    """With an LSTM and normalised observations, of which the value sees the last ones too."""
    changes: Any = {"lstm_size": 4, "normalize_observations": True, "torso": TORSO}
    found = []
    for same_step in (False, True):
        agent, state, core = of_agent(dataclasses.replace(AGENTS[name], minibatches=1, **changes)
                                      if name == "ppo" else ImpalaConfig(**changes))  # fmt: skip
        step_state = state.step[0]._replace(core=core)
        trajectory = trajectory_of(same_step)

        def result(networks, agent=agent, state=state, step=step_state, t=trajectory):
            taken = agent.update_experience(state.experience, step, step, t, networks)
            if name == "ppo":
                return taken.batch.advantage, taken.batch.value, taken.statistics
            loss = lambda n: agent.loss(n, (), taken, jax.random.key(0))[0]  # noqa: E731
            return *jax.value_and_grad(loss)(networks), taken.statistics

        *of_steps, statistics = on_one_device(result)(state.networks)
        if name == "ppo":
            of_steps = [kept(x, trajectory) for x in of_steps]
        found.append((of_steps, statistics.observations[0].mean))
    assert_equal_trees(*found)


@pytest.mark.slow
def test_the_loss_of_sequences_is_that_of_next_step_resets():
    found = []
    for same_step in (False, True):
        agent, state, core = of_agent(dataclasses.replace(AGENTS["r2d2"], burn_in=2, num_steps=3,
                                                          sequence_length=7))  # fmt: skip
        trajectory = trajectory_of(same_step)
        sequence = Sequence(trajectory.env_step, trajectory.action, (), core)
        agent.draw = lambda experience, key: ((), jnp.ones(NUM_ENVS))
        agent.replay = SimpleNamespace(gathered=lambda experience, draw, discount, s=sequence: s)
        agent.replay_metrics = lambda *_: {}
        agent.set_priority = lambda experience, draw, priority: priority
        opt = state.opt._replace(target=jax.tree.map(lambda x: 1.1 * x + 0.05, state.networks))

        def result(networks, agent=agent, opt=opt):
            return agent.loss(networks, opt, (), jax.random.key(0))[:2]

        found.append(on_one_device(jax.value_and_grad(result, has_aux=True))(state.networks))
    assert_equal_trees(found[0][1], found[1][1])
    (loss, (priority, _)), (other, (others, _)) = found[0][0], found[1][0]
    np.testing.assert_allclose(loss, other, rtol=1e-5)
    np.testing.assert_allclose(priority, others, rtol=1e-5)


def test_replayed_transitions_end_in_last_observations():
    replay = TransitionReplay(capacity=1000, num_steps=3)
    run = sebulba.RunSpec(NUM_ENVS, 1, NUM_STEPS, 1)
    trajectory = trajectory_of(same_step=True)._replace(extras=())
    empty = replay.new(trajectory, (), run)
    store = on_one_device(lambda s, t: replay.insert(s, t))(empty, trajectory)
    row, env = (x.ravel() for x in np.meshgrid(range(NUM_STEPS - 3), range(NUM_ENVS)))
    assert (np.asarray(store.weight)[0, : NUM_STEPS - 3] > 0).all()
    zero = np.zeros_like(row)
    draw = Draw(*map(jnp.asarray, (zero, row, env, zero, zero)))
    drawn = jax.jit(lambda s, d: replay.gathered(s, d, DISCOUNT))(store, draw)
    for i, (t, e) in enumerate(zip(row, env, strict=True)):
        steps = told(e)
        last = next((n for n in range(3) if steps.ended[t + n]), 2)
        rewards = [DISCOUNT**n * steps.reward[t + n] for n in range(last + 1)]
        discount = 0.0 if steps.terminated[t + last] else DISCOUNT ** (last + 1)
        expected = steps.obs[t], sum(rewards), discount, steps.next_obs[t + last]
        got = drawn.obs[i], drawn.reward[i], drawn.discount[i], drawn.next_obs[i]
        assert_equal_trees(got, expected)


# Adapters.


def test_disabled_and_same_step_resets_deliver_the_same():
    """So what holds of one holds of the other."""
    modes = MODES[1:]
    envs = [
        sebulba.make_env_factory(functools.partial(vector, mode, broken_envs.Good))(4, [3, 1, 4, 9])
        for mode in modes
    ]
    one, two = (env.reset() for env in envs)
    rng, ends = np.random.default_rng(0), 0
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, one, two)
        action = rng.integers(0, 2, 4).astype(np.int32)
        one, two = (env.step(action) for env in envs)
        given = one.final.given[:, None]
        two = two._replace(final=two.final._replace(obs=np.where(given, two.final.obs, 0)))
        ends += given.sum()
    assert ends


class Batched(gymnasium.vector.VectorWrapper):
    """Gives last observations in one batch, as environments on accelerators do."""

    def step(self, actions: Any) -> tuple:
        *row, info = super().step(actions)
        if "final_obs" in info:
            nothing = np.zeros(self.single_observation_space.shape, np.float32)
            given = zip(info["final_obs"], info["_final_obs"], strict=True)
            info["final_obs"] = np.stack([obs if is_there else nothing for obs, is_there in given])
        return *row, info


def test_last_observations_may_come_in_one_batch():
    make = functools.partial(vector, AutoresetMode.SAME_STEP, broken_envs.Good)
    envs = [
        sebulba.make_env_factory(lambda num_envs, seeds, wrap=wrap: wrap(make(num_envs, seeds)))(
            4, [3, 1, 4, 9]
        )
        for wrap in (lambda env: env, Batched)
    ]
    for env in envs:
        env.reset()
    for _ in range(40):
        one, two = (env.step(np.ones(4, np.int32)) for env in envs)
        jax.tree.map(np.testing.assert_array_equal, one, two)


# What is masked is said.


@pytest.mark.slow
def test_a_run_that_masks_says_so_once():
    env = sebulba.make_env_factory(broken_envs.no_final_obs_vector)
    with pytest.warns(UserWarning, match=r"info\['final_obs'\]") as caught:
        agent = make_agent(sebulba.env_spec(env), ImpalaConfig(torso=TORSO))
        with inline_loop(env, agent, 4) as loop:
            result = loop.run(loop.new_state(0, 30), 1, 30)
    assert result.counters.masked_truncations > 0
    assert len([w for w in caught if "truncation" in str(w.message)]) == 1


def test_a_run_whose_agent_masks_says_so_before_it_begins():
    class Ignores(SimplePolicyGradient):
        uses_final_obs = False

    env = sebulba.make_env_factory(broken_envs.same_step_vector)
    agent = Ignores(sebulba.env_spec(env), SimplePolicyGradientConfig(torso=TORSO))
    with pytest.warns(UserWarning, match="Ignores does not use the last observation"):
        inline_loop(env, agent, 4).close()


def test_other_runs_say_nothing():
    for make in (broken_envs.vector, broken_envs.same_step_vector):
        env = sebulba.make_env_factory(make)
        agent = make_agent(sebulba.env_spec(env), ImpalaConfig(torso=TORSO))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            inline_loop(env, agent, 4).close()


def test_a_loss_that_forgets_last_observations_is_refused():
    with pytest.raises(sebulba.UsageError, match="final_value"):
        returns.transitions(trajectory_of(same_step=True), DISCOUNT)


def test_a_network_of_ones_own_that_takes_no_last_observations_is_said_to_mask():
    class Own(Impala):
        def evaluate(self, networks, obs, core, is_first):
            return super().evaluate(networks, obs, core, is_first)

    env = sebulba.make_env_factory(broken_envs.same_step_vector)
    agent = Own(sebulba.env_spec(env), ImpalaConfig(torso=TORSO))
    with (
        pytest.warns(UserWarning, match="Own does not use the last observation"),
        inline_loop(env, agent, 4) as loop,
    ):
        result = loop.run(loop.new_state(0, 30), 1, 30)
    assert result.counters.masked_truncations > 0

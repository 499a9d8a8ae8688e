"""PQN: its targets beside an independent recursion, its loss, its exploration, its layers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from sebulba_pqn import PQNConfig

from sebulba.agents.configs import OptimizerConfig, TorsoConfig, make_agent
from sebulba.errors import UsageError
from sebulba.tools.check.agent_driver import Streams, run_spec
from sebulba.types import RunSpec, empty_env_step
from tests.agents.test_ppo import with_axis
from tests.support.agent_driver import BOX_SPEC, SPEC, quick_state

CONFIG = PQNConfig(
    discount=0.9,
    trace_decay=0.7,
    reward_scale=2.0,
    minibatches=1,
    torso=TorsoConfig(hidden_sizes=(7,), layer_norm=True),
    optimizer=OptimizerConfig("sgd", max_grad_norm=0.0),
)


class Fed:
    """An agent whose networks know the values, with a trajectory taken in."""

    def __init__(self, config: PQNConfig) -> None:
        self.agent: Any = make_agent(SPEC, config)
        state = quick_state(self.agent, run_spec())
        self.networks, self.opt = state.networks, state.opt
        acting = self.agent.acting_networks(self.networks, state.experience)
        self.trajectory, self.initial, final = Streams(self.agent, state).next(acting, 0)
        take_in = with_axis(self.agent.update_experience)
        self.experience = take_in(
            state.experience, self.initial, final, self.trajectory, self.networks
        )
        rows = self.trajectory.env_step
        given = self.networks, rows.obs, self.initial.core, rows.is_first
        self.values = np.asarray(jax.jit(self.agent.evaluate)(*given).params)


def lambda_targets(rows: Any, best: np.ndarray, discount: float, decay: float) -> np.ndarray:
    """Return the targets of Gallici et al. 2025, algorithm 1, of greatest values ``[T+1, B]``."""
    targets = np.zeros_like(best[1:])
    for env in range(best.shape[1]):
        after = best[-1, env]
        for t in reversed(range(len(targets))):
            ends = bool(rows.truncated[t + 1, env]) or t == len(targets) - 1
            mixed = best[t + 1, env] if ends else decay * after + (1 - decay) * best[t + 1, env]
            reward = 2.0 * rows.reward[t + 1, env]
            targets[t, env] = reward + (0 if rows.terminated[t + 1, env] else discount * mixed)
            after = best[t, env] if rows.is_first[t + 1, env] else targets[t, env]
    return targets


@pytest.mark.parametrize("lstm_size", [0, 4])
def test_targets_and_loss_are_those_of_the_paper(lstm_size: int) -> None:
    fed = Fed(PQNConfig(**{**vars(CONFIG), "lstm_size": lstm_size}))
    rows, batch = jax.device_get((fed.trajectory.env_step, fed.experience.batch))
    valid = ~rows.is_first[1:]
    assert valid.any() and not valid.all() and rows.terminated.any() and rows.truncated.any()
    targets = lambda_targets(rows, fed.values.max(axis=-1), 0.9, 0.7)
    found = batch.value + batch.advantage
    np.testing.assert_allclose(found[valid], targets[valid], atol=1e-4)
    taken = np.take_along_axis(fed.values[:-1], batch.raw[..., None], axis=-1)[..., 0]
    error = (targets - taken)[valid]
    loss = with_axis(fed.agent.loss)
    value, (_, metrics) = loss(fed.networks, fed.opt, fed.experience, jax.random.key(0))
    np.testing.assert_allclose(value, 0.5 * np.mean(error**2), rtol=1e-4)
    np.testing.assert_allclose(metrics["td_error"], np.mean(np.abs(error)), rtol=1e-4)


def test_epsilon_falls_over_env_steps_and_evaluation_is_greedy() -> None:
    config = PQNConfig(final_epsilon=0.0, exploration_env_steps=2 * 400 * 3, torso=CONFIG.torso)
    agent: Any = make_agent(SPEC, config)
    run = RunSpec(400, num_inferencers=2, steps_per_cycle=3, num_update_devices=1)
    state = quick_state(agent, run)
    row, shares = empty_env_step(SPEC, 400), []
    step = jax.jit(agent.step, static_argnames="explore")
    step_state = state.step[0]
    greedy, _ = step(state.networks, step_state, row, explore=False)
    for _ in range(4):
        output, step_state = step(state.networks, step_state, row)
        shares.append(np.mean(np.asarray(output.action != greedy.action)))
    others = 1 - 1 / SPEC.action_space.n  # type: ignore[attr-defined]
    np.testing.assert_allclose(shares, [others, others * 2 / 3, others / 3, 0], atol=0.08)
    assert len(np.unique(greedy.action)) == 1 and shares[-1] == 0
    later = agent.advance_step_state(state.step[0], 3)
    assert step(state.networks, later, row)[0].action.tolist() == greedy.action.tolist()


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(UsageError, match=r"must be a Discrete for PQN"):
        make_agent(BOX_SPEC, CONFIG)

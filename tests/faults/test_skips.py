"""Updates that are not finite and are skipped: nothing of them is left, all are counted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs import DQNConfig, ReplayConfig, TorsoConfig
from sebulba.agents.dqn import DQN
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.errors import NotFiniteError
from sebulba.loops import records
from sebulba.runs.exit_codes import EXIT_NOT_FINITE, exit_code_of
from tests.faults.counts import rounds
from tests.support.loop_helpers import leaves_equal, make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

STEPS = 5
FIRST_BAD = 4
"""From this cycle of each Inferencer on, its trajectories make updates that are not finite."""


class Bad(TinyAgent):
    """Adam's kind of optimizer state, and updates that go wrong on one device."""

    def new_opt(self, networks):
        return {**super().new_opt(networks), "moments": jax.tree.map(jnp.zeros_like, networks)}

    def is_bad(self, experience):
        return (experience.cycle >= FIRST_BAD) & (jax.lax.axis_index(LEARNER_AXIS) == 0)

    def optimize(self, networks, opt, grads):
        networks, new = super().optimize(networks, opt, grads)
        return networks, {**new, "moments": jax.tree.map(lambda m, g: m + g, opt["moments"], grads)}


class BadLoss(Bad):
    def loss(self, networks, opt, experience, key):
        loss, aux = super().loss(networks, opt, experience, key)
        return jnp.where(self.is_bad(experience), jnp.nan, loss), aux


class BadGradient(Bad):
    """Its loss is finite; the gradient is 0 times that of a square root at 0."""

    def loss(self, networks, opt, experience, key):
        loss, aux = super().loss(networks, opt, experience, key)
        inside = jnp.where(self.is_bad(experience), 0.0 * networks["w"].sum(), 1.0)
        return loss + 0.0 * jnp.sqrt(inside), aux


class BadMetric(Bad):
    def loss(self, networks, opt, experience, key):
        loss, (experience, metrics) = super().loss(networks, opt, experience, key)
        metrics["odd"] = jnp.where(self.is_bad(experience), jnp.inf, 0.0)
        return loss, (experience, metrics)


def make_loop(agent_class: Any = BadLoss, **options: Any) -> Any:
    options = {"schedule": "lockstep", "on_not_finite": "skip"} | options
    return make_tiny_loop(agent_class=agent_class, **options)[0]


ONE, FOUR = [0], [1, 2, 3, 4]
CASES = [
    (agent, each, d)
    for agent in (BadGradient, BadMetric, BadLoss)
    for each in (1, 3)
    for d in (ONE, FOUR)
]
CASES_SHORT = [(BadGradient, 1, ONE), (BadLoss, 1, FOUR), (BadMetric, 3, ONE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent_class", "updates_per_cycle", "devices"),
    rounds(CASES_SHORT, CASES),
)
def test_a_skipped_update_leaves_networks_and_optimizer_as_they_were(
    agent_class, updates_per_cycle, devices
):
    config = TinyConfig(updates_per_cycle=updates_per_cycle)
    with make_loop(agent_class, update_devices=devices, config=config) as loop:
        before = loop.run(loop.new_state(0, STEPS), 2 * FIRST_BAD, STEPS)
        networks, opt = jax.device_get((before.state.networks, before.state.opt))
        after = loop.run(before.state, 6, STEPS)
    assert before.counters.skipped_updates == 0
    assert after.counters.skipped_updates == 6 * updates_per_cycle
    assert after.counters.updates == (2 * FIRST_BAD + 6) * updates_per_cycle
    assert leaves_equal((networks, opt), (after.state.networks, after.state.opt))
    assert any(np.any(x) for x in jax.tree.leaves(opt["moments"]))


def test_skipped_updates_are_left_out_of_the_metrics():
    records: list[Any] = []

    class Writer:
        def write(self, metrics):
            records.append(dict(metrics))

        def close(self):
            pass

    with make_loop(metric_writer=Writer(), metrics_interval_s=0.0) as loop:
        loop.run(loop.new_state(0, STEPS), 2 * FIRST_BAD + 4, STEPS)
    assert records[-1]["skipped_updates"] == 4 and records[-1]["loss"] is None
    assert all(record["loss"] is None or np.isfinite(record["loss"]) for record in records)
    assert "skipped" not in records[0]


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_too_many_skipped_updates_end_the_run(schedule, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_SKIPPED_UPDATES", 3)
    options: dict[str, Any] = dict(schedule=schedule, metrics_interval_s=0.0)
    with (
        Checkpointer(tmp_path) as checkpointer,
        make_loop(checkpointer=checkpointer, **options) as loop,
    ):
        with pytest.raises(NotFiniteError, match=r"^4 of .* may skip 3\.") as caught:
            loop.run(loop.new_state(0, STEPS), 10_000, STEPS)
        assert loop._session.counters.skipped_updates == 4
    assert exit_code_of(caught.value) == EXIT_NOT_FINITE


def test_none_is_skipped_where_that_is_not_asked_for():
    with make_loop(on_not_finite="raise") as loop, pytest.raises(NotFiniteError, match="nan"):
        loop.run(loop.new_state(0, STEPS), 100, STEPS)


class PoisonedDQN(DQN):
    """A third of its updates go wrong, and their priorities with them."""

    def loss(self, networks, opt, experience, key):
        self._is_bad = jax.random.bernoulli(jax.random.fold_in(key, 1), 1 / 3)
        loss, aux = super().loss(networks, opt, experience, key)
        return jnp.where(self._is_bad, jnp.nan, loss), aux

    def set_priority(self, experience, draw, priority):
        wrong = jnp.where(self._is_bad, jnp.nan, priority)
        return super().set_priority(experience, draw, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("devices", rounds([ONE], [ONE, FOUR]))
def test_a_prioritized_replay_is_not_poisoned_by_what_is_skipped(devices):
    config = DQNConfig(
        torso=TorsoConfig(hidden_sizes=(8,)),
        replay=ReplayConfig(capacity=400, batch_size=8, prioritized=True, updates_per_cycle=2),
    )
    agent = PoisonedDQN(sebulba.env_spec(CountingEnv), config)
    with sebulba.GymnasiumLoop(
        CountingEnv,
        agent,
        4,
        inference_devices=[0],
        update_devices=devices,
        on_not_finite="skip",
    ) as loop:
        result = loop.run(loop.new_state(0, STEPS), 30, STEPS)
    assert 0 < result.counters.skipped_updates < result.counters.updates
    weight = np.asarray(result.state.experience.weight)
    assert np.isfinite(weight).all() and weight.sum() > 0
    assert np.isfinite(result.state.experience.max_priority)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.networks))

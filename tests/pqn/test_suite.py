"""PQN passes what every agent of Sebulba must pass; its memory is a GRU."""

from __future__ import annotations

from typing import Any

import pytest
from sebulba_pqn import PQNConfig
from sebulba_pqn.presets import PRESETS

from sebulba.agents.configs import TorsoConfig
from sebulba.configs.experiment import ExperimentConfig
from sebulba.tools.check import probe_envs
from tests.agents import test_suite as suite
from tests.support.agent_suite import AGENTS, Case

CASE = Case(
    PQNConfig(
        learning_rate=1e-2,
        discount=probe_envs.DISCOUNT,
        initial_epsilon=0.5,
        final_epsilon=0.5,
        minibatches=2,
        memory="gru",
        lstm_size=8,
        normalize_observations=True,
        torso=TorsoConfig(hidden_sizes=(32,), activation="relu", layer_norm=True),
    ),
    remembers=True,
    even={"minibatches": 1},
)


@pytest.fixture(autouse=True)
def _among_the_agents(monkeypatch: Any) -> None:
    monkeypatch.setitem(AGENTS, "pqn", CASE)


@pytest.mark.slow
def test_answers_every_question_remembers_and_is_saved(tmp_path: Any) -> None:
    suite.test_is_bit_reproducible_answers_every_question_and_is_saved("pqn", tmp_path)


@pytest.mark.slow
def test_four_devices_are_one_and_masked_cells_change_nothing() -> None:
    suite.TestUpdates().test_four_devices_are_one("pqn")
    suite.TestUpdates().test_masked_cells_change_nothing("pqn")


@pytest.mark.slow
def test_what_is_learned_from_is_what_happened() -> None:
    suite.test_what_is_learned_from_is_what_happened("pqn")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "dict"])
def test_takes_images_and_dicts(kind: str) -> None:
    suite.test_takes_images_and_dicts("pqn", kind)


def test_refuses_spaces_that_it_cannot_take() -> None:
    suite.test_refuses_spaces_that_it_cannot_take("pqn")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole_and_take_a_memory(name: str) -> None:
    made: ExperimentConfig = PRESETS[name].make()
    agent: Any = made.agent
    transitions = made.num_envs * made.steps_per_cycle
    assert transitions % agent.minibatches == 0 and made.num_envs % 8 == 0
    updates = made.num_cycles(1) * agent.epochs * agent.minibatches
    assert updates > 10_000
    assert agent.exploration_env_steps <= 0.2 * made.total_env_steps

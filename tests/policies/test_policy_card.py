"""The card that lies beside every policy."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba.agents.configs import ImpalaConfig, MultiAgentConfig, make_agent
from sebulba.commands import cli
from sebulba.policies.card import CARD_FILE, policy_card
from sebulba.types import EnvSpec
from tests.support.populations import Pairs

SPEC = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2, dtype=np.int32), name="Task-v0")
SMALL = [
    *("--num-envs", "4", "--steps-per-cycle", "5", "--num-inferencers-per-device", "1"),
    *("--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"),
    *("--metrics-interval-s", "0", "--total-env-steps", "80", "--schedule", "lockstep"),
]


def facts_of(card: str) -> dict[str, str]:
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", card, re.MULTILINE)
    return {_unescaped(name): _unescaped(value) for name, value in rows}


def _unescaped(words: str) -> str:
    return re.sub(r"\\(.)", r"\1", words)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    words = ["train", "cartpole", *SMALL, "--eval-every-env-steps", "40", "--eval-episodes", "2"]
    assert cli.main([*words, "--seed", "3", "--run-dir", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_it_says_what_was_trained_how_long_and_what_it_returned(run):
    facts = facts_of((run / "policy" / CARD_FILE).read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert facts["agent"] == "Impala" and facts["environment"] == "CartPole-v1"
    assert facts["configuration"] == "cartpole" and facts["seed"] == "3"
    assert facts["trained for"] == "80 env steps"
    assert facts["does"] == "Discrete(2, dtype=int32)" and facts["observes"].startswith("Box([-4.8")
    assert f"jax {jax.__version__}" in facts["versions"]
    last = next(r for r in reversed(records) if r.get("eval_return_mean") is not None)
    assert float(facts["evaluation"].split()[0]) == pytest.approx(
        last["eval_return_mean"], rel=1e-2
    )
    assert facts["discount"] == "0.99" and facts["torso.hidden_sizes"] == "(64, 64)"


def test_the_best_policy_says_what_it_returned(run):
    facts = facts_of((run / "best_policy" / CARD_FILE).read_text())
    best = json.loads((run / "best_policy" / "evaluation.json").read_text())["episode_return_mean"]
    said, _, words = facts["evaluation"].partition(", ")
    assert float(said) == pytest.approx(best, rel=1e-2) and words == "the best so far"


def test_what_it_says_of_its_use_is_true(run):
    card = (run / "policy" / CARD_FILE).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names = {"observation": np.zeros(4, np.float32)}
    exec(code.replace("FOLDER", str(run / "policy")), names)
    assert names["action"] in (0, 1)


@pytest.mark.slow
def test_many_agents_have_one_each(tmp_path):
    config = MultiAgentConfig({"red": ImpalaConfig(), "blue": ImpalaConfig()})
    agent = make_agent(sebulba.env_spec(Pairs), config)
    acting = {
        name: member.agent.acting_networks(member.agent.new_networks(jax.random.key(0)), ())
        for name, member in agent.members.items()
    }
    sebulba.save_policy(tmp_path, agent, acting, about={"seed": 7})
    facts = facts_of((tmp_path / CARD_FILE).read_text())
    assert facts["seed"] == "7" and facts["environment"] == agent.spec.name
    for member in agent.members:
        of_member = facts_of((tmp_path / member / CARD_FILE).read_text())
        assert of_member["member"] == member and of_member["seed"] == "7"


def test_no_name_breaks_the_page():
    odd = 'x"]\n# <script>alert(1)</script> | ![a](http://b)'
    spec = EnvSpec(SPEC.observation_space, SPEC.action_space, name=odd)
    card = policy_card(make_agent(spec, ImpalaConfig()), spec, {"a | b\n": "`c`" * 200})
    tags = next(line for line in card.splitlines() if line.startswith("tags: "))
    assert odd in json.loads(tags.removeprefix("tags: "))
    below = card.partition("---\n\n")[2]
    assert "<script" not in re.sub(r"\\<", "", below) and "![" not in below
    rows = [line for line in below.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)

"""Programs as an accelerator gets them: a GPU reads the predicate of a condition back."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.envs import make_env_factory
from sebulba.support.platforms import cond_on_cpu
from sebulba.transport.item import Item
from tests.envs.test_jax_envs import EchoEnv
from tests.support.agent_suite import AGENTS


def conditions(text: str) -> list[str]:
    """Return the conditions of a lowered program that choose between branches as it runs."""
    constants = set(re.findall(r"(%\w+) = stablehlo\.constant", text))
    found = []
    for match in re.finditer(r'"stablehlo\.case"\((%\w+)\) \(', text):
        depth, branches = 0, 0
        for character in text[match.end() :]:
            depth += (character == "{") - (character == "}")
            branches += character == "{" and depth == 1
            if character == ")" and not depth:
                break
        if branches > 1 and match[1] not in constants:
            found.append(text[match.start() : match.end() + 200])
    return found


def lowered(function, *arguments, platform="cuda") -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def test_a_condition_of_a_cpu_is_found_and_gone_on_a_gpu():
    def sorts(predicate, x):
        return cond_on_cpu(predicate, lambda: jnp.sort(x), lambda: x)

    given = True, jnp.array([3.0, 1.0])
    assert len(conditions(lowered(sorts, *given, platform="cpu"))) == 1
    assert not conditions(lowered(sorts, *given))
    assert jax.jit(sorts)(*given).tolist() == [1.0, 3.0]
    assert jax.jit(sorts)(False, given[1]).tolist() == [3.0, 1.0]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", AGENTS)
def test_no_update_has_a_condition_on_a_gpu(name):
    driver = AGENTS[name].driver(1)
    updater, made = driver.updater, driver.made()
    given = driver._hand_off(Item(*made, step_infos=()))[:3]
    updater._find_metrics(given)
    program = updater._program(given, 1)
    arguments = *updater._owned(given), updater._key_data, np.uint32(0)
    text = program._jitted.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert not conditions(text)


def test_an_environment_in_jax_resets_without_a_condition_on_a_gpu():
    adapter = make_env_factory(EchoEnv)(4, [0, 1, 2, 3])
    fused = adapter.fused()
    action = jnp.zeros(4, jnp.int32)
    assert not conditions(lowered(fused.step, fused.state, action))
    assert conditions(lowered(fused.step, fused.state, action, platform="cpu"))

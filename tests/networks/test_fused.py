"""The network engine in fused cycles: compiled programs step it, as Python does."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from sebulba_networks import CART_POLE, CONGESTION_CONTROL, SHARED_BOTTLENECK, build, jax_call

from sebulba.envs import make_env_factory
from sebulba.errors import EnvError, UsageError
from tests.envs.test_adapters import run_fused
from tests.inference.test_cycle_position import NUM_ENVS, World
from tests.support.needs import needs_compiler

pytestmark = needs_compiler

LINK = {"bandwidth_mbps": (2, 8), "rtt_ms": (4, 20), "buffer_packets": (5, 60)}
FLOWS = {"num_agents": 3, "join_s": (0, 0.3), "stay_s": (0.1, 0.5), "max_episode_steps": 12}


def exponents(rng, *shape):
    return rng.uniform(-1, 1, (*shape, 1)).astype(np.float32)


KINDS = {
    CONGESTION_CONTROL: (
        {**LINK, "random_loss": 0.01, "max_episode_steps": 9},
        lambda rng, t, b: exponents(rng, t, b),
    ),
    SHARED_BOTTLENECK: ({**LINK, **FLOWS}, lambda rng, t, b: {"flow": exponents(rng, t, b, 3)}),
    CART_POLE: ({}, lambda rng, t, b: rng.integers(2, size=(t, b), dtype=np.int32)),
}


def factory(env, **options):
    return make_env_factory(env, **KINDS[env][0] | options)


def stepped(adapter, actions):
    """Return the outputs of an adapter after its reset, ``[T, B, ...]``."""
    adapter.reset()
    outputs = [
        adapter.step(jax.tree.map(lambda x, t=t: x[t], actions))
        for t in range(len(jax.tree.leaves(actions)[0]))
    ]
    adapter.close()
    return jax.tree.map(lambda *x: np.stack(x), *outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "num_envs"),
    [(CONGESTION_CONTROL, 1), (CONGESTION_CONTROL, 20), (SHARED_BOTTLENECK, 3), (CART_POLE, 20)],
)
def test_fused_and_stepped_networks_are_the_same(env, num_envs):
    actions = KINDS[env][1](np.random.default_rng(0), 60, num_envs)
    make = factory(env, num_threads=2)
    fused, num_invalid = run_fused(make(num_envs, list(range(num_envs))), actions)
    expected = stepped(make(num_envs, list(range(num_envs))), actions)
    jax.tree.map(np.testing.assert_array_equal, fused, expected)
    jax.tree.map(lambda x, y: x.dtype == y.dtype or pytest.fail(), fused, expected)
    assert not num_invalid.any() and expected.episode_end.any()


@pytest.mark.parametrize(
    ("env", "wrong", "clamped"),
    [
        (CART_POLE, np.array([[-1, 0, 7]], np.int32), np.array([[0, 0, 1]], np.int32)),
        (
            CONGESTION_CONTROL,
            np.array([[[np.nan], [1], [np.inf]]], np.float32),
            np.array([[[0], [1], [2]]], np.float32),
        ),
    ],
)
def test_actions_outside_the_space_are_clamped_and_counted(env, wrong, clamped):
    outputs, num_invalid = run_fused(factory(env)(3, [1, 2, 3]), wrong)
    expected, none_invalid = run_fused(factory(env)(3, [1, 2, 3]), clamped)
    jax.tree.map(np.testing.assert_array_equal, outputs, expected)
    assert num_invalid.tolist() == [2] and none_invalid.tolist() == [0]


def test_a_program_that_outlives_its_network_gets_an_error():
    closed, other = (factory(CART_POLE)(NUM_ENVS, [1, 2, 3]) for _ in range(2))
    programs = []
    for adapter in (closed, other):
        adapter.reset()
        fused = adapter.fused()
        assert not jax.make_jaxpr(fused.step)(fused.state, np.zeros(3, np.int32)).effects
        programs.append((jax.jit(fused.step), fused.state))
    closed.close()
    closed.close()
    with pytest.raises(Exception, match="this network is closed"):
        jax.block_until_ready(programs[0][0](programs[0][1], np.zeros(3, np.int32)))
    jax.block_until_ready(programs[1][0](programs[1][1], np.zeros(3, np.int32)))
    with pytest.raises(Exception, match="another number of environments"):
        jax.block_until_ready(programs[0][0](programs[1][1], np.zeros((4,), np.int32)))
    with pytest.raises(EnvError, match="closed"):
        closed.fused()
    other.close()


@pytest.mark.parametrize("kinds", [("fused", "fused"), ("fused", "stepped"), ("stepped", "fused")])
def test_a_cycle_goes_on_from_where_another_was_fused_or_stepped(kinds):
    worlds = [World(factory(CART_POLE), kind) for kind in kinds]
    (first, back), step_state = (world.cycle(10) for world in worlds), worlds[0].step_state
    first.reset()
    _, step_state = worlds[0].run(first, jax.tree.map(lambda x: x.copy(), step_state), 2)
    kept = jax.tree.map(lambda x: x.copy(), step_state)
    position = first.position()
    expected, _ = worlds[0].run(first, step_state, 12)
    with pytest.raises(EnvError, match="saved state"):
        back.put_back(position[:-1])
    back.put_back(position)  # and no reset
    outputs, _ = worlds[1].run(back, kept, 12)
    jax.tree.map(np.testing.assert_array_equal, outputs, expected)
    assert any(len(output.step_infos.episode_returns) for output in outputs)


def test_what_cannot_be_called_by_xla_is_stepped(monkeypatch):
    assert World(factory(CART_POLE), "auto").cycle(0).kind == "fused"

    def fail():
        raise UsageError("no compiler")

    monkeypatch.setattr(jax_call, "_load", fail)
    assert World(factory(CART_POLE), "auto").cycle(0).kind == "stepped"
    with pytest.raises(UsageError, match=r"XLA cannot call the network engine \(no compiler\)"):
        World(factory(CART_POLE), "fused").cycle(0)


def test_headers_with_other_contents_make_another_library(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda command, kept: kept.touch())
    kept = []
    for folder, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder).mkdir()
        header = tmp_path / folder / "ffi.h"
        header.write_text(content)
        sources = [jax_call.MAIN, header]
        kept.append(build.compiled("x", jax_call.MAIN, (), sources, headers=header.parent))
    assert kept[0] == kept[1] != kept[2]

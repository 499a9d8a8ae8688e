"""CrossQ's critics and SimBa's blocks beside NumPy, and the averages that follow batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.configs import SACConfig, TorsoConfig
from sebulba.agents.configs.replay import TargetConfig
from sebulba.agents.kernels.averages import AVERAGES, following, with_averages
from sebulba.agents.nets.actor_and_critic import BatchRenorm
from sebulba.agents.nets.torso import MLP
from sebulba.agents.sac import SAC
from sebulba.errors import UsageError
from tests.agents.test_discrete_sac import THREE
from tests.agents.test_discrete_sac import TRANSITIONS as DISCRETE
from tests.support.actor_critic import TRANSITIONS, UNBOUNDED, GivenReplay

CONFIG = SACConfig(crossq=True, torso=TorsoConfig(hidden_sizes=(5,), activation="relu"))


def on_one_device(function: Any, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, called where the axis of one update device is bound."""
    one = jax.tree.map(lambda x: jnp.asarray(x)[None], arguments)
    mapped = jax.vmap(function, axis_name="learner")
    return jax.tree.map(lambda x: x[0], jax.jit(mapped)(*one))


# Averages.


def test_averages_follow_and_all_else_is_optimized() -> None:
    networks = {"layer": {"kernel": jnp.ones(2), AVERAGES: {"mean": jnp.asarray([1.0, 2.0])}}}
    newest = jnp.asarray([3.0, -2.0])
    optimizer = with_averages(optax.adam(0.1), 0.25)
    opt, mean = optimizer.init(networks), np.asarray([1.0, 2.0])

    def loss(networks: Any) -> Any:
        layer = networks["layer"]
        return jnp.sum(layer["kernel"]) + following(layer[AVERAGES], {"mean": newest})

    for _ in range(5):
        value, gradient = jax.value_and_grad(loss)(networks)
        assert value == jnp.sum(networks["layer"]["kernel"])
        updates, opt = optimizer.update(gradient, opt, networks)
        networks = optax.apply_updates(networks, updates)
        mean = 0.75 * mean + 0.25 * np.asarray(newest)
    np.testing.assert_allclose(networks["layer"][AVERAGES]["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(networks["layer"]["kernel"], 0.5, rtol=1e-4)


# Batch renormalisation.


def batch_renorm(x: Any, p: Any, *, corrects: bool) -> np.ndarray:
    """Return Ioffe 2017, algorithm 1, number by number."""
    running, out = p[AVERAGES], np.zeros(x.shape)
    for f in range(x.shape[1]):
        mean = sum(x[:, f]) / len(x)
        deviation = np.sqrt(sum((x[:, f] - mean) ** 2) / len(x) + 1e-3)
        known = np.sqrt(running["variance"][f] + 1e-3)
        r, d = 1.0, 0.0
        if corrects:
            r = min(max(deviation / known, 1 / 3), 3)
            d = min(max((mean - running["mean"][f]) / known, -5), 5)
        for n in range(len(x)):
            out[n, f] = ((x[n, f] - mean) / deviation * r + d) * p["scale"][f] + p["bias"][f]
    return out


def some_parameters(rng: Any, width: int) -> Any:
    return {
        AVERAGES: {"mean": rng.normal(size=width), "variance": rng.uniform(0.05, 4, size=width)},
        "scale": rng.normal(size=width),
        "bias": rng.normal(size=width),
    }


@pytest.mark.parametrize("corrects", [False, True])
def test_batch_renormalisation_is_that_of_the_paper(corrects: bool) -> None:
    rng = np.random.default_rng(0)
    x, p = rng.normal(loc=3.0, scale=2.0, size=(6, 8)), some_parameters(rng, 8)
    x[:, 0] *= 9.0  # beyond the limits of r and d
    updates = BatchRenorm.first_updates - (not corrects)

    def apply(x: Any) -> Any:
        return BatchRenorm().apply({"params": p}, x, jnp.int32(updates), mutable=AVERAGES)

    got, sown = on_one_device(apply, x.astype(np.float32))
    np.testing.assert_allclose(got, batch_renorm(x, p, corrects=corrects), atol=2e-4)
    assert len(jax.tree.leaves(sown)) == 1

    running = p[AVERAGES]
    quiet = BatchRenorm().apply({"params": p}, x.astype(np.float32))
    wanted = (x - running["mean"]) / np.sqrt(running["variance"] + 1e-3) * p["scale"] + p["bias"]
    np.testing.assert_allclose(quiet, wanted, rtol=1e-3, atol=1e-4)


def test_no_gradient_goes_through_the_corrections() -> None:
    rng = np.random.default_rng(1)
    p, x = some_parameters(rng, 3), rng.normal(size=(4, 3)).astype(np.float32)

    def output(x: Any, updates: int) -> Any:
        return BatchRenorm().apply({"params": p}, x, jnp.int32(updates), mutable=AVERAGES)[0]

    def slope(updates: int) -> Any:
        weight = jnp.arange(12.0).reshape(4, 3) ** 2
        return on_one_device(jax.grad(lambda x: jnp.sum(weight * output(x, updates))), x)

    r = np.clip(np.sqrt(x.var(axis=0) + 1e-3) / np.sqrt(p[AVERAGES]["variance"] + 1e-3), 1 / 3, 3)
    np.testing.assert_allclose(slope(100_000), np.asarray(slope(0)) * r, rtol=1e-3, atol=1e-4)


# The loss of CrossQ.


def critic_in_numpy(p: Any, obs: Any, action: Any) -> np.ndarray:
    """Return the outputs of a critic on a batch, ``[N, outputs]``: layers as in Bhatt et al."""
    mlp = p
    x = batch_renorm(np.concatenate([obs, action], axis=1), p["BatchRenorm_0"], corrects=False)
    x = np.maximum(x @ mlp["Dense_0"]["kernel"] + mlp["Dense_0"]["bias"], 0.0)
    x = batch_renorm(x, mlp["BatchRenorm_1"], corrects=False)
    return x @ p["head"]["kernel"] + p["head"]["bias"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_critics_see_both_observations_in_one_batch_and_are_their_own_targets(kind: str) -> None:
    is_box = kind == "continuous"
    agent: Any = SAC(UNBOUNDED if is_box else THREE, CONFIG)
    given = TRANSITIONS if is_box else DISCRETE
    replay = GivenReplay(agent, (1.0, 0.5))
    replay.gathered = lambda *_: given  # type: ignore[method-assign]
    networks = jax.device_get(agent.new_networks(jax.random.key(1)))
    opt = agent.new_opt(networks)
    assert opt.target == ()
    draw = (jnp.full((2, 1), 0.3), jnp.asarray([0.1, 0.2]))
    chances = jnp.asarray([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]])
    drawn = draw if is_box else (chances, jnp.sum(chances * jnp.log(chances), axis=1))
    agent.sampled = lambda *_: drawn

    def loss(networks: Any) -> Any:
        key = jax.random.key(0)
        return jax.value_and_grad(agent.loss, has_aux=True)(networks, opt, (), key)

    (total, (_, metrics)), gradient = on_one_device(loss, networks)

    obs = np.concatenate([given.obs, given.next_obs])
    action = np.concatenate([given.action, drawn[0]]) if is_box else np.zeros((4, 0))
    outputs = np.stack([critic_in_numpy(p, obs, action) for p in networks["critics"]])
    now, then = outputs[:, :2], outputs[:, 2:]
    if is_box:
        values, least = now[..., 0], then[..., 0].min(axis=0)
    else:
        taken = np.asarray(given.action) - 2
        values = now[:, [0, 1], taken]
        least = np.sum(np.asarray(chances) * then.min(axis=0), axis=1)
    target = np.asarray(given.reward) + np.asarray(given.discount) * (least - np.asarray(drawn[1]))
    errors = values - target
    wanted = 0.5 * np.sum(np.mean([1.0, 0.5] * errors**2, axis=1))
    assert metrics["critic_loss"] == pytest.approx(wanted, rel=1e-3)
    assert np.isfinite(total)

    first = networks["critics"][0]["BatchRenorm_0"][AVERAGES]
    moved = gradient["critics"][0]["BatchRenorm_0"][AVERAGES]
    inputs = np.concatenate([obs, action], axis=1)
    np.testing.assert_allclose(first["mean"] - moved["mean"], inputs.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(first["variance"] - moved["variance"], inputs.var(0), atol=1e-4)


def test_running_moments_move_with_the_critics_and_values_use_them() -> None:
    agent: Any = SAC(UNBOUNDED, CONFIG)
    networks = agent.new_networks(jax.random.key(0))
    opt = agent.new_opt(networks)
    grads = jax.tree.map(jnp.ones_like, networks)
    learned, opt = jax.jit(agent.optimize)(networks, opt, grads)
    assert isinstance(opt, Opt) and opt.target == ()
    before, after = (n["critics"][1]["BatchRenorm_1"] for n in (networks, learned))
    np.testing.assert_allclose(before[AVERAGES]["mean"] - after[AVERAGES]["mean"], 0.01)
    np.testing.assert_allclose(before["scale"] - after["scale"], CONFIG.critic_learning_rate, 1e-3)
    obs = agent.encode(TRANSITIONS.obs, num_leading=1)
    one, other = (agent.values(n["critics"], obs, TRANSITIONS.action) for n in (networks, learned))
    assert one.shape == (2, 2) and np.all(one != other)


# Residual blocks.


def layer_norm(x: Any) -> np.ndarray:
    mean, variance = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6)


def test_residual_blocks_are_those_of_simba() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    mlp = MLP(TorsoConfig(hidden_sizes=(6, 6), residual=True))
    variables: Any = mlp.init(jax.random.key(0), x)
    p = jax.device_get(variables["params"])
    shapes = {name: p[name]["kernel"].shape for name in p if name.startswith("Dense")}
    assert list(shapes.values()) == [(4, 6), (6, 24), (24, 6), (6, 24), (24, 6)]
    h = x @ p["Dense_0"]["kernel"]
    for wide, narrow in (("Dense_1", "Dense_2"), ("Dense_3", "Dense_4")):
        h = h + np.maximum(layer_norm(h) @ p[wide]["kernel"], 0.0) @ p[narrow]["kernel"]
    np.testing.assert_allclose(mlp.apply(variables, x), layer_norm(h), atol=1e-4)
    assert isinstance(mlp, nn.Module)


@pytest.mark.parametrize("sizes", [(64, 32), ()])
def test_residual_blocks_of_other_sizes_are_refused(sizes: Any) -> None:
    with pytest.raises(UsageError, match=r"torso.hidden_sizes=.* must be alike .* use sizes such"):
        dataclasses.replace(TorsoConfig(), hidden_sizes=sizes, residual=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": TargetConfig(rate=0.1)}, "target=.*has no use with crossq.*; leave it out"),
        ({"torso": TorsoConfig(residual=True)}, "torso.residual=True cannot be.*; leave one out"),
        ({"torso": TorsoConfig(layer_norm=True)}, "torso.layer_norm=True cannot be"),
    ],
)
def test_what_crossq_would_ignore_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SACConfig(crossq=True, **options)

"""Updates a second from a data set: TD3+BC here, and as libraries of single files write it.

    python -m benchmarks.studies.offline_speed DATASET [--updates 4000] [--rounds 3]

The other form is written here after that of JAX-CORL (github.com/nissymori/JAX-CORL): a jitted
function of eight unrolled updates that draws from a data set in one array for each part. Both have
the same networks, batches and optimizer, and an actor that learns in each update. Both forms take
turns. A row of JSON for each round.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

JITTED_UPDATES = 8
BATCH = 256
HIDDEN = (256, 256)
RATE, TARGET_RATE, DISCOUNT = 3e-4, 0.005, 0.99
ALPHA, NOISE, NOISE_CLIP = 2.5, 0.2, 0.5


class Rows(NamedTuple):
    """Transitions, ``[R, ...]``."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array
    done: jax.Array


class State(NamedTuple):
    """Networks, their targets, and the states of their optimizers."""

    actor: Any
    critics: Any
    target_actor: Any
    target_critics: Any
    actor_opt: Any
    critics_opt: Any


def transitions(folder: str) -> Rows:
    """Return the transitions of a data set, with observations normalised."""
    from sebulba_offline.dataset import load

    rows = load(folder).rows
    starts = np.flatnonzero(~(rows.terminated | rows.truncated))
    obs = (rows.obs - rows.obs.mean(0)) / (rows.obs.std(0) + 1e-5)
    after = starts + 1
    arrays = obs[starts], rows.action[starts], rows.reward[after], obs[after]
    return Rows(*(jnp.asarray(x, jnp.float32) for x in (*arrays, rows.terminated[after])))


def new_mlp(key: jax.Array, sizes: tuple[int, ...]) -> list[tuple[jax.Array, jax.Array]]:
    """Return the kernels and biases of a multilayer perceptron."""
    keys = jax.random.split(key, len(sizes) - 1)
    make = jax.nn.initializers.orthogonal(2.0**0.5)
    layers = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(make(key, (low, high)), jnp.zeros(high)) for key, low, high in layers]


def mlp(layers: Any, x: jax.Array) -> jax.Array:
    """Apply it."""
    for kernel, bias in layers[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    kernel, bias = layers[-1]
    return x @ kernel + bias


def values(critics: Any, obs: jax.Array, action: jax.Array) -> jax.Array:
    """Return the values of both critics, ``[2, N]``."""
    x = jnp.concatenate([obs, action], axis=-1)
    return jnp.stack([mlp(critic, x)[:, 0] for critic in critics])


ADAM = optax.adam(RATE)


def new_state(key: jax.Array, rows: Rows) -> State:
    """Return new networks."""
    keys = jax.random.split(key, 3)
    obs, action = rows.obs.shape[1], rows.action.shape[1]
    actor = new_mlp(keys[0], (obs, *HIDDEN, action))
    critics = [new_mlp(one, (obs + action, *HIDDEN, 1)) for one in keys[1:]]
    target_actor, target_critics = jax.tree.map(jnp.copy, (actor, critics))
    opts = ADAM.init(actor), ADAM.init(critics)
    return State(actor, critics, target_actor, target_critics, *opts)


def moved(target: Any, networks: Any) -> Any:
    """Return targets that followed."""
    return jax.tree.map(lambda t, x: t + TARGET_RATE * (x - t), target, networks)


def update(state: State, rows: Rows, key: jax.Array) -> State:
    """Take one step of critics and actor (Fujimoto and Gu 2021, arXiv 2106.06860)."""
    draw_key, noise_key = jax.random.split(key)
    index = jax.random.randint(draw_key, (BATCH,), 0, len(rows.obs))
    batch = jax.tree.map(lambda x: x[index], rows)
    noise = NOISE * jax.random.normal(noise_key, batch.action.shape)
    following = jnp.tanh(mlp(state.target_actor, batch.next_obs))
    following = jnp.clip(following + jnp.clip(noise, -NOISE_CLIP, NOISE_CLIP), -1, 1)
    next_value = jnp.min(values(state.target_critics, batch.next_obs, following), axis=0)
    target = batch.reward + DISCOUNT * (1 - batch.done) * next_value

    def critic_loss(critics: Any) -> jax.Array:
        error = values(critics, batch.obs, batch.action) - target
        return jnp.mean(jnp.sum(jnp.square(error), axis=0))

    change, critics_opt = ADAM.update(jax.grad(critic_loss)(state.critics), state.critics_opt)
    critics: Any = optax.apply_updates(state.critics, change)

    def actor_loss(actor: Any) -> jax.Array:
        action = jnp.tanh(mlp(actor, batch.obs))
        value = values(critics[:1], batch.obs, action)[0]
        size = jax.lax.stop_gradient(jnp.mean(jnp.abs(value)))
        return jnp.mean(jnp.square(action - batch.action)) - ALPHA * jnp.mean(value) / size

    change, actor_opt = ADAM.update(jax.grad(actor_loss)(state.actor), state.actor_opt)
    actor: Any = optax.apply_updates(state.actor, change)
    return State(
        actor,
        critics,
        moved(state.target_actor, actor),
        moved(state.target_critics, critics),
        actor_opt,
        critics_opt,
    )


@jax.jit
def several(state: State, rows: Rows, key: jax.Array) -> State:
    """Take eight steps."""
    for one in jax.random.split(key, JITTED_UPDATES):
        state = update(state, rows, one)
    return state


def plain(folder: str, updates: int) -> float:
    """Return the updates a second of the other form; the first of them compile."""
    rows = transitions(folder)
    state = new_state(jax.random.key(0), rows)
    keys = iter(jax.random.split(jax.random.key(1), 1 + updates // JITTED_UPDATES))
    state = jax.block_until_ready(several(state, rows, next(keys)))
    began = time.perf_counter()
    for key in keys:
        state = several(state, rows, key)
    jax.block_until_ready(state)
    return updates / (time.perf_counter() - began)


def ours(folder: str, env: str, updates: int) -> float:
    """Return the updates a second of a whole training here, between two records of metrics."""
    from sebulba_offline.configs import TD3BCConfig
    from sebulba_offline.dataset import read_record
    from sebulba_offline.presets import REPLAY, SIZES
    from sebulba_offline.td3_bc import TD3BC

    import sebulba
    from sebulba.agents.configs import TorsoConfig

    config = TD3BCConfig(
        dataset=folder,
        learning_rate=RATE,
        critic_learning_rate=RATE,
        normalize_observations=True,
        torso=TorsoConfig(hidden_sizes=HIDDEN, activation="relu"),
        replay=REPLAY,
    )
    seen: list[tuple[float, int]] = []
    spec = sebulba.env_spec(env)
    steps = {name: SIZES[name] for name in ("num_envs", "num_inferencers_per_device", "schedule")}
    devices: Any = {"inference_devices": [0], "update_devices": [0]}
    with sebulba.GymnasiumLoop(
        env,
        TD3BC(spec, config),
        callbacks=[lambda record: seen.append((time.perf_counter(), record["updates"]))],
        metrics_interval_s=0.5,
        **steps,
        **devices,
    ) as loop:
        rows = int(read_record(folder)["rows"]) + BATCH * updates
        loop.train(total_env_steps=rows, steps_per_cycle=SIZES["steps_per_cycle"])
    learning = [one for one in seen if one[1]][1:]  # after the record that has the compilation
    (began, before), (ended, after) = learning[0], learning[-1]
    return (after - before) / (ended - began)


def main() -> None:
    """Take turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--env", default="HalfCheetah-v4")
    parser.add_argument("--updates", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for number in range(given.rounds):
        rates = {
            "here": ours(given.dataset, given.env, given.updates),
            "single_file": plain(given.dataset, given.updates),
        }
        share = rates["here"] / rates["single_file"]
        row = {name: round(rate) for name, rate in rates.items()}
        print(json.dumps({"round": number, **row, "share": round(share, 2)}), flush=True)


if __name__ == "__main__":
    main()

"""What a league costs beside self-play: ``python -m benchmarks.studies.league_costs``.

Acting for 256 rows with 1, 4 and 16 opponents, in a scan as a fused cycle has it, and one call a
step as a stepped one has it; publishing networks of 7 MiB; memory while 50 snapshots come.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from sebulba_league.config import LeagueConfig

import sebulba
from benchmarks.studies.tables import table
from sebulba import Act, AgentNode, Obs, Population
from sebulba.agent import Agent, with_bank
from sebulba.agents.configs import PPOConfig, TorsoConfig, make_agent
from sebulba.envs import make_env_factory
from sebulba.inference.cycle import env_step_of, no_action
from sebulba.learning.update import Updater
from sebulba.tools.bench import harness
from sebulba.tools.bench.memory_use import rss_bytes
from sebulba.transport.mesh import UpdateMesh
from sebulba.transport.staging import Staged, Staging
from sebulba.types import RunSpec

NUM_ENVS, STEPS, LANES = 128, 100, (1, 4, 16)
"""Games of two rows each, steps of a round, and opponents at once."""
SIZES: Mapping[str, tuple[int, ...]] = {"64, 64": (64, 64), "256, 256": (256, 256)}
LARGE = TorsoConfig(hidden_sizes=(1330, 1330))
"""7 MiB of float32."""
MIB = 2**20


class Endless:
    """Two seats act at once in a game without an end, whose observations follow from actions."""

    node = AgentNode(Obs(spaces.Box(-1, 1, (32,), np.float32)), Act(spaces.Discrete(4)))
    tree = Population({"seat_0": node, "seat_1": node}, payoff="zero_sum", symmetric=True)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Begin anywhere."""
        state = jax.random.uniform(key, (2, 32), minval=-1.0)
        return {"seat": state}, state

    def step(self, key: jax.Array, state: jax.Array, actions: Any) -> Any:
        """Move each seat's observation by its action."""
        state = jnp.sin(1.3 * state + actions["seat"][:, None])
        return {"seat": state}, state, {"seat": jnp.zeros(2)}, False, False


class Short(Endless):
    """The same, over after a step."""

    def step(self, key: jax.Array, state: jax.Array, actions: Any) -> Any:
        """End."""
        obs, state, reward, _, _ = super().step(key, state, actions)
        return obs, state, reward, True, False


def agent_of(torso: TorsoConfig, opponents: int, env: type = Endless, **fields: Any) -> Agent:
    """Return self-play, or with opponents a league without anchors and mirrors."""
    config: Any = PPOConfig(torso=torso, epochs=1, minibatches=1)
    if opponents:
        config = LeagueConfig({"*": config}, opponents=opponents, mirrors=0, **fields)
    return make_agent(sebulba.env_spec(env), config)


def acting_cases(agent: Agent, *, both: bool) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return what measures microseconds a step, fused and stepped.

    Args:
      agent: Of ``Endless``.
      both: Half of the games of a league belong to the match before the last.
    """
    env: Any = make_env_factory(Endless)(NUM_ENVS, list(range(NUM_ENVS)))
    output = env.reset()
    fused = env.fused()
    run = RunSpec(NUM_ENVS, num_inferencers=1, steps_per_cycle=STEPS, num_update_devices=1)
    state: Any = agent.new_state(jax.random.key(0), run)
    networks = agent.acting_networks(state.networks, state.experience)
    bank, step_state = agent.bank(state.experience), state.step[0]
    if isinstance(agent.config, LeagueConfig):
        bank = bank._replace(matches=bank.matches._replace(number=bank.matches.number + 1))
        match = 1 - both * (jnp.arange(NUM_ENVS) % 64 < 32).astype(jnp.int32)
        step_state = step_state._replace(playing=step_state.playing._replace(match=match))
    networks = with_bank(networks, bank)
    row = jax.tree.map(jnp.asarray, env_step_of(output, no_action(env)))
    row = row._replace(is_first=jax.tree.map(jnp.zeros_like, row.is_first))
    act = jax.jit(agent.step)

    @jax.jit
    def cycle(networks: Any, carry: Any) -> Any:
        def one(carry: Any, _: None) -> Any:
            step_state, env_state, row = carry
            output, step_state = agent.step(networks, step_state, row)
            env_state, seen, _ = fused.step(env_state, output.action)
            row = jax.tree.map(
                lambda x, y: jnp.asarray(x, y.dtype), env_step_of(seen, output.action), row
            )
            return (step_state, env_state, row), seen.reward

        return jax.lax.scan(one, carry, None, length=STEPS)

    def scanned() -> float:
        began = time.perf_counter()
        jax.block_until_ready(cycle(networks, (step_state, fused.state, row)))
        return 1e6 * (time.perf_counter() - began) / STEPS

    host_row = jax.device_get(row)

    def called() -> float:
        began, state = time.perf_counter(), step_state
        for _ in range(STEPS):
            output, state = act(networks, state, host_row)
            jax.device_get(output.action)
        return 1e6 * (time.perf_counter() - began) / STEPS

    return scanned, called


def measure_acting(repeats: int) -> None:
    """Print microseconds a step, and ratios to one opponent in the steady state."""
    for size, hidden in SIZES.items():
        torso = TorsoConfig(hidden_sizes=hidden)
        cases: dict[str, Callable[[], float]] = {}
        for name, opponents, both in [
            ("self-play", 0, False),
            *((f"{k} opponents", k, False) for k in LANES),
            *((f"{k} opponents, both generations", k, True) for k in LANES),
        ]:
            fused, stepped = acting_cases(agent_of(torso, opponents), both=both)
            cases |= {f"{name}; fused": fused, f"{name}; stepped": stepped}
        figures = harness.interleave(cases, repeats)
        lines = []
        for name in dict.fromkeys(name.split(";")[0] for name in cases):
            line = [name]
            for kind in ("fused", "stepped"):
                own, one = f"{name}; {kind}", f"1 opponents; {kind}"
                line += [
                    f"{statistics.median(figures[own]):.0f}",
                    f"{harness.ratio(figures, own, one):.2f}",
                ]
            lines.append(line)
        columns = [f"hidden {size}", "fused, us a step", "ratio", "stepped, us a step", "ratio"]
        print(table(columns, lines), flush=True)


def measure_publishing(repeats: int) -> None:
    """Print milliseconds of publishing networks of 7 MiB, with and without 16 opponents."""
    run = RunSpec(64, num_inferencers=1, steps_per_cycle=1, num_update_devices=1)
    cases: dict[str, Callable[[], float]] = {}
    for name, opponents in (("self-play", 0), ("league of 16", 16)):
        agent = agent_of(LARGE, opponents, history=17)
        updater = Updater(agent, UpdateMesh(jax.devices()[:1]), jax.random.key(1))
        updater.begin(run)
        updater.place(agent.new_state(jax.random.key(0), run))
        staging, kept = Staging(), updater.bank()
        size = sum(x.nbytes for x in jax.tree.leaves(updater.acting_networks()))
        print(
            f"{name}: networks of {size / MIB:.1f} MiB, a bank of "
            f"{sum(x.nbytes for x in jax.tree.leaves(kept)) / MIB:.0f}"
        )

        def publish(updater: Any, staging: Staging, kept: Any = None) -> float:
            began = time.perf_counter()
            bank = updater.bank() if kept is None else kept
            networks = with_bank(updater.acting_networks(), bank)
            jax.block_until_ready(networks)
            staging.publish(Staged(0, networks))
            return 1e3 * (time.perf_counter() - began)

        cases[name] = functools.partial(publish, updater, staging, kept)
    edited = functools.partial(publish, updater, Staging())
    figures = harness.interleave(cases, repeats)
    # Alone: it copies and frees a bank, which would slow what comes next.
    figures["after an edit"] = [edited() for _ in range(repeats)]
    lines = [
        [
            name,
            f"{statistics.median(values):.2f}",
            f"{harness.ratio(figures, name, 'self-play'):.2f}",
        ]
        for name, values in figures.items()
    ]
    print(table(["publishing", "ms", "ratio"], lines), flush=True)


def measure_memory(history: int) -> None:
    """Print RSS and the bytes of live arrays while snapshots of 7 MiB networks come."""
    agent = agent_of(LARGE, 4, Short, history=history, snapshot_every=256, rematch_every=256)
    loop = sebulba.GymnasiumLoop(
        Short, agent, 64, schedule="lockstep", num_inferencers_per_device=1,
        inference_devices=[0], update_devices=[0],
    )  # fmt: skip
    lines = []
    with loop:
        state = loop.new_state(0, 4)
        for _ in range(8):
            result = loop.run(state, history // 4, 4)
            state = result.state
            del result
            gc.collect()
            made = int(state.experience.made)
            kept = int((np.asarray(state.experience.generation) >= 0).sum())
            live = sum(x.nbytes for x in jax.live_arrays())
            lines.append(
                [
                    f"{made}",
                    f"{kept}",
                    f"{rss_bytes() / MIB:.0f}",
                    f"{live / MIB:.0f}",
                ]
            )
            print(*lines[-1], flush=True)
    print(table(["made", "kept", "RSS, MiB", "live arrays, MiB"], lines), flush=True)


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--parts", nargs="+", default=("acting", "publishing", "memory"))
    given = parser.parse_args()
    if "acting" in given.parts:
        measure_acting(given.repeats)
    if "publishing" in given.parts:
        measure_publishing(3 * given.repeats)
    if "memory" in given.parts:
        measure_memory(50)


if __name__ == "__main__":
    main()

"""Two members at once or in turn: ``python -m benchmarks.studies.parallel_members``.

Each learns from fed trajectories, with the same program, on a CPU device of one core. XLA's
programs take all cores that they get, so in turn all threads of the process have one core, and at
once two. A third row has both cores in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import jax
import numpy as np
from gymnasium import spaces
from sebulba_league.parallel import ParallelUpdater, parallel_updater

from sebulba import Act, AgentNode, Obs, Population
from sebulba.agents.configs import MultiAgentConfig, PPOConfig, TorsoConfig, make_agent
from sebulba.envs.tree import compile_tree
from sebulba.tools.bench import harness
from sebulba.transport.item import Item
from sebulba.types import RunSpec

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=3"
RUN = RunSpec(num_envs=64, num_inferencers=1, steps_per_cycle=64, num_update_devices=1)
NODE = AgentNode(Obs(spaces.Box(-1, 1, (32,), np.float32)), Act(spaces.Discrete(4)))
PPO = PPOConfig(torso=TorsoConfig(hidden_sizes=(256, 256)), epochs=4, minibatches=4)


def fed() -> tuple[ParallelUpdater, Item]:
    """Return the learners of two members, and a trajectory that they are fed."""
    spec = compile_tree(Population({"main": NODE, "exploiter": Population({"other": NODE})}))
    agent: Any = make_agent(spec, MultiAgentConfig({"*/*": PPO}))
    *update, inference = jax.devices()
    own = {name: [device] for name, device in zip(agent.members, update, strict=True)}
    updater: Any = parallel_updater(agent, own, jax.random.key(1), schedule="lockstep")
    updater.begin(RUN)
    state = agent.new_state(jax.random.key(0), RUN)
    updater.place(state)
    rows = agent.empty_trajectory(agent.acting_networks(state.networks, state.experience), RUN)
    rows, step = jax.device_put((rows, state.step[0]), inference)
    no_infos: Any = ()
    return updater, Item(rows, step, step, no_infos)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--trajectories", type=int, default=10)
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"
    jax.config.update("jax_platforms", "cpu")
    updater, item = fed()
    due = PPO.epochs * PPO.minibatches
    all_cores = sorted(os.sched_getaffinity(0))

    def seconds(*, at_once: bool, cores: int) -> float:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), all_cores[:cores])
        began = time.perf_counter()
        for _ in range(given.trajectories):
            for one in updater.learners:
                one.learn(one.placed(item), 0, due)
                if not at_once:
                    one.finish()
        updater.wait()
        return time.perf_counter() - began

    cases = {
        "at once, a core each": lambda: seconds(at_once=True, cores=2),
        "in turn, one core": lambda: seconds(at_once=False, cores=1),
        "in turn, two cores": lambda: seconds(at_once=False, cores=2),
    }
    figures = harness.interleave(cases, given.rounds)
    for name, times in figures.items():
        print(
            f"{name}: {statistics.median(times):.3f} s, from {min(times):.3f} to {max(times):.3f}"
        )
    at_once, *in_turn = (statistics.median(times) for times in figures.values())
    for name, seconds_in_turn in zip(list(cases)[1:], in_turn, strict=True):
        print(f"{name}, over at once: {seconds_in_turn / at_once:.2f}")
    updater.close()


if __name__ == "__main__":
    main()

"""One of the hosts of ``test_hosts.py``: learns with the others and writes down what came of it.

Run as ``python -m tests.support.hosts_world PORT NUM_HOSTS HOST FOLDER KIND``; with NUM_HOSTS 1
it is one process with all of the four devices. KIND is the agent, ``impala`` or ``dqn``;
``impala-async`` and ``dqn-async`` are without lockstep, with two Inferencers, those of Impala in
processes; and in ``impala-late`` an environment of host 1 fails once the hosts have agreed on the
end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from gymnasium.envs.classic_control.cartpole import CartPoleEnv

NUM_ENVS, NUM_DEVICES, T, CYCLES, ALL_CYCLES = 8, 4, 5, 3, 8


def greedy(kind: str) -> Any:
    """Return an agent whose actions do not depend on how environments are divided over keys."""
    from sebulba.agents.configs import DQNConfig, ImpalaConfig, ReplayConfig, TorsoConfig
    from sebulba.agents.dqn import DQN
    from sebulba.agents.impala import Impala
    from sebulba.envs import env_spec

    torso = TorsoConfig(hidden_sizes=(8,))
    base: Any = Impala
    config: Any = ImpalaConfig(torso=torso, normalize_observations=True)
    if kind.startswith("dqn"):
        replay = ReplayConfig(
            # Fewer than the cycles, so that rows are overwritten.
            capacity=6 * T * NUM_ENVS,
            batch_size=16,
            updates_per_cycle=2,
            warm_up_cycles=2,
            prioritized=True,
        )
        base, config = DQN, DQNConfig(torso=torso, replay=replay, normalize_observations=True)

    class Greedy(base):
        def step(self, networks: Any, step_state: Any, env_step: Any, *, explore: bool = True):
            return super().step(networks, step_state, env_step, explore=False)

    return Greedy(env_spec(factory()), config)


FAILS, IN_IT = threading.Event(), threading.Event()
"""Set once environments of this process are to fail, and once one is in the step that will."""


class Mortal(CartPoleEnv):
    """CartPole that fails once it is to."""

    def step(self, action: Any) -> Any:
        if FAILS.is_set():
            IN_IT.set()
            time.sleep(1.0)  # the hosts agree on the end meanwhile
            raise RuntimeError("the late failure")
        return super().step(action)


def factory(env: Any = "CartPole-v1") -> Any:
    """Return what makes the environments, which can be put back."""
    from sebulba.envs import make_env_factory

    return make_env_factory(env, backend="gymnasium")


def leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of replicated arrays, by number."""
    import jax
    import numpy as np

    return {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}


def main(port: str, num_hosts: int, host: int, folder: Path, kind: str) -> None:
    """Learn, save, stop together, and go on from what was saved."""
    import jax
    import numpy as np

    import sebulba
    from sebulba.checkpoints import checkpointer as checkpointer_module
    from sebulba.options import ClusterOptions, DistributedOptions, LoopOptions
    from sebulba.runs.jax_setup import configure_jax

    configure_jax("cpu", NUM_DEVICES // num_hosts)
    options = DistributedOptions()
    if num_hosts > 1:
        options = DistributedOptions(
            coordinator=f"127.0.0.1:{port}", num_hosts=num_hosts, host=host, start_timeout_s=400
        )
        sebulba.join_hosts(options)
    agent = greedy(kind)
    is_late, is_async = kind == "impala-late", not kind.endswith(("impala", "dqn"))
    # Replays are saved apart, as large ones are.
    checkpointer_module.LARGE_EXPERIENCE_BYTES = 1

    evaluated: list[int] = []

    def note(record: Any) -> None:
        evaluated.extend([record["eval_env_steps"]] if "eval_env_steps" in record else [])

    def make(observe: Any = None, resume: bool = False) -> tuple[Any, Any]:
        checkpointer = sebulba.Checkpointer(
            folder / "checkpoints",
            every_updates=10**6 if is_late else 2,
            host=host,
            num_hosts=num_hosts,
        )
        loop = sebulba.GymnasiumLoop(
            factory(Mortal) if is_late else factory(),
            agent,
            NUM_ENVS // num_hosts,
            options=LoopOptions(
                schedule="async" if is_async else "lockstep",
                num_inferencers_per_device=2 if is_async else 1,
                seed=3,
                queue_size=10**6 if is_late else 2,  # so that nobody waits for room
                cluster=ClusterOptions(
                    address="processes" if kind == "impala-async" else "threads"
                ),
            ),
            distributed=options,
            inference_devices=[0],
            update_devices=list(range(NUM_DEVICES // num_hosts)),
            checkpointer=checkpointer,
            observe_cycle=observe,
            evaluator=sebulba.Evaluator(lambda *_: {"eval_return_mean": 1.0}, every_env_steps=100),
            callbacks=[note],
        )
        state = loop.new_state(3, T)
        if resume:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None
            state = loop.restore(checkpoint)
            assert is_async or not loop.resume_notes, loop.resume_notes
        return loop, state

    num_seen = 0

    def stop_second(trajectory: Any, step_infos: Any) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 2 and host == num_hosts - 1:  # one host alone is asked to stop
            if is_late:
                FAILS.set()
                assert IN_IT.wait(300)
            loop.stop()

    if is_late:
        loop, state = make(stop_second)
        try:
            with loop:
                loop.run(state, 10**6, T)
        finally:
            traceback.print_exc()
            sys.stderr.flush()
            # JAX aborts host 1 once host 0 is gone, and it has to have said why it ends.
            (folder / f"said-{host}").touch()
            deadline = time.monotonic() + 300
            while not (folder / "said-1").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            os._exit(1)
    loop, state = make()
    with loop:
        first = loop.run(state, CYCLES, T)
        of_first = leaves(first.state[:2]), leaves(first.acting_networks)
    loop, state = make(stop_second, resume=True)
    with loop:
        second = loop.run(state, 1000, T)
    loop, state = make(resume=True)
    with loop:
        third = loop.run(state, ALL_CYCLES - second.counters.cycles, T)
    np.savez(folder / f"first-{num_hosts}-{host}.npz", **of_first[0])
    np.savez(folder / f"acting-{num_hosts}-{host}.npz", **of_first[1])
    np.savez(folder / f"third-{num_hosts}-{host}.npz", **leaves(third.state[:2]))
    about = {
        "cycles": [r.counters.cycles for r in (first, second, third)],
        "env_steps": [r.counters.env_steps for r in (first, second, third)],
        "episodes": [r.counters.episodes for r in (first, second, third)],
        "stopped": [r.stopped for r in (first, second, third)],
        "devices": jax.device_count(),
        "evaluated": evaluated,
    }
    (folder / f"about-{num_hosts}-{host}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])

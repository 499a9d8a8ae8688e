"""Actions a second that clients of sebulba-external get, and how long each takes.

    python -m benchmarks.studies.external_speed [serve|train] [--clients 1 8 64] [--seconds 5]

``serve`` asks a server of the policy ``pretrained:cartpole``; ``train`` asks a trainer that learns
from the answers meanwhile. One process plays all clients, each of which asks again as soon as it is
answered; the trainer or server is another process, on the same machine. A row of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

EPISODE = 200
"""Steps after which a client ends its episode."""


def asked(address: str, token: str, clients: int, seconds: float) -> dict[str, float]:
    """Ask for ``seconds`` over so many connections; return rates and latencies."""
    from sebulba_external import protocol

    parts = {"": np.zeros(4, "<f4").tobytes()}
    begin = protocol.pack({"type": "begin", "observation": parts})
    step = protocol.pack({"type": "step", "reward": 1.0, "observation": parts})
    end = protocol.pack({"type": "end", "reward": 1.0, "observation": parts}) + begin
    selector, connections = selectors.DefaultSelector(), []
    for number in range(clients):
        connection = protocol.connect(address)
        hello = {"type": "hello", "version": protocol.VERSION, "token": token}
        connection.sendall(protocol.pack(hello))
        assert protocol.receive(connection)["type"] == "welcome"
        connections.append(connection)
        selector.register(connection, selectors.EVENT_READ, number)
    sent, steps, taken = np.zeros(clients), np.zeros(clients, np.int64), []
    for number, connection in enumerate(connections):
        sent[number] = time.perf_counter()
        connection.sendall(begin)
    began = time.perf_counter()
    warm = began + 1.0  # the first answers are not counted
    while (now := time.perf_counter()) < warm + seconds:
        for key, _ in selector.select(1.0):
            number = key.data
            assert protocol.receive(connections[number])["type"] == "action"
            now = time.perf_counter()
            if now > warm:
                taken.append(now - sent[number])
            steps[number] += 1
            sent[number] = now
            connections[number].sendall(end if steps[number] % EPISODE == 0 else step)
    for connection in connections:
        connection.close()
    p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1000
    return {"actions_per_s": len(taken) / seconds, "p50_ms": p50, "p99_ms": p99}


def serve(address: str, clients: int, pipe: Connection) -> None:
    """Serve a policy until told to stop."""
    from sebulba_external.serve import PolicyServer

    with PolicyServer("pretrained:cartpole", address, num_seats=clients):
        pipe.send("")
        pipe.recv()
    pipe.send({})


def train(address: str, clients: int, pipe: Connection) -> None:
    """Train on clients until told to stop."""
    import threading

    from sebulba_external.seats import Seats

    import sebulba
    from sebulba.agents.configs.agent_config import make_agent
    from sebulba.configs.impala_presets import PRESETS

    config: Any = PRESETS["cartpole"].make().agent
    devices: Any = {"inference_devices": [0], "update_devices": [0]}
    with (
        Seats("CartPole-v1", address) as seats,
        sebulba.GymnasiumLoop(
            seats,
            make_agent(seats.spec, config),
            num_envs=clients,
            num_inferencers_per_device=1,
            **devices,
        ) as loop,
    ):
        run = threading.Thread(target=lambda: loop.train(total_env_steps=10**9, steps_per_cycle=32))
        run.start()
        pipe.send(seats.token)
        pipe.recv()
        counts = seats.counts
        loop.stop()
        run.join()
    batch = counts["asked"] / max(1, counts["batches"])
    pipe.send({"requests_per_batch": batch, "columns_dropped": counts["columns_dropped"]})


def main() -> None:
    """Measure each kind with each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("kinds", nargs="*", default=["serve", "train"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for kind in given.kinds:
        for clients in given.clients:
            with tempfile.TemporaryDirectory() as folder:
                ours, theirs = context.Pipe()
                address = f"unix:{folder}/s"
                target = {"serve": serve, "train": train}[kind]
                process = context.Process(target=target, args=(address, clients, theirs))
                process.start()
                figures = asked(address, ours.recv(), clients, given.seconds)
                ours.send("")
                row = {"kind": kind, "clients": clients, **figures, **ours.recv()}
                row["load"] = os.getloadavg()[0]
                process.join()
                print(
                    json.dumps(
                        {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
                    )
                )


if __name__ == "__main__":
    main()

"""Actions a second that clients of sebulba-external get, and how long each takes.

    python -m benchmarks.studies.external_speed [KIND ...] [--clients 1 8 64] [--seconds 5]

=========  ==================================================================================
serve      a server of ``pretrained:cartpole``; every client asks again when it is answered
train      the same, of a trainer that learns from the clients
paced      a client that asks 20 times a second: alone, served by a server; and beside seven
           fast clients of a trainer
languages  the client in C and that in Python, in turns; each alone, served by a server
worlds     64 clients with Gymnasium's CartPole, and the same environments in the trainer
=========  ==================================================================================

The clients of a row are one process; server or trainer is another, on the same machine, over a Unix
socket. A row of JSON for each. All kinds take five minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

EPISODE = 200
"""Steps after which a client ends its episode."""
HZ = 20
FAST = 7
"""Clients beside one that keeps a pace."""
ROUNDS = 3
"""Of languages."""
STEPS_PER_CYCLE = 32
WARM_UP_S = 1.0
"""The first answers are not counted."""
CONTEXT = multiprocessing.get_context("spawn")

C_CLIENT = """
#define main episodes_main
#include "external_client.c"
#undef main
#include <time.h>
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
int main(int argc, char **argv) {
  static Client client;
  float state[4] = {0};
  if (argc != 4) return 2;
  client_connect(&client, argv[1], argv[2]);
  double begin = now(), last = begin, seconds = atof(argv[3]);
  for (long step = 0; last < begin + seconds; step++) {
    double before = now();
    if (step % 200 == 0) client_begin(&client, state, 4);
    else client_step(&client, 1, state, 4);
    last = now();
    printf("%.7f\\n", last - before);
    if (step % 200 == 199) client_end(&client, 1, state, 4, 1);
  }
  return 0;
}
"""


def figures_of(taken: list[float], seconds: float) -> dict[str, float]:
    """Return rate and latencies."""
    p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1000
    return {"actions_per_s": len(taken) / seconds, "p50_ms": p50, "p99_ms": p99}


# The clients.


def asked(
    address: str, token: str, clients: int, seconds: float, *, with_worlds: bool = False
) -> dict[str, float]:
    """Ask for ``seconds`` over so many connections, as soon as one is answered."""
    import gymnasium
    from sebulba_external import protocol

    def message(kind: str, obs: np.ndarray) -> bytes:
        reward = {} if kind == "begin" else {"reward": 1.0}
        parts = {"": np.asarray(obs, "<f4").tobytes()}
        return protocol.pack({"type": kind, "observation": parts, **reward})

    zeros = np.zeros(4, "<f4")
    begin, step = message("begin", zeros), message("step", zeros)
    end = message("end", zeros) + begin
    worlds = [gymnasium.make("CartPole-v1") for _ in range(clients if with_worlds else 0)]
    selector, connections = selectors.DefaultSelector(), []
    for number in range(clients):
        connection = connected(address, token)
        connections.append(connection)
        selector.register(connection, selectors.EVENT_READ, number)
    sent, steps, taken = np.zeros(clients), np.zeros(clients, np.int64), []
    for number, connection in enumerate(connections):
        sent[number] = time.perf_counter()
        first = message("begin", worlds[number].reset()[0]) if worlds else begin
        connection.sendall(first)
    warm = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm + seconds:
        for key, _ in selector.select(1.0):
            number = key.data
            answer = protocol.receive(connections[number])
            now = time.perf_counter()
            if now > warm:
                taken.append(now - sent[number])
            steps[number] += 1
            following = end if steps[number] % EPISODE == 0 else step
            if worlds:
                world, action = worlds[number], int.from_bytes(answer["action"], "little")
                obs, _, terminated, truncated, _ = world.step(action)
                over = terminated or truncated
                following = message("end" if over else "step", obs)
                following += message("begin", world.reset()[0]) if over else b""
            sent[number] = time.perf_counter()
            connections[number].sendall(following)
    for connection in connections:
        connection.close()
    return figures_of(taken, seconds)


def connected(address: str, token: str) -> Any:
    """Return a connection that was welcomed."""
    from sebulba_external import protocol

    connection = protocol.connect(address)
    connection.sendall(
        protocol.pack({"type": "hello", "version": protocol.VERSION, "token": token})
    )
    assert protocol.receive(connection)["type"] == "welcome"
    return connection


def one_client(address: str, token: str, seconds: float, hz: float | None) -> dict[str, float]:
    """Ask as the client in Python: at a pace, or as soon as it is answered."""
    from sebulba_external.client import Client

    taken, zeros = [], np.zeros(4, np.float32)
    with Client(address, token) as client:
        begun = time.perf_counter()
        for step in range(1 << 62):
            if hz is not None:
                time.sleep(max(0.0, begun + step / hz - time.perf_counter()))
            before = time.perf_counter()
            if step % EPISODE == 0:
                client.begin(zeros)
            else:
                client.step(1.0, zeros)
            now = time.perf_counter()
            if now > begun + WARM_UP_S:
                taken.append(now - before)
            if step % EPISODE == EPISODE - 1:
                client.end(1.0, zeros, truncated=True)
            if now > begun + WARM_UP_S + seconds:
                return figures_of(taken, seconds)
    raise AssertionError


def c_client(folder: Path) -> Path:
    """Return the compiled program of the client in C."""
    source, program = folder / "timed.c", folder / "timed"
    source.write_text(C_CLIENT)
    examples = str(Path(__file__).parents[2] / "examples")
    words = ["cc", "-O2", "-I", examples, "-o", str(program), str(source), "-lm"]
    subprocess.run(words, check=True)
    return program


# Servers and trainers, in processes of their own.


def serve(address: str, clients: int, pipe: Connection) -> None:
    """Serve a policy until told to stop."""
    from sebulba_external.serve import PolicyServer

    with PolicyServer("pretrained:cartpole", address, num_seats=clients):
        pipe.send("")
        pipe.recv()
    pipe.send({})


def _config() -> Any:
    from sebulba.configs.impala_presets import PRESETS

    return PRESETS["cartpole"].make().agent


DEVICES: dict[str, Any] = {
    "num_inferencers_per_device": 1,
    "inference_devices": [0],
    "update_devices": [0],
}


def train(address: str, clients: int, pipe: Connection) -> None:
    """Train on clients until told to stop."""
    from sebulba_external.seats import Seats

    import sebulba
    from sebulba.agents.configs.agent_config import make_agent

    with (
        Seats("CartPole-v1", address) as seats,
        sebulba.GymnasiumLoop(
            seats, make_agent(seats.spec, _config()), num_envs=clients, **DEVICES
        ) as loop,
    ):
        run = threading.Thread(
            target=lambda: loop.train(total_env_steps=10**9, steps_per_cycle=STEPS_PER_CYCLE)
        )
        run.start()
        pipe.send(seats.token)
        pipe.recv()
        counts = seats.counts
        loop.stop()
        run.join()
    batch = counts["asked"] / max(1, counts["batches"])
    pipe.send({"requests_per_batch": batch, "columns_dropped": counts["columns_dropped"]})


def inside(envs: int, seconds: float, pipe: Connection) -> None:
    """Train in the same environments, which the trainer steps."""
    import gymnasium

    import sebulba
    from sebulba.agents.configs.agent_config import make_agent

    def make() -> gymnasium.Env:
        return gymnasium.make("CartPole-v1")

    seen: list[tuple[float, int]] = []

    def look(record: Any) -> str | None:
        seen.append((time.perf_counter(), record["env_steps"]))
        return "enough" if seen[-1][0] > seen[0][0] + seconds else None

    agent = make_agent(sebulba.env_spec(make), _config())
    with sebulba.GymnasiumLoop(
        make, agent, num_envs=envs, callbacks=[look], metrics_interval_s=0.5, **DEVICES
    ) as loop:
        loop.train(total_env_steps=10**9, steps_per_cycle=STEPS_PER_CYCLE)
    (began, before), (ended, after) = seen[1], seen[-1]
    pipe.send({"actions_per_s": (after - before) / (ended - began)})


@contextlib.contextmanager
def running(kind: str, clients: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Run a server or trainer; yields address, token, and what it tells of itself at the end."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = CONTEXT.Pipe()
        address = f"unix:{folder}/s"
        target = {"serve": serve, "train": train}[kind]
        process = CONTEXT.Process(target=target, args=(address, clients, theirs))
        process.start()
        theirs.close()  # its end of the pipe, if it fails
        yield address, ours.recv(), told
        ours.send("")
        told.update(ours.recv())
        process.join()


def tell(row: dict[str, Any]) -> None:
    """Print a row."""
    row["load"] = os.getloadavg()[0]
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps(rounded), flush=True)


# The kinds.


def fast(kind: str, clients: int, seconds: float, *, with_worlds: bool = False) -> None:
    """Tell what so many clients get that ask as soon as they are answered."""
    with running(kind, clients) as (address, token, told):
        figures = asked(address, token, clients, seconds, with_worlds=with_worlds)
    name = "worlds" if with_worlds else kind
    tell({"kind": name, "clients": clients, **figures, **told})


def paced(seconds: float) -> None:
    """Tell how long a client waits that asks 20 times a second."""
    with running("serve", 1) as (address, token, told):
        figures = one_client(address, token, seconds, HZ)
    tell({"kind": "paced, served alone", **figures, **told})
    with running("train", FAST + 1) as (address, token, told):
        load = CONTEXT.Process(target=asked, args=(address, token, FAST, seconds + 4))
        load.start()
        time.sleep(2)
        figures = one_client(address, token, seconds, HZ)
        load.join()
    tell({"kind": f"paced, beside {FAST} fast clients of a trainer", **figures, **told})


def languages(seconds: float) -> None:
    """Tell what the client in C gets, and that in Python, in turns."""
    with tempfile.TemporaryDirectory() as folder, running("serve", 1) as (address, token, _):
        program = c_client(Path(folder))
        path = address.removeprefix("unix:")
        for number in range(ROUNDS):
            words = [str(program), path, token, str(seconds + WARM_UP_S)]
            out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            taken = np.array(out.split(), np.float64)
            kept = taken[np.cumsum(taken) > WARM_UP_S].tolist()
            tell({"kind": "C", "round": number, **figures_of(kept, sum(kept))})
            figures = one_client(address, token, seconds, None)
            tell({"kind": "Python", "round": number, **figures})


def worlds(clients: int, seconds: float) -> None:
    """Tell what environments cost in clients, and in the trainer."""
    fast("train", clients, seconds, with_worlds=True)
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=inside, args=(clients, seconds, theirs))
    process.start()
    tell({"kind": "in the trainer", "environments": clients, **ours.recv()})
    process.join()


def main() -> None:
    """Measure each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = ["serve", "train", "paced", "languages", "worlds"]
    parser.add_argument("kinds", nargs="*", default=kinds)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    for kind in given.kinds:
        if kind in ("serve", "train"):
            for clients in given.clients:
                fast(kind, clients, given.seconds)
        elif kind == "paced":
            paced(4 * given.seconds)  # twenty answers a second are few
        elif kind == "languages":
            languages(given.seconds)
        else:
            worlds(max(given.clients), given.seconds)


if __name__ == "__main__":
    main()

"""A game that speaks the dialect of Godot RL Agents, without an engine: what ``game.gd`` does.

Run as a program: ``python godot_double.py --port=11008 --env_seed=1 [--mixed]``.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from typing import Any

import numpy as np

PUSHES = np.float64([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])
STEPS = 60


def receive(connection: socket.socket) -> dict[str, Any]:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = connection.recv(size - len(data))
            if not piece:
                raise SystemExit(0)
            data += piece
        return data

    return json.loads(exactly(struct.unpack("<I", exactly(4))[0]))


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(body)) + body)


class Discs:
    """Two discs in boxes; the second agent sees pixels."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.begin()

    def begin(self) -> None:
        self.place = self.random.uniform(-0.8, 0.8, (2, 2))
        self.velocity = np.zeros((2, 2))
        self.step = 0
        self.pictures = [self.picture()] * 2

    def picture(self) -> np.ndarray:
        centre = (np.arange(8) + 0.5) / 4 - 1
        x, y = np.meshgrid(centre, centre)
        distance = np.hypot(x - self.place[1, 0], y - self.place[1, 1])
        return (255 * np.clip(1 - distance / 0.4, 0, 1)).astype(np.uint8)

    def observations(self) -> list[dict[str, Any]]:
        self.pictures = [self.pictures[1], self.picture()]
        both = np.stack(self.pictures, -1)
        vector = [*self.place[0].tolist(), *self.velocity[0].tolist()]
        return [{"obs": vector}, {"camera_2d": both.tobytes().hex()}]

    def act(self, actions: list[dict[str, int]]) -> None:
        self.velocity += 0.12 * PUSHES[[one["push"] for one in actions]]
        self.place = np.clip(self.place + self.velocity / 60, -0.95, 0.95)
        self.step += 1

    def rewards(self) -> list[float]:
        return (1 - np.minimum(1, np.linalg.norm(self.place, axis=1))).tolist()


INFO = {
    "type": "env_info",
    "n_agents": 2,
    "agent_policy_names": ["vector", "pixels"],
    "action_space": [{"push": {"size": 5, "action_type": "discrete"}}] * 2,
    "observation_space": [
        {"obs": {"size": [4], "space": "box"}},
        {"camera_2d": {"size": [8, 8, 2], "space": "box"}},
    ],
}


def main(words: list[str]) -> None:
    given = dict(word.split("=") for word in words if "=" in word)
    game = Discs(int(given.get("--env_seed", 0)))
    with socket.create_connection(("127.0.0.1", int(given["--port"]))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (message := receive(connection))["type"] != "close":
            kind = message["type"]
            if kind == "env_info":
                send(connection, INFO)
            elif kind == "reset":
                game.begin()
                send(connection, {"type": "reset", "obs": game.observations()})
            elif kind == "action":
                game.act(message["action"])
                over = game.step == STEPS
                answer = {"type": "step", "obs": game.observations(), "reward": game.rewards()}
                send(connection, answer | {"done": [over, over]})
                if over:
                    game.begin()


if __name__ == "__main__":
    main(sys.argv[1:])

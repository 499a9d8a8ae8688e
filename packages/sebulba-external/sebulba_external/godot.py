"""Games that speak the dialect of Godot RL Agents play in a trainer's seats, unchanged.

The dialect (https://github.com/edbeeching/godot_rl_agents, godot-rl 0.8.2): the game connects to a
port, and gets messages as a little-endian unsigned 32-bit length and JSON. ``handshake`` and
``env_info``, which it answers with its agents, their spaces and the names of their policies; then
``reset``, and ``action`` again and again, which it answers with observations, rewards and done.
Parts of an observation whose name has "2d" are images, as hexadecimal digits of their bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from sebulba_external.actor import Actor, Begin, End, Report, Step
from sebulba_external.protocol import ProtocolError, received

LENGTH = struct.Struct("<I")
MOST_BYTES = 64 << 20
"""Of a message."""
HANDSHAKE = {"type": "handshake", "major_version": "0", "minor_version": "7"}
DEFAULT_PORT = 11008
SHARED = "shared_policy"
"""The policy of agents that name none."""


class Game:
    """The trainer's end of the dialect: one process of a game, with one or many agents."""

    def __init__(
        self,
        command: str = "",
        *,
        port: int = 0,
        seed: int = 0,
        timeout_s: float = 60.0,
        is_quiet: bool = False,
    ) -> None:
        """Listen, start the game, and ask it for its agents.

        Args:
          command: As in a shell, without one; ``{port}`` and ``{seed}`` are filled in. "" waits for
            a game that somebody else starts.
          port: Of this machine; 0 takes a free one.
          seed: For the command.
          timeout_s: Longest wait for the game to connect, and for each of its answers.
          is_quiet: Hide what the game prints.

        Raises:
          ProtocolError: It breaks the dialect, or has spaces that agents cannot take.
          TimeoutError: It does not connect in time.
        """
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        with socket.create_server(("127.0.0.1", port)) as listener:
            listener.settimeout(timeout_s)
            if command:
                filled = command.format(port=listener.getsockname()[1], seed=seed)
                output = subprocess.DEVNULL if is_quiet else None
                self._process = subprocess.Popen(
                    shlex.split(filled), stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            try:
                self._connection, _ = listener.accept()
                self._connection.settimeout(timeout_s)
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._send(HANDSHAKE)
                self._send({"type": "env_info"})
                self._read_info(self._receive("env_info"))
            except BaseException:
                self.close()
                raise

    def _read_info(self, info: dict[str, Any]) -> None:
        count = info.get("n_agents")
        if type(count) is not int or count < 1:
            raise ProtocolError(f"n_agents={count!r} must be 1 or more")

        def of_each(name: str, default: Any = None) -> list:
            given = info.get(name, default)
            given = [given] * count if isinstance(given, dict | str) else given
            if not isinstance(given, list) or len(given) != count:
                raise ProtocolError(f"{name} must be one, or one for each of {count} agents")
            return given

        self.policies: list[str] = of_each("agent_policy_names", SHARED)
        """Of each agent."""
        self.observations = [_parts(space) for space in of_each("observation_space")]
        """Of each agent, ``{part: (dtype, shape)}``; a discrete one has the dtype "n" and n."""
        self.actions = [_heads(space) for space in of_each("action_space")]
        """Of each agent, ``{head: (type, size)}``."""

    def reset(self) -> list[Any]:
        """Begin; return the observation of each agent."""
        self._send({"type": "reset"})
        return self._observed(self._receive("reset"))

    def step(self, actions: list[np.ndarray]) -> tuple[list[Any], list[float], list[bool]]:
        """Act with each agent; return observations, rewards, and whether an episode is over."""
        chosen = [_by_head(a, heads) for a, heads in zip(actions, self.actions, strict=True)]
        self._send({"type": "action", "action": chosen})
        answer = self._receive("step")
        reward, done = (self._of_each(answer, name) for name in ("reward", "done"))
        return self._observed(answer), [float(x) for x in reward], [bool(x) for x in done]

    def _of_each(self, answer: dict[str, Any], name: str) -> list[Any]:
        given = answer.get(name)
        if not isinstance(given, list) or len(given) != len(self.actions):
            raise ProtocolError(f"{name} must be a list of {len(self.actions)}")
        return given

    def _observed(self, answer: dict[str, Any]) -> list[Any]:
        given = self._of_each(answer, "obs")
        return [_observation(x, parts) for x, parts in zip(given, self.observations, strict=True)]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._connection is not None
        body = json.dumps(message).encode()
        self._connection.sendall(LENGTH.pack(len(body)) + body)

    def _receive(self, kind: str) -> dict[str, Any]:
        assert self._connection is not None
        data = received(self._connection, LENGTH, MOST_BYTES)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from None
        if not isinstance(message, dict) or message.get("type") != kind:
            raise ProtocolError(f"a message must be an object of type {kind!r}")
        return message

    def close(self) -> None:
        """Tell the game to end; it is killed if it does not within two seconds."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._send({"type": "close"})
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(2.0 if self._connection is not None else 0.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> Game:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _parts(space: Any) -> dict[str, tuple[str, Any]]:
    parts: dict[str, tuple[str, Any]] = {}
    for name, part in space.items():
        size, kind = part.get("size"), part.get("space")
        if kind == "box":
            shape = tuple(int(n) for n in size)
            parts[name] = ("|u1" if "2d" in name else "<f4", shape)
        elif kind == "discrete":
            parts[name] = ("n", int(size))
        else:
            raise ProtocolError(f"observation {name!r} has space={kind!r}; use box or discrete")
    return parts


def _heads(space: Any) -> dict[str, tuple[str, int]]:
    heads = {name: (head.get("action_type"), int(head["size"])) for name, head in space.items()}
    kinds = {kind for kind, _ in heads.values()}
    if kinds not in ({"discrete"}, {"continuous"}):
        raise ProtocolError(
            f"an agent has actions of the types {sorted(map(str, kinds))}; all must be discrete, "
            "or all continuous"
        )
    return heads


def _by_head(action: Any, heads: dict[str, tuple[str, int]]) -> dict[str, Any]:
    flat = np.asarray(action).reshape(-1)
    if next(iter(heads.values()))[0] == "discrete":
        return {name: int(x) for name, x in zip(heads, flat, strict=True)}
    ends = np.cumsum([size for _, size in heads.values()])
    pieces = np.split(flat.astype(np.float64), ends[:-1])
    return {name: piece.tolist() for name, piece in zip(heads, pieces, strict=True)}


def _observation(given: Any, parts: dict[str, tuple[str, Any]]) -> Any:
    """Return one observation as arrays; without a dict if it has one part."""
    arrays: dict[str, np.ndarray] = {}
    for name, (dtype, shape) in parts.items():
        try:
            if dtype == "|u1":
                array = np.frombuffer(bytes.fromhex(given[name]), np.uint8).reshape(shape)
            elif dtype == "n":
                array = np.asarray(given[name], np.int64).reshape(())
            else:
                array = np.asarray(given[name], np.float32).reshape(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"observation {name!r} is not of shape {shape}: {error}") from None
        arrays[name] = array
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays


def play(game: Game, actors: Mapping[str, Actor], *, truncates: bool, sync_every: int) -> None:
    """Play until the game or a trainer ends.

    Args:
      game: Which.
      actors: By the names of policies.
      truncates: An episode that is done was cut short; the dialect does not say.
      sync_every: Steps between two ``Actor.sync``.
    """
    agents = range(len(game.policies))

    def act(reports: dict[int, Report]) -> dict[Any, Any]:
        actions: dict[Any, Any] = {}
        for policy, actor in actors.items():
            of_policy = {i: one for i, one in reports.items() if game.policies[i] == policy}
            if of_policy:
                actions |= actor.act(of_policy)  # type: ignore[arg-type]
        return actions

    observations = game.reset()
    reports: dict[int, Report] = {i: Begin(observations[i]) for i in agents}
    for step in range(1, sys.maxsize):
        actions = act(reports)
        observations, rewards, done = game.step([actions[i] for i in agents])
        over = {i: End(rewards[i], observations[i], truncates) for i in agents if done[i]}
        if over:
            act(over)  # type: ignore[arg-type]
        # The game has begun anew where it was done.
        reports = {
            i: Begin(observations[i]) if done[i] else Step(rewards[i], observations[i])
            for i in agents
        }
        if step % sync_every == 0:
            for actor in actors.values():
                actor.sync()


def at_random(game: Game, policy: str, seed: int) -> Actor:
    """Return an actor for the agents of a policy that nobody trains."""
    agent = game.policies.index(policy)
    random, heads = np.random.default_rng(seed), game.actions[agent]

    def strategy(observation: Any) -> np.ndarray:
        kind, sizes = next(iter(heads.values()))[0], [size for _, size in heads.values()]
        return random.integers(sizes) if kind == "discrete" else random.uniform(-1, 1, sum(sizes))

    return Actor(strategy=strategy, streams=game.policies.count(policy))


def main(argv: list[str] | None = None) -> int:
    """Play a game in a trainer's seats; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sebulba_external.godot", description=__doc__)
    parser.add_argument("--game", default="", help="command; {port} and {seed} are filled in")
    parser.add_argument("--port", type=int, help=f"of the game ({DEFAULT_PORT} without --game)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address", default=os.environ.get("SEBULBA_ADDRESS", ""))
    parser.add_argument("--policy", default="", help="whose agents play; others act at random")
    parser.add_argument("--local", action="store_true", help="act here, with the policy")
    parser.add_argument("--sync-every", type=int, default=32, help="steps of a local policy")
    parser.add_argument("--truncates", action="store_true", help="done means cut short")
    given = parser.parse_args(argv)
    token = os.environ.get("SEBULBA_TOKEN", "")
    port = given.port if given.port is not None else 0 if given.game else DEFAULT_PORT
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as stack:
        game = stack.enter_context(Game(given.game, port=port, seed=given.seed))
        policies = dict.fromkeys(game.policies)
        if given.policy and given.policy not in policies:
            raise SystemExit(f"--policy {given.policy} is none of {', '.join(policies)}")
        trained = policies if not given.policy else {given.policy}
        actors = {}
        for policy in policies:
            streams = game.policies.count(policy)
            actors[policy] = stack.enter_context(
                Actor(given.address, token, streams=streams, local=given.local, seed=given.seed)
                if policy in trained
                else at_random(game, policy, given.seed)
            )
        with contextlib.suppress(ConnectionError):  # either side has ended
            play(game, actors, truncates=given.truncates, sync_every=given.sync_every)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The client: a robot, a game or a service asks for actions at its own pace. It needs no JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from sebulba_external import protocol


class Client:
    """One seat of a trainer or a server of policies.

    .. code-block:: python

        with Client("unix:/tmp/seats", token) as seat:
            action = seat.begin(observation)
            while playing:
                observation, reward = world.do(action)
                action = seat.step(reward, observation)
            seat.end(reward, observation)
    """

    def __init__(self, address: str, token: str = "", *, timeout_s: float | None = 60.0) -> None:
        """Connect to ``unix:PATH`` or ``HOST:PORT`` and wait for the welcome.

        Raises:
          ConnectionError: Nobody listens, or the trainer refused, for the reason in the message.
        """
        self._connection = protocol.connect(address)
        self._connection.settimeout(timeout_s)
        try:
            self._send(type="hello", version=protocol.VERSION, token=token)
            welcome = self._receive("welcome")
        except BaseException:
            self.close()
            raise
        self.seat: int = welcome["seat"]
        """Number of the seat."""
        self.observation: dict[str, list] = welcome["observation"]
        """``[dtype, shape]`` of each part of an observation; "" is one without parts."""
        self.action: list = welcome["action"]
        """``[dtype, shape]`` of an action."""

    def begin(self, observation: Any) -> np.ndarray:
        """Begin an episode; return the action for its first observation."""
        self._send(type="begin", observation=self._packed(observation))
        return self._action()

    def step(self, reward: float, observation: Any) -> np.ndarray:
        """Report what the last action led to; return the next action."""
        self._send(type="step", reward=float(reward), observation=self._packed(observation))
        return self._action()

    def end(self, reward: float, observation: Any, *, truncated: bool = False) -> None:
        """Report what the last action led to: the end of the episode, or its cut."""
        packed = self._packed(observation)
        self._send(type="end", reward=float(reward), observation=packed, truncated=bool(truncated))

    def close(self) -> None:
        """Give the seat back."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _packed(self, observation: Any) -> dict[str, bytes]:
        parts = observation if isinstance(observation, dict) else {"": observation}
        if parts.keys() != self.observation.keys():
            raise ValueError(
                f"an observation has the parts {sorted(parts)}; "
                f"the welcome says {sorted(self.observation)}"
            )
        return {
            name: protocol.array_bytes(parts[name], dtype, tuple(shape))
            for name, (dtype, shape) in self.observation.items()
        }

    def _action(self) -> np.ndarray:
        dtype, shape = self.action
        return protocol.array_of(self._receive("action")["action"], dtype, tuple(shape))

    def _send(self, **message: Any) -> None:
        try:
            self._connection.sendall(protocol.pack(message))
        except BrokenPipeError:
            self._receive("")  # the trainer may have said why
            raise

    def _receive(self, expected: str) -> dict[str, Any]:
        message = protocol.receive(self._connection)
        if message["type"] == "error":
            raise ConnectionError(f"the trainer refused: {message.get('message')}")
        if message["type"] != expected:
            raise protocol.ProtocolError(f"got {message['type']!r}; expected {expected!r}")
        return message

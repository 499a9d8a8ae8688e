"""The client: a robot, a game or a service asks for actions at its own pace. It needs no JAX."""

from __future__ import annotations

import ssl
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

    def __init__(
        self,
        address: str,
        token: str = "",
        *,
        timeout_s: float | None = 60.0,
        tls: ssl.SSLContext | None = None,
        resumes: bool = False,
        **wishes: Any,
    ) -> None:
        """Connect to ``unix:PATH`` or ``HOST:PORT`` and wait for the welcome.

        Args:
          address: Where a trainer or server listens.
          token: What it wants to hear.
          timeout_s: Longest wait for an answer, or its next piece; the connection is closed after
            it.
          tls: For an encrypted connection, such as ``ssl.create_default_context(cafile=...)``.
          resumes: Ask for a session, so that ``reconnect`` can go on with an episode.
          **wishes: More fields of the ``hello``: ``explore``, ``local``.

        Raises:
          ConnectionError: Nobody listens, or the trainer refused, for the reason in the message.
        """
        self._where = address, tls, timeout_s
        self._hello = {"type": "hello", "version": protocol.VERSION, "token": token, **wishes}
        if resumes:
            self._hello["session"] = ""
        self._reports, self._last = 0, b""
        self._connect()

    def _connect(self) -> dict[str, Any]:
        self._connection = protocol.connect(*self._where)
        try:
            self._connection.sendall(protocol.pack(self._hello))
            welcome = self.receive("welcome")
        except BaseException:
            self.close()
            raise
        self.seat: int = welcome["seat"]
        """Number of the seat."""
        self.observation: dict[str, list] = welcome["observation"]
        """``[dtype, shape]`` of each part of an observation; "" is one without parts."""
        self.action: list = welcome["action"]
        """``[dtype, shape]`` of an action."""
        if "session" in self._hello:
            self._hello["session"] = welcome["session"]
        return welcome

    def reconnect(self) -> np.ndarray | None:
        """Connect again, after an error; go on with the episode if the seat has waited.

        Returns:
          The action for the last observation, or None: begin a new episode.
        """
        self.close()
        reports, self._reports = self._reports, 0
        welcome = self._connect()
        arrived, pending = welcome.get("reports", 0), welcome.get("pending")
        if 0 < arrived == reports - 1:  # but for the last, which is sent again
            self._reports = reports
            self._connection.sendall(self._last)
            return self.receive_action()
        if pending is None or arrived != reports:
            return None
        self._reports = reports
        return self._unpacked(pending)

    def begin(self, observation: Any) -> np.ndarray:
        """Begin an episode; return the action for its first observation."""
        self.send(type="begin", observation=self.packed(observation))
        return self.receive_action()

    def step(self, reward: float, observation: Any) -> np.ndarray:
        """Report what the last action led to; return the next action."""
        self.send(type="step", reward=float(reward), observation=self.packed(observation))
        return self.receive_action()

    def end(self, reward: float, observation: Any, *, truncated: bool = False) -> None:
        """Report what the last action led to: the end of the episode, or its cut."""
        packed = self.packed(observation)
        self.send(type="end", reward=float(reward), observation=packed, truncated=bool(truncated))

    def close(self) -> None:
        """Give the seat back."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # For actors, which have several seats.

    def packed(self, observation: Any) -> dict[str, bytes]:
        """Return an observation as it travels.

        Raises:
          ValueError: It has other parts, or shapes.
          TypeError: It has dtypes that cannot be cast.
        """
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

    def receive_action(self) -> np.ndarray:
        """Wait for an action."""
        return self._unpacked(self.receive("action")["action"])

    def _unpacked(self, action: bytes) -> np.ndarray:
        dtype, shape = self.action
        return protocol.array_of(action, dtype, tuple(shape))

    def send(self, **message: Any) -> None:
        """Send a message."""
        self._last = protocol.pack(message)
        self._reports = {"begin": 1, "end": 0}.get(message["type"], self._reports + 1)
        try:
            self._connection.sendall(self._last)
        except TimeoutError:
            self.close()  # the rest of a message must not become the next
            raise
        except (BrokenPipeError, ConnectionResetError):
            self.receive("")  # the trainer may have said why
            raise

    def receive(self, expected: str) -> dict[str, Any]:
        """Wait for a message of a type."""
        try:
            message = protocol.receive(self._connection)
        except TimeoutError:
            self.close()  # a late answer must not become that to the next message
            raise TimeoutError("no answer came in time; the connection is closed") from None
        if message["type"] == "error":
            raise ConnectionError(f"the trainer refused: {message.get('message')}")
        if message["type"] != expected:
            raise protocol.ProtocolError(f"got {message['type']!r}; expected {expected!r}")
        return message

"""The listener stays up, whatever a client or the machine does; a desk of the test answers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from sebulba_external import listener, protocol
from sebulba_external.client import Client
from sebulba_external.desk import Answer, Desk
from sebulba_external.listener import Listener, Watcher

import sebulba
from sebulba.agents.configs import ImpalaConfig
from sebulba.agents.impala import Impala
from sebulba.types import RunSpec


class ZeroDesk:
    """Answers zeros."""

    num_seats = 4
    longest_frame = 2000
    explores_by_default = True

    def __init__(self) -> None:
        self.explores = np.ones(self.num_seats, np.bool_)
        self.in_episode = np.zeros(self.num_seats, np.bool_)
        self.report_takes_s = 0.0
        self.reported: list[dict[str, Any]] = []

    def shapes(self) -> dict[str, Any]:
        return {"observation": {"": ["<f4", [3]]}, "action": ["<i4", []]}

    def report(self, seat: int, message: dict[str, Any]) -> None:
        time.sleep(self.report_takes_s)
        self.reported.append(message)
        self.in_episode[seat] = message["type"] != "end"

    def answer(self, asked: np.ndarray) -> Answer:
        return Answer(np.zeros(self.num_seats, np.int32), (), 0)


@contextlib.contextmanager
def listening(desk: ZeroDesk) -> Iterator[Listener]:
    one = Listener("127.0.0.1:0", "t")
    one.start(desk, Watcher())  # type: ignore[arg-type]
    try:
        yield one
        one.check()
    finally:
        one.close()


OBSERVATION = np.zeros(3, np.float32)


def test_a_frame_that_ends_late_with_a_piece_of_the_next_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "HELLO_WITHIN_S", 0.5)
    desk = ZeroDesk()
    with listening(desk) as one:
        connection = protocol.connect(one.address)
        connection.settimeout(60)
        connection.sendall(protocol.pack({"type": "hello", "version": 1, "token": "t"}))
        assert protocol.receive(connection)["type"] == "welcome"
        frame = protocol.pack({"type": "begin", "observation": {"": OBSERVATION.tobytes()}})
        desk.report_takes_s = 0.7  # as if the machine were busy
        connection.sendall(frame[:5])
        time.sleep(0.1)
        connection.sendall(frame[5:] + frame[:1])
        assert protocol.receive(connection)["type"] == "action"
        assert "in time" in protocol.receive(connection)["message"]
        connection.close()
        desk.report_takes_s = 0.0
        with Client(one.address, "t") as client:
            assert int(client.begin(OBSERVATION)) == 0


def test_a_connection_that_cannot_be_accepted_costs_the_others_nothing() -> None:
    class Failing(socket.socket):
        failures = 3

        def accept(self) -> Any:
            if Failing.failures:
                Failing.failures -= 1
                raise OSError(24, "Too many open files")
            return super().accept()

    one = Listener("127.0.0.1:0", "t")
    one._socket = Failing(fileno=one._socket.detach())
    with contextlib.closing(one):
        one.start(ZeroDesk(), Watcher())  # type: ignore[arg-type]
        with Client(one.address, "t") as client:
            assert int(client.begin(OBSERVATION)) == 0
    assert not Failing.failures


def test_every_seat_has_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 1)
    with listening(ZeroDesk()) as one, contextlib.ExitStack() as stack:
        for _ in range(ZeroDesk.num_seats):
            stack.enter_context(Client(one.address, "t"))
        idle = stack.enter_context(contextlib.closing(protocol.connect(one.address)))
        with pytest.raises(ConnectionError):
            Client(one.address, "t")
        idle.close()


def test_a_flag_of_numpy_travels() -> None:
    desk = ZeroDesk()
    with listening(desk) as one, Client(one.address, "t") as client:
        client.begin(OBSERVATION)
        client.end(np.float32(1.0), OBSERVATION, truncated=np.bool_(True))  # type: ignore[arg-type]
        client.begin(OBSERVATION)
    assert [message.get("truncated") for message in desk.reported] == [None, True, None]


def test_an_observation_may_have_many_parts_with_long_names() -> None:
    names = [f"a part with quite a long name, number {number}" for number in range(40)]
    box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    spaces = gymnasium.spaces.Dict({name: box for name in names})
    spec = sebulba.EnvSpec(spaces, gymnasium.spaces.Discrete(3))
    agent = Impala(spec, ImpalaConfig())
    run = RunSpec(2, 1, 1, 1)
    step_state = agent.new_step_state(jax.random.key(0), run, 0)
    desk = Desk(agent, 2, step_state, explore=True)
    parts = {name: np.full(2, k / 40, "<f4").tobytes() for k, name in enumerate(names)}
    frame = protocol.pack({"type": "step", "reward": 1.5, "observation": parts})
    assert len(frame) - protocol.LENGTH.size < desk.longest_frame
    desk.report(0, {"type": "begin", "observation": parts})
    desk.report(0, protocol.unpack(frame[protocol.LENGTH.size :]))
    assert float(desk.parts[names[20]][0, 0]) == 0.5


def test_a_session_goes_on_where_its_connection_broke() -> None:
    desk = ZeroDesk()
    with listening(desk) as one, Client(one.address, "t", resumes=True) as client:
        client.begin(OBSERVATION)
        client.step(1.0, OBSERVATION)
        for _ in range(2):  # the report has arrived, and the client lost its answer
            client._connection.close()
            assert int(client.reconnect()) == 0  # type: ignore[arg-type]
        assert [message["type"] for message in desk.reported] == ["begin", "step"]
        client._connection.close()
        with pytest.raises(OSError, match=r"descriptor|closed"):
            client.step(2.0, OBSERVATION)
        assert int(client.reconnect()) == 0  # type: ignore[arg-type]
        assert [message.get("reward") for message in desk.reported] == [None, 1.0, 2.0]
        client.step(3.0, OBSERVATION)
        assert client.seat == 0
        with Client(one.address, "t") as other:
            assert other.seat == 1
        assert one.counts["resumed"] == 3
        assert one.counts["broke_off"] == 0


def test_a_half_open_connection_is_taken_over_by_its_session() -> None:
    with listening(ZeroDesk()) as one, Client(one.address, "t", resumes=True) as client:
        client.begin(OBSERVATION)
        old = client._connection
        client.close = lambda: None  # type: ignore[method-assign]
        assert int(client.reconnect()) == 0  # type: ignore[arg-type]
        del client.close
        assert client.seat == 0
        assert old.recv(1) == b""
        old.close()


def test_a_seat_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GRACE_S", 0.2)
    desk = ZeroDesk()
    with listening(desk) as one, Client(one.address, "t", resumes=True) as client:
        client.begin(OBSERVATION)
        client._connection.close()
        deadline = time.monotonic() + 60
        while not one.counts["broke_off"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert client.reconnect() is None
        client.begin(OBSERVATION)
        client._connection.close()
        assert client.reconnect() is not None

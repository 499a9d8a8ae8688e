"""What a listener gets that is no client: nobody else is disturbed, and no memory is lost."""

from __future__ import annotations

import contextlib
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sebulba_external import http_front, listener, protocol
from sebulba_external.actor import Actor, Begin
from sebulba_external.client import Client
from sebulba_external.http_front import HttpFront
from sebulba_external.serve import PolicyServer, tls_of

import sebulba
from tests.external.test_serve import ask

TOKEN = "a token"
ROW = np.zeros(4, "<f4")
PARTS = {"": ROW.tobytes()}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PolicyServer]:
    with PolicyServer("pretrained:cartpole", f"unix:{tmp_path}/s", token=TOKEN, num_seats=8) as one:
        yield one
        one.listener.check()


@contextlib.contextmanager
def undisturbed(server: PolicyServer) -> Iterator[list[float]]:
    """Have a client ask all the time; yield the seconds that its answers took."""
    taken: list[float] = []
    stop = threading.Event()
    ended: list[BaseException] = []

    def keep_asking() -> None:
        try:
            with Client(server.listener.address, TOKEN, timeout_s=60) as client:
                while not stop.is_set():
                    begin = time.perf_counter()
                    client.begin(ROW)
                    taken.append(time.perf_counter() - begin)
                    time.sleep(0.001)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=keep_asking)
    thread.start()
    while not taken and not ended:
        time.sleep(0.01)
    yield taken
    stop.set()
    thread.join(60)
    assert not ended
    assert taken


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def said(connection: socket.socket) -> list[dict[str, Any]]:
    got = []
    with contextlib.suppress(OSError, protocol.ProtocolError):
        while True:
            got.append(protocol.receive(connection))
    return got


def hello(**more: Any) -> bytes:
    fields = {"type": "hello", "version": 1, "token": TOKEN}
    return protocol.pack(fields | more)


SEEDS = [
    {"type": "begin", "observation": PARTS},
    {"type": "step", "reward": 1.0, "observation": PARTS},
    {"type": "end", "reward": 1.0, "observation": PARTS, "truncated": True},
    {"type": "policy", "seats": [0], "explore": True, "want": "program", "have": -1},
    {
        "type": "rows",
        "version": 1,
        "count": 2,
        "observation": {"": PARTS[""] * 2},
        "reward": bytes(8),
        "flags": b"\x01\x00",
        "action": bytes(8),
        "extras": [bytes(8), bytes(8)],
        "state": [None],
    },
]


def fuzzed(random: np.random.Generator) -> bytes:
    """Return the frame of a message with something changed: a field, its bytes, or its length."""
    message = dict(SEEDS[random.integers(len(SEEDS))])
    odd = [None, -1, 2**63, 1e308, "", "x" * 300, b"\x00" * 5, [], {}, [[[[]]]], True, {"": {}}]
    for _ in range(random.integers(3)):
        key = list(message)[random.integers(len(message))]
        message[key] = odd[random.integers(len(odd))]
    frame = bytearray(protocol.pack(message))
    for _ in range(random.integers(4)):
        frame[random.integers(len(frame))] = random.integers(256)
    if random.random() < 0.2:
        del frame[random.integers(4, len(frame)) :]
    return bytes(frame)


@pytest.mark.parametrize(
    "count", [500, pytest.param(10_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_fuzzed_messages_are_refused_or_answered_and_cost_no_memory(
    server: PolicyServer, count: int
) -> None:
    random, ended = np.random.default_rng(5), 0
    with undisturbed(server):
        before, refused = resident_mb(), server.listener.counts["refused"]
        for number in range(count):
            connection = protocol.connect(server.listener.address)
            with contextlib.closing(connection):
                connection.settimeout(60)
                connection.sendall(hello(local=bool(random.random() < 0.5)))
                assert protocol.receive(connection)["type"] in ("welcome", "error")
                with contextlib.suppress(OSError):
                    connection.sendall(fuzzed(random))
                    connection.shutdown(socket.SHUT_WR)
                ended += any(one["type"] == "error" for one in said(connection))
            if number == count // 5:
                before = resident_mb()
        assert resident_mb() - before < 30
        # Those with half a frame are closed by their client.
        assert count / 3 < ended <= server.listener.counts["refused"] - refused
    taken = server.listener._taken
    deadline = time.monotonic() + 60
    while taken:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_thousand_connections_disturb_nobody(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    monkeypatch.setattr(listener, "HELLO_WITHIN_S", 2.0)
    before = resident_mb()
    with undisturbed(server) as taken, contextlib.ExitStack() as stack:
        for _ in range(1000):
            connection = socket.socket(socket.AF_UNIX)
            stack.callback(connection.close)
            connection.connect(server.listener.address.removeprefix("unix:"))
        asked = len(taken)
        deadline = time.monotonic() + 60
        # All are refused: those beyond the limit at once, the others since they say nothing.
        while server.listener.counts["refused"] < 1000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(taken) > asked
    assert server.listener.counts["refused"] == 1000
    assert resident_mb() - before < 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_slow_clients_are_dropped_and_a_fast_one_is_not_slowed(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_WITHIN_S", 0.5)
    frame = hello() + protocol.pack(SEEDS[0])
    with undisturbed(server) as taken, contextlib.ExitStack() as stack:
        connections = []
        for _ in range(50):
            connections.append(protocol.connect(server.listener.address))
            stack.callback(connections[-1].close)
        alive, at = set(range(50)), 0
        deadline = time.monotonic() + 30
        while alive:  # a byte each, again and again
            assert time.monotonic() < deadline
            for k in list(alive):
                try:
                    connections[k].sendall(frame[at % len(frame) :][:1])
                except OSError:
                    alive.remove(k)
            at += 1
            time.sleep(0.05)
        assert at * 0.05 < 20
        assert server.listener.counts["refused"] >= 50
        assert len(taken) > 20


def test_who_does_not_read_is_dropped(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_WITHIN_S", 0.5)
    ask_for_all = {"type": "policy", "seats": [0], "explore": True, "want": "program"}
    before = resident_mb()
    with undisturbed(server):
        connection = protocol.connect(server.listener.address)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.settimeout(30)
            connection.sendall(hello(local=True))
            for _ in range(20_000):
                connection.sendall(protocol.pack(ask_for_all))
            raise AssertionError("nobody dropped it")
    assert resident_mb() - before < 100


def test_a_late_answer_is_not_that_to_the_next_message(server: PolicyServer) -> None:
    answer, client = server.desk.answer, Client(server.listener.address, TOKEN)
    client._connection.settimeout(0.3)

    def late(asked: np.ndarray) -> Any:
        time.sleep(1.0)
        return answer(asked)

    server.desk.answer = late  # type: ignore[method-assign]
    with client, pytest.raises(TimeoutError, match="no answer came in time"):
        client.begin(ROW)
    with pytest.raises(OSError, match=r"closed|descriptor"):
        client.begin(ROW)


def test_a_client_takes_no_frame_of_any_size() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with ours, theirs:
        theirs.sendall(protocol.LENGTH.pack(2**32 - 1))
        with pytest.raises(protocol.ProtocolError, match="4294967295 bytes; at most"):
            protocol.receive(ours)


def test_what_ended_a_listener_does_not_end_the_next_start(server: PolicyServer) -> None:
    one, answer = server.listener, server.desk.answer

    def failing(asked: np.ndarray) -> Any:
        raise ValueError("failed")

    one.stop()
    server.desk.answer = failing  # type: ignore[method-assign]
    one.start(server.desk, listener.Watcher())
    one.stop()
    with pytest.raises(ValueError, match="failed"):
        one.check()
    server.desk.answer = answer  # type: ignore[method-assign]
    one.start(server.desk, listener.Watcher())
    with Client(one.address, TOKEN) as client:
        client.begin(ROW)
    one.check()


def certificate(folder: Path) -> str:
    """Write a self-signed certificate for this machine and its key; return the file."""
    x509 = pytest.importorskip("cryptography.x509")
    import datetime
    import ipaddress

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sebulba")])
    now = datetime.datetime.now(datetime.UTC)
    names = [
        x509.DNSName("localhost"),
        *(x509.IPAddress(ipaddress.ip_address(a)) for a in ("127.0.0.1", "::1")),
    ]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "certificate.pem"
    file.write_bytes(made.public_bytes(pem) + private)
    return str(file)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")),
    ],
)
def test_connections_are_encrypted_if_there_is_a_certificate(tmp_path: Path, host: str) -> None:
    file = certificate(tmp_path)
    trusting, tls = ssl.create_default_context(cafile=file), tls_of(file)
    with (
        PolicyServer("pretrained:cartpole", f"{host}:0", token=TOKEN, tls=tls, num_seats=4) as one,
        HttpFront(f"{host}:0", one, tls) as front,
    ):
        address = one.listener.address
        with Client(address, TOKEN, tls=trusting) as client:
            assert int(client.begin(ROW)) in (0, 1)
            with Actor(address, TOKEN, tls=trusting, local=True, explore=False) as actor:
                assert int(actor.act({0: Begin(ROW)})[0]) == int(client.begin(ROW))
            with pytest.raises(ssl.SSLError):
                Client(address, TOKEN, tls=ssl.create_default_context())
            with pytest.raises((OSError, protocol.ProtocolError)):
                Client(address, TOKEN)  # in plain
            assert int(client.begin(ROW)) in (0, 1)
        assert one.listener.counts["refused"] >= 2
        import http.client

        name, port = front.address.rsplit(":", 1)
        name = name.strip("[]")
        https = http.client.HTTPSConnection(name, int(port), context=trusting, timeout=60)
        head = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        https.request("POST", "/act", '{"observation": [0, 0, 0, 0]}', head)
        assert https.getresponse().status == 200
        https.close()


def test_addresses_of_ipv6() -> None:
    assert protocol.host_and_port("[::1]:80") == ("::1", 80)
    if has_ipv6():
        with (
            PolicyServer("pretrained:cartpole", "[::1]:0", num_seats=2) as one,
            Client(one.listener.address) as client,
        ):
            assert one.listener.address.startswith("[::1]:")
            assert int(client.begin(ROW)) in (0, 1)
    with pytest.raises(sebulba.UsageError, match="open to other machines"):
        PolicyServer("pretrained:cartpole", "[::]:0")


def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no certificate")
    for wrong in (str(tmp_path / "x"), "/no/such/file"):
        with pytest.raises(sebulba.UsageError, match="must be a PEM file"):
            tls_of(wrong)
    with pytest.raises(sebulba.UsageError, match="is that of a certificate"):
        tls_of("", "key")
    assert tls_of("") is None


def test_the_page_asks_for_the_token_itself(server: PolicyServer) -> None:
    with HttpFront("127.0.0.1:0", server) as front:
        status, text = ask(front, "GET", "/", Authorization="")
        assert status == 200
        assert "token" in text
        for path in ("/example", "/metrics", "/healthz"):
            assert ask(front, "GET", path, Authorization="")[0] == 403
        assert ask(front, "GET", "/", Host="evil.example")[0] == 403


def test_http_connections_beyond_the_limit_are_told_to_come_again(
    server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_front, "MOST_THREADS", 3)
    with HttpFront("127.0.0.1:0", server) as front, contextlib.ExitStack() as stack:
        idle = []
        for _ in range(3):
            idle.append(protocol.connect(front.address))
            stack.callback(idle[-1].close)
        deadline = time.monotonic() + 60

        def status() -> int:
            with contextlib.suppress(ConnectionError):  # closed before the request was read
                return ask(front, "GET", "/healthz")[0]
            return 503

        while status() != 503:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for one in idle:
            one.close()
        while status() != 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)

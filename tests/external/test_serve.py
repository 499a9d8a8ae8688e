"""A served policy acts as ``load_policy`` does, and stays up."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from sebulba_external import http_front, serve
from sebulba_external.client import Client
from sebulba_external.http_front import HttpFront, _arrays
from sebulba_external.serve import PolicyServer

import sebulba
from tests.support.browser import shown_in_a_browser

TOKEN = "a token"


def served(run: str | Path, token: str = "", **changes: Any) -> PolicyServer:
    return PolicyServer(
        str(run), **{"address": "127.0.0.1:0", "num_seats": 8} | changes, token=token
    )


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    with served("pretrained:cartpole", TOKEN) as one:
        yield one


@pytest.fixture(scope="module")
def front(server: PolicyServer) -> Iterator[HttpFront]:
    with HttpFront("127.0.0.1:0", server) as one:
        yield one


def observations(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.5, (count, 4)).astype(np.float32)


def ask(
    front: HttpFront, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(front.address, timeout=60)
    known = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = body if isinstance(body, str | None) else json.dumps(body)
    connection.request(method, path, data, known | headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_clients_get_the_actions_of_the_loaded_policy(
    server: PolicyServer, front: HttpFront
) -> None:
    rows = observations(40)
    expected, _ = sebulba.load_policy("pretrained:cartpole")(rows)
    with Client(server.listener.address, TOKEN) as client:
        assert [int(client.begin(row)) for row in rows] == expected.tolist()
    for row, action in zip(rows[:5], expected, strict=False):
        status, text = ask(front, "POST", "/act", {"observation": row.tolist()})
        assert (status, json.loads(text)) == (200, {"action": int(action)})


@pytest.mark.slow
def test_sessions_keep_the_memory_of_a_recurrent_policy_apart(tmp_path: Path) -> None:
    from sebulba.agents.configs import ImpalaConfig
    from sebulba.agents.impala import Impala
    from sebulba.policies.policy import Policy, save_policy
    from sebulba.types import RunSpec

    agent = Impala(sebulba.env_spec("CartPole-v1"), ImpalaConfig(lstm_size=16))
    networks = jax.tree.map(lambda x: 5 * x, agent.new_networks(jax.random.key(3)))
    save_policy(tmp_path / "policy", agent, networks)
    rows = observations(60).reshape(3, 20, 4)
    expected = []
    for session in rows:
        policy, state = Policy(agent, networks, RunSpec(1, 1, 1, 1, 1)), None
        for row in session:
            action, state = policy(row, state)
            expected.append(int(action))
    with (
        served(tmp_path) as server,
        HttpFront("127.0.0.1:0", server) as front,
    ):
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for step in range(20):
            for session in (2, 0, 1):
                body = {"observation": rows[session, step].tolist(), "session": f"s{session}"}
                status, text = ask(front, "POST", "/act", body)
                assert status == 200, text
                got[session].append(json.loads(text)["action"])
    assert got[0] + got[1] + got[2] == expected
    assert len(set(expected)) == 2


def test_a_newer_policy_is_taken_without_a_failed_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sebulba.policies.policy import save_policy

    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.05)
    policy = sebulba.load_policy("pretrained:cartpole")
    save_policy(tmp_path / "policy", policy.agent, policy.acting_networks)
    opposite = jax.tree.map(lambda x: x, policy.acting_networks)
    rows = observations(20)
    before, _ = policy(rows)
    failures, stop = [], threading.Event()
    with served(tmp_path, watch=True) as server:

        def keep_asking() -> None:
            with Client(server.listener.address) as client:
                while not stop.is_set():
                    try:
                        client.begin(rows[0])
                    except Exception as error:
                        failures.append(error)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        opposite["policy"] = jax.tree.map(lambda x: -x, opposite["policy"])
        save_policy(tmp_path / "policy", policy.agent, opposite)
        deadline = time.monotonic() + 60
        while server.policies_loaded < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with Client(server.listener.address) as client:
            after = [int(client.begin(row)) for row in rows]
        stop.set()
        thread.join(60)
    assert not failures
    assert after == [1 - action for action in before.tolist()]


REFUSED = {
    "no json": ("POST", "/act", "{", {}, 400, "Expecting"),
    "no observation": ("POST", "/act", {}, {}, 400, '"observation'),
    "unknown key": ("POST", "/act", {"observation": [0] * 4, "obs": 1}, {}, 400, "obs"),
    "shape": ("POST", "/act", {"observation": [0, 1]}, {}, 400, "expected (4,)"),
    "words": ("POST", "/act", {"observation": ["a"] * 4}, {}, 400, "numbers"),
    "not finite": ("POST", "/act", '{"observation": [NaN, 0, 0, 0]}', {}, 400, "not finite"),
    "too large": ("POST", "/act", {"observation": [1e300, 0, 0, 0]}, {}, 400, "beyond float32"),
    "long": ("POST", "/act", {"observation": [10**400, 0, 0, 0]}, {}, 400, "numbers"),
    "reward": ("POST", "/act", {"observation": [0] * 4, "reward": 1e300}, {}, 400, "32 bits"),
    "long reward": ("POST", "/act", {"observation": [0] * 4, "reward": 10**400}, {}, 400, "number"),
    "nested": ("POST", "/act", "[" * 50_000, {}, 400, ""),
    "session": ("POST", "/act", {"observation": [0] * 4, "session": 1}, {}, 400, "string"),
    "no page": ("GET", "/else", None, {}, 404, "/healthz"),
    "no post": ("POST", "/else", {}, {}, 404, "/act"),
    "form": ("POST", "/act", "a=1", {"Content-Type": "text/plain"}, 415, "application/json"),
    "huge": ("POST", "/act", "", {"Content-Length": str(1 << 40)}, 413, "at most"),
    "token": ("GET", "/metrics", None, {"Authorization": "Bearer other"}, 403, "token"),
    "host": ("GET", "/metrics", None, {"Host": "evil.example"}, 403, "Host"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_in_words(front: HttpFront, case: str) -> None:
    method, path, body, headers, status, words = REFUSED[case]
    got, text = ask(front, method, path, body, **headers)
    assert got == status
    assert words in json.loads(text)["error"]
    assert ask(front, "GET", "/healthz")[0] == 200


def test_many_requests_at_once_are_answered_and_leave_seats_to_others(
    server: PolicyServer, front: HttpFront
) -> None:
    def act(session: str | None) -> int:
        return ask(front, "POST", "/act", {"observation": [0] * 4, "session": session})[0]

    sessions = [None, *"abcdefghijkl"] * 4
    with ThreadPoolExecutor(24) as pool:
        assert set(pool.map(act, sessions)) == {200}
    with contextlib.ExitStack() as stack:
        for _ in range(4):  # half of the seats
            stack.enter_context(client_in_time(server))


def client_in_time(server: PolicyServer) -> Client:
    """Return a client; a connection that was closed just now may still have its seat."""
    for _ in range(100):
        with contextlib.suppress(ConnectionError):
            return Client(server.listener.address, TOKEN)
        time.sleep(0.02)
    raise AssertionError("no seat")


def test_a_bad_request_leaves_its_session_alone(server: PolicyServer, front: HttpFront) -> None:
    def act(**more: Any) -> int:
        body = {"observation": [0] * 4, "session": "kept"} | more
        return ask(front, "POST", "/act", body)[0]

    assert act() == 200
    welcomed, broke_off = server.listener.counts["welcomed"], server.listener.counts["broke_off"]
    assert act(observation=[0]) == act(reward="much") == 400
    assert act() == 200
    assert (server.listener.counts["welcomed"], server.listener.counts["broke_off"]) == (
        welcomed,
        broke_off,
    )


def test_whole_numbers_are_not_changed() -> None:
    parts = {"": ["|u1", [2]]}
    assert _arrays([7, 255], parts).tolist() == [7, 255]
    with pytest.raises(ValueError, match="beyond uint8"):
        _arrays([7, 256], parts)
    with pytest.raises(ValueError, match="a fraction"):
        _arrays([7, 1.5], parts)
    assert _arrays([1, 0], {"": ["|b1", [2]]}).tolist() == [True, False]


def test_all_names_of_this_machine_are_its_own(server: PolicyServer) -> None:
    with HttpFront("localhost:0", server) as front:
        port = front.address.rpartition(":")[2]
        for name in ("127.0.0.1", "localhost"):
            assert ask(front, "GET", "/healthz", Host=f"{name}:{port}")[0] == 200
        assert ask(front, "GET", "/healthz", Host="localhost:1")[0] == 403


def test_pages_and_metrics(front: HttpFront) -> None:
    ask(front, "POST", "/act", {"observation": [0] * 4})
    status, text = ask(front, "GET", "/metrics")
    assert status == 200
    assert int(re.search(r"^sebulba_asked_total (\d+)$", text, re.M)[1]) > 0  # type: ignore[index]
    assert 'sebulba_act_seconds{quantile="0.99"}' in text
    assert json.loads(ask(front, "GET", "/example")[1]) == [0, 0, 0, 0]
    assert "<textarea" in ask(front, "GET", "/")[1]


PERSON = """<script>
setTimeout(() => { get("t").value = "TOKEN"; get("t").onchange(); }, 1000);
setTimeout(() => { get("o").value = "[0, 0, 0.1, 0]"; get("b").click(); }, 2000);
</script>"""
"""Types the token and an observation, and presses the button."""


@pytest.mark.parametrize(("token", "said"), [(TOKEN, '{"action": 1}'), ("wrong", "wrong Host")])
def test_a_person_tries_an_observation_in_a_browser(
    front: HttpFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, said: str
) -> None:
    monkeypatch.setattr(http_front, "PAGE", http_front.PAGE + PERSON.replace("TOKEN", token))
    page = shown_in_a_browser(front.address, tmp_path)
    answer = re.findall(r'<pre id="a">(.*?)</pre>', page)[0]
    assert said in answer
    assert 'placeholder="token" hidden' not in page  # its first request was refused


def test_what_cannot_be_served_is_refused(tmp_path: Path, server: PolicyServer) -> None:
    with pytest.raises(sebulba.UsageError, match="seats=0 must be from 1"):
        serve.main([str(tmp_path), "--seats", "0"])
    with pytest.raises(sebulba.UsageError, match="open to other machines"):
        served("pretrained:cartpole", address="0.0.0.0:0")
    with pytest.raises(sebulba.UsageError, match="must be HOST:PORT"):
        HttpFront("7771", server)
    with (
        HttpFront("127.0.0.1:0", server) as taken,
        pytest.raises(sebulba.UsageError, match="nobody can listen"),
    ):
        HttpFront(taken.address, server)
    open_server = SimpleNamespace(listener=SimpleNamespace(token=""))
    with pytest.raises(sebulba.UsageError, match="--token-file"):
        HttpFront("0.0.0.0:0", open_server)  # type: ignore[arg-type]


def test_a_token_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = serve.token_in(file)
    assert len(token) > 20
    assert file.stat().st_mode & 0o077 == 0
    assert serve.token_in(file) == token
    file.write_text("")
    with pytest.raises(sebulba.UsageError, match="is empty"):
        serve.token_in(file)
    for wrong in (tmp_path / "none/token", tmp_path, Path("/dev/zero")):
        with pytest.raises(sebulba.UsageError, match=r"--token-file .* cannot be used"):
            serve.token_in(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    socket_file = f"unix:{tmp_path}/s"
    command = [sys.executable, "-m", "sebulba", "serve", "pretrained:cartpole"]
    command += ["--listen", socket_file]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    assert "serving pretrained:cartpole" in process.stdout.readline()
    with Client(socket_file) as client:
        assert int(client.begin(np.zeros(4, np.float32))) in (0, 1)
    process.send_signal(number)
    assert process.wait(60) == 0
    process.stdout.close()
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_client_in_c_plays_a_served_policy(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "examples/external_client.c"
    program = str(tmp_path / "client")
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, str(source), "-lm"]
    subprocess.run(command, check=True)

    def play(token: str) -> subprocess.CompletedProcess[str]:
        words = [program, f"{tmp_path}/s", token, "10"]
        return subprocess.run(words, capture_output=True, text=True, timeout=300)

    listen = f"unix:{tmp_path}/s"
    with served("pretrained:cartpole", TOKEN, address=listen):
        played, refused = play(TOKEN), play("another")
    assert float(re.findall(r"mean return (.*)", played.stdout)[0]) > 490
    assert refused.returncode == 1
    assert "the token is wrong" in refused.stderr

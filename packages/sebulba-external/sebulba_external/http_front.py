"""HTTP with JSON in front of a policy server; each session is a client of the protocol."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import socket
import ssl
import sys
import threading
import time
from collections import OrderedDict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np

from sebulba.errors import UsageError
from sebulba_external import protocol
from sebulba_external.client import Client
from sebulba_external.desk import MOST_REWARD
from sebulba_external.listener import LOOPBACK

if TYPE_CHECKING:
    from sebulba_external.serve import PolicyServer

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
MOST_BYTES = 16 << 20
LATENCIES = 1000
"""Requests whose latencies are kept for the quantiles."""
PAGE = """<!doctype html><meta charset="utf-8"><title>Sebulba policy</title>
<style>
body{font:16px system-ui;max-width:40em;margin:3em auto}
textarea{width:100%;height:8em}
</style>
<h1>Policy</h1><p>An observation, as JSON:</p><textarea id="o"></textarea>
<p><button id="b">Act</button> <input id="t" type="password" placeholder="token" hidden></p>
<pre id="a"></pre>
<script>
const get = id => document.getElementById(id);
const headers = () => Object.assign({"Content-Type": "application/json"},
  get("t").value ? {"Authorization": "Bearer " + get("t").value} : {});
const example = async () => {
  const answer = await fetch("example", {headers: headers()});
  get("t").hidden = answer.ok && !get("t").value;
  if (answer.ok) get("o").value = JSON.stringify(await answer.json(), null, 1);
};
get("t").onchange = example;
get("b").onclick = async () => {
  try {
    const body = JSON.stringify({observation: JSON.parse(get("o").value)});
    const answer = await fetch("act", {method: "POST", body, headers: headers()});
    get("a").textContent = await answer.text();
  } catch (error) { get("a").textContent = error; }
};
example();
</script>"""
"""The page shows a field for the token if its first request is refused."""
MOST_THREADS = 256
"""HTTP connections at a time; others are told to come again."""


class HttpFront:
    """``POST /act``, ``GET /healthz``, ``/metrics``, ``/example`` and a page to try it."""

    def __init__(
        self, address: str, server: PolicyServer, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen at ``HOST:PORT``; a port of 0 takes a free one; ``tls`` encrypts both sides.

        Raises:
          UsageError: An address beyond this machine, and the server has no token.
        """
        try:
            host, port = protocol.host_and_port(address)
        except protocol.ProtocolError as error:
            raise UsageError(str(error)) from None
        if host not in LOOPBACK and not server.listener.token:
            raise UsageError(
                f"--http {address} is open to other machines; protect it with --token-file FILE"
            )
        self._server = server
        self._sessions: OrderedDict[str, Client] = OrderedDict()
        self._idle: deque[Client] = deque()
        self._lock = threading.Lock()
        self._most = max(1, server.desk.num_seats // 2)
        """Clients that are kept; beyond them the session that is longest unused is forgotten."""
        self._turns = threading.Semaphore(max(1, server.desk.num_seats - self._most))
        self._parts = server.desk.shapes()["observation"]
        self.latencies: deque[float] = deque(maxlen=LATENCIES)
        handler = type("Handler", (_Handler,), {"front": self})
        try:
            self._http = _Server((host, port), handler)
        except OSError as error:
            raise UsageError(
                f"nobody can listen at {address} ({error.strerror or error}); use another port"
            ) from None
        self._tls_to_server: ssl.SSLContext | None = None
        if tls is not None:
            self._http.socket = tls.wrap_socket(
                self._http.socket, server_side=True, do_handshake_on_connect=False
            )
            if not server.listener.address.startswith("unix:"):
                # This process itself listens there: its certificate proves nothing more.
                self._tls_to_server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                self._tls_to_server.check_hostname = False
                self._tls_to_server.verify_mode = ssl.CERT_NONE
        port = self._http.server_address[1]
        names = [f"[{name}]" if ":" in name else name for name in (host, *LOOPBACK)]
        self.address = f"{names[0]}:{port}"
        self._hosts = {f"{name}:{port}" for name in names}
        if port == (http.client.HTTP_PORT if tls is None else http.client.HTTPS_PORT):
            self._hosts |= {*names}
        self._is_local = host in LOOPBACK
        self._thread = threading.Thread(target=self._http.serve_forever, name="http", daemon=True)
        self._thread.start()

    def act(self, request: Any) -> dict[str, Any]:
        """Return the action for a request: ``observation``, and perhaps ``session``, ``reward``.

        Without a session, each observation begins an episode of its own.

        Raises:
          ValueError: What is wrong with it.
        """
        if not isinstance(request, dict) or "observation" not in request:
            raise ValueError('the body must be a JSON object with an "observation"')
        unknown = request.keys() - {"observation", "session", "reward", "first"}
        if unknown:
            raise ValueError(f"unknown keys {sorted(unknown)}; use observation, session, reward")
        session = request.get("session")
        if session is not None and not isinstance(session, str):
            raise ValueError("session must be a string; leave it out for single observations")
        observation = _arrays(request["observation"], self._parts)
        reward = _reward(request.get("reward", 0.0))
        begin = time.perf_counter()
        with self._turns:  # more requests than seats wait
            client, is_new = self._client(session)
            try:
                if session is None or is_new or request.get("first") is True:
                    action = client.begin(observation)
                else:
                    action = client.step(reward, observation)
            except BaseException:
                client.close()
                raise
            self._give_back(session, client)
        self.latencies.append(time.perf_counter() - begin)
        return {"action": action.tolist()}

    def _client(self, session: str | None) -> tuple[Client, bool]:
        with self._lock:
            if session is not None and session in self._sessions:
                return self._sessions.pop(session), False
            if self._idle:
                return self._idle.pop(), True
            oldest = None
            if len(self._sessions) >= self._most:
                oldest = self._sessions.popitem(last=False)[1]
        if oldest is not None:
            oldest.close()
        listener = self._server.listener
        return Client(listener.address, listener.token, tls=self._tls_to_server), True

    def _give_back(self, session: str | None, client: Client) -> None:
        gone = []
        with self._lock:
            if session is None:
                self._idle.append(client)
            else:
                if session in self._sessions:  # two requests of a session at once
                    gone.append(self._sessions.pop(session))
                self._sessions[session] = client
            while len(self._sessions) + len(self._idle) > self._most:
                is_idle = bool(self._idle)
                gone.append(self._idle.pop() if is_idle else self._sessions.popitem(last=False)[1])
        for one in gone:
            one.close()

    def metrics(self) -> str:
        """Return the server's counts in the text format of Prometheus."""
        counts = self._server.listener.counts
        lines = [
            f"# TYPE sebulba_{name}_total counter\nsebulba_{name}_total {count}"
            for name, count in {
                **{name: counts[name] for name in ("asked", "batches", "refused")},
                "policies_loaded": self._server.policies_loaded,
            }.items()
        ]
        taken = list(self.latencies) or [0.0]
        lines.append("# TYPE sebulba_act_seconds summary")
        for q in (0.5, 0.99):
            value = np.quantile(taken, q)
            lines.append(f'sebulba_act_seconds{{quantile="{q}"}} {value:.6f}')
        return "\n".join(lines) + "\n"

    def example(self) -> Any:
        """Return an observation of zeros."""
        parts = self._server.desk.parts
        zeros = {name: np.zeros(x.shape[1:], x.dtype).tolist() for name, x in parts.items()}
        return zeros[""] if zeros.keys() == {""} else zeros

    def is_allowed(self, host: str | None, authorization: str | None, needs_token: bool) -> bool:
        """Tell whether a request names this host, and the token if it needs one."""
        if self._is_local and host not in self._hosts:
            return False  # a page of another site, whose name now points to this machine
        token = self._server.listener.token
        given = (authorization or "").removeprefix("Bearer ")
        return not (needs_token and token) or hmac.compare_digest(given.encode(), token.encode())

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for client in (*self._idle, *self._sessions.values()):
            client.close()

    def __enter__(self) -> HttpFront:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _arrays(given: Any, parts: dict[str, list]) -> Any:
    """Return an observation of JSON as arrays.

    Raises:
      ValueError: It does not fit; the text says how.
    """
    one = parts.keys() == {""}
    given = {"": given} if one else given
    if not isinstance(given, dict) or given.keys() != parts.keys():
        raise ValueError(f"observation must be an object with the keys {sorted(parts)}")
    arrays = {}
    for name, (dtype, shape) in parts.items():
        try:
            array = np.asarray(given[name], np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"observation {name!r} must be nested lists of numbers") from None
        if array.shape != tuple(shape):
            raise ValueError(f"observation has shape {array.shape}; expected {tuple(shape)}")
        kind = np.dtype(dtype)
        info = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind) if kind.kind in "iu" else None
        low, high = (0, 1) if info is None else (info.min, info.max)
        if not ((array >= low) & (array <= high)).all():  # nor if it is not finite
            raise ValueError(
                f"observation has a value that is not finite, or is beyond {kind.name}"
            )
        if kind.kind != "f" and (array % 1).any():
            raise ValueError(f"observation has a fraction; expected {kind.name}")
        arrays[name] = array.astype(kind)
    return arrays[""] if one else arrays


def _reward(given: Any) -> float:
    try:
        reward = float(given)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("reward must be a number") from None
    if not abs(reward) <= MOST_REWARD:
        raise ValueError("reward must be a finite number of 32 bits")
    return reward


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    """Connections that wait to be accepted; beyond them some are reset."""

    def __init__(self, address: tuple[str, int], handler: type) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._free = threading.Semaphore(MOST_THREADS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a client that is gone, or does not speak TLS."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    front: HttpFront
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        front = self.front
        if not self._is_allowed(needs_token=self.path != "/"):
            return
        answers = {
            "/": lambda: (PAGE, "text/html"),
            "/healthz": lambda: (json.dumps({"status": "ok"}), "application/json"),
            "/metrics": lambda: (front.metrics(), "text/plain"),
            "/example": lambda: (json.dumps(front.example()), "application/json"),
        }
        if self.path not in answers:
            self._send(404, {"error": f"no such page; use {', '.join(answers)} or POST /act"})
        else:
            text, kind = answers[self.path]()
            self._answer(200, text, kind)

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        if self.path != "/act":
            self.close_connection = True  # its body is not read
            self._send(404, {"error": "no such page; use POST /act"})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True
            self._send(413, {"error": f"Content-Length must be at most {MOST_BYTES}"})
            return
        body = self.rfile.read(int(length))
        if self.headers.get_content_type() != "application/json":
            self._send(415, {"error": "Content-Type must be application/json"})
            return
        try:
            self._send(200, self.front.act(json.loads(body)))
        except (ValueError, TypeError, RecursionError) as error:
            self._send(400, {"error": str(error)})
        except (ConnectionError, OSError) as error:
            self._send(503, {"error": str(error)})

    def _is_allowed(self, *, needs_token: bool = True) -> bool:
        headers = self.headers
        if self.front.is_allowed(headers.get("Host"), headers.get("Authorization"), needs_token):
            return True
        self.close_connection = True
        self._send(403, {"error": "wrong Host or token"})
        return False

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        self._answer(status, json.dumps(answer), "application/json")

    def _answer(self, status: int, text: str, kind: str) -> None:
        data = text.encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing: requests are counted in /metrics."""

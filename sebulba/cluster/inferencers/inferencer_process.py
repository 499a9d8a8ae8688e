"""The process of one or several Inferencers, or of a trajectory manager: it answers at sockets.

``processes.py`` starts it by ``python -m`` with the arguments ``CONTROL FD...``, and asks: each FD
is the socket of one Inferencer, and networks come through CONTROL, once for all. It ends when the
other end of its sockets is closed, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from sebulba.cluster.inferencers.inferencer_server import failure_of
from sebulba.cluster.inferencers.remote_inferencer import make_servers
from sebulba.support.user_code import use_search_path

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""A terminal sends them to all of its processes; the one that trains decides what becomes of it."""


def main() -> None:
    """Serve the sockets whose numbers are the arguments."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    control, *connections = (Connection(int(number)) for number in sys.argv[1:])
    (path, folders), config, given, name = control.recv()
    sys.path[:] = path
    use_search_path(path, folders)
    servers = make_servers(name, given, config, len(connections))

    def receive(version: int, leaves: list, keep: Collection[int]) -> None:
        servers[0].shared.put(version, lambda: leaves, keep)

    threading.Thread(target=_listen, args=(control, receive), daemon=True).start()
    for connection, server in zip(connections[1:], servers[1:], strict=True):
        threading.Thread(target=_serve, args=(connection, server), daemon=True).start()
    _serve(connections[0], servers[0])  # some environments want the main thread


def _serve(connection: Connection, server: Any) -> NoReturn:
    """Answer the requests of one Inferencer, one after the other."""
    requests: queue.SimpleQueue[tuple[str, tuple]] = queue.SimpleQueue()

    def take(name: str, arguments: tuple) -> None:
        if name == "stop":  # at once, while a cycle runs
            server.stop(*arguments)
        else:
            requests.put((name, arguments))

    threading.Thread(target=_listen, args=(connection, take), daemon=True).start()
    try:
        while True:
            _send(connection, server.answer(*requests.get()))
    except OSError:
        os._exit(0)  # nobody is there any more


def _send(connection: Connection, answer: Any) -> None:
    """Send an answer, or why it cannot be sent: whoever asked would wait for ever."""
    try:
        connection.send(answer)
    except OSError:
        raise
    except Exception as raised:  # it cannot be pickled
        connection.send(failure_of(raised))


def _listen(connection: Connection, take: Callable[..., None]) -> NoReturn:
    """Give each message to ``take``; end the process with the connection, or if one is damaged."""
    try:
        while True:
            take(*connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # threads inside XLA or an environment must not delay the end
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()

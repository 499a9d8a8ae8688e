"""The process of one Inferencer, or of a trajectory manager: it answers at the end of a socket.

``processes.py`` starts it as ``python -m sebulba.inference.inferencer_process FD``, and asks. It
ends when the other end of its socket is closed, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from sebulba.inference.remote import server_class

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""A terminal sends them to all of its processes; the one that trains decides what becomes of it."""


def main() -> None:
    """Serve the socket whose number is the argument."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    path, config, given, name = connection.recv()
    sys.path[:] = path
    server = server_class(name)(given, config)
    requests: queue.SimpleQueue[tuple[str, tuple]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests, server), daemon=True).start()
    while True:
        connection.send(server.answer(*requests.get()))


def _read(
    connection: Connection, requests: queue.SimpleQueue[tuple[str, tuple]], server: Any
) -> None:
    """Pass requests on, and tell a cycle to stop at once; end the process with the connection."""
    try:
        while True:
            name, arguments = connection.recv()
            if name == "stop":
                server.stop(*arguments)
            else:
                requests.put((name, arguments))
    except (EOFError, OSError):
        # Threads inside XLA or an environment must not delay the end.
        os._exit(0)


if __name__ == "__main__":
    main()

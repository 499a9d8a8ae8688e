"""``sebulba board``: the runs of a folder on loopback, by starlette and uvicorn."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sebulba.errors import UsageError
from sebulba_board.pages import (
    POLICY,
    diff_page,
    error_page,
    report_page,
    run_page,
    table_page,
)
from sebulba_board.run_details import films_of
from sebulba_board.run_index import Shelf

LOOPBACK = "127.0.0.1"
"""The only address that is served: nobody else's machine can reach it."""
HOSTS = [LOOPBACK, "localhost"]
"""Names by which a browser may ask. A page elsewhere could have its own name lead to loopback."""
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Board:
    """Answers requests; starlette calls it in threads."""

    def __init__(self, root: Path) -> None:
        """Serve the runs in ``root``, which exists."""
        self._root = root
        self._shelf = Shelf(root)

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self._table),
            Route("/run/{word}", self._run),
            Route("/run/{word}/report.html", self._report),
            Route("/run/{word}/film/{name}", self._film),
            Route("/diff", self._diff),
            Route("/board.js", self._script),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
        return Starlette(routes=routes, middleware=[hosts], exception_handlers={404: self._missing})

    def _table(self, request: Request) -> Response:
        return _answer(request, table_page(self._shelf.table(), str(self._root)))

    def _run(self, request: Request) -> Response:
        return self._shown(request, [request.path_params["word"]], run_page)

    def _report(self, request: Request) -> Response:
        answer = self._shown(request, [request.path_params["word"]], report_page)
        if answer.status_code == 200:
            answer.headers["Content-Disposition"] = 'attachment; filename="report.html"'
        return answer

    def _film(self, request: Request) -> Response | ASGIApp:
        folder = self._shelf.folder(request.path_params["word"])
        for film in films_of(folder) if folder is not None else []:
            if folder is not None and film.file.name == request.path_params["name"]:
                with contextlib.suppress(OSError, UsageError):
                    return _sent(folder.resolve() / film.file.relative_to(folder))
        return _answer(request, error_page("There is no such film."), 404)

    def _diff(self, request: Request) -> Response:
        words = request.query_params.getlist("run")
        if len(words) != 2:
            said = f"{len(words)} runs are chosen; choose two in the table of all runs"
            return _answer(request, error_page(said), 400)
        return self._shown(request, words, diff_page)

    def _script(self, request: Request) -> Response:
        script = Path(__file__).with_name("board.js").read_bytes()
        return Response(script, media_type="text/javascript", headers=HEADERS)

    def _missing(self, request: Request, error: Exception) -> Response:
        return _answer(request, error_page("There is no such page."), 404)

    def _shown(self, request: Request, words: list[str], make: Callable[..., str]) -> Response:
        """Return the page of some runs, or why there is none."""
        runs = self._shelf.runs()
        if not all(word in runs for word in words):
            said = f"There is no such run in {self._root}."
            return _answer(request, error_page(said), 404)
        folders = tuple(runs[word] for word in words)
        try:
            return _answer(request, self._shelf.page(make, folders))
        except UsageError as error:
            return _answer(request, error_page(str(error)), 409)
        except OSError as error:  # it vanished meanwhile
            said = f"The run cannot be read ({error.strerror})."
            return _answer(request, error_page(said), 409)


def _sent(film: Path) -> ASGIApp:
    """Return what sends the file that is opened here, whatever takes its name later.

    Raises:
      OSError: It is not there any more, or the file or its folder is a link by now.
      UsageError: It is not a regular file.
    """
    place = os.open(film.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a writer
        opened = os.open(film.name, flags, dir_fd=place)
    finally:
        os.close(place)
    seen = os.fstat(opened)
    if not stat.S_ISREG(seen.st_mode):
        os.close(opened)
        raise UsageError(f"{film} is not a regular file")
    response = FileResponse(
        f"/dev/fd/{opened}", media_type="video/mp4", headers=HEADERS, stat_result=seen
    )

    async def send_and_close(scope: Scope, receive: Receive, send: Send) -> None:
        try:  # a browser often goes away in the middle of a film
            await response(scope, receive, send)
        finally:
            os.close(opened)

    return send_and_close


def _answer(request: Request, page: str, status: int = 200) -> Response:
    """Return a page, or that the browser has it already."""
    tag = f'"{hashlib.sha256(page.encode()).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(page, status, headers, "text/html; charset=utf-8")


def listen(port: int) -> socket.socket:
    """Return a socket on loopback.

    Raises:
      UsageError: The port is in use, or not for this user.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((LOOPBACK, port))
        bound.listen()
    except OSError as error:
        bound.close()
        why = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
        )
        raise UsageError(
            f"--port {port} {why}; choose another, or --port 0 for any that is free"
        ) from error
    return bound


def server(root: Path) -> uvicorn.Server:
    """Return a server of the runs in ``root``; its ``run(sockets=[...])`` returns at its end."""
    config = uvicorn.Config(
        Board(root).app(),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)

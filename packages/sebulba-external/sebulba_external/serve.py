"""``sebulba serve``: a trained policy that answers clients, over the protocol and over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba.commands.options import BEST, PLATFORM, TRUST, flag, number, option, parse
from sebulba.errors import UsageError
from sebulba.runs.folder import RunFolder
from sebulba.support.files import check_no_link

if TYPE_CHECKING:
    import numpy as np

    from sebulba.policies.policy import Policy
    from sebulba_external.desk import Answer

LOOK_EVERY_S = 1.0
"""Seconds between two looks for a newer policy."""
MOST_SEATS = 4096


def main(argv: Sequence[str]) -> int:
    """Serve the policy of a run until Ctrl-C; returns the exit code."""
    given = parse(
        "serve",
        "Serve the trained policy of a run to clients.",
        argv,
        (
            option("run", "folder of the run, or pretrained:NAME", metavar="RUN"),
            option("--listen", "HOST:PORT or unix:PATH of the protocol", default="127.0.0.1:7770"),
            option("--http", "HOST:PORT of HTTP with JSON", metavar="ADDRESS"),
            option("--token-file", "file of the token; made if it is missing", metavar="FILE"),
            number("--seats", 64, "most clients at a time"),
            flag("--watch", "take newer policies of the run while it trains"),
            flag("--explore", "sample actions as in training"),
            *(BEST, TRUST, PLATFORM),
        ),
    )
    if given.seats not in range(1, MOST_SEATS + 1):
        raise UsageError(f"seats={given.seats} must be from 1 to {MOST_SEATS}; use 64")
    token = "" if given.token_file is None else token_in(Path(given.token_file))
    from sebulba.runs.jax_setup import configure_jax

    configure_jax(given.platform)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(PolicyServer(given, token))
        print(f"serving {given.run} at {server.address}, {given.seats} seats", flush=True)
        if given.http is not None:
            from sebulba_external.http_front import HttpFront

            front = stack.enter_context(HttpFront(given.http, server))
            print(f"HTTP at http://{front.address}", flush=True)
        _wait_for_signal(server)
    return 0


def token_in(file: Path) -> str:
    """Return the token in a file, which is made for its owner alone if it is missing."""
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as new:
                new.write(secrets.token_urlsafe(24) + "\n")
        check_no_link(file)
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--token-file {file} cannot be used ({why}); use another") from None
    if not token:
        raise UsageError(f"--token-file {file} is empty; delete it to have a token made")
    return token


def _wait_for_signal(server: PolicyServer) -> None:
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while not stop.wait(0.2):
            server.check()
    finally:
        for number_, handler in before.items():
            signal.signal(number_, handler)


class PolicyServer:
    """A policy at an address: the protocol of the seats, but nothing is learned."""

    def __init__(self, given: argparse.Namespace, token: str) -> None:
        """Load the policy; answer from now on.

        Args:
          given: ``run``, ``listen``, ``seats``, ``watch``, ``best``, ``explore``, ``trust``.
          token: Clients have to say it.
        """
        from sebulba_external.desk import Desk
        from sebulba_external.listener import Listener

        self._given = given
        folder = RunFolder(_folder(given.run))
        self._policy_folder = folder.best_policy if given.best else folder.root
        self._stamp = self._newest_stamp()
        policy = self._load()
        self.run, self.policies_loaded = given.run, 1
        self.desk = Desk(
            policy.agent, given.seats, policy.new_state(given.seats).step, explore=given.explore
        )
        self.desk.networks = policy.acting_networks
        self._listener = Listener(given.listen, token)
        self.address, self.token = self._listener.address, token
        self.counts = self._listener.counts
        self._error: BaseException | None = None
        names = {"serve": self._serve} | ({"watch": self._watch} if given.watch else {})
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True) for name, work in names.items()
        ]
        for thread in self._threads:
            thread.start()

    def _load(self) -> Policy:
        from sebulba.loops.devices import local_devices
        from sebulba.policies.policy import load_policy

        local_devices()  # says in words what is wrong with the platform
        given = self._given
        run = given.run if not given.best else self._policy_folder
        policy = load_policy(run, explore=given.explore, trust=given.trust)
        if not hasattr(policy, "spec") or not hasattr(policy.spec, "observation_space"):
            raise UsageError(f"{given.run} is a policy of many agents; serve one of its members")
        return policy

    def _newest_stamp(self) -> int:
        files = [self._policy_folder / "policy/config.json", self._policy_folder / "config.json"]
        return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)

    def _watch(self) -> None:
        """Load the policy again whenever the run has written a newer one."""
        import jax
        import numpy as np

        def shapes(networks: Any) -> Any:
            return jax.tree.map(lambda x: (np.shape(x), str(x.dtype)), networks)

        while not self._listener.closed.wait(LOOK_EVERY_S):
            if (stamp := self._newest_stamp()) == self._stamp:
                continue
            try:
                networks = self._load().acting_networks
                if shapes(networks) != shapes(self.desk.networks):
                    raise UsageError("its networks have other shapes; restart the server")
            except Exception as error:  # half written: the next look finds it whole
                print(f"sebulba: warning: kept the older policy: {error}", file=sys.stderr)
            else:
                self.desk.networks = networks
                self.policies_loaded += 1
            self._stamp = stamp

    def _serve(self) -> None:
        try:
            self._listener.serve(self.desk, self)
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what ended the thread that answers."""
        if self._error is not None:
            raise self._error

    def reported(self, seat: int) -> None:
        """Do nothing: nothing is learned."""

    def answered(self, asked: np.ndarray, answer: Answer) -> None:
        """Do nothing."""

    def left(self, seat: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Stop to answer."""
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> PolicyServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _folder(run: str) -> Path:
    from sebulba.policies.pretrained import folder_of

    return folder_of(run)

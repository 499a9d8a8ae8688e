"""``sebulba serve``: a trained policy that answers clients, over the protocol and over HTTP."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import ssl
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba.commands.options import BEST, PLATFORM, TRUST, flag, number, option, parse
from sebulba.errors import UsageError
from sebulba.runs.folder import RunFolder
from sebulba.support.files import check_regular
from sebulba.types import EnvSpec

if TYPE_CHECKING:
    from sebulba_external.listener import Listener

LOOK_EVERY_S = 1.0
"""Seconds between two looks for a newer policy."""
MOST_SEATS, MOST_TOKEN_BYTES = 4096, 4096


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
            option("--certificate", "file of a certificate, to encrypt TCP", metavar="FILE"),
            option("--private-key", "file of its key, if it is another one", metavar="FILE"),
            number("--seats", 64, "most clients at a time"),
            flag("--watch", "take newer policies of the run as it writes them"),
            flag("--explore", "sample actions as in training"),
            *(BEST, TRUST, PLATFORM),
        ),
    )
    if given.seats not in range(1, MOST_SEATS + 1):
        raise UsageError(f"seats={given.seats} must be from 1 to {MOST_SEATS}; use 64")
    token = "" if given.token_file is None else token_in(Path(given.token_file))
    tls = tls_of(given.certificate or "", given.private_key or "")
    from sebulba.loops.devices import local_devices
    from sebulba.runs.jax_setup import configure_jax

    configure_jax(given.platform)
    local_devices()  # says in words what is wrong with the platform
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            PolicyServer(
                given.run,
                given.listen,
                token=token,
                tls=tls,
                num_seats=given.seats,
                best=given.best,
                watch=given.watch,
                explore=given.explore,
                trust=given.trust,
            )
        )
        listener = server.listener
        print(f"serving {given.run} at {listener.address}, {given.seats} seats", flush=True)
        if given.http is not None:
            from sebulba_external.http_front import HttpFront

            front = stack.enter_context(HttpFront(given.http, server, tls))
            print(f"HTTP at http{'s' if tls else ''}://{front.address}", flush=True)
        _wait_for_signal(listener)
    return 0


def token_in(file: Path) -> str:
    """Return the token in a file, which is made for its owner alone if it is missing."""
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as new:
                new.write(secrets.token_urlsafe(24) + "\n")
        check_regular(file, links=False, most=MOST_TOKEN_BYTES)
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError, UsageError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--token-file {file} cannot be used ({why}); use another") from None
    if not token:
        raise UsageError(f"--token-file {file} is empty; delete it to have a token made")
    return token


def tls_of(certificate: str, private_key: str = "") -> ssl.SSLContext | None:
    """Return how a server encrypts; None without a certificate.

    Raises:
      UsageError: A file cannot be read, or they do not fit.
    """
    if not certificate:
        if private_key:
            raise UsageError(f"private_key={private_key} is that of a certificate; name it, too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key or None)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"certificate={certificate} cannot be used ({error}); it must be a PEM file with a "
            "certificate, and its key there or in private_key"
        ) from None
    return context


def _wait_for_signal(listener: Listener) -> None:
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while not stop.wait(0.2):
            listener.check()
    finally:
        for number_, handler in before.items():
            signal.signal(number_, handler)


class PolicyServer:
    """A policy at an address: the protocol of the seats, but nothing is learned."""

    def __init__(
        self,
        run: str,
        address: str,
        *,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        num_seats: int = 64,
        best: bool = False,
        watch: bool = False,
        explore: bool = False,
        trust: bool = False,
    ) -> None:
        """Load the policy of a run, and answer from now on.

        Args:
          run: As for ``load_policy``.
          address: ``HOST:PORT`` or ``unix:PATH``.
          token: Clients have to say it.
          tls: With a certificate, to encrypt TCP.
          num_seats: Most clients at a time.
          best: The policy with the highest evaluation return, not the last one.
          watch: Take newer policies as the run writes them.
          explore: Act as in training.
          trust: As for ``load_policy``.
        """
        from sebulba.policies.policy import load_policy
        from sebulba.policies.pretrained import folder_of
        from sebulba_external.desk import Acting, Desk
        from sebulba_external.listener import Listener, Watcher

        folder = RunFolder(folder_of(run))
        self._folder = folder.best_policy if best else folder.root
        which = self._folder if best else run
        self._load = functools.partial(load_policy, which, explore=explore, trust=trust)
        self._stamp = self._newest_stamp()
        policy = self._load()
        if not isinstance(policy.agent.spec, EnvSpec):
            raise UsageError(f"{run} is a policy of many agents; serve one of its members")
        self.policies_loaded = 1
        step_state = policy.new_state(num_seats).step
        self.desk = Desk(policy.agent, num_seats, step_state, explore=explore)
        self.desk.acting = Acting(self.policies_loaded, policy.acting_networks)
        self.listener = Listener(address, token, tls)
        self.listener.start(self.desk, Watcher())
        self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        if watch:
            self._watching.start()

    def _newest_stamp(self) -> int:
        newest = 0
        for name in ("policy/config.json", "config.json"):
            with contextlib.suppress(OSError):  # missing, or exchanged in this moment
                newest = max(newest, (self._folder / name).stat().st_mtime_ns)
        return newest

    def _watch(self) -> None:
        """Load the policy again whenever the run has written a newer one."""
        import jax
        import numpy as np

        from sebulba_external.desk import Acting

        def shapes(networks: Any) -> Any:
            return jax.tree.map(lambda x: (np.shape(x), str(x.dtype)), networks)

        while not self.listener.closed.wait(LOOK_EVERY_S):
            if (stamp := self._newest_stamp()) == self._stamp:
                continue
            try:
                networks = self._load().acting_networks
                if shapes(networks) != shapes(self.desk.acting.networks):
                    raise UsageError("its networks have other shapes; restart the server")
            except Exception as error:  # a policy is exchanged at once: it will not get better
                print(f"sebulba: warning: kept the older policy: {error}", file=sys.stderr)
            else:
                self.policies_loaded += 1
                self.desk.acting = Acting(self.policies_loaded, networks)
            self._stamp = stamp

    def close(self) -> None:
        """Stop to answer."""
        self.listener.close()
        if self._watching.is_alive():
            self._watching.join()

    def __enter__(self) -> PolicyServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

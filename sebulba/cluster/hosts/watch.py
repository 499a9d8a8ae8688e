"""Who of the hosts is still there: each leaves a sign of life every second, and reads the others'.

Free of JAX. ``jax.distributed`` has a heartbeat of its own, which aborts the process without saying
which host is gone; this one is quicker and says it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from sebulba.errors import HostError

BEAT_S = 1.0
"""Seconds between signs of life."""
DEAD_S = 4.0
"""Where a collective has failed, a host that gave no sign of life for so long is the reason."""
EXPLAIN_S = 8.0
"""How long to look for the reason why a collective has failed."""
GRACE_S = 5.0
"""Seconds that the update loop is given to raise by itself once a host has failed."""

LIFE, REASON, FAILED, DONE, STOP = "life", "reason", "failed", "done", "stop"
"""Topics of notes: signs of life; why a host has no round; why one ended; that one is done; the
round after which one stops."""

WAY_ON = (
    "Run sebulba resume RUN on all hosts with the same --distributed options; it continues from "
    "the newest checkpoint that all hosts have saved"
)


class Notes:
    """Notes in the store of keys and values of ``jax.distributed``, a JSON text for each host.

    JAX has no public name for it; orbax and flax use the same one.
    """

    def __init__(self) -> None:
        """Use the client of this process, which has joined the others.

        Raises:
          RuntimeError: It has not.
        """
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise RuntimeError("jax.distributed has not been initialised")
        self._client: Any = client

    def leave(self, topic: str, host: int, about: Any) -> None:
        """Leave ``about`` in the place of what this host left under ``topic`` before."""
        key = f"sebulba/{topic}/{host}"
        self._client.key_value_set(key, json.dumps(about), allow_overwrite=True)

    def read(self, topic: str) -> dict[int, Any]:
        """Return what hosts left under ``topic``, by host."""
        found = self._client.key_value_dir_get(f"sebulba/{topic}/")
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}


class Watch:
    """A thread that gives signs of life and notices when those of another host end."""

    def __init__(self, notes: Notes, host: int, num_hosts: int, timeout_s: float) -> None:
        """Begin at once.

        Args:
          timeout_s: A host that has given none for so long is gone.
        """
        self._notes = notes
        self.host = host
        self.num_hosts = num_hosts
        self._timeout_s = timeout_s
        self._number = 0
        self._seen: dict[int, tuple[Any, float]] = {}
        """The last sign of life of each other host, and when it was first seen."""
        self._names: dict[int, str] = {}
        self._answered_at = time.monotonic()
        """When the coordinator last answered."""
        self._lost_at: float | None = None
        self.on_lost: Callable[[HostError], None] | None = None
        """Called, in the thread of this watch, where the update loop does not raise by itself."""
        self.round = 0
        """The number of the round that this host is in."""
        self.stop_requested: threading.Event | None = None
        """Set once another host stops after that round, so that this one takes no more for it."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            self.look()

    def look(self, now: float | None = None) -> None:
        """Give a sign of life and read those of the others once."""
        now = time.monotonic() if now is None else now
        self._number += 1
        me = {"number": self._number, "name": f"{socket.gethostname()}, process {os.getpid()}"}
        try:
            self._notes.leave(LIFE, self.host, me)
            signs = self._notes.read(LIFE)
            stops = self._notes.read(STOP)
            self._answered_at = now
        except Exception:  # jaxlib's own; the coordinator does not answer
            signs, stops = {}, {}
        if self.stop_requested is not None and self.round in stops.values():
            self.stop_requested.set()
        for host in set(range(self.num_hosts)) - {self.host}:
            sign = signs.get(host)
            number = sign and sign["number"]
            if sign:
                self._names[host] = sign["name"]
            if host not in self._seen or self._seen[host][0] != number:
                self._seen[host] = (number, now)
        error = self.lost(now=now)
        if error is None:
            return
        self._lost_at = now if self._lost_at is None else self._lost_at
        if self.on_lost is not None and now - self._lost_at >= GRACE_S:
            on_lost, self.on_lost = self.on_lost, None
            on_lost(error)

    def lost(self, timeout_s: float | None = None, now: float | None = None) -> HostError | None:
        """Return the error that names a host that failed or is gone; None if all are there.

        Args:
          timeout_s: A host that has given no sign of life for so long is gone; None is the limit of
            this watch.
        """
        now = time.monotonic() if now is None else now
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if now - self._answered_at > timeout_s:
            return HostError(f"{self.name_of(0)}, the coordinator, is lost. {WAY_ON}")
        try:
            failed, done = self._notes.read(FAILED), self._notes.read(DONE)
        except Exception:  # jaxlib's own
            return None
        for host in sorted(failed.keys() - {self.host}):
            return self._failure(host, failed[host])
        for host, (_, since) in sorted(self._seen.items()):
            silent_s = now - since
            if host not in done and silent_s > timeout_s:
                return HostError(
                    f"{self.name_of(host)} is lost: it has been silent for "
                    f"{silent_s:.0f} s. {WAY_ON}"
                )
        return None

    def failure_of(self, host: int) -> HostError | None:
        """Return the error that says why a host has failed; None if it has not said it."""
        why = self._notes.read(REASON).get(host)
        return None if why is None else self._failure(host, why)

    def _failure(self, host: int, why: str) -> HostError:
        return HostError(f"{self.name_of(host)} has failed: {why}. {WAY_ON}")

    def name_of(self, host: int) -> str:
        """Return a name for people."""
        name = f"host {host} of {self.num_hosts}"
        return f"{name} ({self._names[host]})" if host in self._names else name

    def explain(self) -> HostError | None:
        """Return why a collective failed; None if all hosts seem to be there."""
        deadline = time.monotonic() + EXPLAIN_S
        while time.monotonic() < deadline:
            if error := self.lost(DEAD_S):
                return error
            time.sleep(BEAT_S / 4)
        return None

    def note(self, topic: str, about: Any) -> None:
        """Leave a note for the others, if the coordinator still answers."""
        try:
            self._notes.leave(topic, self.host, about)
        except Exception:
            self._answered_at = min(self._answered_at, time.monotonic() - DEAD_S)

    def wait_for_others(self, topics: tuple[str, ...], wait_s: float) -> None:
        """Wait until every other host has left a note under one of the topics, or is gone."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            try:
                there = {host for topic in topics for host in self._notes.read(topic)}
            except Exception:
                return
            silent = {
                h for h, (_, since) in self._seen.items() if time.monotonic() - since > DEAD_S
            }
            if len(there | silent | {self.host}) == self.num_hosts:
                return
            time.sleep(BEAT_S / 4)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(BEAT_S * 5)

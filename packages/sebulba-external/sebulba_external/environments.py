"""``--env.id external:clients``: an environment that clients drive, on the command line."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sebulba.envs.packages import VectorKind, VectorParts
from sebulba.errors import EnvError, UsageError

if TYPE_CHECKING:
    import jax

    from sebulba.inference.cycle import CyclePrograms
    from sebulba.metrics.timer import PhaseTimer
    from sebulba.types import EnvSpec
    from sebulba_external.seats import ServedCycle


@dataclasses.dataclass(frozen=True)
class ClientOptions:
    """``--env.options`` of ``external:clients``."""

    like: str
    """An environment with the spaces of the clients: an id, or FILE.py:CLASS."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT or unix:PATH where clients connect."""
    token_file: str = ""
    """File of the token, made if it is missing; "" makes a token for simulators alone."""
    command: str = ""
    """Starts a simulator: words with ``{address}``, ``{token}``, ``{seed}``; "" starts none."""
    simulators: int = 0
    """How many at a time; 0 is one for each environment."""

    def __post_init__(self) -> None:
        if not self.command and not self.token_file:
            raise UsageError(
                "external:clients needs command, which starts simulators, or token_file, whose "
                "token clients have to say"
            )
        if isinstance(self.simulators, bool) or not isinstance(self.simulators, int):
            raise UsageError(f"simulators={self.simulators!r} must be a whole number; use 4")
        if self.simulators < 0:
            raise UsageError(f"simulators={self.simulators} must be 0 or more; use 4")


def _parts(
    options: Mapping[str, Any], num_threads: int | None, step_timeout_s: float
) -> VectorParts:
    known = [field.name for field in dataclasses.fields(ClientOptions)]
    unknown = options.keys() - set(known)
    if unknown or "like" not in options:
        wrong = f"has no option {sorted(unknown)[0]!r}" if unknown else "needs the option 'like'"
        raise UsageError(f"external:clients {wrong}; its options are {', '.join(known)}")
    read = ClientOptions(**options)
    return VectorParts(functools.partial(_made, read), functools.partial(_spec, read.like), 1)


def _made(options: ClientOptions, num_envs: int, seeds: list[int]) -> ClientVector:
    return ClientVector(options, _spec(options.like), seeds)


@functools.cache
def _spec(like: str) -> EnvSpec:
    from sebulba.envs import env_spec
    from sebulba.types import EnvSpec

    spec = env_spec(like)
    if not isinstance(spec, EnvSpec):
        raise UsageError(f"like={like!r} has many agents; clients are one agent each")
    return EnvSpec(spec.observation_space, spec.action_space)


ENVIRONMENTS = {"clients": VectorKind(_parts)}


class ClientVector:
    """The adapter of seats: it cannot be stepped, and brings its cycle."""

    def __init__(self, options: ClientOptions, spec: EnvSpec, seeds: list[int]) -> None:
        """Listen; start the simulators, if there is a command."""
        from sebulba_external.listener import Listener
        from sebulba_external.serve import token_in
        from sebulba_external.simulators import Simulators

        self.spec, self.num_envs = spec, len(seeds)
        token = token_in(Path(options.token_file)) if options.token_file else None
        self._listener = Listener(options.listen, token)
        self._simulators: Simulators | None = None
        if options.command:
            count = options.simulators or self.num_envs
            address, token = self._listener.address, self._listener.token
            try:
                self._simulators = Simulators(options.command, count, address, token, seeds)
            except BaseException:
                self._listener.close()
                raise

    def make_cycle(
        self, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> ServedCycle:
        """Return the cycle that clients drive."""
        from sebulba_external.seats import ServedCycle

        return ServedCycle(self._listener, self.num_envs, programs, timer, self._simulators)

    def reset(self) -> NoReturn:
        """Raise: clients begin episodes."""
        raise EnvError(
            "clients drive external:clients; it cannot be reset and stepped. To see what a policy "
            "does, serve it to them: sebulba serve RUN"
        )

    def step(self, action: Any) -> NoReturn:
        """Raise: clients step."""
        self.reset()

    def fused(self) -> str:
        """Return why there is no fused cycle."""
        return "clients drive the environment"

    def state(self) -> str:
        """Return why it cannot be saved."""
        return "clients drive the environment"

    def put_back(self, state: bytes) -> NoReturn:
        """Raise: see ``state``."""
        self.reset()

    def close(self) -> None:
        """Kill the simulators and close the connections."""
        if self._simulators is not None:
            self._simulators.close()
        self._listener.close()

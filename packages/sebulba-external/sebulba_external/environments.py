"""``--env.id external:...``: environments that clients and games drive, on the command line."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sebulba.envs.packages import VectorKind, VectorParts
from sebulba.errors import UsageError

if TYPE_CHECKING:
    import gymnasium

    from sebulba.types import EnvSpec
    from sebulba_external.seats import SeatsVector


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
    """How many at a time in the whole run; 0 is one for each environment."""
    certificate: str = ""
    """File of the certificate, to encrypt TCP; "" does not."""
    private_key: str = ""
    """File of its key; "" if it is in the same file."""

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


@dataclasses.dataclass(frozen=True)
class GodotOptions:
    """``--env.options`` of ``external:godot``: a game that speaks Godot RL Agents' dialect."""

    game: str
    """Starts the game: words with ``{port}`` and ``{seed}``."""
    policy: str = ""
    """Name of the policy whose agents are trained; "" trains all, and they must be alike."""
    truncates: bool = False
    """Whether an episode that is done was cut short, which the dialect does not say."""
    local: bool = False
    """Whether the policy acts in the process that the game talks to, without a round trip."""

    def __post_init__(self) -> None:
        for name in ("truncates", "local"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r} must be true or false")


def _read(kind: type, name: str, options: Mapping[str, Any], needed: str) -> Any:
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = options.keys() - set(known)
    if unknown or needed not in options:
        wrong = (
            f"has no option {sorted(unknown)[0]!r}" if unknown else f"needs the option {needed!r}"
        )
        raise UsageError(f"external:{name} {wrong}; its options are {', '.join(known)}")
    return kind(**options)


def _clients(
    options: Mapping[str, Any], num_threads: int | None, step_timeout_s: float
) -> VectorParts:
    read = _read(ClientOptions, "clients", options, "like")
    return VectorParts(functools.partial(_made, read), functools.partial(_spec, read.like), 1)


def _godot(
    options: Mapping[str, Any], num_threads: int | None, step_timeout_s: float
) -> VectorParts:
    read = _read(GodotOptions, "godot", options, "game")

    def make(num_envs: int, seeds: list[int]) -> SeatsVector:
        spec, agents = _game(read)
        words = [sys.executable, "-m", "sebulba_external.godot", "--game", _doubled(read.game)]
        words += ["--seed", "{seed}"]
        words += ["--policy", read.policy] * bool(read.policy)
        words += ["--truncates"] * read.truncates + ["--local"] * read.local
        if num_envs % agents:
            raise UsageError(
                f"num_envs={num_envs} must be a multiple of the {agents} agents of the game"
            )
        given = {"command": shlex.join(words), "simulators": num_envs // agents}
        return _vector(spec, num_envs, seeds, **given)

    return VectorParts(make, lambda: _game(read)[0], 1)


def _doubled(words: str) -> str:
    """Return ``words`` so that ``str.format`` leaves their braces."""
    return words.replace("{", "{{").replace("}", "}}")


@functools.cache
def _game(options: GodotOptions) -> tuple[EnvSpec, int]:
    """Return the spec of the agents of a game, which is started for it, and their number."""
    from gymnasium import spaces

    from sebulba.types import EnvSpec
    from sebulba_external.godot import Game
    from sebulba_external.protocol import ProtocolError

    try:
        with Game(options.game, is_quiet=True) as game:
            names, observations, actions = game.policies, game.observations, game.actions
    except (ProtocolError, OSError, ValueError, KeyError, IndexError) as error:
        raise UsageError(f"game={options.game!r} cannot be played: {error}") from None
    agents = [k for k, name in enumerate(names) if options.policy in ("", name)]
    if not agents:
        raise UsageError(f"policy={options.policy!r} is none of the game's: {sorted(set(names))}")
    first = agents[0]
    if any((observations[k], actions[k]) != (observations[first], actions[first]) for k in agents):
        raise UsageError(
            f"the agents of game={options.game!r} have different spaces; say with policy which "
            f"are trained: {', '.join(sorted(set(names)))}"
        )

    def part(dtype: str, shape: Any) -> spaces.Space:
        if dtype == "n":
            return spaces.Discrete(shape)
        pixels = dtype == "|u1"
        low, high, kind = (0, 255, np.uint8) if pixels else (-np.inf, np.inf, np.float32)
        return spaces.Box(low, high, shape, kind)  # type: ignore[arg-type]

    parts = {name: part(*one) for name, one in observations[first].items()}
    space = next(iter(parts.values())) if len(parts) == 1 else spaces.Dict(parts)
    kinds, sizes = zip(*actions[first].values(), strict=True)
    action: spaces.Space = spaces.Box(-1.0, 1.0, (sum(sizes),), np.float32)
    if kinds[0] == "discrete":
        action = spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete([*sizes])
    return EnvSpec(space, action), len(agents)


def _made(options: ClientOptions, num_envs: int, seeds: list[int]) -> SeatsVector:
    from sebulba_external.serve import tls_of, token_in

    limited = _LIMITED.get(options)
    if limited is not None and not limited.is_closed:
        raise UsageError(
            f"simulators={options.simulators} are a limit of the whole run, and a second "
            "Inferencer would start as many; use --num-inferencers-per-device 1 and one inference "
            "device"
        )
    vector = _vector(
        _spec(options.like),
        num_envs,
        seeds,
        address=options.listen,
        token=token_in(Path(options.token_file)) if options.token_file else None,
        tls=tls_of(options.certificate, options.private_key),
        command=options.command,
        simulators=options.simulators,
    )
    if options.simulators:
        _LIMITED[options] = vector
    return vector


def _vector(spec: EnvSpec, num_envs: int, seeds: list[int], **how: Any) -> SeatsVector:
    """Return the environment of seats that nobody else closes."""
    from sebulba_external.seats import Seats

    seats = Seats(spec, **how)
    try:
        vector = seats(num_envs, seeds)
    except BaseException:
        seats.close()
        raise
    vector.closes_seats = True
    return vector


def spec_like(like: Any) -> EnvSpec:
    """Return the spec of clients with the spaces of an environment, or of an ``EnvSpec``.

    Raises:
      UsageError: It has many agents.
    """
    from sebulba.envs import env_spec
    from sebulba.types import EnvSpec

    spec = like if isinstance(like, EnvSpec) else env_spec(like)
    if not isinstance(spec, EnvSpec):
        raise UsageError(f"like={like!r} has many agents; clients are one agent each")
    return EnvSpec(spec.observation_space, spec.action_space)


_spec = functools.cache(spec_like)
_LIMITED: weakref.WeakValueDictionary[ClientOptions, SeatsVector] = weakref.WeakValueDictionary()
"""Environments whose simulators are limited, by their options."""


def _dm_env_rpc(
    address: str, settings: str = "{}", seed_setting: str = "", timeout_s: float = 60.0
) -> gymnasium.Env:
    """Return a world of a server of dm_env_rpc; see ``dm_env.DmEnvRpc``."""
    from sebulba_external.dm_env import DmEnvRpc

    return DmEnvRpc(address, settings, seed_setting, timeout_s)


ENVIRONMENTS = {
    "clients": VectorKind(_clients),
    "godot": VectorKind(_godot),
    "dm_env_rpc": _dm_env_rpc,
}

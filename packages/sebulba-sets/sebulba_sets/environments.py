"""``--env.id sets:KIND``: sets of environments on the command line."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from sebulba.envs.factory import make_env_factory
from sebulba.envs.jax_adapter import JaxAdapter
from sebulba.envs.option_checks import check_option_names
from sebulba.envs.packages import VectorKind, VectorParts
from sebulba.errors import UsageError, shown
from sebulba.types import EnvSpec
from sebulba_sets.adapter import Draws, SetAdapter, spec_of_members
from sebulba_sets.level_replay import LevelReplayAdapter, ReplayOptions
from sebulba_sets.set_env import SetEnv, maker_of
from sebulba_sets.structures import Adversarial, Curriculum, Prior, Structure

OWN: dict[str, tuple[str, ...]] = {
    "split": (),
    "prior": ("weights",),
    "curriculum": ("after", "gate"),
    "adversarial": ("best", "step_size"),
}
"""Options of each kind beside ``COMMON``."""
COMMON = ("envs", "test", "processes")
"""Options of every kind."""
NEEDED = {"split": ("test",), "prior": ("weights",), "curriculum": ("after", "gate")}
"""Options that have no default, as ``envs`` has none."""
EXAMPLES = {
    "envs": "a list of ids, or a dict such as {'easy': 'my_envs:Easy', 'hard': 'my_envs:Hard'}",
    "test": "test \"['my_envs:Unseen']\"",
    "weights": "weights \"{'easy': 0.7, 'hard': 0.3}\"",
    "after": "after \"{'hard': 'easy'}\"",
    "gate": "gate 0.8, the mean return that opens the next environment",
}
"""Of options, for messages."""


def _parts(
    kind: str, options: Mapping[str, Any], num_threads: int | None, step_timeout_s: float
) -> VectorParts:
    check_option_names(options, (*COMMON, *OWN[kind]), f"sets:{kind}")
    for name in ("envs", *NEEDED.get(kind, ())):
        if name not in options:
            raise UsageError(f"sets:{kind} needs the option {name!r}; use {EXAMPLES[name]}")
    train, test = (_by_name(name, options.get(name)) for name in ("envs", "test"))
    if both := [name for name in test if name in train]:
        raise UsageError(f"{both[0]!r} is in envs and in test; name it in one of them")
    names = (*train, *test)
    drawn, played = _draws(kind, [*train], [*test], options)
    make = functools.partial(SetEnv, names, [maker_of(env) for env in {**train, **test}.values()])
    inner: Any = make_env_factory(
        make,
        vectorization="async" if options.get("processes") else "sync",
        step_timeout_s=step_timeout_s,
    )

    def make_set(num_envs: int, seeds: list[int]) -> SetAdapter:
        return SetAdapter(inner(num_envs, seeds), f"sets:{kind}", names, drawn, played)

    return VectorParts(make_set, lambda: _spec(inner, f"sets:{kind}"), 1)


def _draws(
    kind: str, train: list[str], test: list[str], options: Mapping[str, Any]
) -> tuple[Draws, Draws]:
    """Return how environments are drawn in training, and where a policy is played."""
    own: dict[str, Callable[[], Structure]] = {
        "split": lambda: Prior.uniform(train),
        "prior": lambda: Prior.named(train, options["weights"]),
        "curriculum": lambda: Curriculum.named(train, options["after"], options["gate"]),
        "adversarial": lambda: Adversarial.named(
            train, options.get("best", 0.0), options.get("step_size", 0.01)
        ),
    }
    drawn = Draws(train, own[kind]())
    if test:
        return drawn, Draws(test, Prior.uniform(test))
    return drawn, drawn if kind == "prior" else Draws(train, Prior.uniform(train))


def _by_name(option: str, given: Any) -> dict[str, Any]:
    """Return environments by name; those of a list have their ids for names."""
    if given is None:
        return {}
    if isinstance(given, list | tuple) and all(isinstance(env, str) for env in given):
        given = {env: env for env in given}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UsageError(f"{option}={shown(given)} must be {EXAMPLES['envs']}")
    if not given:
        raise UsageError(f"{option}={shown(given)} is empty; use {EXAMPLES['envs']}")
    return dict(given)


def _spec(inner: Any, name: str) -> EnvSpec:
    spec = inner.spec()
    if not isinstance(spec, EnvSpec):
        raise UsageError("a set has environments of one agent each; leave out those of many")
    return spec_of_members(spec, name)


def _levels(
    options: Mapping[str, Any], num_threads: int | None, step_timeout_s: float
) -> VectorParts:
    own = [field.name for field in dataclasses.fields(ReplayOptions)]
    check_option_names(options, ("levels", "max_episode_steps", *own), "sets:levels")
    if "levels" not in options:
        raise UsageError("sets:levels needs the option 'levels'; use levels my_levels:Maze")
    given, more = options["levels"], {}
    if isinstance(given, list | tuple) and len(given) == 2:
        given, more = given
    if "max_episode_steps" in options:
        more = {**more, "max_episode_steps": options["max_episode_steps"]}
    factory: Any = make_env_factory(given, **more)
    replay = ReplayOptions(**{name: options[name] for name in own if name in options})
    one = factory(1, [0])
    if type(one) is not JaxAdapter:
        one.close()
        raise UsageError(
            f"levels={shown(given)} must be an environment of one agent that is written in JAX; "
            "use sets:split for others"
        )
    env, spec = one._env, dataclasses.replace(one.spec, name="sets:levels")

    def make(num_envs: int, seeds: list[int]) -> LevelReplayAdapter:
        return LevelReplayAdapter(env, seeds, replay, name="sets:levels")

    return VectorParts(make, lambda: spec)  # type: ignore[arg-type]


ENVIRONMENTS = {
    **{kind: VectorKind(functools.partial(_parts, kind)) for kind in OWN},
    "levels": VectorKind(_levels),
}

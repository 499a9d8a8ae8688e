"""Environment factories from ids, callables and module attributes, and specs of environments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import gymnasium
from gymnasium.vector import VectorEnv

from sebulba.envs.checked_env import CheckedEnv
from sebulba.envs.envpool_families import import_envpool
from sebulba.envs.flat_parts import warn_of_text
from sebulba.envs.gymnasium_adapter import STEP_TIMEOUT_S, GymnasiumAdapter, vector_env_spec
from sebulba.envs.jax_env import JaxEnv, TimeLimit, is_jax_env, makes_jax_env
from sebulba.envs.jax_libraries import library_of, library_versions, make_library_env
from sebulba.envs.multi.multi_agent_env import MultiAgentEnv
from sebulba.envs.multi.pettingzoo_env import (
    PETTINGZOO,
    PettingZooEnv,
    check_pettingzoo_id,
    is_pettingzoo,
    is_pettingzoo_id,
    make_pettingzoo,
    pettingzoo_package,
)
from sebulba.envs.multi.population_env import SPEC, PopulationAdapter, PopulationEnv, as_gymnasium
from sebulba.envs.observation_parts import (
    ActionMaskPlace,
    marked,
    prepared,
    spec_of,
    warn_of_unused_mask,
)
from sebulba.envs.option_checks import check_number, check_option_names
from sebulba.envs.packages import VectorKind, is_package_id, package_env, package_versions
from sebulba.envs.vectorize import make_vector_env, remember
from sebulba.envs.wrappers import load_wrapper, warn_of_statistics, wrapped
from sebulba.errors import UsageError, shown
from sebulba.support.checks import check_types, nearest
from sebulba.support.user_code import import_module, is_attribute, load_attribute, module_of_file
from sebulba.types import EnvAdapter, EnvFactory, EnvSpec, MultiAgentSpec

Backend = Literal["envpool", "gymnasium"]
Vectorization = Literal["sync", "async"]

BY_ITSELF = "is a vector environment by itself"
Look = Callable[[gymnasium.Env], None]
"""Is shown the single environment that is made for a spec, if one is."""

_MAKE_OPTIONS = {"max_episode_steps", "disable_env_checker", "render_mode"}
"""Options of ``gymnasium.make`` itself; all others go to the environment."""


@dataclasses.dataclass(frozen=True)
class EnvSource:
    """What an environment is on this machine."""

    id: str
    """Id, with its version, as the backend has it; or ``module:attribute``."""
    backend: str | None
    """What makes it: a ``Backend``, a library of JAX environments or ``pettingzoo``; None for
    ``module:attribute`` and ids of installed packages."""
    versions: dict[str, str]
    """Versions of the backend's package and of that which brings the environment, by name."""

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.id} ({packages})"


@dataclasses.dataclass(frozen=True)
class _Factory:
    """An EnvFactory that checks its arguments."""

    make: Callable[..., EnvAdapter]
    """Makes the vector environment from the number of environments and their seeds."""
    name: str
    """For messages."""
    make_spec: Callable[[Look], EnvSpec | MultiAgentSpec] | None = None
    """Makes the spec more cheaply than by making a vector of one environment."""
    make_one: Callable[[], gymnasium.Env] | None = None
    """Makes a single environment; None if ``make`` only makes vectors."""
    num_threads: int | None = None
    """Most threads that step a vector environment; None if that is unknown."""
    own: _OwnOptions = dataclasses.field(default_factory=lambda: _OwnOptions())
    """What the user says of the spec."""
    threads_each: Callable[..., int] | None = None
    """Chooses ``num_threads`` for a number of Inferencers; None if it is to stay."""

    def shared_by(self, num_inferencers: int, *, on_cpu: bool) -> _Factory:
        """Return this factory for so many Inferencers, with another number of threads if it may."""
        if self.threads_each is None:
            return self
        threads = self.threads_each(num_inferencers, on_cpu=on_cpu)
        make = functools.partial(self.make, num_threads=threads)
        return dataclasses.replace(self, make=make, num_threads=threads)

    def __call__(self, num_envs: int, seeds: list[int]) -> EnvAdapter:
        check_number("num_envs", num_envs, default=16, smallest=1)
        env = self.make(int(num_envs), seeds)
        try:
            stated = self._stated(env.spec)
            if stated is not env.spec:
                env.spec = stated
        except UsageError:
            env.close()
            raise
        return env

    def spec(self, look: Look = lambda env: None) -> Any:
        """Return the spec of a single environment, which is made, and closed after ``look``."""
        if self.make_spec is not None:
            return self._stated(self.make_spec(look))  # type: ignore[arg-type]
        env = self(1, [0])
        env.close()
        return env.spec

    def _stated(self, spec: Any) -> Any:
        """Return ``spec`` with what the user says of it."""
        own = self.own
        if isinstance(spec, MultiAgentSpec):
            for name in ("channels_first", "action_mask", "privileged"):
                if (value := getattr(own, name)) not in (None, ()):
                    raise UsageError(
                        f"{name}={shown(value)} is for one agent, and {self.name!r} has many; drop "
                        "it"
                    )
            return spec
        if own.channels_first is not None:
            if spec.frame_stack and not own.channels_first:
                raise UsageError(
                    f"channels_first=False does not fit {self.name!r}, whose observations stack "
                    f"{spec.frame_stack} frames in axis 0; drop it"
                )
            spec = dataclasses.replace(spec, channels_first=own.channels_first)
        return marked(spec, own.action_mask, own.privileged)


def make_env_factory(
    env: Any,
    *,
    backend: Backend | None = None,
    num_threads: int | None = None,
    vectorization: Vectorization = "sync",
    step_timeout_s: float = STEP_TIMEOUT_S,
    channels_first: bool | None = None,
    action_mask: ActionMaskPlace | None = None,
    privileged: Sequence[str] = (),
    wrappers: Sequence[str | Callable[[gymnasium.Env], gymnasium.Env]] = (),
    **options: Any,
) -> EnvFactory:
    """Return a factory of the vector environment of one Inferencer.

    Args:
      env: One of

        * an id such as ``"CartPole-v1"``, made by envpool if it has it, else by Gymnasium;
        * ``"module:attribute"``, which names one of the callables below;
        * a callable ``() -> gymnasium.Env``, such as a class: its environments are vectorised with
          next-step autoreset, and seeded at their first reset; or one that makes a
          ``MultiAgentEnv``, or an AEC or Parallel environment of PettingZoo;
        * a callable with parameters ``num_envs`` and ``seeds`` that returns a Gymnasium vector
          environment, in any autoreset mode, or an EnvAdapter;
        * ``"LIBRARY:ID"`` of gymnax, brax, playground, jumanji, pgx or jaxmarl, or a ``JaxEnv`` or
          ``MultiAgentJaxEnv``: an object, a class, or a function that is annotated to return one;
        * ``"pettingzoo:FAMILY/NAME"``, such as ``"pettingzoo:classic/connect_four_v3"``;
        * the id of one that an installed package brings, ``"PREFIX:NAME"`` or ``"PREFIX/NAME"``,
          such as ``"sebulba/CongestionControl-v0"`` of sebulba-networks;
        * a return value of this function.
      backend: ``"envpool"`` or ``"gymnasium"`` for ids; None chooses.
      num_threads: Threads of each envpool. None takes 1 for classic control and toy text, where
        waking a thread costs more than a step, and otherwise half of the cores, as for two
        Inferencers; a loop with another number of Inferencers chooses another.
      vectorization: ``"sync"`` or ``"async"`` (a process per environment, which pays above about
        0.3 ms per step) for single environments.
      step_timeout_s: Longest time that worker processes may take for a step.
      channels_first: Whether images are ``[channels, height, width]``; None leaves it to the
        environment's own spec, or to the rule of ``EnvSpec.channels_first``.
      action_mask: Where a mask of legal actions is: ``"observation"`` says the part
        ``action_mask`` of a Dict, ``"info"`` the infos of single Gymnasium environments. None says
        that there is none, but for what a tree of the environment says.
      privileged: Parts of a Dict observation that the policy never sees: they are for the learner,
        such as a central critic.
      wrappers: Put around each single Gymnasium environment, the first innermost: functions of an
        environment, or their names as ``"module:attribute"`` or
        ``"gymnasium.wrappers:FrameStackObservation(stack_size=4)"``.
      **options: Options of ``envpool.make``, ``gymnasium.make`` or the callable.

    Raises:
      UsageError: An id (the message names the nearest), module, attribute or option is unknown, or
        a value breaks a rule.
    """
    own = _OwnOptions(
        backend,
        num_threads,
        vectorization,
        step_timeout_s,
        channels_first,
        action_mask,
        tuple(privileged) if isinstance(privileged, list | tuple) else privileged,  # type: ignore[arg-type]
        tuple(wrappers) if isinstance(wrappers, list | tuple) else wrappers,  # type: ignore[arg-type]
    )
    if isinstance(env, _Factory):
        if given := options | own.changed():
            raise UsageError(
                f"env={env.name!r} is already a factory and takes no options; got "
                f"{', '.join(given)}"
            )
        return env
    if is_package_id(env):
        return _package_factory(env, own, options)
    if isinstance(env, str) and library_of(env):
        return _jax_factory(functools.partial(make_library_env, env, options), env, own)
    if isinstance(env, str) and is_pettingzoo_id(env):
        check_pettingzoo_id(env)
        _check_fits(own, env, backend=True, threads=True)
        return _single_factory(functools.partial(make_pettingzoo, env, options), env, own)
    if isinstance(env, str) and not _names_attribute(env):
        return _factory_of_id(env, own, options)
    return _factory_of_callable(_load(env) if isinstance(env, str) else env, env, own, options)


@dataclasses.dataclass(frozen=True)
class _OwnOptions:
    """The options of ``make_env_factory``, which describes them, that are not the environment's."""

    backend: Backend | None = None
    """For ids; None chooses."""
    num_threads: int | None = None
    """Of each envpool; None chooses."""
    vectorization: Vectorization = "sync"
    """How single environments become a vector."""
    step_timeout_s: float = STEP_TIMEOUT_S
    """Longest time that worker processes may take for a step."""
    channels_first: bool | None = None
    """Where images have their channels; None leaves that to the spec."""
    action_mask: ActionMaskPlace | None = None
    """Where the mask of legal actions is."""
    privileged: tuple[str, ...] = ()
    """Parts of the observation that only the learner sees."""
    wrappers: tuple[Any, ...] = ()
    """Wrappers around single environments, or their names."""

    def __post_init__(self) -> None:
        seconds, default = self.step_timeout_s, STEP_TIMEOUT_S
        check_number("step_timeout_s", seconds, default=default, is_int=False, smallest=0.001)
        if (threads := self.num_threads) is not None:
            check_number("num_threads", threads, default=1, smallest=1, largest=1024)
        if not isinstance(self.wrappers, tuple):
            raise UsageError(
                f"wrappers={shown(self.wrappers)} must be a tuple of wrappers or their names; use "
                "for example ('gymnasium.wrappers:FlattenObservation',)"
            )
        check_types(self, open_fields=("num_threads", "step_timeout_s"))

    def changed(self) -> dict[str, Any]:
        """Return those that were given."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}


def _factory_of_id(env: str, own: _OwnOptions, options: dict[str, Any]) -> _Factory:
    if _choose_backend(env, own.backend) == "envpool":
        or_else = "; or pass backend='gymnasium'"
        _check_fits(own, env, single="is made by envpool", or_else=or_else)
        return _envpool_factory(env, own, options)
    make_env = _gymnasium_maker(env, options)
    _check_fits(own, env, threads=True)
    return _single_factory(make_env, env, own)


def _factory_of_callable(
    make_env: Any, env: Any, own: _OwnOptions, options: dict[str, Any]
) -> _Factory:
    """Return the factory of a callable, or of an environment in JAX, that was given as ``env``."""
    if own.backend == "envpool":
        raise UsageError(f"backend='envpool' takes ids, not env={shown(env)}; drop backend")
    name = _name(env)
    if not isinstance(make_env, type) and is_jax_env(make_env):
        check_option_names(options, {"max_episode_steps"}, name)
        return _jax_factory(lambda: _limited(make_env, options), name, own)
    if not callable(make_env):
        raise UsageError(
            f"env={shown(env)} must be an id, 'module:attribute' or a callable that makes the "
            f"environment, not a {type(make_env).__name__}"
        )
    parameters = _parameters(make_env, name)
    _check_fits(own, name, threads=True)
    if makes_jax_env(make_env):
        return _jax_factory(_jax_maker(make_env, name, parameters, options), name, own)
    if parameters.keys() >= {"num_envs", "seeds"}:
        _check_fits(own, name, single=BY_ITSELF)
        return _vector_factory(make_env, name, parameters, own, options)
    _check_single(name, parameters, options)
    make_env = functools.partial(make_env, **options) if options else make_env
    return _single_factory(make_env, name, own)


def env_spec(env: Any, **options: Any) -> Any:
    """Return the spaces and frame structure of one environment, as agents are built from.

    It is an ``EnvSpec``, or a ``MultiAgentSpec`` where the environment has many agents.

    Args:
      env: Anything that ``make_env_factory`` takes, of which one environment is made and closed; or
        an EnvAdapter, a vector environment or a ``gymnasium.Env``, which is only looked at.
      **options: Options of ``make_env_factory``.

    Raises:
      UsageError: ``make_env_factory`` refuses its arguments, or a space is not supported.
    """
    if isinstance(getattr(env, "spec", None), EnvSpec | MultiAgentSpec):
        return env.spec
    if _is_envpool(env):
        from sebulba.envs.envpool_adapter import pool_spec

        return pool_spec(env, env.config, _name(env))
    if isinstance(env, VectorEnv):
        return vector_env_spec(env, _name(env))
    if isinstance(env, MultiAgentEnv):
        return PopulationEnv(env).population  # type: ignore[return-value]
    if not isinstance(env, type) and is_pettingzoo(env):
        return PopulationEnv(PettingZooEnv(lambda: env), _name(env)).population
    if isinstance(env, gymnasium.Env):
        env = prepared(lambda: env)
        _warn_of_losses(env, _name(env))
        return spec_of(env, _name(env))
    factory = make_env_factory(env, **options)
    assert isinstance(factory, _Factory)
    return factory.spec()


def env_source(env: str, backend: Backend | None = None) -> EnvSource:
    """Return what an id, or ``module:attribute``, is on this machine.

    Args:
      env: As ``make_env_factory`` takes it.
      backend: As ``make_env_factory`` takes it.

    Raises:
      UsageError: The id is unknown.
    """
    if is_package_id(env):
        return EnvSource(env, None, package_versions(env))
    if library := library_of(env):
        return EnvSource(env, library, library_versions(env))
    if is_pettingzoo_id(env):
        check_pettingzoo_id(env)
        return EnvSource(env, PETTINGZOO, _versions(PETTINGZOO, pettingzoo_package(env)))
    if _names_attribute(env):
        return EnvSource(env, None, _versions(env, "gymnasium"))
    chosen = _choose_backend(env, backend)
    if chosen == "envpool":
        from sebulba.envs.envpool_adapter import envpool_id

        return EnvSource(envpool_id(env) or env, chosen, _versions("envpool"))
    entry_point = gymnasium.spec(env.rpartition(":")[2]).entry_point
    module = entry_point if isinstance(entry_point, str) else entry_point.__module__
    return EnvSource(env, chosen, _versions("gymnasium", module))


def _versions(*modules: str) -> dict[str, str]:
    """Return the versions of the packages that modules are in, without those that have none."""
    versions = {}
    for package in (re.split("[.:]", module)[0] for module in modules):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _names_attribute(env: str) -> bool:
    """Tell whether it is ``module:attribute``, and no id without a version that it registers."""
    if not is_attribute(env):
        return False
    module, _, name = env.partition(":")
    if module.endswith(".py"):
        return True
    found = import_module("env", env, module)
    return name not in gymnasium.registry or hasattr(found, name)


def _choose_backend(env: str, backend: Backend | None) -> Backend:
    from sebulba.envs.envpool_adapter import envpool_id

    if backend is None and has_gymnasium_id(env):
        try:
            import_envpool()
        except UsageError as error:
            warnings.warn(f"{env!r} is made by Gymnasium: {error}", stacklevel=2)
            return "gymnasium"
    if backend != "gymnasium" and envpool_id(env):
        return "envpool"
    if backend != "envpool" and has_gymnasium_id(env):
        return "gymnasium"
    known = set()
    if backend != "gymnasium":
        known |= set(import_envpool().list_all_envs())
    if backend != "envpool":
        known |= gymnasium.registry.keys()
    where = backend or "envpool or gymnasium"
    hint = (
        nearest(env.removeprefix("ALE/"), known)
        or "; 'module:attribute' names an environment of your own"
    )
    if env.startswith("ALE/") and backend == "gymnasium":
        hint = "; `pip install ale-py` brings these to gymnasium, envpool has them without"
    raise UsageError(f"env={env!r} is not an id of {where}{hint}")


def has_gymnasium_id(env: str) -> bool:
    """Tell whether Gymnasium knows an id, whose module is imported if it names one."""
    if env.startswith("ALE/") and env not in gymnasium.registry:
        try:
            gymnasium.register_envs(importlib.import_module("ale_py"))
        except ImportError:
            return False
    module, _, env_id = env.rpartition(":")
    if module:
        with _missing_packages_named(env):
            import_module("env", env, module)
    return env_id in gymnasium.registry


def _load(env: str) -> Any:
    found = load_attribute("env", env)
    _check_makes_envs(found, env)
    return found


def _check_makes_envs(found: Any, env: str) -> None:
    """Raise UsageError if what ``module:attribute`` names cannot be what makes environments."""
    if not callable(found):
        return  # make_env_factory says so
    maker = found.func if isinstance(found, functools.partial) else found
    module = getattr(maker, "__module__", None) or "builtins"
    has_steps = all(hasattr(maker, name) for name in ("reset", "step"))
    if module.partition(".")[0] in {*sys.stdlib_module_names, "builtins"}:
        problem = f"{module}.{_name(maker)} of Python's standard library"
    elif isinstance(maker, type) and not has_steps:
        problem = f"the class {maker.__qualname__}, which has no reset and step"
    else:
        return
    raise UsageError(
        f"env={env!r} names {problem}; it must name a gymnasium.Env class, or a function that "
        "returns an environment"
    )


def _name(env: Any) -> str:
    if isinstance(env, str):
        return env
    spec = getattr(env, "spec", None)
    return getattr(spec, "id", None) or getattr(env, "__qualname__", None) or type(env).__name__


def _parameters(make_env: Callable, name: str) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(make_env).parameters)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"env={name!r} has no readable signature; wrap it in a function"
        ) from error


def _check_single(name: str, parameters: dict[str, inspect.Parameter], options: dict) -> None:
    """Raise UsageError unless ``make_env(**options)`` can be called."""
    named = {
        key
        for key, one in parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        check_option_names(options, named, name)
    missing = [
        key
        for key, one in parameters.items()
        if one.default is one.empty
        and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        and key not in options
    ]
    if missing:
        raise UsageError(
            f"env={name!r} must be callable without arguments, or have the parameters num_envs and "
            f"seeds; it needs {', '.join(missing)}; give these as options"
        )


def _check_fits(
    own: _OwnOptions,
    name: str,
    *,
    backend: bool = False,
    threads: bool = False,
    single: str = "",
    or_else: str = "",
) -> None:
    """Raise UsageError for an option that does not go with an environment.

    Args:
      own: The options.
      name: Of the environment.
      backend: No backend can be chosen.
      threads: It has no envpool, whose threads could be counted.
      single: Why it is no single environment of Gymnasium; empty if it is.
      or_else: Another remedy.
    """
    by_itself = f"and {name!r} {BY_ITSELF}"
    if backend and own.backend is not None:
        raise UsageError(f"backend={own.backend!r} does not go with env={name!r}; drop it")
    if threads and own.num_threads is not None:
        raise UsageError(
            f"num_threads={own.num_threads} is an option of envpool, which does not make {name!r}; "
            "drop it"
        )
    if single and own.vectorization == "async":
        raise UsageError(
            f"vectorization='async' is for single environments, {by_itself}; drop it{or_else}"
        )
    if single and own.action_mask == "info":
        raise UsageError(
            f"action_mask='info' is for single environments of Gymnasium, {by_itself}; give the "
            f"mask in the observation{or_else}"
        )
    if single and own.wrappers:
        raise UsageError(
            f"wrappers={shown(list(own.wrappers))} go around single environments of Gymnasium, and "
            f"{name!r} {single}; drop them{or_else}"
        )


def _jax_factory(make: Callable[[], Any], name: str, own: _OwnOptions) -> _Factory:
    from sebulba.envs.jax_adapter import JaxAdapter
    from sebulba.envs.multi.jax_population import JaxPopulationAdapter, jax_population_spec

    _check_fits(own, name, backend=True, threads=True, single="is written in JAX")
    env = make()  # one will do: its functions are pure
    if not own.privileged:
        own = dataclasses.replace(own, privileged=getattr(env, "privileged", ()))
    many = hasattr(env, "tree")
    adapter = JaxPopulationAdapter if many else JaxAdapter
    make_spec: Any = jax_population_spec if many else spec_of
    return _Factory(
        lambda num_envs, seeds: adapter(env, seeds, name=name),
        name,
        make_spec=lambda look: make_spec(env, name),  # type: ignore[arg-type]
        own=own,
    )


def _package_factory(env: str, own: _OwnOptions, options: dict[str, Any]) -> _Factory:
    """Return the factory of an environment that an installed package brings."""
    found = package_env(env)
    if not isinstance(found, VectorKind):
        return _factory_of_callable(found, env, own, options)
    _check_fits(own, env, backend=True, single=BY_ITSELF)
    parts = found.parts(options, own.num_threads, own.step_timeout_s)
    return _Factory(
        parts.make,
        env,
        make_spec=lambda look: parts.make_spec(),
        num_threads=parts.num_threads,
        own=own,
    )


def _jax_maker(
    make_env: Callable, name: str, parameters: dict[str, inspect.Parameter], options: dict[str, Any]
) -> Callable[[], JaxEnv]:
    own = {k: v for k, v in options.items() if k != "max_episode_steps" or k in parameters}
    _check_single(name, parameters, own)
    limit = {k: v for k, v in options.items() if k not in own}
    return lambda: _limited(make_env(**own), limit)


def _limited(env: JaxEnv, options: dict[str, Any]) -> JaxEnv:
    """Return ``env``, with the time limit that ``options`` may have."""
    if not is_jax_env(env):
        raise UsageError(
            f"env={_name(env)!r} must have reset(key) and step(key, state, action); it is a "
            f"{type(env).__name__}"
        )
    if "max_episode_steps" not in options:
        return env
    return TimeLimit(env, options["max_episode_steps"])


def _envpool_factory(env: str, own: _OwnOptions, options: dict[str, Any]) -> _Factory:
    from sebulba.envs import envpool_adapter

    env_id = envpool_adapter.envpool_id(env)
    assert env_id is not None
    envpool_adapter.check_envpool_options(env_id, options)
    num_threads = own.num_threads or envpool_adapter.default_num_threads(env_id)
    make = functools.partial(
        envpool_adapter.make_envpool, env_id, num_threads=num_threads, options=options
    )
    may_choose = own.num_threads is None and not envpool_adapter.has_one_thread(env_id)
    threads_each = envpool_adapter.threads_each if may_choose else None
    return _Factory(make, env, num_threads=num_threads, own=own, threads_each=threads_each)


def _gymnasium_maker(env: str, options: dict[str, Any]) -> Callable[[], gymnasium.Env]:
    # The module of "module:Id", which registers the id, has been imported already.
    module, colon, env_id = env.rpartition(":")
    if module.endswith(".py"):
        module = module_of_file("env", Path(module))
    entry_point: Any = gymnasium.spec(env_id).entry_point
    if isinstance(entry_point, str):
        with _missing_packages_named(env):
            entry_point = gymnasium.envs.registration.load_env_creator(entry_point)
    if entry_point is not None:
        parameters = _parameters(entry_point, env)
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            check_option_names(options, parameters.keys() | _MAKE_OPTIONS, env)
    made = f"{module}{colon}{env_id}"  # worker processes import the module, too
    return functools.partial(_make_gymnasium, made, {"disable_env_checker": True, **options})


def _make_gymnasium(env: str, options: dict[str, Any]) -> gymnasium.Env:
    # Spaces warn of lost precision, and outdated versions of their age.
    with warnings.catch_warnings(action="ignore"), _missing_packages_named(env):
        return gymnasium.make(env, **options)


@contextlib.contextmanager
def _missing_packages_named(env: str) -> Iterator[None]:
    """Raise UsageError where Gymnasium says which package an environment needs."""
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise UsageError(f"env={env!r} needs a package: {error}") from error


def _single_factory(make_env: Callable, name: str, own: _OwnOptions) -> _Factory:
    make_env = functools.partial(as_gymnasium, make_env, name)
    if own.wrappers:
        make_env = functools.partial(wrapped, make_env, list(map(load_wrapper, own.wrappers)), name)
    make_env = functools.partial(prepared, make_env, own.action_mask)

    def make(num_envs: int, seeds: list[int]) -> EnvAdapter:
        with warnings.catch_warnings(action="ignore"):
            vector_env = make_vector_env(make_env, num_envs, own.vectorization)
        return _adapt(vector_env, seeds, name, own.step_timeout_s)

    def make_spec(look: Look) -> EnvSpec | MultiAgentSpec:
        with warnings.catch_warnings(action="ignore"):
            env = CheckedEnv(make_env, 0)
        look(env.env)
        env.close()
        remember(make_env, env)
        if isinstance(env.env, PopulationEnv):
            return env.env.population  # type: ignore[return-value]
        _warn_of_losses(env.env, name)
        return spec_of(env, name)

    return _Factory(make, name, make_spec, make_env, own=own)


def _warn_of_losses(env: gymnasium.Env, name: str) -> None:
    """Warn of all in an environment that agents will not have."""
    warn_of_text(env, name)
    warn_of_unused_mask(env, name)
    warn_of_statistics(env, name)


def _vector_factory(
    make_env: Callable,
    name: str,
    parameters: dict[str, inspect.Parameter],
    own: _OwnOptions,
    options: dict[str, Any],
) -> _Factory:
    _check_single(name, parameters, {"num_envs": None, "seeds": None, **options})

    def make(num_envs: int, seeds: list[int]) -> EnvAdapter:
        adapter = make_env(num_envs=num_envs, seeds=list(seeds), **options)
        if not isinstance(getattr(adapter, "spec", None), EnvSpec | MultiAgentSpec):
            adapter = _adapt(adapter, seeds, name, own.step_timeout_s)
        if adapter.num_envs != num_envs:
            adapter.close()
            raise UsageError(
                f"{name!r} made {adapter.num_envs} environments; it must make the "
                f"num_envs={num_envs} that it was asked for"
            )
        return adapter

    return _Factory(make, name, own=own)


def _is_envpool(env: Any) -> bool:
    return hasattr(env, "all_env_ids") and hasattr(env, "config")


def _adapt(vector_env: Any, seeds: list[int], name: str, step_timeout_s: float) -> EnvAdapter:
    """Put an adapter in front of a vector environment, which is closed if that fails."""
    if not isinstance(vector_env, VectorEnv):
        raise UsageError(
            f"{name!r} has the parameters num_envs and seeds and returned a "
            f"{type(vector_env).__name__}; it must return a gymnasium.vector.VectorEnv or an "
            "EnvAdapter"
        )
    try:
        if _is_envpool(vector_env):
            from sebulba.envs.envpool_adapter import adapt_pool

            return adapt_pool(vector_env, name)
        env = GymnasiumAdapter(vector_env, seeds, name=name, step_timeout_s=step_timeout_s)
        population = (vector_env.metadata or {}).get(SPEC)
        many = None if population is None else PopulationAdapter(env, population)
        return many or env  # type: ignore[return-value]
    except BaseException:
        vector_env.close()
        raise

"""``CONFIG [options]`` as tyro reads them: the words of a command line become an experiment."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import docstring_parser
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from sebulba.configs.experiment import ExperimentConfig, OptionValue
from sebulba.configs.own_agent import with_agent
from sebulba.configs.presets import PRESETS
from sebulba.configs.trainers import with_trainers
from sebulba.errors import UsageError
from sebulba.runs.configurations import AGENT, FROM, is_trust_given, start_of, take_agent
from sebulba.support.trust import Trust

ENV_OPTIONS, TRAINER = "--env.options", "--trainer"
SHORT_OPTIONS = {
    "--learning-rate": "--agent.learning-rate",
    "--agent.torso": "--agent.torso.kind",
    FROM: "--from-run",
}
"""Options that are common enough to have a shorter name."""

OWN_AGENT = (
    "--agent module:class is your own agent, --trainer NAME ... are trainers; "
    "this help then shows their options"
)

COMMON_OPTIONS = {
    "task and agent": {
        "--env.id ID": "environment",
        "--env.backend NAME": "envpool, the default if it has the id, or gymnasium",
        "--agent AGENT": "your own agent: my_package:MyAgent",
        "--learning-rate X": "step size of the optimizer",
        "--seed N": "seed of networks, actions and environments",
    },
    "length": {
        "--total-env-steps N": "environment steps to train for",
        "--stop-at-return X": "end the run when its return reaches X",
        "--eval-every-env-steps N": "evaluate every N environment steps; 0: never",
    },
    "loop": {
        "--num-envs N": "environments per Inferencer",
        "--steps-per-cycle N": "environment steps in a trajectory",
        "--schedule NAME": "async, or lockstep for bit-identical networks",
        "--platform NAME": "cpu, cuda or tpu; None: the best available",
    },
    "output": {
        "--name NAME": "folder of the run, under runs/",
        "--run-dir DIR": "folder of the run, instead of runs/NAME",
        "--resume": "resume the run in the folder, or begin it",
        "--writers NAME ...": "tensorboard, wandb, mlflow, or my_package:MyWriter",
    },
}
"""The options that people change first, in groups; a test holds that each exists."""

NO_OPTIONS = ("agent_class",)
"""Fields that have another spelling on the command line."""

registry = ConstructorRegistry()
"""How tyro reads dataclasses: with help that flows over the width of the terminal."""


def read_config(argv: list[str], command: str) -> tuple[str, ExperimentConfig]:
    """Read ``CONFIG [options]``; ``sebulba.runs.configurations`` says what CONFIG may be.

    Returns:
      The name of the configuration, and the experiment.

    Raises:
      UsageError: The configuration is unknown, or an option breaks a rule.
      SystemExit: tyro has printed what is wrong with an option, or the help.
    """
    word, *options = argv
    start = start_of(word, trust=is_trust_given(options), command=command)
    if start.file is None:
        return start.name, parse(start.name, options, command, start.config)
    # No file can say of itself that it is to be trusted.
    words = [*start.words, "--no-trust", *options]
    config = parse(start.name, words, command, start.config)
    if named := config.named_code():
        _, agent = take_agent(words)  # of which start_of has asked, if it is the file's
        typed = [*options, *([AGENT, agent] if agent else [])]
        known = parse(start.name, typed, command, start.config).named_code()
        for what in (what for what in named if what not in known):
            doubt = "nothing says who wrote the file"
            Trust(doubt, config.trust).check(f"{start.file} names {what}")
    return start.name, config


def parse(
    preset: str,
    options: list[str],
    command: str = "sebulba train",
    default: ExperimentConfig | None = None,
) -> ExperimentConfig:
    """Read options onto the experiment of a preset, or onto ``default``."""
    short = "; ".join(f"{short} is {long}" for short, long in SHORT_OPTIONS.items())
    start = default or PRESETS[preset].make()
    options, agent = take_agent(options)
    if agent is not None:
        start = with_agent(start, agent)
    options, trainers = take_trainers(options)
    start = with_trainers(start, trainers)
    summary = PRESETS[preset].summary if preset in PRESETS else f"{start.agent_name}, your own"
    if {"-h", "--help"} & set(options):
        print(_short_help(f"{command} {preset}", summary, start))
        raise SystemExit(0)
    options = ["--help" if option == "--help-all" else option for option in options]
    words, env_options = take_env_options([_long_option(option) for option in options])
    _check_memory(words, start.agent)
    try:
        config = tyro.cli(
            ExperimentConfig,
            prog=f"{command} {preset}",
            description=f"{summary}.\n{short}.\n{OWN_AGENT}.",
            default=start,
            args=words,
            # The preset chooses the algorithm; without this each class would be a sub-command.
            config=(tyro.conf.AvoidSubcommands,),
            registry=registry,
        )
    except _RefusedError as error:
        raise error.args[0] from None
    env = dataclasses.replace(config.env, options={**config.env.options, **env_options})
    return dataclasses.replace(config, env=env)


def _check_memory(words: list[str], agent: Any) -> None:
    """Raise UsageError if an agent with a replay is asked for a memory that it has not."""
    asked = [word for word in words if word.startswith(("--agent.memory", "--agent.lstm"))]
    fields = {field.name for field in dataclasses.fields(agent)}
    has_one = any(name.startswith(("memory", "lstm")) for name in fields)
    if asked and "replay" in fields and not has_one:
        raise UsageError(
            f"{asked[0]} is for agents with a memory, which {type(agent).__name__} has not; use "
            "r2d2, which is DQN with one, or ppo or impala, which take continuous actions, too"
        )


def common_options(config: ExperimentConfig | None = None) -> list[str]:
    """Return lines with the options that people change first, and their values in ``config``."""
    wide = max(len(option) for group in COMMON_OPTIONS.values() for option in group)
    lines = []
    for title, group in COMMON_OPTIONS.items():
        lines += ["", f"{title}:"]
        for option, what in group.items():
            default = "" if config is None else _default_of(option.split()[0], config)
            lines.append(f"  {option:<{wide}}  {what}{default}")
    return lines[1:]


def _default_of(option: str, config: ExperimentConfig) -> str:
    """Return the value of an option in ``config``, in brackets; nothing if it has none."""
    value: Any = config
    for name in _long_option(option).removeprefix("--").replace("-", "_").split("."):
        value = getattr(value, name, None)
    if value is None or value is False or dataclasses.is_dataclass(value):
        return ""
    return f" [{' '.join(value) if isinstance(value, tuple) else value}]"


def _short_help(command: str, summary: str, config: ExperimentConfig) -> str:
    lines = [f"usage: {command} [options]", "", f"{summary}.", "", *common_options(config)]
    return "\n".join([*lines, "", f'"{command} --help-all" shows all options.'])


def _long_option(option: str) -> str:
    name, equals, value = option.partition("=")
    return SHORT_OPTIONS.get(name.replace("_", "-"), name) + equals + value


@registry.struct_rule
def dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Return the fields of a dataclass, the docstring of each without the source's line breaks."""
    if not dataclasses.is_dataclass(info.type) or not dataclasses.is_dataclass(info.default):
        return None
    hints = typing.get_type_hints(info.type)
    texts = _field_docstrings(info.type)

    def field_spec(name: str) -> StructFieldSpec:
        value = getattr(info.default, name)
        # An agent of one's own may have hyper-parameters of any class.
        hint: Any = type(value) if dataclasses.is_dataclass(value) else hints[name]
        if name in NO_OPTIONS:
            hint = Annotated[hint, tyro.conf.Fixed, tyro.conf.Suppress]
        return StructFieldSpec(name, hint, value, texts.get(name, ""))

    names = [field.name for field in dataclasses.fields(info.type) if field.init]

    def make(**values: Any) -> Any:
        try:
            return info.type(**values)
        except UsageError as error:  # a ValueError, which tyro would show as one of parsing
            raise _RefusedError(error) from error

    return StructConstructorSpec(make, tuple(map(field_spec, names)))


@registry.primitive_rule
def whole_number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Read whole numbers that are written as in Python or with an exponent: 1e6 is 1,000,000."""
    if info.type is not int:
        return None

    def read(words: list[str]) -> int:
        number = math.nan
        with contextlib.suppress(ValueError):
            number = float(words[0])
            return int(words[0])
        if not number.is_integer() or abs(number) > 2**53:
            raise ValueError(f"{words[0]!r} is not a whole number; use for example 1000000 or 1e6")
        return int(number)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


class _RefusedError(Exception):
    """Carries the UsageError of a configuration out of tyro."""


def _field_docstrings(cls: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        for param in docstring_parser.parse_from_object(base).params:
            texts[param.arg_name] = " ".join((param.description or "").split())
    return texts


def take_trainers(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take ``--trainer NAME ...`` out of ``words``, of which the last counts.

    Returns:
      The other words, in which ``--NAME.option`` became ``--agent.option``; and the names.

    Raises:
      UsageError: No name is given.
    """
    others, names, left = [], [], list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        if option != TRAINER:
            others.append(option + equals + value)
            continue
        names = [value] if equals else [*itertools.takewhile(lambda w: w[:1] != "-", left)]
        del left[: 0 if equals else len(names)]
        if not names:
            raise UsageError(f"{TRAINER} needs a name; use {TRAINER} league")
    prefixes = tuple(f"--{name}." for name in names)
    return [
        f"--agent.{word.partition('.')[2]}" if word.startswith(prefixes) else word
        for word in others
    ], names


def take_env_options(words: Sequence[str]) -> tuple[list[str], dict[str, OptionValue]]:
    """Take the options of the environment out of ``words``, however they are written.

    Args:
      words: Among them ``--env.options NAME VALUE NAME VALUE``, ``--env.options.NAME VALUE`` and
        ``--env.options.NAME=VALUE``.

    Returns:
      The other words, and values by name.

    Raises:
      UsageError: A name has no value.
    """
    others: list[str] = []
    pairs: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        if option == ENV_OPTIONS and not equals:
            given = list(itertools.takewhile(lambda word: not word.startswith("--"), left))
            del left[: len(given)]
            if len(given) % 2:
                raise UsageError(f"{option} {' '.join(given)}: the last name needs a value")
            pairs += given
        elif option.startswith(f"{ENV_OPTIONS}."):
            if not equals and (not left or left[0].startswith("--")):
                raise UsageError(f"{option} needs a value; use {option} VALUE")
            name = option.removeprefix(f"{ENV_OPTIONS}.").replace("-", "_")
            pairs += [name, value if equals else left.pop(0)]
        else:
            others.append(word)
    return others, tyro.cli(dict[str, OptionValue], args=pairs) if pairs else {}

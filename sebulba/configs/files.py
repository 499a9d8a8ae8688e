"""Configuration files: a preset and options for it, as JSON that people can read and edit.

``{"config": "cartpole", "options": {"num-envs": 64, "inference-devices": [0]}, "measured": {}}``

The options are those of ``sebulba train``, without the dashes. They become command-line words, so
that one parser checks them wherever they come from. ``measured`` is for the reader alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.own_agent import with_agent
from sebulba.configs.presets import NEUTRAL, PRESETS
from sebulba.errors import UsageError
from sebulba.support import plugins
from sebulba.support.files import lines_of_keys, read_edited_json, write_json

Scalar: TypeAlias = bool | int | float | str | None
Option: TypeAlias = Scalar | Sequence[Scalar] | Mapping[str, Scalar]
"""Value of an option: a scalar, a list, or pairs of name and value."""

DefaultOf: TypeAlias = Callable[[str, Any], ExperimentConfig]
"""Returns the experiment that the name of a configuration and an agent of one's own stand for."""

KEYS = ("config", "options", "measured")

FROZEN = "agent.frozen"
"""A dict, of whose members each is an option."""
NOT_KEPT = ("name", "run_dir", "resume", "drop_replay", "strict", "trust")
"""Fields of an ``ExperimentConfig`` that belong to one run, not to a configuration."""


def read_config_file(
    path: str | Path, default_of: DefaultOf | None = None
) -> tuple[str, list[str]]:
    """Return what a configuration file stands for on the command line of ``sebulba train``.

    Args:
      path: The file.
      default_of: Returns the configuration of a name, with an agent of one's own where the options
        name one, or refuses it; None takes presets alone.

    Returns:
      The configuration's name, and its options as command-line words.

    Raises:
      UsageError: It is missing or damaged, or does not have the form above. Whether the options
        exist is for the command line to say.
    """
    path = Path(path)
    if not os.path.isfile(path):  # False for a name that is too long, too
        raise UsageError(
            f"configuration file {path} does not exist; use one that sebulba bench tune wrote, "
            f"or a configuration: {' or '.join(NEUTRAL)}"
        )
    record = read_edited_json(path)
    unknown = sorted(set(record) - set(KEYS))
    if unknown:
        raise UsageError(f"{path} has the unknown key {unknown[0]!r}; use {', '.join(KEYS)}")
    name, options = record.get("config"), record.get("options", {})
    if not isinstance(options, dict):
        raise UsageError(
            f"{path} has options={options!r}, which must be an object of names and values; "
            'use {"num-envs": 64}'
        )
    if default_of is None or not isinstance(name, str):
        default = config_of_preset(name, path)
    else:
        agent = options.get("agent")
        default = default_of(name, None if isinstance(agent, Mapping) else agent)
    words: list[str] = []
    spelled: dict[str, str] = {}
    for option, value in _by_dotted_name(default, options):
        key = option.replace("_", "-")
        if key in spelled:
            raise UsageError(
                f"{path} has {spelled[key]!r} and {option!r}, one option, "
                f"{lines_of_keys(path, spelled[key], option)}; keep one of them"
            )
        spelled[key] = option
        words += option_words(default, option, value)
    return str(name), words


def _by_dotted_name(
    part: Any, options: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Option]]:
    """Yield options by dotted name, whether they are nested, as a run writes them, or not."""
    for name, value in options.items():
        own = getattr(part, name.replace("-", "_"), None)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(own):
            yield from _by_dotted_name(own, value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def is_config_file(path: Path) -> bool:
    """Tell whether a file has the form above, as far as its keys say."""
    try:
        record = read_edited_json(path)
    except UsageError:
        return False
    return "config" in record and set(record) <= set(KEYS)


def config_of_preset(name: Any, path: Path) -> ExperimentConfig:
    """Return the preset that a configuration file names; UsageError if there is none."""
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name].make()
    if isinstance(name, str):
        plugins.check_not_apart(plugins.PRESETS, name, f"the configuration {name!r} of {path}")
    near = difflib.get_close_matches(name if isinstance(name, str) else "", PRESETS, cutoff=0.5)
    raise UsageError(
        f"{path} names the unknown configuration {name!r} under 'config'; use "
        f"{' or '.join(near or NEUTRAL)}"
    )


def write_config_file(
    path: str | Path,
    preset: str,
    options: Mapping[str, Option],
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Write a configuration file.

    Args:
      path: The file; one that is there is replaced.
      preset: Name of the configuration that the options change.
      options: Value by name, as ``config_options`` returns them.
      measured: Anything worth telling the reader, as JSON.

    Raises:
      UsageError: It cannot be written.
    """
    record = {"config": preset, "options": dict(options), "measured": dict(measured or {})}
    write_json(path, record)


def config_options(
    config: ExperimentConfig, preset: str, default: ExperimentConfig | None = None
) -> dict[str, Option]:
    """Return the options that make ``config`` of another, without those of a single run.

    Args:
      config: What the options are to make.
      preset: Name of the configuration that they change.
      default: That configuration, where it is no preset.

    Raises:
      UsageError: Options cannot make it, since its agent has other hyper-parameters.
    """
    default = default or PRESETS[preset].make()
    own = dataclasses.replace(config, **{name: getattr(default, name) for name in NOT_KEPT})
    if config.agent_class is None and type(config.agent) is not type(default.agent):
        raise UsageError(
            f"no options make {type(config.agent).__name__} of the configuration {preset!r}, which "
            f"has {type(default.agent).__name__}, as in a run of an older Sebulba; begin with "
            f"{preset!r} itself"
        )
    if config.agent_class is None or config.agent_class == default.agent_class:
        return dict(_differences(default, own, ""))
    default = with_agent(default, config.agent_class)
    return {"agent": config.agent_class, **dict(_differences(default, own, ""))}


def _differences(default: Any, config: Any, prefix: str) -> list[tuple[str, Option]]:
    found: list[tuple[str, Option]] = []
    now = config_parts(config)
    for part, before in config_parts(default).items():
        after = now[part]
        name = prefix + part.replace("_", "-")
        if config_parts(before) and config_parts(before).keys() == config_parts(after).keys():
            found += _differences(before, after, f"{name}.")
        elif prefix + part == FROZEN:
            changed = {who: one for who, one in after.items() if before.get(who) != one}
            found += [(f"{name}.{who.replace('_', '-')}", one) for who, one in changed.items()]
        elif before != after:
            found.append((name, list(after) if isinstance(after, tuple) else after))
    return found


def config_parts(config: Any) -> dict[str, Any]:
    """Return what ``config`` is made of, by name: fields of a dataclass, or members in a dict."""
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    has_members = isinstance(config, Mapping) and all(
        map(dataclasses.is_dataclass, config.values())
    )
    return dict(config) if has_members else {}


def option_words(default: ExperimentConfig, name: str, value: Any) -> list[str]:
    """Return an option as command-line words."""
    if isinstance(value, bool) and _is_flag(default, name):
        path, dot, last = name.rpartition(".")
        return [f"--{path}{dot}{'' if value else 'no-'}{last}"]
    if isinstance(value, dict):
        return [f"--{name}", *(str(word) for pair in value.items() for word in pair)]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]  # one word, so that a value may begin with a dash


def _is_flag(default: Any, name: str) -> bool:
    """Tell whether the command line has --x and --no-x for it, rather than --x VALUE."""
    first, _, rest = name.replace("-", "_").partition(".")
    parts = {part.replace("-", "_"): value for part, value in config_parts(default).items()}
    if first not in parts:
        return False  # the command line will say that it is unknown
    if rest:
        return _is_flag(parts[first], rest)
    return typing.get_type_hints(type(default)).get(first) is bool

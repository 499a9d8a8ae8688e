"""What CONFIG of ``sebulba train CONFIG`` may be, and the agent that ``--agent`` names.

CONFIG is the name of a configuration of this package; ``module:attribute`` or ``FILE.py:attribute``
of an experiment or an agent of one's own; or a file of JSON: one that ``sebulba bench tune`` wrote,
or a run's ``config.json`` (or its folder). ``--agent A`` in its place is short for A.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sebulba.agents.configs import AgentConfig
from sebulba.agents.configs.agent_config import is_agent_class
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.files import NOT_KEPT, config_of_preset, is_config_file, read_config_file
from sebulba.configs.own_agent import with_agent
from sebulba.configs.preset import Preset
from sebulba.configs.presets import NEUTRAL, PRESETS
from sebulba.errors import UsageError, shown
from sebulba.policies.pretrained import folder_of, is_pretrained
from sebulba.runs.folder import KIND, config_of_record
from sebulba.support.files import read_edited_json
from sebulba.support.plugins import PRESETS as PRESETS_OF_PACKAGES
from sebulba.support.plugins import check_not_apart
from sebulba.support.trust import Trust, trust_of
from sebulba.support.user_code import load_attribute

AGENT, FROM = "--agent", "--from"
OWN_ENV_STEPS = 1_000_000
"""Environment steps for an agent of one's own, where nothing else is said."""


class Start(NamedTuple):
    """The configuration with which options begin."""

    name: str
    """CONFIG, or the one that a file names."""
    config: ExperimentConfig
    """The configuration."""
    file: str | None = None
    """File of options for it, which somebody else may have written."""
    words: Sequence[str] = ()
    """These options as command-line words."""


def config_first(words: Sequence[str]) -> list[str]:
    """Return ``[CONFIG, *options]``.

    In place of CONFIG, ``--from RUN`` may come first, for the configuration of that run, or
    ``--agent`` anywhere.
    """
    if not words or not words[0].startswith("-"):
        return [*words]
    if words[0] == FROM:
        return [*words[1:2], *words]
    rest, agent = take_agent(words)
    return [*words] if agent is None else [agent, *rest]


def take_agent(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Take ``--agent A`` and ``--agent=A`` out of command-line words.

    Returns:
      The other words, and the last agent, or None.

    Raises:
      UsageError: ``--agent`` has no value.
    """
    others, agent, left = [], None, list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        if option != AGENT:
            others.append(option + equals + value)
            continue
        if not equals and (not left or left[0].startswith("-")):
            raise UsageError(f"{AGENT} needs a value; use {AGENT} my_package:MyAgent")
        agent = value if equals else left.pop(0)
    return others, agent


def is_trust_given(words: Sequence[str]) -> bool:
    """Tell whether the last of ``--trust`` and ``--no-trust`` among the words is ``--trust``."""
    said = [word for word in words if word in ("--trust", "--no-trust")]
    return said[-1:] == ["--trust"]


def start_of(word: str, *, trust: bool, command: str) -> Start:
    """Return the configuration that CONFIG stands for.

    Args:
      trust: Import what a file names whoever wrote it.

    Raises:
      UsageError: It stands for none, or a file names code and is not trusted.
    """
    if word in PRESETS:
        return Start(word, PRESETS[word].make())
    if word.endswith(".json") or os.path.isdir(word) or is_pretrained(word):
        return _of_file(folder_of(word), trust)
    if ":" in word:
        return Start(word, _loaded(word))
    check_not_apart(PRESETS_OF_PACKAGES, word, f"configuration {word!r}")
    near = difflib.get_close_matches(word.lower(), PRESETS, n=3, cutoff=0.5)
    command = command.removesuffix(f" {word}")  # python -m benchmarks learn NAME
    raise UsageError(
        f"configuration {word!r} is unknown; use {' or '.join(near or NEUTRAL)}, a file NAME.json, "
        "the folder of a run, or an experiment or agent of your own, as module:attribute or "
        f"FILE.py:attribute ({command} CONFIG [options]; --env.id trains on any other environment)"
    )


def _of_file(file: Path, trust: bool) -> Start:
    """Return what a file of JSON, or the folder of a run, stands for."""
    # Not Path.is_dir and Path.is_file, which raise where a name is too long.
    if os.path.isdir(file):
        file = _in_folder(file)
    record = read_edited_json(file) if os.path.isfile(file) else {}
    if "agent_config" not in record:
        return _of_options(file, trust)
    trusted = trust_of(KIND, record, trust)
    name, config = config_of_record(record, file, trusted)
    defaults: Any = {f.name: f.default for f in dataclasses.fields(config) if f.name in NOT_KEPT}
    config = dataclasses.replace(config, **defaults)
    for named in config.named_code():
        trusted.check(f"{file} names {named}")
    return Start(name, config)


def _in_folder(folder: Path) -> Path:
    """Return the configuration of a run's folder."""
    config = folder / "config.json"
    if os.path.isfile(config):
        return config
    others = [file for file in sorted(folder.glob("*.json")) if is_config_file(file)]
    if not others:
        return config
    names = " or ".join(str(file) for file in others[:3])
    raise UsageError(f"{folder} is not the folder of a run; use a file in it: {names}")


def _of_options(file: Path, trust: bool) -> Start:
    """Return what a file of a configuration's name and options stands for."""
    who, configs = Trust("nothing says who wrote the file", trust), {}

    def default_of(name: str, agent: Any) -> ExperimentConfig:
        if name in PRESETS or ":" not in name:
            config = config_of_preset(name, file)
        else:
            who.check(f"{file} names the configuration {name}, which would be imported")
            config = _loaded(name)
        if agent is not None:
            who.check(f"{file} names the agent {agent}, which would be imported")
            config = with_agent(config, str(agent))
        configs[name] = config
        return config

    name, words = read_config_file(file, default_of)
    return Start(name, configs[name], str(file), words)


def _loaded(word: str) -> ExperimentConfig:
    """Return the experiment that ``module:attribute`` or ``FILE.py:attribute`` names."""
    found = load_attribute("configuration", word)
    if isinstance(found, type) and is_agent_class(found):
        config = ExperimentConfig(
            env=EnvConfig("CartPole-v1"), agent=AgentConfig(), total_env_steps=OWN_ENV_STEPS
        )
        return with_agent(config, word)
    made = found() if callable(found) and not isinstance(found, type) else found
    made = made.make() if isinstance(made, Preset) else made
    if not isinstance(made, ExperimentConfig):
        raise UsageError(
            f"configuration {word!r} is {shown(found)}; it must be a subclass of sebulba.Agent, an "
            "ExperimentConfig (sebulba.configs.experiment), or a function that returns one"
        )
    return made

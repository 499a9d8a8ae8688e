"""``sebulba.train`` and ``sebulba.resume``: what the commands do, from Python.

Free of JAX until the run begins, so that what is wrong with a configuration shows at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.own_agent import with_agent
from sebulba.configs.presets import NEUTRAL
from sebulba.configs.trainers import with_trainers
from sebulba.errors import UsageError, shown
from sebulba.runs.exit_codes import tell_hosts
from sebulba.runs.folder import RunFolder, choose_run_folder
from sebulba.runs.read_config import read_config
from sebulba.runs.wording import in_python, setting
from sebulba.support.checks import nearest
from sebulba.support.machine import allow_open_files
from sebulba.support.user_code import class_name

if TYPE_CHECKING:
    from sebulba.loops.gymnasium_loop import Result

_trains = 0
"""The thread in which ``train`` or ``resume`` runs; 0 if none does."""


def train(config: str | ExperimentConfig, /, **changes: Any) -> Result | None:
    """Train in a run folder, as ``sebulba train`` does.

    The folder gets metrics, checkpoints, the trained policy and a learning curve. Ctrl-C ends the
    run with everything saved, and raises KeyboardInterrupt.

    Args:
      config: The name of a preset, such as ``"cartpole"``; what else CONFIG of the command may be;
        or an experiment.
      **changes: Fields of ``ExperimentConfig`` to change, such as ``total_env_steps=100_000`` or
        ``name="mine"``. A dict changes fields of a field: ``agent={"learning_rate": 1e-3}``.
        ``env`` may be an id, or a class or function at the top of a module, which takes the place
        of ``env.id`` alone; ``agent`` a subclass of ``sebulba.Agent``. ``trainer`` names a trainer
        around the loop, such as ``"league"``, or several, the outermost first.

    Returns:
      The result, with ``result.folder``; None on a host other than the first of several.

    Raises:
      UsageError: A value breaks a rule.
      Exception: Whatever the run raised; what was learned is saved.
    """
    with _alone():
        preset, config = _configured(config, changes)
        config = joined(config)
        return _run(config, choose_run_folder(config, preset), preset)


def resume(run: str | os.PathLike[str], /, **changes: Any) -> Result | None:
    """Resume a run from its newest checkpoint, as ``sebulba resume`` does.

    Args:
      run: The folder of the run.
      **changes: As for ``train``; those that a run may change, such as ``total_env_steps``, which
        counts from the beginning of the run.

    Returns:
      The result. If nothing was left to do, it is that of the checkpoint.

    Raises:
      UsageError: A value breaks a rule, or the run has no checkpoint.
      CheckpointError: No checkpoint is whole.
      Exception: Whatever the run raised; what was learned is saved.
    """
    with _alone():
        folder, record, (preset, saved) = open_run(run, trust=changes.get("trust", False) is True)
        config = resumed(folder, record, _changed(saved, changes))
        return _run(config, folder, preset)


def open_run(
    run: str | os.PathLike[str], *, trust: bool, if_trusted: Callable[[], None] = lambda: None
) -> tuple[RunFolder, dict[str, Any], tuple[str, ExperimentConfig]]:
    """Return the folder of a run, its record, and its preset and configuration.

    Args:
      trust: The user says that what it names may be imported, whoever wrote it.
      if_trusted: Called before anything is imported that the run names.

    Raises:
      UsageError: It holds no run, or one that is not trusted.
    """
    folder = RunFolder(Path(run))
    folder.check_path()
    record = folder.record()  # once: nobody can exchange it between the check and its use
    if folder.trust(trust, record).is_trusted:
        if_trusted()
    return folder, record, folder.read_config(record, trust=trust)


def resumed(
    folder: RunFolder, record: Mapping[str, Any], config: ExperimentConfig
) -> ExperimentConfig:
    """Return the configuration with which the run in ``folder`` is resumed.

    Raises:
      UsageError: The folder is not trusted, has no checkpoint, or its run cannot change so.
    """
    config = dataclasses.replace(config, resume=True, name=None, run_dir=str(folder.path))
    config = joined(config)
    folder.check_trusted(config.trust, record)
    folder.check_resumable(config)
    folder.check_has_checkpoints()
    return config


def joined(config: ExperimentConfig) -> ExperimentConfig:
    """Meet the other hosts, if there are any, and note which of them this is."""
    if not config.distributed.is_on:
        return config
    from sebulba.runs.meet_hosts import joined_config

    return joined_config(config)


def ready(config: ExperimentConfig, folder: RunFolder, preset: str) -> ExperimentConfig:
    """Check what can be checked before JAX starts, and say what begins."""
    from sebulba.runs.writers import find_callback, find_recorder, find_writer

    allow_open_files()
    for name in config.writers:
        find_writer(name)
    for name in config.callbacks:
        find_callback(name)
    if config.record_dataset is not None:
        find_recorder("training")
    config = folder.continued(config)
    # Said now, since importing JAX and compiling take seconds; the folder is not made yet.
    print(f"sebulba: {preset}", flush=True)
    if config.anneal_learning_rate and not folder.config.exists():
        print(
            f"the learning rate falls to 0 over {config.annealed_env_steps:,} env steps; in a run "
            f"that is to go on after them, {setting('anneal_learning_rate', False)} keeps it",
            flush=True,
        )
    return config


def _run(config: ExperimentConfig, folder: RunFolder, preset: str) -> Result | None:
    config = ready(config, folder, preset)
    from sebulba.runs.train import train_in_folder

    return train_in_folder(config, folder, preset=preset)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Refuse a second training, which a script begins that is imported for its classes.

    Other hosts, if there are any, are told of what ends this one.
    """
    global _trains
    if _trains == threading.get_ident():
        raise UsageError(
            "sebulba.train is called while it trains already; a script that names its own classes "
            'is imported again, so call it below: if __name__ == "__main__":'
        )
    if _trains:
        raise UsageError(
            "another thread of this process trains already; use a process for each training"
        )
    _trains = threading.get_ident()
    try:
        with in_python():
            yield
    except BaseException as error:
        tell_hosts(error)
        raise
    finally:
        _trains = 0


def _configured(
    config: str | ExperimentConfig, changes: Mapping[str, Any]
) -> tuple[str, ExperimentConfig]:
    """Return the name of a configuration and the experiment, with the changes."""
    if isinstance(config, ExperimentConfig):
        config = _changed(config, changes)
        return _preset_of(config), config
    if not isinstance(config, str):
        raise UsageError(
            f"config={shown(config)} must be the name of a preset or an ExperimentConfig; use for "
            'example sebulba.train("cartpole")'
        )
    words = [config, *(["--trust"] if changes.get("trust", False) is True else [])]
    try:
        preset, experiment = read_config(words, "sebulba.train")
    except SystemExit as error:
        raise UsageError(f"{config} has an option that is refused, as printed above") from error
    return preset, _changed(experiment, changes)


def _preset_of(config: ExperimentConfig) -> str:
    """Return the preset with which a sweep of the run can begin: that of its agent for any task."""
    if config.agent_class is None:
        for name, preset in NEUTRAL.items():
            if type(preset.make().agent) is type(config.agent):
                return name
    return config.env.id


def _changed(config: ExperimentConfig, changes: Mapping[str, Any]) -> ExperimentConfig:
    """Return ``config`` with the changes of a user."""
    given = dict(changes)
    agent = given.get("agent")
    if isinstance(agent, type):
        config = with_agent(config, _name_of("agent", agent))
        del given["agent"]
    trainers = given.pop("trainer", ())
    config = with_trainers(config, [trainers] if isinstance(trainers, str) else trainers)
    env = given.get("env")
    if isinstance(env, str):
        given["env"] = {"id": env}
    elif callable(env):
        given["env"] = {"id": _name_of("env", env)}
    elif env is not None and not isinstance(env, EnvConfig | Mapping):
        raise UsageError(
            f"env={shown(env)} must be an id, or a class or function that makes the environment, "
            f"not a {type(env).__name__}"
        )
    return _replaced(config, given, "")


def _replaced(value: Any, changes: Mapping[str, Any], prefix: str) -> Any:
    """Return a dataclass with fields changed; a mapping changes fields of a field.

    No field is a list, so that a list stands for a tuple, as in JSON.
    """
    fields = {field.name for field in dataclasses.fields(value) if field.init}
    for name in changes:
        if name not in fields:
            raise UsageError(f"{prefix}{name} is not a field{nearest(name, fields)}")
    return dataclasses.replace(
        value,
        **{
            name: _replaced(getattr(value, name), change, f"{prefix}{name}.")
            if isinstance(change, Mapping) and dataclasses.is_dataclass(getattr(value, name))
            else (tuple(change) if isinstance(change, list) else change)
            for name, change in changes.items()
        },
    )


def _name_of(field: str, code: Callable[..., Any]) -> str:
    """Return ``module:attribute`` of a class or function, or its file where that is the script.

    Raises:
      UsageError: A run on disk could not find it again.
    """
    name = getattr(code, "__qualname__", "")
    if not name or "<" in name:
        raise UsageError(
            f"{field}={shown(code)} cannot be found again by its name, which a run on disk keeps; "
            "use a class or function at the top of a module, or train it with GymnasiumLoop"
        )
    if code.__module__ != "__main__":
        return class_name(code)  # type: ignore[arg-type]
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise UsageError(
            f"{field}={name} cannot be found again by a run on disk; define it in a file and "
            "import it, or train it with GymnasiumLoop"
        )
    return f"{os.path.abspath(file)}:{name}"

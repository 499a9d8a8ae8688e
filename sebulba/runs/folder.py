"""The folder of a run: ``runs/<name>/`` and what lies where in it. Free of JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sebulba
from sebulba.agents.configs.agent_config import AgentConfig, agent_configs
from sebulba.agents.configs.auxiliary import RandomNetworkDistillationConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.files import config_parts
from sebulba.errors import UsageError, refusing, shown
from sebulba.metrics.plots import record_of
from sebulba.options import ENV_LIBRARIES, SUBTRACT_OFFSET, DistributedOptions
from sebulba.runs.wording import setting
from sebulba.support.files import (
    PARTIAL,
    absolute,
    check_regular,
    dataclass_from_json,
    put_right,
    read_json_object,
    write_whole,
)
from sebulba.support.moved import with_new_keys
from sebulba.support.trust import Trust, links_in, signed, trust_of, was_changed
from sebulba.support.user_code import (
    CODE_FOLDERS,
    class_name,
    code_folders,
    find_code_in,
    load_attribute,
)


def _entry(name: str) -> Any:
    """Return a property: the path of what has this name in the folder of a run."""
    return property(lambda self: self.root / name)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run writes."""

    path: Path
    """The folder as it was given, for messages."""

    def __post_init__(self) -> None:
        """Find the folder now: an environment may change the working directory later."""
        object.__setattr__(self, "_root", absolute(self.path))

    @property
    def root(self) -> Path:
        """The folder itself, wherever the process is."""
        return self._root  # type: ignore[attr-defined]

    config = _entry("config.json")
    """What ran, as JSON."""
    metrics = _entry("metrics.jsonl")
    """One JSON object a window of updates."""
    episodes = _entry("episodes.jsonl")
    """Returns of a sample of the training episodes."""
    tensorboard = _entry("tensorboard")
    """TensorBoard events."""
    learning_curve = _entry("learning_curve.png")
    """The learning curve."""
    policy = _entry("policy")
    """The trained policy."""
    best_policy = _entry("best_policy")
    """The policy that returned most in an evaluation, where the run had any."""
    videos = _entry("videos")
    """Films of the policy as it was trained, where the run made any."""
    checkpoints = _entry("checkpoints")
    """Where the run can be resumed."""
    ended = _entry("ended.txt")
    """Why the run ended, for people; not there while it runs, or after kill -9."""
    last_transition = _entry("last_transition.npz")
    """What the environment that failed was given last, and what it had shown before."""

    def best_return(self) -> float | None:
        """Return what the best policy returned in its evaluation; None where there is none."""
        file = self.best_policy / BEST_RETURN_FILE
        if not file.exists():
            return None
        mean = with_new_keys(read_json_object(file)).get(RETURN)
        if not isinstance(mean, int | float):
            raise UsageError(
                f"{file} is damaged ({RETURN}={shown(mean)}); restore it, or delete "
                f"{self.best_policy}"
            )
        return mean

    def write_best_return(self, folder: Path, mean: float) -> None:
        """Write that into ``folder``, which is to become the best policy's."""
        (folder / BEST_RETURN_FILE).write_text(json.dumps({RETURN: mean}) + "\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing here: two would delete each other's checkpoints.

        Raises:
          UsageError: One does already, or the folder cannot be written.
        """
        # Never through a link, which could lead out of the folder.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with self._usable("written"):
            descriptor = os.open(self.root / ".lock", flags, 0o666)
        with open(descriptor, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"another process is running in {self.path}; wait for it to end, or choose "
                    "another folder"
                ) from error
            except OSError:
                pass  # a file system without locks
            yield

    def create(self) -> None:
        """Make the folder.

        Raises:
          UsageError: It cannot be made.
        """
        with self._usable("made"):
            self.root.mkdir(parents=True, exist_ok=True)

    def check_path(self) -> None:
        """Raise UsageError if no run can have this path: too long, not UTF-8, or not permitted."""
        with self._usable("used"):
            path = os.path.abspath(self.path)
        as_bytes = path.encode(errors="replace")
        if "\0" in path or path != as_bytes.decode():
            if problem := _problem_of_locale(path):
                raise UsageError(problem)
            raise UsageError(f"run folder {shown(path)} must be UTF-8 text; choose another")
        if max(map(len, as_bytes.split(os.sep.encode()))) > MOST_NAME_BYTES:
            raise UsageError(
                f"run folder {shown(path)} has a name of more than {MOST_NAME_BYTES} bytes, the "
                "most that file systems take; choose another"
            )
        with self._usable("used"):
            self.config.exists()

    def _usable(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Raise UsageError in place of an OSError."""
        remedy = f"choose another with {setting('run_dir', 'DIR')}"
        return refusing(f"run folder {shown(str(self.path))} cannot be {what}", remedy)

    def is_deleted(self) -> bool:
        """Tell whether the folder is not there any more, or not with what a run begins with."""
        try:
            return not self.config.exists()
        except OSError:  # of a disk that does not answer
            return False

    def tidy(self) -> None:
        """Put right, or delete, what a process left that was killed while it wrote."""
        put_right(self.policy)
        put_right(self.best_policy)
        for path in self.root.glob(f"{PARTIAL}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def holds_nothing(self) -> bool:
        """No run has left anything here that was learned; a checkpoint at 0 env steps was not."""
        names, metrics = (self.policy, self.best_policy, self.videos), self.metrics
        is_empty = os.path.isfile(metrics) and not os.path.getsize(metrics)
        if any(map(os.path.lexists, names)) or (os.path.lexists(metrics) and not is_empty):
            return False
        return not any(map(int, self._checkpoint_numbers()))

    def _checkpoint_numbers(self) -> list[str]:
        folder = self.checkpoints
        if not folder.is_dir():
            return []
        return [entry.name for entry in folder.iterdir() if entry.name.isdecimal()]

    def begin_anew(self) -> None:
        """Delete what a run left that had learned nothing, for another in its place.

        Raises:
          UsageError: Another process has begun to save here meanwhile, or it cannot be deleted.
        """
        if not self.holds_nothing:
            raise UsageError(f"{self.path} holds another run by now; choose another folder")
        with self._usable("written"):
            if self.checkpoints.is_dir():  # which may be a link to another disk
                for path in self.checkpoints.iterdir():
                    shutil.rmtree(path)
            for file in (self.episodes, self.ended, self.last_transition, self.config):
                file.unlink(missing_ok=True)

    @property
    def is_complete(self) -> bool:
        """A run has ended here and left everything, whatever it ended with."""
        return all(path.exists() for path in (self.ended, self.policy, self.learning_curve))

    def write_config(
        self,
        config: ExperimentConfig,
        preset: str,
        command: Sequence[str],
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``config.json``, signed, with the identity that the run has or is now given.

        Args:
          preset: Name of the configuration that it began with.
          environment: What the environment is here: its ``id``, ``backend`` and ``versions``.

        Raises:
          UsageError: JSON cannot hold who acts by a fixed strategy, or it cannot be written.
        """
        for name, strategy in getattr(config.agent, "frozen", {}).items():
            if not isinstance(strategy, str):
                raise UsageError(
                    f"frozen[{name!r}]={shown(strategy)} cannot be saved in {self.config}, which "
                    "resume needs; save the policy and use its folder, or train it "
                    "with GymnasiumLoop"
                )
        before = self.record() if self.config.exists() else {}
        record = {
            "sebulba": sebulba.__version__,
            "run_id": before.get("run_id") or uuid.uuid4().hex,
            "preset": preset,
            "command": list(command),
            "agent_config": _config_name(type(config.agent)),
            MEMBER_CONFIGS: _member_configs(config.agent),
            **dataclasses.asdict(dataclasses.replace(config, **OF_ONE_PROCESS)),
            "name": config.name or before.get("name"),  # resume gives the folder instead
            ENVIRONMENT: environment,
            LINKS: links_in(self.root),
            CODE_FOLDERS: code_folders(type(config.agent)),
        }
        with self._usable("written"):
            write_whole(self.config, json.dumps(signed(KIND, record), indent=2) + "\n")

    def record(self) -> dict[str, Any]:
        """Return what ``config.json`` says; UsageError if it is missing, damaged or a link."""
        check_regular(self.config, links=False)
        return read_json_object(self.config)

    def run_id(self) -> str | None:
        """Return what tells this run from all others; None before it is written."""
        if not self.config.exists():
            return None
        return self.record().get("run_id")

    def chosen_env(self, config: ExperimentConfig) -> EnvConfig:
        """Return the environment, with the backend that a resumed run chose if it has none.

        So an id that another backend has by now stays with the one it was trained on.
        """
        env = config.env
        if env.backend is not None or not (config.resume and self.config.exists()):
            return env
        return self._with_backend(env, read_json_object(self.config))

    def with_its_inferencers(self, config: ExperimentConfig) -> ExperimentConfig:
        """Return ``config`` with the number of Inferencers that a resumed run has, if it has none.

        Its saved state fits no other number, and another machine would choose another.
        """
        number = config.num_inferencers_per_device
        if number is not None or not (config.resume and self.config.exists()):
            return config
        number = read_json_object(self.config).get("num_inferencers_per_device")
        return dataclasses.replace(config, num_inferencers_per_device=number)

    def _with_backend(self, env: EnvConfig, record: Mapping[str, Any]) -> EnvConfig:
        environment = record.get(ENVIRONMENT)
        if env.backend is not None or not isinstance(environment, dict):
            return env
        backend = environment.get("backend")
        if backend in ENV_LIBRARIES:  # the id says so
            return env
        return dataclasses.replace(env, backend=backend)

    def trust(self, is_given: bool, record: Mapping[str, Any] | None = None) -> Trust:
        """Return whether what ``config.json`` names may run, and what lies here may be opened.

        If so, Python finds the code that the run names from now on, where the run found it.

        Args:
          record: What ``record`` returned, if it is used: the file may be another by now.

        Raises:
          UsageError: ``config.json`` is missing, damaged, or was edited without ``is_given``.
        """
        record = self.record() if record is None else record
        trust = trust_of(KIND, record, is_given)
        if was_changed(record) and not is_given:
            raise UsageError(
                f"{self.config} was changed after the run wrote it; restore it, or use --trust "
                "(in Python: trust=True)"
            )
        links, before = links_in(self.root), {} if trust.doubt else record[LINKS]
        if strange := [name for name in links if links[name] != before.get(name)]:
            doubt = f"{strange[0]} in it is a link to {links[strange[0]]}"
            trust = trust._replace(doubt=trust.doubt or doubt)
            trust.check(f"{self.path} leads out of itself by links ({len(strange)})")
        if trust.is_trusted:
            find_code_in(record.get(CODE_FOLDERS))
        return trust

    def check_trusted(self, is_given: bool, record: Mapping[str, Any] | None = None) -> None:
        """Raise UsageError unless the folder is trusted with all that it holds."""
        self.trust(is_given, record).check(
            f"{self.path} is to be resumed, which imports what its config.json names and opens "
            "saved states of environments"
        )

    def check_no_file_links(self, is_given: bool) -> None:
        """Raise UsageError if a new run would write through links to files, unless ``is_given``.

        Links to folders are left to the user, who may want checkpoints on another disk.
        """
        for name, target in links_in(self.root).items():
            if not Path(self.root, name).is_dir():
                doubt = "nothing says who made it"
                Trust(doubt, is_given).check(f"{self.path / name} is a link to {target}")

    def read_config(
        self, record: Mapping[str, Any] | None = None, *, trust: bool = False
    ) -> tuple[str, ExperimentConfig]:
        """Return the preset and the configuration of the run.

        Args:
          record: What ``record`` returned; None reads it.
          trust: Import the agent that it names whoever wrote it.

        Raises:
          UsageError: ``config.json`` is missing or damaged, or of another Sebulba; or it names
            code and is not trusted.
        """
        record = self.record() if record is None else record
        return config_of_record(record, self.config, trust_of(KIND, record, trust))

    def continued(self, config: ExperimentConfig) -> ExperimentConfig:
        """Return ``config`` as it goes on with the run that is here, if it does.

        The wrapper that the run found for observations far from 0 stays, and so does what its agent
        did before there was an option for it. In a run that is longer now and has an
        ``extension_learning_rate``, the learning rate falls as it did.
        """
        if not (config.resume and self.config.exists()):
            return config
        saved = self.read_config(trust=config.trust)[1]
        found = tuple(one for one in saved.env.wrappers if one.startswith(f"{SUBTRACT_OFFSET}("))
        if found and (*config.env.wrappers, *found) == saved.env.wrappers:
            env = dataclasses.replace(config.env, wrappers=saved.env.wrappers)
            config = dataclasses.replace(config, env=env)
        agent = _as_before(config.agent, saved.agent, self.record()["agent"])
        config = dataclasses.replace(config, agent=agent)
        if config.extension_learning_rate is None:
            return config
        annealed = saved.annealed_env_steps
        if config.total_env_steps <= annealed:
            return config
        return dataclasses.replace(config, anneal_env_steps=annealed)

    def check_resumable(self, config: ExperimentConfig) -> None:
        """Raise UsageError, with the differences, if ``config`` is not that of the run."""
        _, saved = self.read_config(trust=config.trust)
        self._check_same(as_json(saved), self.continued(config))

    def _check_same(self, before: Mapping[str, Any], config: ExperimentConfig) -> None:
        """Raise UsageError, with the differences, if ``config`` is not what was saved.

        Args:
          before: The fields of a configuration by dotted name.
          config: The configuration of now.
        """
        after = as_json(config)
        may_change = _may_change(config, before)
        why = dict.fromkeys(WITH_ANNEALING_TOO, " (the learning rate falls over the run)")
        if config.total_env_steps > (before.get("total_env_steps") or config.total_env_steps):
            why["total_env_steps"] = (
                " (the learning rate falls to 0 over the run; "
                f"{setting('extension_learning_rate', 'X')} goes on from there at the rate X, such "
                "as a tenth of the first)"
            )
        different = [
            f"{name} is {before.get(name)!r} in the run and {after.get(name)!r} now"
            f"{why.get(name, '')}"
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name) and not may_change(name)
        ]
        if different:
            raise UsageError(
                f"{self.path} cannot be resumed with another configuration: "
                f"{'; '.join(different)}. Leave that as it was, or begin a new run"
            )

    def about(self, config: ExperimentConfig) -> dict[str, Any]:
        """Return what a checkpoint says of its run, for ``check_of_this_run``."""
        may_change = _may_change(config)
        fields = {name: value for name, value in _flat(config).items() if not may_change(name)}
        return {"run_id": self.run_id(), "config": fields}

    def check_of_this_run(self, record: Mapping[str, Any], config: ExperimentConfig) -> None:
        """Raise UsageError if a checkpoint is of another run or configuration.

        Args:
          record: The record of the checkpoint, with what ``about`` returned.
        """
        theirs, ours = record.get("run_id"), self.run_id()
        if theirs is not None and ours is not None and theirs != ours:
            raise UsageError(
                f"{self.checkpoints} holds checkpoints of another run ({theirs[:8]}) than "
                f"{self.config} ({ours[:8]}); restore the folder of one run"
            )
        if "config" in record:
            # Fields that it does not know are of a newer version of Sebulba, and no difference.
            self._check_same({**as_json(config), **record["config"]}, config)

    def check_has_checkpoints(self) -> None:
        """Raise UsageError if no checkpoint was saved here, damaged or not."""
        if not self._checkpoint_numbers():
            raise UsageError(
                f"{self.path} has no checkpoint: the run is still going, or ended before it saved "
                "one. Begin it again with sebulba train --resume --run-dir and the same options"
            )

    def drop_metrics_after(self, env_steps: int) -> int:
        """Drop the records of what a checkpoint at ``env_steps`` does not know; return how many."""
        with self._usable("written"):
            _drop_lines_after(self.episodes, env_steps)
            return _drop_lines_after(self.metrics, env_steps)

    def evaluated_at(self, env_steps: int) -> int:
        """Return where the newest evaluation was that ``drop_metrics_after`` keeps, 0 if none."""
        if not self.metrics.exists():
            return 0
        lines = self.metrics.read_bytes().splitlines(keepends=True)
        kept = filter(None, (_record_until(env_steps, line) for line in lines))
        return max((record.get("eval_env_steps") or 0 for record in kept), default=0)

    def read_env_config(self, trust: Trust, record: Mapping[str, Any]) -> EnvConfig:
        """Return the environment of the run.

        Raises:
          UsageError: ``config.json`` is missing or damaged, or names code and is not trusted.
        """
        _check_of_run(record, self.config)
        try:
            config = dataclass_from_json(EnvConfig, {**record["env"]})
            for named in config.named_code():
                trust.check(f"{self.config} names {named}")
            return self._with_backend(config, record)
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"{self.config} does not describe an environment ({error}); "
                "expected the config.json that a run wrote"
            ) from error


def _as_before(now: Any, saved: Any, record: Mapping[str, Any]) -> Any:
    """Return ``now`` with what ``record`` has no fields for as in ``saved``, where it is unset."""
    kind, kept = type(saved), {}
    if not isinstance(now, kind):
        return now
    for name in [field.name for field in dataclasses.fields(kind)]:
        value, before = getattr(now, name), getattr(saved, name)
        if name not in record:
            kept[name] = before if value == getattr(kind, name, None) else value
        elif dataclasses.is_dataclass(before) and isinstance(record[name], Mapping):
            kept[name] = _as_before(value, before, record[name])
    return dataclasses.replace(now, **kept)


def _check_of_run(record: Mapping[str, Any], file: Path) -> None:
    """Raise UsageError if a policy wrote ``record``."""
    if "format" in record:
        raise UsageError(
            f"{file.parent} is the folder of a policy, which does not name its environment; "
            "name the folder of its run, or load it with sebulba.load_policy"
        )


def config_of_record(
    record: Mapping[str, Any], file: Path, trust: Trust
) -> tuple[str, ExperimentConfig]:
    """Return the preset and the configuration that a run wrote.

    If it is trusted, Python finds the code that the run names from now on.

    Raises:
      UsageError: It is damaged, of another Sebulba, or names code and is not trusted.
    """
    _check_of_run(record, file)
    if trust.is_trusted:
        find_code_in(record.get(CODE_FOLDERS))
    try:
        preset = record["preset"]
        fields = {f.name for f in dataclasses.fields(ExperimentConfig)} - {"agent"}
        given = {name: value for name, value in record.items() if name in fields}
        agent = _agent_of_record(record, file, trust)
        config = dataclass_from_json(ExperimentConfig, {**given, "agent": agent})
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} does not describe a run of this Sebulba "
            f"({type(error).__name__}: {error}); resume it with the one that wrote it, "
            f"{record.get('sebulba', 'unknown')}"
        ) from error
    return preset, config


def _agent_of_record(record: Mapping[str, Any], file: Path, trust: Trust) -> Any:
    """Return the hyper-parameters of the agent, and of its members if it has any."""
    fields = dict(record["agent"])
    for field, members in record.get(MEMBER_CONFIGS, {}).items():
        fields[field] = {
            name: dataclass_from_json(_config_class(own, file, trust), fields[field][name])
            for name, own in members.items()
        }
    return dataclass_from_json(_config_class(record["agent_config"], file, trust), fields)


def _member_configs(agent: AgentConfig) -> dict[str, dict[str, str]]:
    """Return the names of the members' classes of hyper-parameters, by field and member."""
    return {
        field: {name: _config_name(type(own)) for name, own in parts.items()}
        for field, members in config_parts(agent).items()
        if isinstance(members, Mapping) and (parts := config_parts(members))
    }


def _own_configs() -> dict[str, type]:
    """Return Sebulba's hyper-parameters of agents and auxiliaries, by name."""
    novelty = RandomNetworkDistillationConfig
    return {**agent_configs(), novelty.__name__: novelty}


def _config_name(cls: type) -> str:
    """Return the name of a class of hyper-parameters: ``module:class`` unless it is of Sebulba."""
    is_ours = cls.__module__.startswith("sebulba.") and cls.__name__ in _own_configs()
    return cls.__name__ if is_ours else class_name(cls)


def _config_class(name: Any, file: Path, trust: Trust) -> Any:
    """Return a class of hyper-parameters; one that is not Sebulba's only if ``file`` is trusted."""
    if ":" not in name:
        return _own_configs()[name]
    if name != class_name(AgentConfig):
        trust.check(f"{file} names the class {shown(name)}, which would be imported")
    found = load_attribute(f"{file}: agent_config", name)
    if not dataclasses.is_dataclass(found):
        raise UsageError(f"{file} names {name}, which is not a configuration (a dataclass)")
    return found


MOST_NAME_BYTES = 255
"""Of a file or a folder, as file systems have it."""

BEST_RETURN_FILE = "evaluation.json"
RETURN = "episode_return_mean"
"""What that file says of the best policy."""
KIND = "run"
"""What the signature of ``config.json`` is of; see ``sebulba.support.trust``."""
MEMBER_CONFIGS = "member_configs"
"""Entry of ``config.json`` with the classes of hyper-parameters of an agent's members."""
ENVIRONMENT = "environment"
"""Entry of ``config.json`` with what the environment was; runs of older versions have none."""
LINKS = "links"
"""Entry of ``config.json`` with the symbolic links that the folder had when it was written."""
OF_ONE_PROCESS: dict[str, Any] = {
    "resume": False,
    "drop_replay": False,
    "strict": False,
    "trust": False,
    "record_dataset": None,
    "distributed": DistributedOptions(),
}
"""Fields that belong to one process and not to the run."""

MAY_CHANGE = (
    *("total_env_steps", "num_envs", "num_inferencers_per_device", "schedule", "cycle"),
    *("max_policy_lag", "queue_size", "eval_every_env_steps", "eval_episodes", "eval_num_envs"),
    *("eval_max_episode_steps", "video_every_env_steps", "writers", "stop_at_return", "callbacks"),
    *("metrics_interval_s", "checkpoint", "faults", "platform", *OF_ONE_PROCESS),
    *("num_cpu_devices", "inference_devices", "update_devices", "compile_cache", "name", "run_dir"),
    *("env.num_threads", "env.vectorization", "pin_inferencers", "cluster"),
)
"""Fields of a configuration with which a run may be resumed that began with others. Whether the
saved state fits other numbers of environments and Inferencers is for the loop to say."""


WITH_ANNEALING_TOO = {"total_env_steps", "num_envs"}
"""Which say how many updates the run has, over which the learning rate falls: no longer then."""


EXTENSION = {"total_env_steps", "anneal_env_steps", "extension_learning_rate"}
"""Which change where such a run is extended for the first time."""


def _may_change(
    config: ExperimentConfig, before: Mapping[str, Any] | None = None
) -> Callable[[str], bool]:
    """Return what tells whether a field, by dotted name, may change when a run is resumed.

    Args:
      config: The configuration of now.
      before: The fields of the run, by dotted name; None asks for any run.
    """
    before = before or {}
    may_change = set(MAY_CHANGE)
    if config.anneal_learning_rate:
        may_change -= WITH_ANNEALING_TOO
    annealed = before.get("anneal_env_steps") or before.get("total_env_steps")
    if config.anneal_env_steps is not None and config.anneal_env_steps == annealed:
        may_change |= {"total_env_steps"} if before.get("anneal_env_steps") else EXTENSION
    return lambda name: name in may_change or name.partition(".")[0] in may_change


def _flat(config: ExperimentConfig) -> dict[str, Any]:
    """Return the fields of a configuration and of those in it, by dotted name."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not (parts := config_parts(value)):
            yield prefix, type(value).__name__ if dataclasses.is_dataclass(value) else value
            return
        yield prefix, type(value).__name__
        for part, own in parts.items():
            yield from walk(f"{prefix}.{part}" if prefix else part, own)

    return dict(walk("", config))


def _drop_lines_after(file: Path, env_steps: int) -> int:
    """Drop the lines of records after ``env_steps``; return how many."""
    if not file.exists():
        return 0
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _record_until(env_steps, line)]
    if len(kept) < len(lines):
        write_whole(file, b"".join(kept).decode())
    return len(lines) - len(kept)


def _record_until(env_steps: int, line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of ``metrics.jsonl``; None if it is damaged or of later."""
    # Even if only the end of the line is missing, after kill -9, more would follow on it.
    record = record_of(line) if line.endswith(b"\n") else None
    return record if record is not None and record["env_steps"] <= env_steps else None


def as_json(config: ExperimentConfig) -> dict[str, Any]:
    """Return the fields of a configuration by dotted name, in a form for JSON: tuples are lists."""
    return json.loads(json.dumps(_flat(config)))


def choose_run_folder(config: ExperimentConfig, preset: str) -> RunFolder:
    """Return the folder for a run; nothing is made yet.

    Raises:
      UsageError: It already holds a run that has left something and is not to be resumed, or not
        with ``config``.
    """
    if config.run_dir is not None:
        folder, flag = RunFolder(Path(config.run_dir)), "run_dir"
    elif config.name is not None:
        folder, flag = RunFolder(Path("runs", config.name)), "name"
    else:
        folder, flag = _unused_folder(preset), "run_dir"
    folder.check_path()
    if config.resume:
        if folder.config.exists():
            folder.check_trusted(config.trust)
            folder.check_resumable(config)
        else:
            folder.check_no_file_links(config.trust)
        return folder
    if config.distributed.host:
        return folder  # host 0 looks at it, and may have begun to write
    if not folder.holds_nothing:
        raise UsageError(
            f"{folder.path} already holds a run, which would be lost; choose another "
            f"{setting(flag, 'X')}, or go on with it by {setting('resume', True)}"
        )
    folder.check_no_file_links(config.trust)
    return folder


def _problem_of_locale(path: str) -> str | None:
    """Return what is wrong if a path is UTF-8 and Python does not take it for that; else None."""
    try:
        text = os.fsencode(path).decode()
    except UnicodeError:
        return None
    if "\0" in text:
        return None
    variables = ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8")
    given = [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
    return (
        f"run folder {shown(path)} is UTF-8, and Python takes names of files for "
        f"{sys.getfilesystemencoding()} here ({', '.join(given) or 'no locale is set'}); set "
        "LC_ALL=C.UTF-8 or PYTHONUTF8=1"
    )


def file_name(preset: str) -> str:
    """Return a name for files and folders from that of a configuration, ``module:attribute``."""
    return preset.rpartition(":")[2].replace(os.sep, "-")


def _unused_folder(preset: str) -> RunFolder:
    # With the process: several may be started in the same second, and make it seconds later.
    stem = f"{file_name(preset)}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    path, number = Path("runs", stem), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{stem}-{number}")
    return RunFolder(path)

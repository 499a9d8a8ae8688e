"""The folder of a run: ``runs/<name>/`` and what lies where in it. Free of JAX."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import sebulba
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.errors import UsageError
from sebulba.json_files import read_json_object


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run writes."""

    path: Path
    """The folder itself."""

    @property
    def config(self) -> Path:
        """What ran, as JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a window of updates."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def learning_curve(self) -> Path:
        """The learning curve."""
        return self.path / "learning_curve.png"

    @property
    def policy(self) -> Path:
        """The trained policy."""
        return self.path / "policy"

    @property
    def best_policy(self) -> Path:
        """The policy that returned most in an evaluation, where the run had any."""
        return self.path / "best_policy"

    def create(self) -> None:
        """Make the folder.

        Raises:
          UsageError: It cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"run folder {self.path} cannot be made ({error.strerror}); "
                "choose another with --run-dir"
            ) from error

    def write_config(self, config: ExperimentConfig, preset: str, command: Sequence[str]) -> None:
        """Write ``config.json``."""
        record = {
            "sebulba": sebulba.__version__,
            "preset": preset,
            "command": list(command),
            "agent_config": type(config.agent).__name__,
            **dataclasses.asdict(config),
        }
        self.config.write_text(json.dumps(record, indent=2) + "\n")

    def read_env_config(self) -> EnvConfig:
        """Return the environment of the run.

        Raises:
          UsageError: ``config.json`` is missing or damaged.
        """
        record = read_json_object(self.config)
        try:
            return EnvConfig(**record["env"])
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"{self.config} does not describe an environment ({error}); "
                "expected the config.json that a run wrote"
            ) from error


def choose_run_folder(config: ExperimentConfig, preset: str) -> RunFolder:
    """Return the folder for a new run; nothing is made yet.

    Raises:
      UsageError: It already holds a run.
    """
    if config.run_dir is not None:
        folder, flag = RunFolder(Path(config.run_dir)), "--run-dir"
    elif config.name is not None:
        folder, flag = RunFolder(Path("runs", config.name)), "--name"
    else:
        return _unused_folder(preset)
    if folder.config.exists() or folder.metrics.exists():
        raise UsageError(
            f"{folder.path} already holds a run, which would be lost; choose another {flag}"
        )
    return folder


def _unused_folder(preset: str) -> RunFolder:
    stem = f"{preset}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path("runs", stem), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{stem}-{number}")
    return RunFolder(path)

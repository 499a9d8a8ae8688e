"""Writers for experiment trackers: Weights & Biases, and MLflow.

Each begins what the tracker calls a run when it is made, goes on with it in a resumed run, and says
at the end how the run ended. Their libraries are optional, and imported here only when used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sebulba.errors import UsageError
from sebulba.metrics.writers import is_number
from sebulba.types import RunEnd, RunInfo

PROJECT = "sebulba"
"""Project of Weights & Biases, and experiment of MLflow, where the environment names no other."""


@contextlib.contextmanager
def _beginning(writer: str, remedy: str) -> Iterator[None]:
    """Say in a sentence why a tracker cannot begin."""
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"--writers {writer} cannot begin ({type(error).__name__}: {error}); {remedy}, or "
            f"leave {writer} out"
        ) from error


class WandbWriter:
    """Writes to Weights & Biases: configuration, numbers and images over environment steps."""

    def __init__(self, run: RunInfo) -> None:
        """Begin the run, or go on with it; ``WANDB_*`` variables say where and in which project.

        Its files are where W&B puts them, ``wandb`` in the current folder: they hold links, with
        which the folder of a run would not be trusted.

        Raises:
          UsageError: ``wandb.init`` raised, such as where nobody is logged in.
        """
        import wandb

        self._wandb = wandb
        with _beginning("wandb", "log in (wandb login), or set WANDB_MODE=offline"):
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=run.run_id,
                name=os.environ.get("WANDB_NAME", run.folder.name),
                config=dict(run.config),
                resume="allow",
                allow_val_change=True,  # of what may change when a run is resumed
                settings=wandb.Settings(console="off"),  # the live panel has the terminal
            )
        self._run.define_metric("*", step_metric="env_steps")
        self._run.define_metric("eval_*", step_metric="eval_env_steps")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write numbers, and ``[H, W, C]`` uint8 arrays as images."""
        shown = {name: float(value) for name, value in metrics.items() if is_number(value)}
        images = {name: value for name, value in metrics.items() if np.ndim(value) == 3}
        self._run.log(shown | {name: self._wandb.Image(value) for name, value in images.items()})

    def end(self, end: RunEnd) -> None:
        """Say how the run ended (``ended`` in the summary), and send what is left."""
        self._run.summary["ended"] = end
        self._run.finish(exit_code=int(end == "failed"))

    def close(self) -> None:
        """Do nothing more."""


class MlflowWriter:
    """Writes to MLflow: configuration as parameters, and numbers over environment steps."""

    RETRY_S = 60.0
    """After an error, records are dropped for this many seconds: a server that does not answer
    would hold training up at every record."""
    STATUS: Mapping[RunEnd, str] = {
        "finished": "FINISHED",
        "stopped": "KILLED",
        "failed": "FAILED",
    }
    MOST_PARAMS = 100
    """In one request."""

    def __init__(self, run: RunInfo) -> None:
        """Begin the run, or go on with it.

        It is kept in ``mlruns`` of the run's folder, unless ``MLFLOW_TRACKING_URI`` names another
        place, in the experiment ``MLFLOW_EXPERIMENT_NAME`` or sebulba.

        Raises:
          UsageError: MLflow raised, such as where its server does not answer.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # unless it is asked for
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (run.folder.absolute() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks for the word
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param = Metric, Param
        self._retry_at = 0.0
        with _beginning("mlflow", "look at MLFLOW_TRACKING_URI and whether its server answers"):
            self._client = MlflowClient(uri)
            self._id = self._begin(run)

    def _begin(self, run: RunInfo) -> str:
        """Return MLflow's id of the run, a new one unless it knows the run."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([place], f"tags.`sebulba.run_id` = '{run.run_id}'")
        if found:
            known: str = found[0].info.run_id
            self._client.update_run(known, status="RUNNING")
            return known
        tags = {"sebulba.run_id": run.run_id}
        made = self._client.create_run(place, run_name=run.folder.name, tags=tags)
        new: str = made.info.run_id
        params = [self._param(key, str(value)) for key, value in run.config.items()]
        for first in range(0, len(params), self.MOST_PARAMS):
            self._client.log_batch(new, params=params[first : first + self.MOST_PARAMS])
        return new

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write numbers; results of an evaluation at the step at which its networks were taken."""
        if time.monotonic() < self._retry_at:
            return
        now_ms = int(1000 * time.time())
        steps = {when: int(metrics.get(when) or 0) for when in ("env_steps", "eval_env_steps")}
        numbers = [
            self._metric(
                name,
                float(value),
                now_ms,
                steps["eval_env_steps" if name.startswith("eval_") else "env_steps"],
            )
            for name, value in metrics.items()
            if is_number(value)
        ]
        try:
            self._client.log_batch(self._id, metrics=numbers)
        except Exception:
            self._retry_at = time.monotonic() + self.RETRY_S
            raise

    def end(self, end: RunEnd) -> None:
        self._client.set_terminated(self._id, self.STATUS[end])

    def close(self) -> None:
        """Do nothing: every record was sent."""

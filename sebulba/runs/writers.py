"""What the names of ``--writers`` and ``--callbacks`` stand for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from sebulba.errors import UsageError, shown, text_of
from sebulba.metrics.trackers import MlflowWriter, WandbWriter
from sebulba.metrics.writers import TensorBoardWriter
from sebulba.support import plugins
from sebulba.support.checks import nearest
from sebulba.support.user_code import load_attribute
from sebulba.types import Callback, MetricWriter, RunInfo


def find_writer(name: str) -> Callable[[RunInfo], MetricWriter]:
    """Return what makes a writer for a run: a class, or a function.

    Args:
      name: ``tensorboard``, ``wandb``, ``mlflow``, the name of an entry point, or
        ``module:attribute``.

    Raises:
      UsageError: There is none of that name, its library is missing, or a package that brings it
        is refused (``sebulba.support.plugins``).
    """
    entry = plugins.find(plugins.WRITERS, name, OURS)
    if entry is not None:
        found = plugins.load(plugins.WRITERS, entry)
    elif ":" in name:
        found = load_attribute("writers", name)
    elif name in OURS:
        found = OURS[name]
        if name in LIBRARIES and importlib.util.find_spec(name) is None:
            raise UsageError(
                f"writers={name!r} needs {LIBRARIES[name]}, which is not installed; "
                f"pip install 'sebulba[{name}]'"
            )
    else:
        names = [*OURS, *plugins.names(plugins.WRITERS)]
        hint = nearest(name, names) or f"; there is {', '.join(names)}"
        raise UsageError(
            f"writers={shown(name)} is unknown{hint}; one of your own is my_package:MyWriter"
        )
    if not callable(found):
        raise UsageError(
            f"writers={name!r} is {shown(found)}; it must be a class or a function that is given a "
            "sebulba.types.RunInfo and returns a writer"
        )
    return found


def made_writer(make: Callable[[RunInfo], MetricWriter], run: RunInfo) -> MetricWriter:
    """Return the writer that ``find_writer`` found, made for a run.

    Raises:
      UsageError: It is none: it does not take a ``RunInfo``, or what it returns cannot write.
    """
    name = getattr(make, "__qualname__", shown(make))
    try:
        writer = make(run)
    except TypeError as error:
        raise UsageError(
            f"writers: {name} cannot be made ({text_of(error)}); it must be a class or a function "
            "that is given a sebulba.types.RunInfo and returns a writer"
        ) from error
    if not (callable(getattr(writer, "write", None)) and callable(getattr(writer, "close", None))):
        raise UsageError(
            f"writers: {name} returned {shown(writer)}, which has no methods write and close; "
            "return a writer"
        )
    return writer


def find_callback(name: str) -> Callback:
    """Return a callback of the user's own; a class is called without arguments.

    Args:
      name: ``module:attribute``.

    Raises:
      UsageError: There is none of that name, it cannot be called, or the class cannot be made.
    """
    found = load_attribute("callbacks", name)
    if isinstance(found, type):
        try:
            found = found()
        except Exception as error:
            raise UsageError(f"callbacks={name!r} cannot be made: {text_of(error)}") from error
    if not callable(found):
        raise UsageError(
            f"callbacks={name!r} is {shown(found)}; it must be a function of a record of metrics"
        )
    return found


def find_recorder(kind: str) -> Callable[..., Any]:
    """Return what makes the recorder of ``--record-dataset``, for "training" or "evaluation".

    Raises:
      UsageError: No package brings it.
    """
    plugins.check_not_apart(plugins.RECORDERS, kind, "--record-dataset")
    entry = plugins.find(plugins.RECORDERS, kind)
    assert entry is not None, "it is installed"
    return plugins.load(plugins.RECORDERS, entry)


OURS: dict[str, Callable[[RunInfo], MetricWriter]] = {
    "tensorboard": lambda run: TensorBoardWriter(run.folder / "tensorboard", run.resumed_at),
    "wandb": WandbWriter,
    "mlflow": MlflowWriter,
}
LIBRARIES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
"""Optional libraries, by the name of their writer, module and extra."""

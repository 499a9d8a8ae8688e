"""The forms in which a policy is written: StableHLO by JAX, ONNX by jax2onnx."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sebulba
from sebulba.errors import UsageError, text_of
from sebulba.policies.export.acting import Acting
from sebulba.policies.policy import Policy

DESCRIPTION_FILE = "policy.json"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Of which one StableHLO file holds a program each."""

Run = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Runs a file: arrays in the order of the inputs to arrays in the order of the outputs."""


def to_stablehlo(acting: Acting, file: Path) -> Run:
    """Write a program that ``jax.export.deserialize`` reads, without Sebulba; return how to run it.

    Raises:
      UsageError: flatbuffers, which JAX writes with, is missing, or JAX cannot export it.
    """
    try:
        import flatbuffers  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"sebulba export --to stablehlo needs {error.name}, which is not installed; "
            "pip install 'sebulba[export]'"
        ) from error
    shapes = _shapes(acting)
    try:
        exported = jax.export.export(jax.jit(acting.function), platforms=PLATFORMS)(*shapes)
        file.write_bytes(bytes(exported.serialize()))
    except Exception as error:  # JAX raises many kinds
        raise UsageError(f"JAX cannot export this policy: {text_of(error)}") from error
    read = jax.export.deserialize(bytearray(file.read_bytes()))
    return lambda inputs: [np.asarray(one) for one in read.call(*inputs)]


def to_onnx(acting: Acting, file: Path) -> Run:
    """Write an ONNX model; return how onnxruntime runs it.

    Raises:
      UsageError: jax2onnx or onnxruntime is missing, or cannot do with this policy.
    """
    try:
        with _quiet():
            import jax2onnx
            import onnxruntime
    except ModuleNotFoundError as error:
        raise UsageError(
            f"sebulba export --to onnx needs {error.name}, which is not installed; "
            "pip install 'sebulba[onnx]'"
        ) from error
    try:
        with _quiet():
            model = jax2onnx.to_onnx(
                lambda *arrays: tuple(acting.function(*arrays)),
                _shapes(acting),
                model_name="policy",
                input_names=[port.name for port in acting.inputs],
                output_names=[port.name for port in acting.outputs],
            )
        file.write_bytes(model.SerializeToString())
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:  # jax2onnx and onnxruntime raise many kinds
        raise UsageError(
            f"jax2onnx cannot turn this policy into ONNX: {text_of(error)}; use --to stablehlo"
        ) from error
    names = [one.name for one in session.get_inputs()]

    def run(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        given = {port.name: one for port, one in zip(acting.inputs, inputs, strict=True)}
        return session.run(None, {name: given[name] for name in names})

    return run


FORMS: dict[str, Callable[[Acting, Path], Run]] = {"stablehlo": to_stablehlo, "onnx": to_onnx}
"""What writes each form, which is also the suffix of its file."""


def describe(policy: Policy, acting: Acting, form: str, largest: float) -> dict[str, Any]:
    """Return what ``policy.json`` says of an exported policy."""
    return {
        "form": form,
        "environment": policy.spec.name,
        "agent": type(policy.agent).__name__,
        "observation_space": str(policy.spec.observation_space),
        "action_space": str(policy.spec.action_space),
        "inputs": [dataclasses.asdict(port) for port in acting.inputs],
        "outputs": [dataclasses.asdict(port) for port in acting.outputs],
        "carried": acting.carried,
        "initial": {name: value.tolist() for name, value in acting.initial.items()},
        "largest_difference": largest,
        "versions": {"sebulba": sebulba.__version__, "jax": jax.__version__},
    }


def _shapes(acting: Acting) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(port.shape, port.dtype) for port in acting.inputs]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep away what jax2onnx prints and logs of plugins that we do not use."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)

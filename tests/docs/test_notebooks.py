"""The notebooks run from their first cell to their last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.as_users import environment_of_readers

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples/notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [file.stem for file in NOTEBOOKS] == ["first_agent", "runs_on_disk"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    bin_folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([bin_folder, os.environ["PATH"]]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    if "XLA_FLAGS" not in environment_of_readers():
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # set by another test, it hides pictures
    notebook = nbformat.read(file, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("300000", "20000").replace("60000", "10000")
    resources = {"metadata": {"path": str(tmp_path)}}
    # The kernel of this Python, whatever kernels are installed elsewhere.
    manager = nbclient.NotebookClient(notebook, timeout=280, resources=resources)
    manager.km = manager.create_kernel_manager()
    manager.km.kernel_spec.argv[0] = sys.executable
    manager.execute()
    printed = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert sum(out.output_type == "display_data" for out in printed) >= 2, "no pictures"

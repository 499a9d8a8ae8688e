"""What the faults did, kept in a file: counts, figures, machine and commit."""

from __future__ import annotations

import pytest


@pytest.fixture
def record_fault(request):
    def record(**figures):
        print(figures)

    return record


@pytest.fixture(scope="session")
def compile_cache_folder(tmp_path_factory):
    """Return the folder in which all processes of the session keep compiled programs."""
    return tmp_path_factory.mktemp("compiled")

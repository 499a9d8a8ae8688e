"""A mark for tests that take long, and of which one Python is enough."""

from __future__ import annotations

import sys

import pytest

in_one_python = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="takes long: runs in one Python"
)

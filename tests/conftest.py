"""Eight forced CPU devices stand in for many; set before JAX starts its backend."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

# It sizes JAX's thread pool, which collectives of more devices than cores would exhaust.
os.environ["NPROC"] = str(max(8, int(os.environ.get("NPROC", "0") or 0)))

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def compile_cache() -> Iterator[None]:
    """Keep compiled programs for the length of the session: many tests make the same ones."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        yield
        jax.config.update("jax_compilation_cache_dir", None)

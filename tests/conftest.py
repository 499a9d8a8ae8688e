"""Eight forced CPU devices stand in for many; set before JAX starts its backend."""

from __future__ import annotations

import os

# It sizes JAX's thread pool, which collectives of more devices than cores would exhaust.
os.environ["NPROC"] = str(max(8, int(os.environ.get("NPROC", "0") or 0)))

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

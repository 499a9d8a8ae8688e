"""What a minimal system lacks: tests that need it are skipped, and say what to install."""

import shutil

import pytest

from sebulba.envs import envpool_families

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the engine is compiled by g++, which is not installed"
)

envpool_families.import_envpool()
needs_mujoco = pytest.mark.skipif(
    "envpool.mujoco.gym" in envpool_families.LEFT_OUT,
    reason="envpool's MuJoCo draws with libEGL; apt install libegl1 libopengl0",
)

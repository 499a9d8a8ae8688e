"""envpool on a machine without what some of its families need."""

from __future__ import annotations

import subprocess
import sys

import pytest

HIDDEN = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith(HIDDEN) and name.endswith(("_envpool", "envpool.registration")):
            raise ImportError("libEGL.so.1: cannot open shared object file: No such file")
sys.meta_path.insert(0, Hide())
import warnings
warnings.simplefilter("error", RuntimeWarning)
from sebulba.envs import env_spec
from sebulba.errors import UsageError
def tried(*arguments, **options):
    try:
        return type(env_spec(*arguments, **options)).__name__
    except UsageError as error:
        return str(error)
"""


def run(hidden, code):
    program = f"HIDDEN = {hidden!r}\n{HIDDEN}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_families_that_cannot_be_loaded_are_left_out_and_only_who_asks_is_told():
    code = "print(tried('CartPole-v1'), tried('HalfCheetah-v4'), sep='\\n')"
    spec, said = run(("envpool.mujoco", "envpool.gfootball"), code).stdout.splitlines()
    assert spec == "EnvSpec"
    assert "is of envpool.mujoco.gym, which cannot be loaded: libEGL.so.1" in said
    assert "apt install libegl1 libopengl0" in said


@pytest.mark.slow
def test_without_envpool_the_environments_of_gymnasium_are_usable():
    code = (
        "print(tried('CartPole-v1', backend='gymnasium'), tried('CartPole-v1'))\n"
        "print(tried('CartPole-v1', backend='envpool'))"
    )
    done = run("envpool.registration", code)
    used, said = done.stdout.splitlines()
    assert used == "EnvSpec EnvSpec"
    assert "'CartPole-v1' is made by Gymnasium: envpool cannot be imported" in done.stderr
    assert "envpool cannot be imported" in said and "--env.backend gymnasium" in said

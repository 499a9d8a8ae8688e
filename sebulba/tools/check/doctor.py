"""The checks of ``sebulba doctor``: this machine, the installed packages, and small self-tests."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from sebulba.cluster.inferencers import ray_actors
from sebulba.envs.envpool_families import LEFT_OUT, import_envpool, remedy_of
from sebulba.errors import UsageError
from sebulba.loops.devices import local_devices
from sebulba.options import ENV_LIBRARIES
from sebulba.runs import huge_pages
from sebulba.runs.jax_setup import Platform, auto_compile_cache, configure_jax
from sebulba.support import machine
from sebulba.tools.check import self_tests
from sebulba.tools.check.checks import Check, Finding, note, ok, problem
from sebulba.tools.check.versions import check_versions

GB = 1e9
LITTLE_MEMORY_GB = 2.0
LITTLE_DISK_GB = 1.0

FAMILIES = {
    "envpool.classic_control": "CartPole-v1",
    "envpool.toy_text": "FrozenLake-v1",
    "envpool.atari": "Pong-v5",
    "envpool.mujoco.gym": "HalfCheetah-v4",
    "envpool.mujoco.dmc": "CartpoleBalance-v1",
    "envpool.box2d": "LunarLander-v3",
    "envpool.minigrid": "MiniGrid-Empty-5x5-v0",
    "envpool.procgen": "BigfishEasy-v0",
}
"""The families of which one environment is tried, because that takes less than a second and leaves
no file behind (ViZDoom leaves some)."""

EXTRAS = {
    "tensorboard": ("looking at curves", "pip install 'sebulba[tensorboard]'"),
    "ale_py": ("Atari by Gymnasium; envpool's needs none", "pip install 'sebulba[atari]'"),
    "mujoco": ("MuJoCo by Gymnasium; envpool's needs none", "pip install 'gymnasium[mujoco]'"),
    "Box2D": ("Box2D by Gymnasium; envpool's needs none", "pip install 'gymnasium[box2d]'"),
    "wandb": ("metrics on wandb.ai, by a writer of yours", "pip install wandb"),
    **{
        library: (f"environments {library}:ID", f"pip install 'sebulba[{library}]'")
        for library in ENV_LIBRARIES
    },
    "sebulba_ns3": ("networks on ns-3", "pip install ./packages/sebulba-ns3, in a checkout"),
    "ns3": ("networks on ns-3, with sebulba_ns3", "pip install --no-deps ns3==3.44.post0"),
    "ray": ("Inferencers on several machines", "pip install 'sebulba[cluster]'"),
    "sebulba_board": (
        "sebulba report and board",
        "pip install ./packages/sebulba-board, in a checkout",
    ),
    "sebulba_sweep": ("sebulba sweep", "pip install ./packages/sebulba-sweep, in a checkout"),
    "stable_baselines3": ("python -m benchmarks rivals", "pip install 'sebulba[rivals]'"),
}
"""Purpose of an optional package and how to get it, by its module."""

HUGE_PAGES = {
    "always": f"for all; scripts do well to set {huge_pages.VARIABLE}={huge_pages.with_wanted()}",
    "madvise": f"for this command's training, for scripts by {huge_pages.VARIABLE}="
    f"{huge_pages.with_wanted()}",
    "never": "for nobody",
    None: "unknown here",
}
"""Description of huge pages by the value of ``huge_pages.mode()``."""


def checks(platform: Platform | None) -> list[Check]:
    """Return the checks, and set JAX up for them; None takes the best platform there is."""
    configure_jax(platform, compile_cache="off")
    families = [
        Check(_short(family), functools.partial(_check_family, family, env_id), ("envpool ids",))
        for family, env_id in FAMILIES.items()
    ]
    needs_jax, needs_loop = ("devices",), ("devices", "envpool classic_control")
    return [
        Check("versions", check_versions),
        Check("devices", check_devices),
        Check("cores", check_cores),
        Check("memory", check_memory),
        Check("disk", check_disk),
        Check("compile cache", check_compile_cache),
        Check("envpool ids", _check_envpool),
        *families,
        Check("extras", check_extras),
        Check("cluster", check_cluster),
        Check("aliasing", self_tests.check_aliasing, needs_jax),
        Check("donation", self_tests.check_donation, needs_jax),
        Check("gradient", self_tests.check_gradient, needs_jax),
        Check("training", self_tests.check_training, needs_loop),
    ]


def check_devices() -> Finding:
    """Yield the devices that JAX sees, or why there are none."""
    try:
        devices = local_devices()
    except UsageError as error:
        return problem(str(error), "unset JAX_PLATFORMS, or pass --platform cpu")
    kinds = Counter(device.device_kind for device in devices)
    shown = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    seen = f"{shown} (platform {devices[0].platform})"
    has_nvidia = Path("/proc/driver/nvidia/version").exists()
    is_cpu_wanted = (getattr(jax.config, "jax_platforms", None) or "").startswith("cpu")
    if devices[0].platform == "cpu" and has_nvidia and not is_cpu_wanted:
        remedy = "pip install 'sebulba[cuda]', if it is to be used"
        return note(f"{seen}, although there is an NVIDIA driver", remedy)
    return ok(seen)


def check_cluster() -> Finding:
    """Yield the machines of the cluster of Ray that this machine is part of."""
    address = ray_actors.known_cluster()
    if address is None:
        return ok("none; Inferencers run on this machine")
    if importlib.util.find_spec("ray") is None:
        return note(f"{address}, and Ray is not installed here", "pip install 'sebulba[cluster]'")
    try:
        machines, free = ray_actors.machines_of(address)
    except UsageError as error:
        return note(str(error), "`ray stop`, or unset RAY_ADDRESS, if there is to be none")
    shown = ", ".join(f"{one.name} ({one.cpus:g} CPUs)" for one in machines)
    seen = f"{address}, {len(machines)} machines: {shown}; {free:g} CPUs are free"
    if free:
        return ok(seen)
    return note(seen, "end what runs there, or add machines: every Inferencer takes a CPU")


def check_cores() -> Finding:
    """Yield how many cores this process may use."""
    cores = machine.cores()
    limits = [f"{cores.installed} installed", f"{cores.allowed} by affinity"]
    if cores.quota is not None:
        limits.append(f"{cores.quota:g} by the control group")
    seen = f"{cores.usable:g} usable ({', '.join(limits)})"
    if cores.usable < cores.allowed:
        return note(
            seen,
            "threads are sized by affinity and will be too many: --env.num-threads "
            f"{max(1, int(cores.usable) // 2)}, or start under taskset",
        )
    if cores.usable < 2:
        return note(seen, "acting and updating will take turns: 2 or more are worth it")
    return ok(seen)


def check_memory() -> Finding:
    """Yield how much memory this process may use."""
    memory = machine.memory()
    limit = "no limit" if memory.limit is None else f"limit {memory.limit / GB:.1f} GB"
    seen = (
        f"{memory.available / GB:.1f} GB available of {memory.total / GB:.1f} GB "
        f"(control group: {limit}); huge pages {HUGE_PAGES[huge_pages.mode()]}"
    )
    if memory.available < LITTLE_MEMORY_GB * GB:
        return note(seen, "free some, or train with a smaller replay and fewer environments")
    return ok(seen)


def check_disk() -> Finding:
    """Yield whether runs can be written to their folder, and how much space there is."""
    runs = Path("runs")
    folder = machine.nearest_folder(runs)
    free = shutil.disk_usage(folder).free
    seen = f"{free / GB:.1f} GB free for {runs.absolute()}"
    if reason := _why_not_writable(folder):
        return problem(f"{runs.absolute()} cannot be written: {reason}", "pass --run-dir DIR")
    if free < LITTLE_DISK_GB * GB:
        return problem(seen, "free some, or pass --run-dir DIR on another disk")
    return ok(seen)


def check_compile_cache() -> Finding:
    """Yield whether compiled programs can be kept for the next start."""
    cache = auto_compile_cache()
    if "://" in cache:
        return ok(f"{cache} (not looked at)")
    if reason := _why_not_writable(machine.nearest_folder(Path(cache))):
        return problem(
            f"{cache} cannot be written: {reason}",
            "repair it, or pass --compile-cache DIR (or off: every start compiles again)",
        )
    return ok(cache)


def _why_not_writable(folder: Path) -> str:
    """Return why nothing can be written to ``folder``, or "" if it can be written."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def check_extras() -> Iterator[Finding]:
    """Yield which optional packages are installed, and how to get the others."""
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    present = [name for name in EXTRAS if name not in missing]
    yield ok(f"optional, present: {', '.join(present) or 'none'}")
    for name in missing:
        what_for, how = EXTRAS[name]
        yield ok(f"optional, missing ({what_for})", how, name=name)
    if compiler := shutil.which("g++"):
        yield ok(f"{compiler}, for the environments of networks", name="g++")
    else:
        yield ok("optional, missing (environments of networks)", "apt install g++", name="g++")


def _envpool_ids() -> Counter[str]:
    """Return the number of ids of each installed family."""
    envpool = import_envpool()
    from envpool.registration import registry

    return Counter(registry.specs[env_id][0] for env_id in envpool.list_all_envs())


def _check_envpool() -> Iterator[Finding]:
    counts = _envpool_ids()
    others = [
        f"{_short(family).removeprefix('envpool ')} {number}"
        for family, number in sorted(counts.items())
        if family not in FAMILIES
    ]
    yield ok(f"{counts.total()} in {len(counts)} families; not tried: {', '.join(others)}")
    for family, reason in sorted(LEFT_OUT.items()):
        yield note(f"{family} cannot be loaded: {reason}", remedy_of(reason))


def _short(family: str) -> str:
    return family.replace(".", " ", 1)


def _check_family(family: str, env_id: str) -> Finding:
    from sebulba.envs.factory import make_env_factory

    number = _envpool_ids()[family]
    if not number:
        return note("is not in this envpool", "pip install --upgrade envpool")
    try:
        env = make_env_factory(env_id, backend="envpool")(1, [0])
    except UsageError as error:
        return note(f"{number} ids, {env_id} does not run: {error.__cause__ or error}")
    env.reset()
    action = np.array([env.spec.action_space.sample()], env.spec.action_space.dtype)
    env.step(action)
    env.close()
    return ok(f"{number} ids, {env_id} runs")

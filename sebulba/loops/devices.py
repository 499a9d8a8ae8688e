"""Which devices infer and which update."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sebulba.agent import Agent
from sebulba.errors import UsageError, shown
from sebulba.options import LoopOptions
from sebulba.support import plugins
from sebulba.support.machine import num_cores
from sebulba.types import EnvFactory, RunSpec

FEW_INFERENCERS = 2
"""Inferencers per device where no rule says more."""
MANY_CORES = 16
"""Cores from which a device has twice as many Inferencers."""
ENOUGH_CORES = 4
"""Cores from which more than two Inferencers are of use."""
Devices = Sequence[int | str | jax.Device] | None
"""Devices, names such as ``"cpu:0"``, or indices into ``jax.local_devices()``; None chooses."""


def local_devices(platform: str | None = None) -> list[jax.Device]:
    """Return this process's devices, or say in words why there are none.

    Args:
      platform: Such as ``"cpu"``; None is the default platform.
    """
    try:
        return jax.local_devices(backend=platform)
    except (RuntimeError, AssertionError) as error:
        chosen = getattr(jax.config, "jax_platforms", None) or "(any)"
        platform = platform or chosen.partition(",")[0]
        raise UsageError(
            f"JAX cannot start platform {platform!r}: "
            f"{str(error) or 'this jaxlib has no such backend'}. Install the wheel for it "
            "(pip install 'sebulba[cuda]' or 'sebulba[tpu]') or choose cpu."
        ) from error


class Placed(NamedTuple):
    """How a run uses a machine."""

    options: LoopOptions
    """Those of the run, with its number of Inferencers."""
    factory: EnvFactory
    """Makes environments with as many threads as suit so many Inferencers."""
    inference: list[jax.Device]
    """Inference devices."""
    update: list[jax.Device]
    """Update devices."""
    unpinned: bool
    """The environments of all Inferencers share the cores."""
    about: str | None
    """A line for people on the number of Inferencers; None where nothing was chosen."""
    by_member: dict[str, list[jax.Device]]
    """Those of ``update`` that each member has for its own; empty where they learn on all."""
    num_shares: int
    """By how many the environments of an update are divided."""


def place(
    options: LoopOptions,
    factory: EnvFactory,
    agent: Agent,
    num_envs: int,
    inference: Devices = None,
    update: Devices = None,
) -> Placed:
    """Choose devices, the number of Inferencers, and the threads of their environments.

    Args:
      options: Of the run; a configuration has ``steps_per_cycle`` in addition.
      factory: Makes the environments.
      inference: Instead of the devices in ``options``.
      update: Likewise.

    Raises:
      UsageError: Devices break a rule.
    """
    inference = options.inference_devices if inference is None else inference
    update, counts = _of_members(options.update_devices if update is None else update)
    if counts and options.distributed.is_on:
        raise UsageError("update_devices by member are those of one host; leave out distributed")
    on_cpu = _infers_on_cpu(options, inference)
    steps = getattr(options, "steps_per_cycle", None)
    number = options.num_inferencers_per_device
    is_free = number is None
    few = FEW_INFERENCERS if number is None else number
    chosen = choose_devices(inference, update, what_fits(agent, num_envs, few, steps))
    rest = iter(chosen[1])
    by_member = {name: list(itertools.islice(rest, n)) for name, n in counts.items()}
    learn = math.lcm(*counts.values()) if counts else len(chosen[1])
    if number is None:
        number = _num_inferencers(options, factory, on_cpu)
        infer = len(chosen[0])
        sizes = [RunSpec(num_envs, n * infer, steps or 1, learn) for n in (number, few)]
        if (steps is None and hasattr(agent.config, "replay")) or (
            not _accepts(agent, sizes[0]) and _accepts(agent, sizes[1])
        ):
            number = FEW_INFERENCERS
        options = dataclasses.replace(options, num_inferencers_per_device=number)
    share = getattr(factory, "shared_by", None)
    if share is not None and options.cluster.address in ("threads", "processes"):
        factory = share(max(1, number) * len(chosen[0]), on_cpu=on_cpu)
    about = _about(options, factory, on_cpu, num_envs) if is_free else None
    return Placed(options, factory, *chosen, not on_cpu, about, by_member, learn)


def _of_members(update: Devices) -> tuple[Devices, dict[str, int]]:
    """Return devices, and how many of them each member has, where words such as main=0,1 say so."""
    words = list(update) if isinstance(update, Sequence) and not isinstance(update, str) else []
    if not any(isinstance(word, str) and "=" in word for word in words):
        return update, {}
    return plugins.parallel_members().devices_of(words)


def _infers_on_cpu(options: LoopOptions, inference: Devices) -> bool:
    """Tell whether a CPU infers; in worker processes it does."""
    if options.cluster.address == "processes":
        return True
    first = inference[0] if isinstance(inference, Sequence) and len(inference) else None
    if isinstance(first, str):
        return first.startswith("cpu")
    device = first if isinstance(first, jax.Device) else local_devices()[0]
    return device.platform == "cpu"


def _num_inferencers(options: LoopOptions, factory: EnvFactory, on_cpu: bool) -> int:
    """Return the Inferencers of a device: a power of two, and as many on every small machine.

    Environments in Python share one interpreter, and those in JAX need no cores: more Inferencers
    would not step them faster. In lockstep their number decides what is learned.
    """
    in_processes = options.cluster.address == "processes"
    has_threads = getattr(factory, "num_threads", None) is not None
    uses_cores = in_processes or (options.cluster.address == "threads" and has_threads)
    cores = num_cores()
    # Hosts that learn together must have equal numbers, and may have other cores.
    is_fixed = options.schedule == "lockstep" or options.distributed.is_on
    if is_fixed or not uses_cores or cores < ENOUGH_CORES:
        return FEW_INFERENCERS
    if on_cpu and not in_processes:
        return FEW_INFERENCERS * (2 if cores >= MANY_CORES else 1)
    return 2 * FEW_INFERENCERS * (2 if cores >= MANY_CORES else 1)


def _about(options: LoopOptions, factory: EnvFactory, on_cpu: bool, num_envs: int) -> str:
    """Return a line for people on the number of Inferencers, and its reason."""
    number, threads = options.num_inferencers_per_device, getattr(factory, "num_threads", None)
    line = f"{number} Inferencers per inference device"
    if threads is not None:
        line += f", {threads} environment thread{'s' * (threads > 1)} each"
    line += f", on {num_cores()} cores"
    if not on_cpu:
        line += " that all share, since cores idle while an accelerator infers"
    if number == FEW_INFERENCERS:
        return line
    return f"{line}; an update learns from the {num_envs} environments of one, as with two"


Fits = Callable[[int, int], bool]
"""Tells whether a run can have so many update devices and so many inference devices."""


def choose_devices(
    inference: Devices,
    update: Devices,
    fits: Fits,
) -> tuple[list[jax.Device], list[jax.Device]]:
    """Return the inference devices and the update devices.

    Args:
      inference: Devices, names such as ``"cpu:0"``, or indices into ``jax.local_devices()``.
        None: the only device, or the first quarter (at least one) of several; where ``update`` is
        None too, also as many as fit of those that cannot update.
      update: Likewise. None: the only device, or as many as fit of those that do not infer.
      fits: Says what the run allows; it is asked where this function chooses.

    Raises:
      UsageError: A device that does not exist, is named twice, or an empty list.
    """
    devices = local_devices()
    chosen_inference = _select("inference_devices", inference, devices)
    chosen_update = _select("update_devices", update, devices)
    if chosen_inference is None:
        chosen_inference = devices[: max(1, len(devices) // 4)]
    if chosen_update is None:
        free = [d for d in devices if d not in chosen_inference] or chosen_inference
        chosen_update = free[-_most(len(free), lambda number: fits(number, 1)) :]
    both = inference is None and update is None
    if both and (rest := [d for d in devices if d not in chosen_update]):
        chosen_inference = rest[: _most(len(rest), lambda n: fits(len(chosen_update), n))]
    return chosen_inference, chosen_update


def _most(at_most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, and 1 where none does."""
    return next((number for number in range(at_most, 1, -1) if fits(number)), 1)


def _accepts(agent: Agent, run: RunSpec) -> bool:
    try:
        agent.check_run(run)
    except UsageError:
        return False
    return True


def what_fits(
    agent: Agent, num_envs: int, inferencers_per_device: int, steps_per_cycle: int | None
) -> Fits:
    """Return what tells how many devices a run can have.

    Args:
      num_envs: Environments of an Inferencer.
      inferencers_per_device: 0 where they run inline, one on each device.
      steps_per_cycle: None where it is not known yet; then only the environments have to fit.
    """

    def is_accepted(num_update: int, num_inference: int) -> bool:
        num_inferencers = num_inference * max(1, inferencers_per_device)
        run = RunSpec(num_envs, num_inferencers, steps_per_cycle or 1, num_update)
        return _accepts(agent, run)

    # What is refused with one device of each kind is not refused for its devices.
    asks_agent = steps_per_cycle is not None and is_accepted(1, 1)
    return lambda num_update, num_inference: (
        not num_envs % num_update and (not asks_agent or is_accepted(num_update, num_inference))
    )


def _select(name: str, chosen: Devices, devices: list[jax.Device]) -> list[jax.Device] | None:
    if chosen is None:
        return None
    is_list = isinstance(chosen, Sequence) and not isinstance(chosen, str | bytes)
    if not is_list and not (isinstance(chosen, np.ndarray) and chosen.ndim == 1):
        raise UsageError(f"{name}={shown(chosen)} must be a list of devices or of their numbers")
    if not len(chosen):
        raise UsageError(f"{name}=[] must name at least one device; there are {len(devices)}")
    result = [_device(name, item, devices) for item in chosen]
    if len(set(result)) != len(result):
        raise UsageError(f"{name}={list(chosen)} names a device twice; name each once")
    if len({device.platform for device in result}) > 1:
        raise UsageError(
            f"{name}={list(chosen)} mixes platforms; name devices of one platform in each of "
            "inference_devices and update_devices"
        )
    return result


def _device(name: str, item: int | str | jax.Device, devices: list[jax.Device]) -> jax.Device:
    """Return the device that a number or a name such as ``cpu:0`` means."""
    if isinstance(item, jax.Device):
        return item
    if isinstance(item, str):
        platform, _, number = item.partition(":")
        if not platform.isalpha() or not number.isdecimal():
            raise UsageError(f"{name} names {shown(item)}; use a number or a name such as cpu:0")
        devices, item = local_devices("gpu" if platform == "cuda" else platform), int(number)
    if isinstance(item, bool) or not isinstance(item, int):
        raise UsageError(f"{name} names {shown(item)}; use devices or their numbers, such as 0")
    if not 0 <= item < len(devices):
        raise UsageError(
            f"{name} names device {shown(item)}, but there are {len(devices)} "
            f"{devices[0].platform} devices (0 to {len(devices) - 1}); for more CPU devices use "
            "--num-cpu-devices or jax.config.update('jax_num_cpu_devices', n)"
        )
    return devices[item]

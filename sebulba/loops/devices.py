"""Which devices infer and which update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from sebulba.agent import Agent
from sebulba.errors import UsageError, shown
from sebulba.types import RunSpec


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


Fits = Callable[[int, int], bool]
"""Tells whether a run can have so many update devices and so many inference devices."""


def choose_devices(
    inference: Sequence[int | str | jax.Device] | None,
    update: Sequence[int | str | jax.Device] | None,
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


def what_fits(
    agent: Agent, num_envs: int, inferencers_per_device: int, steps_per_cycle: int | None
) -> Fits:
    """Return what tells how many devices a run can have.

    Args:
      agent: Its ``check_run`` says whether its batches can be split.
      num_envs: Environments of an Inferencer.
      inferencers_per_device: 0 where they run inline, one on each device.
      steps_per_cycle: None where it is not known yet; then only the environments have to fit.
    """

    def is_accepted(num_update: int, num_inference: int) -> bool:
        num_inferencers = num_inference * max(1, inferencers_per_device)
        run = RunSpec(num_envs, num_inferencers, steps_per_cycle or 1, num_update)
        try:
            agent.check_run(run)
        except UsageError:
            return False
        return True

    # What is refused with one device of each kind is not refused for its devices.
    asks_agent = steps_per_cycle is not None and is_accepted(1, 1)
    return lambda num_update, num_inference: (
        not num_envs % num_update and (not asks_agent or is_accepted(num_update, num_inference))
    )


def _select(
    name: str, chosen: Sequence[int | str | jax.Device] | None, devices: list[jax.Device]
) -> list[jax.Device] | None:
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

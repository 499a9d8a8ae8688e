"""Which devices infer and which update."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sebulba.agent import LEARNER_AXIS
from sebulba.errors import UsageError, shown


def local_devices() -> list[jax.Device]:
    """Return this process's devices, or say in words why there are none."""
    try:
        return jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        platforms = getattr(jax.config, "jax_platforms", None) or "(any)"
        raise UsageError(
            f"JAX cannot start platform {platforms!r}: "
            f"{str(error) or 'this jaxlib has no such backend'}. Install the wheel for it "
            "(pip install 'sebulba[cuda]' or 'sebulba[tpu]') or choose cpu."
        ) from error


def choose_devices(
    inference: Sequence[int | jax.Device] | None, update: Sequence[int | jax.Device] | None
) -> tuple[list[jax.Device], list[jax.Device]]:
    """Return the inference devices and the update devices.

    Args:
      inference: Devices, or indices into ``jax.local_devices()``. None: the only device, or
        the first quarter (at least one) of several.
      update: Likewise. None: the only device, or those that do not infer.

    Raises:
      UsageError: A device that does not exist, is named twice, or an empty list.
    """
    devices = local_devices()
    chosen_inference = _select("inference_devices", inference, devices)
    chosen_update = _select("update_devices", update, devices)
    if chosen_inference is None:
        chosen_inference = devices[: max(1, len(devices) // 4)]
    if chosen_update is None:
        chosen_update = [d for d in devices if d not in chosen_inference] or chosen_inference
    return chosen_inference, chosen_update


def _select(
    name: str, chosen: Sequence[int | jax.Device] | None, devices: list[jax.Device]
) -> list[jax.Device] | None:
    if chosen is None:
        return None
    is_list = isinstance(chosen, Sequence) and not isinstance(chosen, str | bytes)
    if not is_list and not (isinstance(chosen, np.ndarray) and chosen.ndim == 1):
        raise UsageError(f"{name}={shown(chosen)} must be a list of devices or of their numbers")
    if not len(chosen):
        raise UsageError(f"{name}=[] must name at least one device; there are {len(devices)}")
    result = []
    for item in chosen:
        if isinstance(item, bool) or not isinstance(item, int | jax.Device):
            raise UsageError(f"{name} names {shown(item)}; use devices or their numbers, such as 0")
        if isinstance(item, int):
            if not 0 <= item < len(devices):
                raise UsageError(
                    f"{name} names device {shown(item)}, but there are {len(devices)} "
                    f"{devices[0].platform} devices (0 to {len(devices) - 1}); on CPU more can be "
                    "had with --num-cpu-devices or jax.config.update('jax_num_cpu_devices', n)"
                )
            item = devices[item]
        result.append(item)
    if len(set(result)) != len(result):
        raise UsageError(f"{name}={list(chosen)} names a device twice; name each once")
    return result


def learner_mesh(update_devices: Sequence[jax.Device]) -> Mesh:
    """Return the mesh over the update devices, with the one axis ``"learner"``."""
    return Mesh(np.array(update_devices), (LEARNER_AXIS,), axis_types=(AxisType.Auto,))

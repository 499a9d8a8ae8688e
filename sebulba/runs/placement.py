"""Which platform infers and which one updates, decided before JAX starts.

What the rules rest on is measured in docs/accelerators.md.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import itertools
import os
from typing import NamedTuple

import gymnasium

from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import env_source, env_spec, make_env_factory
from sebulba.support.machine import num_cores

IMAGE_NETWORKS = ("nature_cnn", "impala_resnet")
"""Kinds of torso whose update is split over the cores: on one CPU device XLA computes most of the
gradient of a convolution in one thread."""

MOST_CPU_DEVICES = 4
"""Most devices into which the CPU is split where nothing is said; more have not been measured."""

SMALL_ROW = 500_000
"""Multiplications of a row up to which a policy acts on the CPU, inside a fused cycle."""

SMALL_UPDATE = 20_000_000
"""Multiplications of an update up to which it stays on the CPU, too: a program of an accelerator
takes longer to start than to run."""

FORWARD_AND_BACKWARD = 3
"""Multiplications of a gradient, as a multiple of those of the network."""


class Placement(NamedTuple):
    """Where a run with a small network acts and learns on a machine with an accelerator."""

    updates_on_cpu: bool
    """Inference is on the CPU either way."""
    why: str
    """A line for the terminal."""


def has_accelerator() -> bool:
    """Tell whether JAX can use a GPU or a TPU here, without starting it."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if not plugins and importlib.util.find_spec("libtpu") is None:
        return False
    paths = "/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*"
    return any(glob.glob(path) for path in paths)


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that JAX can use here, as ``CUDA_VISIBLE_DEVICES`` names them."""
    if not has_accelerator():
        return []
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [one.strip() for one in named.split(",") if one.strip()]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def placement_of(config: ExperimentConfig) -> Placement | None:
    """Return where a small network with native environments runs; None leaves it to JAX.

    A fused cycle of envpool is one program of the CPU for a whole trajectory. On an accelerator the
    same policy is called once a step, which took eight times as long for CartPole.
    """
    chosen = config.platform, config.num_cpu_devices, config.inference_devices
    if any(each is not None for each in (*chosen, config.update_devices)):
        return None
    if config.cycle == "stepped" or config.cluster.address != "threads":
        return None
    if config.distributed.is_on:
        return None
    row = _multiplications_of_a_row(config)
    if row is None or row > SMALL_ROW:
        return None
    update = FORWARD_AND_BACKWARD * row * _rows_of_an_update(config)
    if update <= SMALL_UPDATE:
        why = "a small network acts and learns on the CPU; --platform cuda uses the GPU"
        return Placement(True, why)
    why = "a small network acts on the CPU and learns on the accelerator; --platform cpu uses none"
    return Placement(False, why)


def _multiplications_of_a_row(config: ExperimentConfig) -> int | None:
    """Return them for an MLP on a vector of envpool; None for any other network or environment."""
    env, torso = config.env, getattr(config.agent, "torso", None)
    if env.wrappers or torso is None or torso.kind not in ("auto", "mlp"):
        return None
    if env_source(env.id, env.backend).backend != "envpool":
        return None
    spec = env_spec(make_env_factory(env.id, **env.factory_arguments()))
    space = spec.observation_space
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) > 1:
        return None
    inputs = gymnasium.spaces.flatdim(space)
    sizes = [inputs, *torso.hidden_sizes, gymnasium.spaces.flatdim(spec.action_space)]
    of_layers = sum(a * b for a, b in itertools.pairwise(sizes))
    if torso.residual:  # two layers of four times the width in each block
        of_layers += 8 * sum(size**2 for size in torso.hidden_sizes)
    lstm = getattr(config.agent, "lstm_size", 0)
    return of_layers + 4 * lstm * (lstm + sizes[-2])


def _rows_of_an_update(config: ExperimentConfig) -> int:
    """Return how many rows one update learns from."""
    agent = config.agent
    if replay := getattr(agent, "replay", None):
        return replay.batch_size * getattr(agent, "sequence_length", 1)
    return config.num_envs * config.steps_per_cycle // getattr(agent, "minibatches", 1)


def num_cpu_devices_for(config: ExperimentConfig) -> int:
    """Return into how many devices the CPU is to be split, if JAX turns out to run on it.

    Where nothing is said of devices and the network is one for images, it is the number of cores,
    or the next smaller number by which the environments and what an update draws can be divided.
    """
    chosen = (config.num_cpu_devices, config.inference_devices, config.update_devices)
    torso = getattr(config.agent, "torso", None)
    if (
        any(each is not None for each in chosen)
        or config.platform not in (None, "cpu")
        or getattr(torso, "kind", None) not in IMAGE_NETWORKS
    ):
        return 1
    numbers = range(1, min(num_cores(), MOST_CPU_DEVICES) + 1)
    return max(n for n in numbers if _can_be_divided(config, n))


def _can_be_divided(config: ExperimentConfig, num_devices: int) -> bool:
    """Tell whether environments, and what an update draws, can be divided over the devices."""
    agent = config.agent
    num_envs, rest = divmod(config.num_envs, num_devices)
    columns = num_envs if getattr(agent, "lstm_size", 0) else num_envs * config.steps_per_cycle
    batch_size = getattr(getattr(agent, "replay", None), "batch_size", 0)
    return not (rest or columns % getattr(agent, "minibatches", 1) or batch_size % num_devices)

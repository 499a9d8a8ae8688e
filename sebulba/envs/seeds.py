"""Seeds of environments: one block per Inferencer, and no two blocks overlap."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from sebulba.errors import UsageError, shown

_BITS = 31
_MASK = (1 << _BITS) - 1
ENVS_A_GENERATION = 2**18
"""Environments that a run may have, on all hosts, if some of them are ever made anew."""
LAST_GENERATION = 2**_BITS // ENVS_A_GENERATION - 2
"""Last generation of environments; the seeds after it are those of evaluations."""


def check_seed(seed: Any, name: str = "seed") -> int:
    """Return ``seed`` as a Python int.

    Raises:
      UsageError: ``seed`` is not an integer (a bool is none), or does not fit 32 bits.
    """
    if isinstance(seed, bool | np.bool_) or not isinstance(seed, int | np.integer):
        raise UsageError(
            f"{name}={shown(seed)} must be an integer, not {type(seed).__name__}; use for example 0"
        )
    value = operator.index(seed)
    if not -(2**31) <= value < 2**31:
        raise UsageError(
            f"{name}={shown(value)} must fit 32 bits, -2147483648 to 2147483647; use a smaller one"
        )
    return value


def check_seeds(seeds: Any, num_envs: int) -> list[int]:
    """Return seeds, one per environment, as Python ints.

    Raises:
      UsageError: There are not ``num_envs`` of them, or one is not an int32.
    """
    is_list = isinstance(seeds, Sequence) and not isinstance(seeds, str | bytes)
    if not is_list and not (isinstance(seeds, np.ndarray) and seeds.ndim == 1):
        raise UsageError(f"seeds={shown(seeds)} must be a list of {num_envs} integers")
    if len(seeds) != num_envs:
        raise UsageError(f"seeds must be {num_envs}, one per environment; got {len(seeds)}")
    return [check_seed(seed, f"seeds[{i}]") for i, seed in enumerate(seeds)]


def seed_block(
    seed: int,
    *,
    inferencer: int,
    num_inferencers: int,
    num_envs: int,
    host: int = 0,
    generation: int = 0,
) -> list[int]:
    """Return the seeds of one Inferencer's environments.

    Every environment of every host has an index of its own, which a bijection of the 31-bit numbers
    maps to a seed; ``seed`` chooses the bijection. So no two environments of a run share a seed,
    and neighbouring indices or run seeds do not give neighbouring seeds. Environments that are made
    anew, because the run was resumed or they were restarted, share no seed with those of another
    generation, nor with those of an evaluation (of up to 2^17 environments).

    Args:
      seed: Seed of the run, an int32.
      inferencer: Index of the Inferencer on this host, from 0.
      num_inferencers: Inferencers per host.
      num_envs: Environments per Inferencer.
      host: Index of the host, from 0.
      generation: Number of times that the environments were made anew, at most
        ``LAST_GENERATION``. From 1 on a run has at most ``ENVS_A_GENERATION`` environments on all
        its hosts.

    Returns:
      ``num_envs`` non-negative int32 seeds (Gymnasium takes no negative ones).

    Raises:
      UsageError: ``seed`` is not an int32, or there are more environments than 2^31, or than
        ``ENVS_A_GENERATION`` from generation 1 on, or more than ``LAST_GENERATION`` generations.
    """
    key = check_seed(seed) & 0xFFFFFFFF
    for name, value in (("inferencer", inferencer), ("host", host), ("generation", generation)):
        check_seed(value, name)  # the same rule holds for these
    first = (host * num_inferencers + inferencer) * num_envs
    if not 0 <= inferencer < num_inferencers or host < 0 or num_envs < 0:
        raise UsageError(
            f"inferencer={inferencer} must be in 0 to {num_inferencers - 1} and host={host} and "
            f"num_envs={num_envs} must not be negative"
        )
    if first + num_envs > _MASK + 1:
        raise UsageError(
            f"environments {first} to {first + num_envs - 1} need more than 2^31 seeds; use fewer "
            "environments"
        )
    if not 0 <= generation <= LAST_GENERATION:
        raise UsageError(
            f"generation={generation} must be in 0 to {LAST_GENERATION}: no seeds are left; begin "
            "a run with another seed"
        )
    if generation and first + num_envs > ENVS_A_GENERATION:
        raise UsageError(
            f"environments {first} to {first + num_envs - 1} cannot be replaced: a run with more "
            f"than {ENVS_A_GENERATION} environments has seeds for one generation only; use fewer"
        )
    first += generation * ENVS_A_GENERATION
    return [_permute(index, key) for index in range(first, first + num_envs)]


def _permute(x: int, key: int) -> int:
    """Map 31-bit ``x`` to a 31-bit number, one to one for each ``key``.

    Each line is invertible: it adds, multiplies by an odd number, or xors ``x`` with its high bits.
    """
    for round_constant in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35):
        key = (key * 0x5851F42D4C957F2D + round_constant) & 0xFFFFFFFFFFFFFFFF
        x = (x + (key >> 33)) & _MASK
        x = (x * 0x2C1B3C6D) & _MASK
        x ^= x >> 15
        x = (x * 0x297A2D39) & _MASK
        x ^= x >> 16
    return x

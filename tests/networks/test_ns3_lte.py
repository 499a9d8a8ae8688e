"""LTE on ns-3: DEFIANCE's published SINR, and carts that are balanced over the air."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import sebulba
from sebulba.types import MultiAgentSpec
from tests.networks.test_ns3 import needs_ns3

EXAMPLES = Path(__file__).parents[2] / "packages/sebulba-ns3/examples"
PROGRAM = EXAMPLES / "lte_power.cc"
pytestmark = [needs_ns3, pytest.mark.slow]

# Every 25th row of the experiments test1 and test2: SINR in dB at 30.5 m, 43 m and 55.5 m.
FRIIS = (29.83590316772461, 26.84423065185547, 24.623180389404297)
"""At 0 dBm, which test1 has first. Its later powers are 7 dB more than the action it names."""
PUBLISHED = {
    "ns3::FriisPropagationLossModel": (44.835899353027344, 41.84423065185547, 39.6231803894043),
    "ns3::LogDistancePropagationLossModel": (22.303966522216797,),
    "ns3::ThreeLogDistancePropagationLossModel": (38.615577697753906,),
    "ns3::RangePropagationLossModel": (113.4678726196289,),
}
"""At 15 dBm, of test2. Its other models are random, do not depend on the power, or depend on
heights that were not published (TwoRayGround)."""


def sinrs(make, power: float, num_rows: int, **options) -> list[float]:
    env = make(**options)
    env.reset(seed=0)
    rows = [env.step(np.float32([power]))[0] for _ in range(25 * (num_rows - 1) + 1)][::25]
    assert [row[1] for row in rows] == pytest.approx([30.5 + 12.5 * i for i in range(num_rows)])
    return [float(row[0]) for row in rows]


def test_the_sinr_is_the_one_that_was_published(make):
    assert sinrs(make, 0, 3) == pytest.approx(FRIIS, abs=1e-3)
    assert sinrs(make, 12, 1) == pytest.approx([41.83590316772461], abs=1e-3)
    for model, published in PUBLISHED.items():
        found = sinrs(make, 15, len(published), propagation=model)
        assert found == pytest.approx(published, abs=1e-3), model


CELLS = Path(__file__).parents[1] / "support/ns3_cells.cc"
STANDING = {
    "3_1": {(0,): (98.4678726196289,), (20,): (118.4678726196289,)},
    "3_2": {
        (0, 0): (3.1791555881500244, 0, 0, 3.1791555881500244),
        (10, 0): (13.179155349731445, 0, 0, -3.581125259399414),
        (15, 10): (11.418874740600586, 0, 0, 1.8009507656097412),
        (20, 10): (16.418874740600586, 0, 0, -3.0708792209625244),
        (20, 20): (6.929121017456055, 0, 0, 6.929121017456055),
    },
}
"""The SINR of each phone in each cell, by experiment and the powers of the cells."""


@pytest.mark.parametrize("experiment", STANDING)
def test_the_sinr_of_phones_that_stand_is_the_one_that_was_published(make, experiment):
    env = make(CELLS, experiment=experiment)
    env.reset(seed=0)
    for powers, published in STANDING[experiment].items():
        for _ in range(5):
            found = env.step(np.float32(powers))[0][:-1]
        assert found == pytest.approx(published, abs=1e-3), powers


MOVING = {
    "4_1": {
        0: (39.8359, 0.0),
        600: (19.1126, 0.0),
        1250: (13.2955, 18.7471),
        1950: (13.2955, 54.8455),
        2475: (13.2955, 20.9339),
    },
    "4_2": {
        0: (29.6389, 0.0, 0.0, 0.0, 6.4189, 11.8147),
        600: (5.923, 0.0, 0.0, 0.0, 6.4189, 11.8147),
        1175: (-4.2437, 0.0, 0.0, 0.0, 6.4189, 11.8147),
        1250: (-5.2646, 0.0, 0.0, 18.7471, 15.514, 21.5346),
        2000: (-5.2646, 0.0, 0.0, 39.8359, 15.514, 21.5346),
    },
    "4_3": {
        0: (29.6389, 11.8147, 0.0, 0.0, 0.0, 0.0, 6.4189, 11.8147),
        600: (5.923, 11.8147, 0.0, 0.0, 0.0, 0.0, 6.4189, 11.8147),
        1250: (-5.2646, 11.8147, 0.0, 0.0, 5.3781, 0.0, 6.4189, 11.8147),
        2000: (-5.2646, 11.8147, 0.0, 0.0, 30.1126, 0.0, 6.4189, 11.8147),
    },
}
"""At 10 dBm, by experiment and row, while the first phone drives from cell to cell."""


@pytest.mark.parametrize("experiment", MOVING)
def test_the_sinr_of_a_phone_that_is_handed_over_is_the_one_that_was_published(make, experiment):
    # In 4_2, two rows before the handover differ: whether the cell that the phone leaves still
    # sends depends on traffic that was not published. So does the order of the handovers after the
    # powers change in row 3000.
    env, row = make(CELLS, experiment=experiment), -1
    env.reset(seed=0)
    for number, published in MOVING[experiment].items():
        while row < number:
            found, row = env.step(np.float32([10, 10]))[0], row + 1
        assert found[:-1] == pytest.approx(published, abs=1e-3), number
        assert found[-1] == pytest.approx(30.5 + 0.5 * number, abs=1e-3)


@pytest.mark.parametrize("deployment", ["center", "cells", "models"])
def test_powers_of_four_cells_are_set_from_a_center_or_in_each_cell(deployment):
    options = {"source": str(EXAMPLES / "cells.cc"), "deployment": deployment, "episode_s": 1}
    factory = sebulba.make_env_factory("ns3:program", **options, backhaul_mbps=1)
    earned, told = {}, []
    for power in (-1, 0.5):
        env = factory(1, [3])
        env.on_end = told.append
        rows = [env.reset()]
        if deployment == "models":
            env.publish(1, 1000)
        for step in range(40):
            if deployment == "models" and step == 4:
                env.publish(2, 12_500)  # 0.1 s at 1 Mbit/s, to each of four cells over its own link
            action = np.full((1, 4, 1) if deployment != "center" else (1, 4), power, np.float32)
            rows.append(env.step({"cell": action} if deployment != "center" else action))
            if rows[-1].episode_end[0]:
                break
        if deployment == "models":
            assert env.versions.tolist() == [[2] * 4]
        first, second = (type(env).metrics_of([env]) for _ in range(2))
        assert first["info/bytes"] == told[-1]["bytes"] and "info/bytes" not in second
        env.close()
        earned[power] = np.mean([jax.tree.leaves(row.reward)[0].mean() for row in rows[3:]])
    assert 15 <= len(rows) <= 22 and rows[-1].episode_end[0]
    assert earned[-1] != earned[0.5] and all(one["mbps"] > 0.1 for one in told)
    # In 1 s, four cells report three numbers each 50 ms, 19 or 20 times: the last is at the end.
    # The center sends each one number 19 times, after 75 ms and each 50 ms on. A message has 16
    # bytes and 8 for each number. Models are four messages of 12,500 bytes and a number.
    center = 19 * 4 * (40 + 24), 4 * (20 * 40 + 19 * 24)
    models = (4 * (16 + 8 + 12_500),) * 2
    least, most = {"center": center, "cells": (0, 0), "models": models}[deployment]
    assert least <= told[0]["bytes"] <= most


@pytest.mark.parametrize("agents_on", ["server", "carts"])
def test_two_carts_share_a_policy_over_lte(agents_on):
    options = {"source": str(EXAMPLES / "lte_carts.cc"), "agents_on": agents_on}
    factory = sebulba.make_env_factory("ns3:program", **options)
    spec = sebulba.env_spec(factory)
    assert isinstance(spec, MultiAgentSpec) and spec.groups["agent"].slots == ("agent_0", "agent_1")
    env = factory(1, [3])
    rows = [env.reset()]
    while not rows[-1].episode_end[0]:
        rows.append(env.step({"agent": np.full((1, 2), len(rows) % 2, np.int32)}))
    env.close()
    assert 10 < len(rows) < 200 and rows[-1].terminated["agent"].all()
    earned = np.sum([row.reward["agent"] for row in rows], axis=0)
    assert earned.shape == (1, 2) and (earned > 5).all()

"""LTE on ns-3: DEFIANCE's published SINR, and carts that are balanced over the air."""

from __future__ import annotations

from pathlib import Path

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

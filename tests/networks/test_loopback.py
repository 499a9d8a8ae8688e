"""A network in real time: what must hold however busy the machine is."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from sebulba_networks.native import INFO, PACKET_BYTES, NativePool
from sebulba_networks.options import LoopbackOptions

from sebulba.errors import EnvError, UsageError
from tests.support.needs import needs_compiler

pytestmark = needs_compiler

LINK = {"bandwidth_mbps": 8, "rtt_ms": 10, "buffer_packets": 60, "slow_start_packets": 8}


def held(window: float, num_steps: int = 20, **options) -> dict[str, np.ndarray]:
    """Return the info of steps with one window, ``[N]`` by name; the first is before them."""
    pool = NativePool(LoopbackOptions(**LINK | options), [5])
    infos = [pool.reset(with_info=True).info[0]]
    for _ in range(num_steps):
        exponent = np.log2(window / infos[-1][INFO.index("window")])
        rows = pool.step(np.array([exponent], np.float32), with_info=True)
        infos.append(rows.info[0])
        if rows.terminated[0]:
            break
    pool.close()
    return {name: np.array([info[i] for info in infos]) for i, name in enumerate(INFO)}


def test_packets_take_the_time_of_the_link():
    seen = held(12)
    assert seen["acked"].sum() > 20
    answered = seen["acked"] > 0
    assert (seen["mean_rtt_ns"][answered] >= seen["base_rtt_ns"][answered]).all()
    seconds = (seen["time_ns"][-1] - seen["time_ns"][0]) / 1e9
    of_link = seconds * 8e6 / 8 / PACKET_BYTES
    assert seen["acked"][1:].sum() <= of_link + 12, "and those that were there before"
    assert not seen["lost"].any() and not seen["num_drops"].any()


def test_a_full_buffer_drops_and_the_sender_finds_out():
    seen = held(100, buffer_packets=5)
    assert seen["num_drops"][-1] > 5 and seen["lost"].sum() > 5


def test_a_lossy_link_loses():
    seen = held(10, random_loss=0.3)
    assert seen["lost"].sum() > 0 and not seen["num_drops"].any()


def test_a_flow_without_end_is_followed_by_another_and_nothing_is_left_behind():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    NativePool(LoopbackOptions(**LINK), [0]).close()  # compiles and loads the engine
    before = open_files(), threading.active_count(), len(os.listdir("/proc/self/task"))
    pool = NativePool(LoopbackOptions(**LINK, max_episode_steps=2), [0])
    first = pool.reset()
    ends = [pool.step(np.zeros(1, np.float32)) for _ in range(9)]
    assert first.is_first[0] and [bool(rows.truncated[0]) for rows in ends] == 3 * [0, 1, 0]
    with pytest.raises(EnvError, match="has no state"):
        pool.state()
    pool.close()
    assert (open_files(), threading.active_count(), len(os.listdir("/proc/self/task"))) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_hops": 2}, "num_hops=2 a real network here has one flow over one link"),
        ({"num_cubic": 1}, "num_cubic=1"),
        ({"cross_traffic_mbps": 5}, "cross_traffic_mbps"),
        ({"rtt_ms": -1}, "rtt_ms"),
    ],
    ids=str,
)
def test_more_than_a_flow_over_a_link_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        LoopbackOptions(**options)


def test_environments_do_not_wait_for_each_other():
    with pytest.raises(UsageError, match="num_envs=2 is not 1"):
        NativePool(LoopbackOptions(), [0, 1])

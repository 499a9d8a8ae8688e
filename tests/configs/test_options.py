"""How a loop is told to run: options, keywords, and both at once."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import numpy as np
import pytest

from sebulba import ClusterOptions, FaultOptions, LoopOptions, UsageError
from sebulba.configs.experiment import ExperimentConfig
from sebulba.options import LoopKeywords
from sebulba.support.files import dataclass_from_json
from tests.support.loop_helpers import make_tiny_loop


def test_options_and_keywords_say_the_same():
    options = LoopOptions(
        schedule="lockstep", queue_size=3, faults=FaultOptions(on_env_failure="restart")
    )
    by_options, _ = make_tiny_loop(options=options)
    by_keywords, _ = make_tiny_loop(schedule="lockstep", queue_size=3, on_env_failure="restart")
    with by_options, by_keywords:
        assert by_options._options == by_keywords._options == options


def test_a_keyword_wins_over_the_options():
    options = LoopOptions(
        queue_size=3, faults=FaultOptions(max_env_restarts=4, hang_timeout_s=None)
    )
    loop, _ = make_tiny_loop(options=options, queue_size=5, hang_timeout_s=9.0, cycle="stepped")
    with loop:
        assert loop._options == LoopOptions(
            queue_size=5,
            cycle="stepped",
            faults=FaultOptions(max_env_restarts=4, hang_timeout_s=9.0),
        )


def test_devices_of_the_options_are_taken_where_no_keyword_names_others():
    options = LoopOptions(inference_devices=(1,), update_devices=(2, 3))
    loop, _ = make_tiny_loop(options=options, inference_devices=None, update_devices=None)
    with loop:
        assert [device.id for device in loop.inference_devices] == [1]
        assert [device.id for device in loop.update_devices] == [2, 3]
    loop, _ = make_tiny_loop(options=options, update_devices=[0], inference_devices=None)
    with loop:
        assert [device.id for device in loop.update_devices] == [0]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"shedule": "lockstep"}, r"shedule='lockstep' is not an option.*nearest are schedule"),
        ({"hang_timeout": 3.0}, r"hang_timeout=3.0 is not an option.*hang_timeout_s"),
        ({"open_fields": ()}, r"open_fields=\(\) is not an option"),
        ({"queue_size": 1.5}, r"queue_size=1.5 must be a whole number; use for example 2"),
        ({"queue_size": True}, "queue_size=True must be a whole number"),
        ({"num_inferencers_per_device": 2000}, "must be at most 1024"),
        ({"faults": {"on_env_failure": "restart"}}, "faults=.* must be a FaultOptions"),
        ({"faults": {}, "max_env_restarts": 1}, "faults={} must be a FaultOptions"),
        ({"max_env_restarts": -1}, "^max_env_restarts=-1 must be at least 0"),
        ({"hang_timeout_s": 0}, "^hang_timeout_s=0 must be positive; use 300, or None"),
        (
            {"metrics_interval_s": float("nan")},
            "metrics_interval_s=nan must be a number at least 0",
        ),
        ({"metric_writr": None}, "metric_writr=None is not an option.*nearest are metric_writer"),
        ({"inference_only": 1}, "inference_only=1 must be True or False"),
        ({"options": {"queue_size": 3}}, "options=.* must be a LoopOptions"),
    ],
)
def test_what_is_no_option_is_refused_with_the_remedy(keywords, message):
    with pytest.raises(UsageError, match=message):
        make_tiny_loop(**keywords)


def test_an_experiment_has_every_option_of_a_loop_and_repeats_none():
    of_loop = {field.name for field in dataclasses.fields(LoopOptions)}
    assert of_loop < {field.name for field in dataclasses.fields(ExperimentConfig)}
    assert not of_loop & set(inspect.get_annotations(ExperimentConfig))


def test_seeds_of_numpy_are_seeds():
    loop, _ = make_tiny_loop(seed=np.uint32(3), hang_timeout_s=10**17, schedule=np.str_("async"))
    with loop:
        assert loop._options.seed == 3 and type(loop._options.seed) is int


def test_type_checkers_know_every_keyword():
    explicit = {"cycle", "inference_devices", "update_devices"}
    fields = {f.name for cls in (LoopOptions, FaultOptions) for f in dataclasses.fields(cls)}
    assert fields - explicit == set(LoopKeywords.__annotations__)


def test_options_need_no_jax():
    code = "import sys, sebulba.options; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_options_that_need_each_other_may_be_given_together():
    faults = FaultOptions(max_env_restarts=3)
    options = LoopOptions().changed({"faults": faults, "on_env_failure": "restart"})
    assert options.faults == FaultOptions(max_env_restarts=3, on_env_failure="restart")
    with pytest.raises(UsageError, match=r"^faults="):
        LoopOptions().changed({"faults": 3, "on_env_failure": "restart"})


def test_a_record_of_before_has_options_that_are_gone():
    fields = {"address": "processes", "infer_here": 1, "min_nodes": 2}
    assert dataclass_from_json(ClusterOptions, fields) == ClusterOptions(address="processes")
    fields = {"on_not_finite": "skip", "max_skipped_updates": 7}
    assert dataclass_from_json(FaultOptions, fields) == FaultOptions(on_not_finite="skip")

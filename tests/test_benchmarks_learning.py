"""The learning benchmark: what it takes from the records of a run."""

from __future__ import annotations

from sebulba.benchmarks.learning import HEADER, seed_result, summary, table_row


def records(*means):
    return [
        {"episode_return_mean": mean, "env_steps": 1000 * i, "seconds": 0.5 * i}
        for i, mean in enumerate(means, 1)
    ]


def test_the_first_record_at_the_threshold_counts_and_the_last_is_the_end():
    result = seed_result(records(None, 470.0, 475.0, 500.0, 480.0), 7, 0, 475, 9.0)
    assert (result.env_steps_to_threshold, result.seconds_to_threshold) == (3000, 1.5)
    assert (result.final_mean, result.seconds, result.seed) == (480.0, 2.5, 7)


def test_a_run_that_never_gets_there_says_so_and_is_not_in_the_median():
    never = seed_result(records(None, -400.0), 1, 0, -300, 9.0)
    failed = seed_result([], 2, 3, -300, 1.0)
    reached = seed_result(records(-290.0), 3, 0, -300, 9.0)
    assert never.seconds_to_threshold is None and failed.final_mean is None
    assert "never" in table_row(never)
    assert summary([never, failed, reached], -300) == (
        "1 of 3 seeds reached -300; median 0.5 s, slowest 0.5 s"
    )
    assert {len(table_row(r)) for r in (never, failed, reached)} == {len(HEADER)}


def test_a_mean_of_zero_is_a_mean():
    assert seed_result(records(None, 0.0), 1, 0, -5, 9.0).env_steps_to_threshold == 2000

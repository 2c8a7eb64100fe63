"""Counts of steps by their outcome and duration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.observe.step_counts import BOUNDS_S, StepCounts, error_class
from dflow.tracing.errors import DeadlineExceeded, TaskLost


@given(st.lists(st.floats(0, 1000)))
def test_each_time_is_in_the_first_bucket_whose_bound_is_no_less(times_s: list[float]) -> None:
    counts = StepCounts()
    for time_s in times_s:
        counts.ended(time_s, None)
    totals = counts.totals()
    bounds = (*BOUNDS_S, float("inf"))
    for place, bound in enumerate(bounds):
        assert sum(totals.buckets[: place + 1]) == sum(time_s <= bound for time_s in times_s)
    assert totals.done == len(times_s)
    assert totals.total_s == pytest.approx(sum(times_s))
    assert totals.mean_s == 0 if not times_s else min(times_s) - 1e-6 <= totals.mean_s <= max(times_s) + 1e-6


def test_errors_are_counted_by_class_and_their_times_are_left_out() -> None:
    counts = StepCounts()
    for error in (TaskLost("gone"), TaskLost("gone"), DeadlineExceeded("late"), ValueError("odd")):
        counts.ended(1.0, error)
    totals = counts.totals()
    assert totals.errors == {"TaskLost": 2, "DeadlineExceeded": 1, "other": 1}
    assert (totals.done, totals.total_s) == (0, 0.0)


def test_an_errors_class_is_one_that_dflow_knows() -> None:
    class MyLoss(TaskLost):
        pass

    class Own(Exception):
        pass

    assert [error_class(error) for error in (MyLoss(""), Own(""), KeyboardInterrupt())] == [
        "TaskLost",
        "other",
        "other",
    ]

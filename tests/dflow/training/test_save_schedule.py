"""When a manager saves: steps, times, and the interval that loses the least."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dflow.training.save_schedule import RunRecord, SaveSchedule, daly_interval_s

DAY = timedelta(days=1)


def lost(interval_s: float, save_s: float, failure_interval_s: float) -> float:
    """Expected time of a run per second of work, with failures at random (Daly 2006, equation 20), without restarts."""
    return failure_interval_s * math.expm1((interval_s + save_s) / failure_interval_s) / interval_s


@given(st.floats(0.01, 1e3), st.floats(60.0, 1e6), st.floats(0.3, 3.0))
def test_no_other_interval_loses_clearly_less(save_s: float, failure_interval_s: float, other: float) -> None:
    assume(save_s < failure_interval_s / 8)
    interval_s = daly_interval_s(save_s, failure_interval_s)
    assert interval_s >= save_s
    least = lost(interval_s, save_s, failure_interval_s)
    assert least <= 1.005 * lost(other * interval_s, save_s, failure_interval_s)


@pytest.mark.parametrize(("save_s", "failure_interval_s"), [(10.0, 5.0), (10.0, 3.0), (10.0, 6.0), (10.0, 1e-3)])
def test_the_interval_is_never_shorter_than_a_save(save_s: float, failure_interval_s: float) -> None:
    assert daly_interval_s(save_s, failure_interval_s) >= save_s


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 20))
def test_every_multiple_is_saved_or_the_first_step_after_it(strides: list[int], every: int) -> None:
    schedule, last, step, multiples = SaveSchedule(every, DAY), -1, -1, set[int]()
    for stride in strides:
        step += stride
        passed = {number for number in range(step - stride + 1, step + 1) if number % every == 0}
        is_due = schedule.is_due(step, last, 0.0, None)
        assert is_due == bool(passed)
        if is_due:
            last, multiples = step, multiples | passed


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 1e5)), max_size=20), st.floats(1.0, 1e6))
def test_the_time_between_failures_is_that_of_the_runs_with_one_failure_assumed(
    runs: list[tuple[bool, float]], prior_s: float
) -> None:
    record = RunRecord()
    for is_closed, ran_s in runs:
        record = record.begun("a process").saved(1.0, ran_s)
        record = record.ended(ran_s) if is_closed else record
    failures = sum(not is_closed for is_closed, _ in runs)
    total_s = prior_s + sum(ran_s for _, ran_s in runs)
    seen = record.begun("the next")
    assert seen.failures == failures
    assert seen.failure_interval_s(prior_s) == pytest.approx(total_s / (1 + failures))


def test_the_interval_comes_from_the_last_saves() -> None:
    schedule, record = SaveSchedule("auto", DAY), RunRecord().begun("a process")
    assert schedule.interval_s(record) is None
    assert schedule.is_due(0, -1, 0.0, None)
    for took_s in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        record = record.saved(took_s, 0.0)
    assert record.save_s == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert schedule.interval_s(record) == daly_interval_s(3.0, DAY.total_seconds())

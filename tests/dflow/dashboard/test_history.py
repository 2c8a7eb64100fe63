"""The curves of the dashboard: bounded, and without a lost spike."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.dashboard.history import History, Series, SeriesName
from tests.effort import examples

WEEK_S = 7 * 24 * 3600


def column(series: Series, name: str) -> list[float]:
    return [math.nan if value is None else value for value in series.json()[name]]


def test_a_week_of_values_stays_within_the_limits() -> None:
    series = Series(400)
    for second in range(0, WEEK_S, 4):
        series.add(float(second), 10 * second, 5.0 if second == 123_456 else 1.0)
    assert 200 <= len(series) <= 400
    assert column(series, "at_s")[-1] == WEEK_S - 4
    assert column(series, "step")[-1] == 10 * (WEEK_S - 4)
    assert max(column(series, "high")) == 5.0, "a spike of one value is seen after a week"
    steps_s = [later - earlier for earlier, later in pairwise(column(series, "at_s"))]
    assert max(steps_s[:-1]) == min(steps_s[:-1]), "old and new parts of the curve are equally fine"
    held = sum(sys.getsizeof(each) for each in series._columns())
    assert held <= 5 * 8 * 400 * 2


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60), st.integers(2, 9))
def test_points_cover_all_values_in_order(values: list[float], most: int) -> None:
    series = Series(most)
    for index, value in enumerate(values):
        series.add(float(index), index, value)
        assert len(series) <= most
    ends = [int(at_s) for at_s in column(series, "at_s")]
    assert ends == sorted(set(ends))
    begins = [0, *(end + 1 for end in ends)]
    for begin, end, low, high, value in zip(
        begins, ends, *(series.json()[name] for name in ("low", "high", "value")), strict=False
    ):
        known = [each for each in values[begin : end + 1] if math.isfinite(each)]
        assert (low, high) == ((min(known), max(known)) if known else (None, None))
        assert value == (values[end] if math.isfinite(values[end]) else None)
    assert not values or ends[-1] == len(values) - 1


def test_series_beyond_the_limit_are_counted_and_dropped() -> None:
    history = History(most_points=10, most_series=2)
    names = [SeriesName(f"worker:{index}", "loss") for index in range(3)]
    kept = history.add(1.0, 1, dict.fromkeys(names, 0.5))
    history.add(2.0, 2, {names[2]: 1.0, SeriesName("", "x" * 500): 1.0})
    assert kept == {"worker:0/loss": 0.5, "worker:1/loss": 0.5}
    told = history.json()
    assert [one["id"] for one in told["series"]] == ["worker:0/loss", "worker:1/loss"]
    assert told["left_out"] == 2


def test_series_are_chosen_by_quantity() -> None:
    history = History()
    history.add(1.0, 1, {SeriesName("worker:0", "loss"): math.inf, SeriesName("", "steps/s", "1/s"): 2.0})
    (one,) = history.json({"loss"})["series"]
    assert one == {
        "id": "worker:0/loss",
        "task": "worker:0",
        "name": "loss",
        "unit": "",
        "at_s": [1.0],
        "step": [1],
        "value": [None],
        "low": [None],
        "high": [None],
    }


@pytest.mark.parametrize("name", ["steps/s", "processor", "missed", "queue examples", "metric steps/s"])
def test_a_metric_with_the_name_of_a_rate_is_a_curve_of_its_own(name: str) -> None:
    history = History()
    kept = history.add(1.0, 1, {SeriesName("worker:0", name): 5.0, SeriesName("worker:0", name, "1/s"): 70.0})
    assert kept == {f"worker:0/metric {name}": 5.0, f"worker:0/{name}": 70.0}

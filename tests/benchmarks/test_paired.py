"""The order of a benchmark's alternatives."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from benchmarks._paired import in_turn


def order(ways: str, rounds: int) -> list[str]:
    """Return the order of the alternatives in each round."""
    ran: list[str] = []
    in_turn({way: partial(ran.append, way) for way in ways}, rounds)
    return ran


def test_each_way_is_measured_once_in_each_round_and_its_figures_stay_in_order() -> None:
    times = iter(range(12))
    found = in_turn({way: lambda: next(times) for way in "abc"}, 4)
    for number in range(4):
        assert sorted(figures[number] // 3 for figures in found.values()) == [number] * 3


@pytest.mark.parametrize("ways", ["ab", "abc", "abcde"])
def test_no_way_follows_another_or_itself_more_often_than_the_others_do(ways: str) -> None:
    ran = order(ways, 4000)
    followed = Counter(pairwise(ran))
    for way in ways:
        # It comes first in a round after any alternative; within a round after any of the others.
        itself, others = followed[way, way], [followed[before, way] for before in ways if before != way]
        assert itself == pytest.approx(4000 / len(ways) ** 2, rel=0.15)
        assert max(others) == pytest.approx(min(others), rel=0.15)


def test_two_runs_have_the_same_order() -> None:
    assert order("abc", 20) == order("abc", 20)
    assert len({tuple(order("abc", 20)[start : start + 3]) for start in range(0, 60, 3)}) > 2

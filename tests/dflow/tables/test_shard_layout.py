"""Divisions of an array: each row in exactly one shard, in the order that `places` says."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.tables.shard_layout import DIVISIONS, ShardLayout, shards_for, traffic_cuts
from tests.effort import examples


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.sampled_from(DIVISIONS))
def test_the_shards_have_each_row_once(rows: int, columns: int, shards: int, by: str) -> None:
    array = np.arange(rows * columns).reshape(rows, columns)
    layout = ShardLayout(array.shape, min(shards, array.shape[by == "columns"]), by)
    parts = [layout.part(shard).of(array) for shard in range(layout.shards)]
    np.testing.assert_array_equal(layout.joined(parts), array)
    assert sum(part.size for part in parts) == array.size
    sizes = [part.shape[layout.axis] for part in parts]
    assert max(sizes) - min(sizes) <= 1
    in_order = np.concatenate(parts, layout.axis)
    np.testing.assert_array_equal(np.take(in_order, layout.positions(np.arange(layout.size)), layout.axis), array)


@pytest.mark.parametrize(
    ("shape", "shards", "by", "message"),
    [
        ((4, 2), 5, "rows", r"shards of an array of \(4, 2\) by rows: expected 1 to 4, got 5"),
        ((4, 2), 0, "rows", "expected 1 to 4, got 0"),
        ((4, 2), 3, "columns", "by columns: expected 1 to 2, got 3"),
        ((4,), 1, "columns", "expected an array of 2 or more dimensions"),
        ((), 1, "rows", "expected an array of 1 or more dimensions"),
        ((4, 2), 2, "row", "by: expected a division of the array, got .row."),
    ],
)
def test_what_cannot_be_divided_is_refused(shape: tuple[int, ...], shards: int, by: str, message: str) -> None:
    with pytest.raises(dflow.VariableError, match=message):
        ShardLayout(shape, shards, by)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], int, int]:
    """Counts of lookups, a number of shards, and the most rows of a shard."""
    counts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    shards = draw(st.integers(1, len(counts)))
    return np.array(counts), shards, draw(st.integers(-(-len(counts) // shards), len(counts)))


@settings(max_examples=examples(100), deadline=None)
@given(traffic())
def test_no_division_by_traffic_has_a_less_used_largest_shard(case: tuple[np.ndarray[Any, Any], int, int]) -> None:
    counts, shards, most = case
    cuts = traffic_cuts(counts, len(counts), shards, most)
    layout = ShardLayout((len(counts), 2), shards, cuts=cuts)
    sizes = np.diff(layout.bounds)
    assert sizes.min() >= 1
    assert sizes.max() <= most
    array = np.arange(2 * len(counts)).reshape(-1, 2)
    np.testing.assert_array_equal(layout.joined([layout.part(shard).of(array) for shard in range(shards)]), array)

    def largest(bounds: Any) -> int:
        return max(counts[first:end].sum() for first, end in itertools.pairwise(bounds))

    others = [
        (0, *inner, len(counts))
        for inner in itertools.combinations(range(1, len(counts)), shards - 1)
        if np.diff((0, *inner, len(counts))).max() <= most
    ]
    assert not counts.any() or largest(layout.bounds) == min(map(largest, others))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2], r"traffic: expected the number of lookups of each of 3 rows, at least 0, got int64 of \(2,\)"),
        ([1, -1, 1], "of each of 3 rows, at least 0, got int64"),
        ([1, np.nan, 1], "at least 0, got float64"),
        (["a", "b", "c"], "at least 0, got <U1"),
    ],
)
def test_traffic_that_is_no_count_is_refused(counts: Any, message: str) -> None:
    with pytest.raises(dflow.VariableError, match=message):
        traffic_cuts(counts, 3, 2, 3)


def test_arguments_that_contradict_traffic_are_refused() -> None:
    counts = np.arange(6)
    table = dflow.ShardedVariable(np.zeros((6, 2), np.float32), traffic=counts, shards=2)
    assert table.layout.bounds == (0, 4, 6)
    for options, message in (
        ({"by": "modulo"}, "traffic: expected a division by rows, got by='modulo'"),
        ({"near": table}, "traffic: expected a division by rows, got near"),
        ({"shards": 2, "max_shard_bytes": 16}, "max_shard_bytes: expected room for 6 rows in 2 shards, got room for 2"),
    ):
        with pytest.raises(dflow.VariableError, match=message):
            dflow.ShardedVariable(np.zeros((6, 2), np.float32), traffic=counts, **options)
    even = dflow.ShardedVariable(np.zeros((6, 2), np.float32), traffic=counts, shards=2, max_shard_bytes=24)
    assert even.layout.bounds == (0, 3, 6)
    assert dflow.ShardedVariable(np.zeros(6), near=table).layout.bounds == (0, 4, 6)


def test_the_number_of_shards_is_the_least_whose_bytes_fit() -> None:
    assert shards_for((10, 4), "float32", "rows", 32) == 5
    assert shards_for((10, 4), "float32", "rows", 47) == 5
    assert shards_for((10, 4), "float32", "rows", 160) == 1
    with pytest.raises(dflow.VariableError, match="max_shard_bytes: expected at least 16"):
        shards_for((10, 4), "float32", "rows", 15)


def test_rows_stay_together() -> None:
    table = dflow.ShardedVariable(np.zeros((20, 2), np.float32), shards=3, together=4)
    assert table.layout.bounds == (0, 8, 16, 20)
    assert dflow.ShardedVariable(np.zeros(20), near=table).layout.bounds == (0, 8, 16, 20)
    for options in ({"together": 3}, {"together": 4, "by": "modulo"}, {"together": 4, "near": table}):
        with pytest.raises(dflow.VariableError, match="expected a division by rows that have this divisor"):
            dflow.ShardedVariable(np.zeros((20, 2), np.float32), **options)
    with pytest.raises(dflow.VariableError, match=r"shards of an array of \(5,\) by rows: expected 1 to 5, got 6"):
        dflow.ShardedVariable(np.zeros((20, 2), np.float32), shards=6, together=4)


@pytest.mark.parametrize(("shape", "shards"), [((0, 2), 1), ((5, 0), 2)])
def test_arrays_without_elements_are_divided_by_traffic(shape: tuple[int, ...], shards: int) -> None:
    table = dflow.ShardedVariable(np.zeros(shape, np.float32), traffic=np.ones(shape[0]), shards=shards)
    assert table.read().shape == shape

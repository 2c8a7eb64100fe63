"""Divisions of an array: each row in exactly one shard, in the order that `places` says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.tables.shard_layout import DIVISIONS, ShardLayout, shards_for
from dflow.tracing.rows.slices import AxisSlice
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
    np.testing.assert_array_equal(np.take(in_order, layout.places(np.arange(layout.size)), layout.axis), array)


@pytest.mark.parametrize("by", DIVISIONS)
def test_a_division_that_misses_or_repeats_a_row_is_refused(by: str) -> None:
    class Missing(ShardLayout):
        def part(self, shard: int) -> AxisSlice:
            found = super().part(shard)
            return found._replace(size=found.size - (shard == 1))

    class Repeating(ShardLayout):
        def part(self, shard: int) -> AxisSlice:
            found = super().part(shard)
            return found._replace(start=found.start - (shard == 1))

    for layout in (Missing, Repeating):
        with pytest.raises(dflow.VariableError, match=f"do not have each of 9 {by} once"):
            layout((9, 9), 3, by)


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


def test_shards_by_their_bytes() -> None:
    assert shards_for((10, 4), "float32", "rows", 32) == 5
    assert shards_for((10, 4), "float32", "rows", 47) == 5
    assert shards_for((10, 4), "float32", "rows", 160) == 1
    with pytest.raises(dflow.VariableError, match="max_shard_bytes: expected at least 16"):
        shards_for((10, 4), "float32", "rows", 15)

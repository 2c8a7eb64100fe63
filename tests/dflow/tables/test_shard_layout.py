"""Divisions of an array into shards: each row in one, routes of row numbers, and the share of full buckets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.tables.growing_table import rows_for, share_without_row
from dflow.tables.id_routing import bucket_of
from dflow.tables.routing import MOST_COUNTED, combined, route
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


@pytest.mark.parametrize(("load", "bucket"), [(0.6, 8), (0.8, 32), (1.0, 32)])
def test_the_share_of_ids_without_a_row_is_as_computed(load: float, bucket: int) -> None:
    count = 200_000
    ids = dflow.wide_ids(np.arange(count) * 7919)
    buckets = round(count / load / bucket)
    sizes = np.bincount(np.asarray(bucket_of(ids.high, ids.low, buckets)), minlength=buckets)
    found = np.maximum(sizes - bucket, 0).sum() / count
    assert found == pytest.approx(share_without_row(load, bucket), rel=0.15, abs=2e-4)


def test_rows_for_ids_leave_a_small_share_without_one() -> None:
    for ids in (1, 50, 20_000, 3_000_000):
        for bucket in (8, 32, 128):
            rows = rows_for(ids, bucket)
            assert share_without_row(ids / rows, bucket) <= 0.001
            assert rows >= ids
    assert share_without_row(0.0) == 0.0
    assert share_without_row(2.0) == pytest.approx(0.5, abs=0.01)


def crowded(rows: int, count: int) -> Iterator[int]:
    """Train with ids of the first of `rows` / 2 buckets, one after the other; yield the evictions after each."""
    table = dflow.Embedding(rows, 2, name="users", vocabulary=dflow.Vocabulary(bucket=2))
    optimizer = dflow.Optimizer(optax.adagrad(0.1), [table])

    @dflow.jit
    def step(ids: dflow.WideIds) -> None:
        found = table.find(ids)
        optimizer.apply(dflow.grad(lambda: table(found).sum(), [table])(), found=found)

    ids = dflow.wide_ids(np.arange(400))
    for id in np.flatnonzero(np.asarray(bucket_of(ids.high, ids.low, rows // 2)) == 0)[:count]:
        step(dflow.wide_ids([int(id)]))
        yield table.counts().evicted


@pytest.mark.once
def test_counts_warn_of_evictions_while_rows_are_free(caplog: pytest.LogCaptureFixture) -> None:
    assert [*crowded(12, 8)] == [0, 0, 1, 2, 3, 4, 5, 6]
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" times")[0] for text in told] == [f"table 'users': {count}" for count in (1, 2, 4)]
    assert "though 83% of the rows are free: an id has its row in one bucket of 2" in told[0]
    assert "Vocabulary(bucket=8)" in told[0]


@pytest.mark.once
def test_counts_do_not_advise_fewer_rows_than_the_table_has(caplog: pytest.LogCaptureFixture) -> None:
    assert [*crowded(128, 3)] == [0, 0, 1]
    assert rows_for(2, 2) == 67
    assert not caplog.records


COMBINED = {"scatter_add": np.add, "scatter_sub": np.add, "scatter_mul": np.multiply, "scatter_max": np.maximum}


@st.composite
def cases(draw: Any) -> tuple[ShardLayout, np.ndarray[Any, Any]]:
    rows = draw(st.sampled_from([1, 2, 7, 12]))
    shards = draw(st.sampled_from([count for count in (1, 2, 4, MOST_COUNTED + 1) if count <= rows]))
    layout = ShardLayout((rows, 2), shards, draw(st.sampled_from(["rows", "modulo"])))
    if layout.by == "rows" and draw(st.booleans()):
        layout = replace(layout, cuts=traffic_cuts(np.arange(rows)[::-1], rows, layout.shards, rows))
    numbers = draw(st.lists(st.integers(-3, rows + 3), min_size=6, max_size=6))
    return layout, np.asarray(numbers, np.int32)


@pytest.mark.once
@settings(max_examples=examples(20), deadline=None)
@given(cases())
def test_each_shard_is_asked_for_its_rows_once(case: tuple[ShardLayout, np.ndarray[Any, Any]]) -> None:
    layout, numbers = case
    way = jax.jit(lambda numbers: route(layout, numbers))(numbers)
    inside = [number for number in numbers if 0 <= number < layout.size]
    asked = []
    for shard, (rows, count) in enumerate(zip(way.rows, way.counts, strict=True)):
        part = layout.part(shard)
        assert ({*np.asarray(rows[count:])} or {part.size}) == {part.size}
        asked += [part.start + part.step * int(row) for row in rows[:count]]
    assert sorted(asked) == sorted({*inside})
    table = np.arange(layout.size * 2).reshape(layout.shape)
    found = np.concatenate(
        [
            layout.part(shard).of(table)[np.minimum(rows, layout.part(shard).size - 1)]
            for shard, rows in enumerate(way.rows)
        ]
    )
    for number, place in zip(numbers, np.asarray(way.positions), strict=True):
        if 0 <= number < layout.size:
            np.testing.assert_array_equal(found[place], table[number])
        else:
            assert place >= len(found)


@pytest.mark.once
@settings(max_examples=examples(15), deadline=None)
@given(cases(), st.sampled_from(sorted(COMBINED)))
def test_rows_for_one_number_are_combined(case: tuple[ShardLayout, np.ndarray[Any, Any]], kind: str) -> None:
    layout, numbers = case
    rows = np.arange(1, 1 + 2 * len(numbers), dtype=np.float32).reshape(-1, 2)
    way = route(layout, numbers)
    given = dict(zip(numbers.tolist(), [None] * len(numbers), strict=True))
    for number, row in zip(numbers.tolist(), rows, strict=True):
        given[number] = row if given[number] is None else COMBINED[kind](given[number], row)
    for shard, each in enumerate(combined(kind, way, rows)):
        part = layout.part(shard)
        for place in range(int(way.counts[shard])):
            number = part.start + part.step * int(way.rows[shard][place])
            np.testing.assert_array_equal(each[place], given[number])
        assert not np.asarray(each[int(way.counts[shard]) :]).any()

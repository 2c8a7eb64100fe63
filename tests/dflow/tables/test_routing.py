"""Routes of row numbers to shards, against NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.tables.routing import MOST_COUNTED, combined, route
from dflow.tables.shard_layout import ShardLayout, traffic_cuts
from tests.effort import examples

pytestmark = pytest.mark.once

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

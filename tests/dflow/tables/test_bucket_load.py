"""Share of ids whose bucket is full, by the load: the formula, the tables' own hash, and the warning of `counts`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import optax
import pytest

import dflow
from dflow.tables.growing_table import rows_for, share_without_row
from dflow.tables.id_routing import bucket_of


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

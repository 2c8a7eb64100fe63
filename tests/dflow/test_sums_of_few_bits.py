"""Sums that dflow makes of bfloat16 and float16 numbers: computed in float32, and rounded once.

A running sum of ones stays at 256 in bfloat16, and at 2,048 in float16. The tests sum 3,000 ones, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.testing import memory_cluster

COUNT = 3000
IDS = jnp.zeros(COUNT, jnp.int32)
ONES = jax.nn.initializers.ones


def table_of(dtype: Any, **options: Any) -> dflow.Embedding:
    return dflow.Embedding(4, 2, dtype=dtype, initializer=ONES, name="table", **options)


def segments_of(table: dflow.Embedding, **options: Any) -> Any:
    ids = IDS if table.vocabulary is None else dflow.wide_ids(np.asarray(IDS))
    return dflow.jit(lambda ids: table.bag(ids, segments=IDS, bags=2, **options)[0, 0])(ids)


def gradient(dtype: Any) -> Any:
    table = table_of(dtype)
    return dflow.jit(dflow.grad(lambda: table(IDS).sum().astype(jnp.float32), table))().shards[0][0, 0]


def row_gradient(dtype: Any) -> Any:
    rows = dflow.RowGradient(IDS, jnp.ones((COUNT, 2), dtype), (4, 2))
    return rows.dense()[0, 0]


def scattered(dtype: Any, *, update: str = "scatter_add", compiled: bool = True, shards: int = 0) -> Any:
    zeros = jnp.zeros((4, 2), dtype)
    counts: Any = dflow.ShardedVariable(zeros, shards=shards) if shards else dflow.Variable(zeros)
    method = getattr(counts, update)
    (dflow.jit(method) if compiled else method)((IDS - 4).astype(jnp.int8), jnp.ones((COUNT, 2), dtype))
    return abs(counts.read()[0, 0])


def in_a_batch(dtype: Any) -> Any:
    counts = dflow.Variable(jnp.zeros(4, dtype))
    dflow.jit(jax.vmap(lambda i: counts.scatter_add(i, jnp.ones((), dtype), reduce="sum")))(IDS)
    return counts.read()[0]


def accumulated(dtype: Any, reduction: str, each: float, count: int) -> Any:
    held = dflow.ConditionalAccumulator([jax.ShapeDtypeStruct((2,), dtype)], reduction=reduction)
    for _ in range(count):
        held.apply([jnp.full(2, each, dtype)])
    return held.take(count)[0][0]


def accumulated_rows(dtype: Any) -> Any:
    rows = jax.ShapeDtypeStruct((4, 2), dtype)
    spec = dflow.RowGradient(jax.ShapeDtypeStruct((4,), jnp.int32), rows, (4, 2))
    held = dflow.ConditionalAccumulator([spec], reduction="sum")
    for _ in range(10):
        held.apply([dflow.RowGradient(IDS[:300], jnp.ones((300, 2), dtype), (4, 2))])
    return held.take(10)[0].rows[0, 0]


def product(dtype: Any) -> Any:
    weights = dflow.ShardedVariable(jnp.ones((COUNT, 2), dtype), shards=500)
    return (jnp.ones(COUNT, dtype) @ weights)[0]


def softmax(dtype: Any) -> Any:
    """The exponential of a cross entropy over equal classes is their number."""
    weights = dflow.ShardedVariable(jnp.zeros((COUNT, 2), dtype), shards=300)
    loss = dflow.softmax_cross_entropy(weights, jnp.ones(2, dtype), jnp.int32(3))
    assert loss.dtype == dtype
    return loss.astype(jnp.float32), np.log(COUNT)


SUMS: dict[str, Callable[[Any], Any]] = {
    "bag": lambda dtype: table_of(dtype).bag(IDS[None])[0, 0],
    "segments": lambda dtype: segments_of(table_of(dtype)),
    "segments on shards": lambda dtype: segments_of(table_of(dtype, shards=2)),
    "weights": lambda dtype: segments_of(table_of(dtype), weights=jnp.full(COUNT, 0.1)) * 10,
    "mean": lambda dtype: segments_of(table_of(dtype), combine="mean") * COUNT,
    "weighted mean": lambda dtype: segments_of(table_of(dtype), combine="mean", weights=jnp.full(COUNT, 0.1)) * COUNT,
    "gradient": gradient,
    "row gradient": row_gradient,
    "scatter_add": scattered,
    "eager scatter_add": lambda dtype: scattered(dtype, compiled=False),
    "scatter_sub": lambda dtype: scattered(dtype, update="scatter_sub"),
    "scatter_add of shards": lambda dtype: scattered(dtype, shards=2),
    "batch": in_a_batch,
    "accumulator": lambda dtype: accumulated(dtype, "sum", 10, 300),
    "mean of an accumulator": lambda dtype: accumulated(dtype, "mean", COUNT, 40),
    "rows of an accumulator": accumulated_rows,
    "sum": lambda dtype: dflow.ShardedVariable(jnp.ones((COUNT, 2), dtype), shards=500).sum(0)[0],
    "mean of an array": lambda dtype: dflow.ShardedVariable(jnp.full((200, 600), COUNT, dtype), shards=2).mean(),
    "product": product,
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("way", SUMS)
def test_a_sum_of_few_bits_is_rounded_once(way: str, dtype: Any) -> None:
    found = SUMS[way](dtype)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.float32(found), np.float32(dtype(COUNT)), rtol=2**-8)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_softmax_of_few_bits_over_many_shards(dtype: Any) -> None:
    np.testing.assert_allclose(*softmax(dtype), rtol=2**-8)


def test_sums_on_tasks_and_of_a_vocabulary() -> None:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            table = table_of(jnp.bfloat16)
            grown = dflow.Embedding(
                8, 2, dtype=jnp.bfloat16, initializer=ONES, name="grown", vocabulary=dflow.Vocabulary()
            )
        assert segments_of(table) == segments_of(grown) == jnp.bfloat16(COUNT)
        dflow.jit(table.scatter_add)(IDS, jnp.ones((COUNT, 2), jnp.bfloat16))
        assert table.read()[0, 0] == jnp.bfloat16(COUNT)


def test_the_mean_of_large_integers_is_no_sum_of_32_bits() -> None:
    assert dflow.ShardedVariable(jnp.full((300, 100), 2**30), shards=3).mean() == 2.0**30


@pytest.mark.parametrize("bad", [-1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_segment_without_a_bag_is_named(bad: int, compiled: bool) -> None:
    table = table_of(jnp.float32)

    def bags(segments: Any) -> Any:
        return table.bag(IDS[:2], segments=segments, bags=2)

    with pytest.raises(dflow.InputError, match=rf"table 'table': expected segments from 0 to 1, got {bad} at \(1,\)"):
        (dflow.jit(bags) if compiled else bags)(jnp.array([0, bad]))
    with pytest.raises(dflow.InputError, match="expected segments from 0 to 1"):
        bags([0, bad])
    with pytest.raises(dflow.InputError, match="segments of bags: expected integers, got float32"):
        bags(jnp.zeros(2))

"""Embeddings: lookups by checked ids, and bags."""

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
from dflow.tracing.primitives import id_checks


@pytest.fixture
def table() -> dflow.Embedding:
    return dflow.Embedding(100, 4, name="words")


def test_an_embedding_begins_with_what_its_initialiser_gives() -> None:
    drawn = jax.random.key(1)
    made = dflow.Embedding(50, 3, initializer=jax.nn.initializers.glorot_uniform(), key=drawn, shards=4, by="modulo")
    np.testing.assert_array_equal(made.read(), jax.nn.initializers.glorot_uniform()(drawn, (50, 3), jnp.float32))
    words, others = (dflow.Embedding(1000, 16, name=name).read() for name in ("one", "another"))
    assert abs(words.std() - 0.25) < 0.01
    assert (words != others).any()
    assert (dflow.Embedding(9, 4).read() != dflow.Embedding(9, 4).read()).any()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 100], r"table 'words': expected ids from 0 to 99, got 100 at \(1,\)\n  at .*test_embedding.py:\d+\n  map"),
        ([[5, 7], [-1, 300]], r"got -1 at \(1, 0\), and 1 more ids outside"),
    ],
)
def test_an_id_without_a_row_is_named(table: dflow.Embedding, ids: Any, message: str) -> None:
    steps = dflow.Variable(0, name="steps")

    @dflow.jit
    def step(ids: Any) -> Any:
        steps.assign_add(1)
        return table(ids).sum()

    with pytest.raises(dflow.InputError, match=message):
        step(jnp.array(ids))
    assert steps.read() == 0
    with pytest.raises(dflow.InputError, match="expected ids from 0 to 99"):
        table(jnp.array(ids))


def map_of_jax(table: dflow.Embedding, ids: Any) -> Any:
    return dflow.jit(lambda ids: jax.lax.map(table, ids))(ids)


#: Ways to a lookup that XLA runs, or JAX transforms.
LOOKUPS: dict[str, Callable[[dflow.Embedding, Any], Any]] = {
    "scan": map_of_jax,
    "cond": lambda table, ids: dflow.jit(lambda ids: jax.lax.cond(ids[0] > 0, lambda: table(ids).sum(), lambda: 0.0))(
        ids
    ),
    "vmap": lambda table, ids: dflow.jit(jax.vmap(table))(ids),
    "vmap of a scan": lambda table, ids: jax.vmap(dflow.jit(lambda ids: jax.lax.map(table, ids)))(ids[None]),
    "grad of a scan": lambda table, ids: dflow.jit(
        lambda ids: dflow.grad(lambda: jax.lax.map(table, ids).sum(), table)()
    )(ids),
    "evaluation": lambda table, ids: dflow.evaluate(lambda ids: jax.lax.map(table, ids).mean(), [ids]),
    "compiled": lambda table, ids: dflow.jit(lambda ids: jax.lax.map(table, ids)).lower(ids).compile()(ids),
    "bag": lambda table, ids: dflow.jit(lambda ids: jax.lax.map(lambda id: table.bag(id[None]), ids))(ids),
    "softmax": lambda table, ids: dflow.jit(
        lambda ids: jax.lax.map(lambda id: dflow.softmax_cross_entropy(table, jnp.ones(4), id), ids)
    )(ids),
}


@jax.jit
def computed_later(ids: Any) -> Any:
    """The ids, which are not computed yet when the call returns."""
    return ids + (jax.lax.fori_loop(0, 3_000_000, lambda _, x: jnp.cos(x), 0.5) > 2)


@pytest.mark.parametrize("way", LOOKUPS)
def test_an_id_without_a_row_is_one_error_in_every_program(
    table: dflow.Embedding, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(dflow.InputError) as caught:
        LOOKUPS[way](table, computed_later(jnp.array([1, 111])))
    fact, line, remedy = str(caught.value).split("\n")
    assert fact.startswith("table 'words': expected ids from 0 to 99, got 111")
    assert "test_embedding.py:" in line
    assert remedy.startswith("  map the ids to the rows")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert caplog.text == ""


def test_a_failed_check_in_a_loop_changes_no_variable(table: dflow.Embedding) -> None:
    steps = dflow.Variable(0, name="steps")

    @dflow.jit
    def step(ids: Any) -> Any:
        steps.assign_add(1)
        return jax.lax.map(table, ids)

    with pytest.raises(dflow.InputError):
        step(jnp.array([1, 111]))
    assert not any(error.__traceback__ for error in id_checks._failed.values())  # its frames hold batches
    assert steps.read() == 0
    step(jnp.array([1, 2]))
    assert steps.read() == 1


#: Loops and branches around a step that takes ids.
LOOPS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "scan": lambda step, ids: jax.lax.map(step, ids).sum(),
    "cond": lambda step, ids: jax.lax.cond(ids.sum() > 0, step, lambda _: 0.0, ids[1]),
}


@pytest.mark.parametrize("way", LOOPS)
def test_a_loop_that_looks_up_and_writes_a_table_of_one_task(way: str) -> None:
    def run(table: dflow.Embedding, ids: Any) -> Any:
        def step(ids: Any) -> Any:
            seen = table(ids).sum()
            table.scatter_add(ids, jnp.ones((2, 2)))
            return seen

        return dflow.jit(lambda ids: LOOPS[way](step, ids))(ids)

    ids, make = np.array([[0, 5], [5, 2]]), lambda: jnp.arange(12.0).reshape(6, 2)
    alone = dflow.Embedding(6, 2, initializer=lambda *_: make())
    with memory_cluster(ps=1, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            table = dflow.Embedding(6, 2, initializer=lambda *_: make(), name=f"of one task, {way}")
        np.testing.assert_array_equal(run(table, ids), run(alone, ids))
        np.testing.assert_array_equal(table.read(), alone.read())
        with pytest.raises(dflow.InputError, match="expected ids from 0 to 5, got 6"):
            run(table, ids + 1)


def test_a_bag_is_the_weighted_sum_or_mean_of_its_rows(table: dflow.Embedding) -> None:
    rows = np.asarray(table.read())
    ids = np.array([[1, 2, 3], [4, 5, 5]])
    weights = np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]], np.float32)
    weighted = (rows[ids] * weights[..., None]).sum(1)
    np.testing.assert_allclose(table.bag(ids), rows[ids].sum(1), rtol=1e-5)
    np.testing.assert_allclose(table.bag(ids, combine="mean"), rows[ids].mean(1), rtol=1e-5)
    np.testing.assert_allclose(table.bag(ids, weights=weights), weighted, rtol=1e-5)
    np.testing.assert_allclose(table.bag(ids, weights=weights, combine="mean")[0], weighted[0] / 3, rtol=1e-5)
    assert not table.bag(ids, weights=weights, combine="mean")[1].any()
    ragged = dflow.jit(lambda: table.bag(ids.ravel(), segments=jnp.array([0, 0, 0, 0, 2, 2]), bags=4, combine="mean"))()
    np.testing.assert_allclose(ragged[0], rows[[1, 2, 3, 4]].mean(0), rtol=1e-5)
    assert not ragged[1].any()
    np.testing.assert_allclose(ragged[2], rows[5], rtol=1e-5)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (3, {}, "expected a dimension of ids, got a scalar"),
        ([1, 2, 3], {"combine": "max"}, "expected 'sum' or 'mean', got 'max'"),
        ([1, 2, 3], {"weights": [1.0]}, r"expected the shape of the ids, \(3,\), got \(1,\)"),
        ([1, 2, 3], {"segments": [0, 0, 1]}, "and bags=None"),
        ([1, 2, 3], {"segments": [0], "bags": 2}, r"got \(1,\) and bags=2"),
        ([1, 2, 3], {"bags": 2}, "got None and bags=2"),
    ],
)
def test_a_bag_with_wrong_arguments_is_refused(table: dflow.Embedding, ids: Any, options: Any, message: str) -> None:
    with pytest.raises(dflow.InputError, match=message):
        table.bag(ids, **options)


def test_a_lookup_of_no_ids_has_their_shape(table: dflow.Embedding) -> None:
    assert table(jnp.zeros((0, 3), jnp.int32)).shape == (0, 3, 4)


@pytest.mark.parametrize("ids", [np.array([2**32 + 5]), np.array([2**32 - 1], np.uint32), np.array([-(2**31) - 7])])
def test_an_id_of_many_bits_does_not_wrap_around(table: dflow.Embedding, ids: Any) -> None:
    with pytest.raises(dflow.InputError, match=f"expected ids from 0 to 99, got {ids[0]} at"):
        table(ids)
    with pytest.raises(dflow.InputError, match=f"expected ids from 0 to 99, got {ids[0]} at"):
        dflow.jit(lambda: table(ids))()
    sharded = dflow.ShardedVariable(lambda: jnp.zeros((100, 2)), shards=3, name="sharded")
    sharded.scatter_add(ids, jnp.ones((1, 2)))
    assert not sharded.read().any()
    with pytest.raises(dflow.InputError, match="expected ids from 0 to 99"):
        dflow.softmax_cross_entropy(table, jnp.ones((1, 4)), ids)


def test_a_bag_has_the_dtype_of_the_table() -> None:
    narrow = dflow.Embedding(9, 4, dtype=jnp.bfloat16, name="narrow")
    assert {narrow.bag(jnp.array([1, 2]), combine=combine).dtype for combine in ("sum", "mean")} == {narrow.dtype}

"""Sharded variables against one variable of the whole, embeddings, and tables trained by several workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.lowering.values.first_value import joined_rows
from dflow.tables.shard_layout import DIVISIONS
from dflow.testing import memory_cluster
from dflow.tracing.primitives import id_checks

SHAPE = (23, 4)
IDS = jnp.array([[3, 3, 22], [0, -1, 40]])


#: The divisions as arguments, by name. That by rows is uneven.
BY: dict[str, dict[str, Any]] = {by: {"by": by} for by in DIVISIONS} | {"rows": {"traffic": 1 / np.arange(1, 24)}}


def initial() -> Any:
    return jax.random.normal(jax.random.key(0), SHAPE)


#: Each division in one process, and one of them on a cluster.
PLACES = [*(("one process", by) for by in BY), ("cluster", "rows")]


@pytest.fixture(scope="module", params=["one process", "cluster"])
def servers(request: Any) -> Iterator[Any]:
    """A function whose contexts place variables."""
    if request.param == "one process":
        yield nullcontext
        return
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        yield worker.parameter_servers


@pytest.mark.once
@pytest.mark.parametrize(("servers", "by"), PLACES, indirect=["servers"])
def test_a_sharded_variable_is_read_and_written_as_the_whole_one(servers: Any, by: str) -> None:
    with servers():
        table = dflow.ShardedVariable(initial, shards=3, name=f"as whole {by}", **BY[by])
    whole = dflow.Variable(initial)
    np.testing.assert_array_equal(table.read(), whole.read())
    np.testing.assert_array_equal(table.gather(IDS), whole.gather(IDS))
    np.testing.assert_array_equal(table[2:9:3], whole.read()[2:9:3])
    places = jnp.array([1, 1, 22, -2, 50, -40])
    rows = jax.random.normal(jax.random.key(3), (6, 4))
    for kind in ("add", "sub", "mul", "max", "min", "update"):
        chosen = places[1:] if kind == "update" else places  # of two rows for one index either may stay
        getattr(table, f"scatter_{kind}")(chosen, rows[-len(chosen) :])
        getattr(whole, f"scatter_{kind}")(chosen, rows[-len(chosen) :])
        np.testing.assert_allclose(table.read(), whole.read(), rtol=1e-5)

    x, y, now = rows[:4], jax.random.normal(jax.random.key(4), (2, 23)), whole.read()
    found = dflow.jit(
        lambda: (
            table @ x,
            table @ x[0],
            y @ table,
            y[0] @ table,
            table.sum(),
            table.sum(-1),
            table.mean(0),
            table.mean(),
        )
    )()
    expected = (now @ x, now @ x[0], y @ now, y[0] @ now, now.sum(), now.sum(-1), now.mean(0), now.mean())
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5), found, expected)
    np.testing.assert_array_equal(table.max(1), now.max(1))
    np.testing.assert_array_equal(table.min(), now.min())
    table.assign(now[::-1])
    np.testing.assert_array_equal(table.read(), now[::-1])


@pytest.mark.once
@pytest.mark.parametrize(("servers", "by"), [("one process", "columns"), ("cluster", "modulo")], indirect=["servers"])
def test_optimizers_update_a_sharded_variable_as_the_whole_one(servers: Any, by: str) -> None:
    made = {}
    transformation = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))
    for kind in (dflow.ShardedVariable, dflow.Variable):
        options = {"shards": 3, **BY[by]} if kind is dflow.ShardedVariable else {}
        with servers():
            table = kind(initial, name=f"{kind.__name__} {by}", **options)
            made[kind] = table, dflow.Optimizer(transformation, [table], name=f"opt {kind.__name__} {by}")

    def step(table: Any, optimizer: dflow.Optimizer) -> Any:
        @dflow.jit
        def run(ids: Any, target: Any) -> Any:
            def loss() -> Any:
                return ((table.gather(ids) - target) ** 2).mean()

            value, gradients = dflow.value_and_grad(loss, [table])()
            optimizer.apply(gradients)
            return value, optax.tree.norm(gradients)

        return run

    steps = [step(*made[kind]) for kind in made]
    for number in range(3):
        sharded, whole = (run(IDS + number, jnp.full((2, 3, 4), float(number))) for run in steps)
        np.testing.assert_allclose(sharded, whole, rtol=1e-5)
    (table, _), (variable, _) = made.values()
    np.testing.assert_allclose(table.read(), variable.read(), rtol=1e-5, atol=1e-6)


@pytest.mark.once
def test_gradients_have_arrays_in_the_place_of_variables() -> None:
    table = dflow.ShardedVariable(initial, shards=2, name="differentiated")
    gradient = dflow.grad(lambda: (table.gather(IDS) ** 2).sum() + (table @ jnp.ones(4)).sum(), table)()
    expected = jax.grad(lambda w: (w[IDS] ** 2).sum() + (w @ jnp.ones(4)).sum())(initial())
    np.testing.assert_allclose(gradient.read(), expected, rtol=1e-5)
    assert jax.tree.map(jnp.shape, gradient).shards == ((12, 4), (11, 4))
    dflow.assign(table, jax.tree.map(jnp.zeros_like, gradient))
    assert not table.read().any()
    with pytest.raises(dflow.VariableError, match="expected a sharded variable, got one with ArrayImpl"):
        gradient.gather(IDS)


@pytest.mark.once
def test_only_ids_and_rows_travel() -> None:
    """The bytes sent depend on the ids that differ, not on the room for more or on the table."""
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            table = dflow.ShardedVariable(lambda: jnp.ones((1000, 8)), name="table")
            optimizer = dflow.Optimizer(optax.adagrad(0.1), [table], name="opt")
        assert [shard.device for shard in table.shards] == ["/job:ps/task:0", "/job:ps/task:1"]

        @dflow.jit
        def step(ids: Any) -> Any:
            value, gradients = dflow.value_and_grad(lambda: table.gather(ids).sum(), [table])()
            optimizer.apply(gradients)
            return value

        assert step(jnp.arange(300) // 3 * 7) == 2400.0
        sent = [edge for edge in worker.server.channel.traffic() if "ps" in edge.destination]
        assert sum(edge.size_bytes for edge in sent) == 100 * (4 + 8 * 4)
        assert len(sent) == 4


@pytest.mark.once
@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda table: table.gather(jnp.ones(2)), dflow.VariableShapeError, "has no gather here"),
        (lambda table: table.assign(jnp.ones(2)), dflow.VariableShapeError, r"expected an array of \(23, 4\), got"),
        (lambda table: table.scatter_add(IDS, jnp.ones(4)), dflow.VariableShapeError, r"expected rows of \(2, 3, 4\)"),
        (lambda table: table.sum(2), dflow.VariableShapeError, "expected -2 to 1, got 2"),
        (lambda table: table[1, 2], dflow.VariableShapeError, "expected integers or a slice"),
        (lambda table: table @ jnp.ones((1, 1, 4)), dflow.VariableShapeError, "expected matrices that fit"),
        (jnp.sum, TypeError, "ShardedVariable"),
        (
            lambda table: dflow.ShardedVariable(initial, shards=2, max_shard_bytes=9),
            dflow.VariableError,
            "expected one of shards, max_shard",
        ),
    ],
)
def test_what_does_not_fit_a_sharded_variable_is_refused(use: Any, error: type[Exception], message: str) -> None:
    table = dflow.ShardedVariable(initial, shards=2, name="table")
    with pytest.raises(error, match=message):
        use(table)


@pytest.mark.once
@pytest.mark.parametrize(("servers", "by"), [("one process", "rows"), ("cluster", "modulo")], indirect=["servers"])
def test_a_large_shard_begins_block_by_block(servers: Any, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks give the bits of the whole; an initialiser that needs the whole is not computed in blocks."""
    monkeypatch.setattr("dflow.tables.initial_part.BLOCK_BYTES", 1 << 20)
    shape = (3 << 16, 8)
    seen = []

    def noted(type: Any, starts: Any, rows_at: Any) -> Any:
        seen.append(len(starts))
        return joined_rows(type, starts, rows_at)

    for owner in ("dflow.lowering.programs.initial_ops", "dflow.distributed.task.variable_creation"):
        monkeypatch.setattr(f"{owner}.joined_rows", noted)
    for initial, blocks in (
        (lambda: jax.random.normal(jax.random.key(2), shape) * 0.1, 3),
        (lambda: jnp.cumsum(jnp.ones(shape), 0), 0),
    ):
        with servers():
            table = dflow.ShardedVariable(initial, shards=2, by=by, name=f"large {by} {blocks}")
        np.testing.assert_array_equal(table.read(), initial())
        assert seen == [blocks] * 2 * bool(blocks)
        seen.clear()


@pytest.mark.once
def test_rows_without_elements_are_gathered_and_scattered(servers: Any) -> None:
    with servers():
        empty = dflow.ShardedVariable(lambda: jnp.zeros((9, 0)), shards=2, name="no elements")
    assert dflow.jit(lambda: empty.gather(jnp.array([1, 8])))().shape == (2, 0)
    empty.scatter_add(jnp.array([1]), jnp.ones((1, 0)))


@pytest.mark.once
def test_booleans_are_scattered_by_max_and_min() -> None:
    seen = dflow.ShardedVariable(lambda: jnp.zeros(9, bool), shards=2, name="seen rows")
    seen.scatter_max(jnp.array([1, 8, 1]), jnp.array([True, True, False]))
    np.testing.assert_array_equal(np.flatnonzero(seen.read()), [1, 8])
    seen.scatter_min(jnp.array([8]), jnp.array([False]))
    np.testing.assert_array_equal(np.flatnonzero(seen.read()), [1])


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
        (
            [1, 100],
            r"table 'words': expected ids from 0 to 99, got 100 at \(1,\)\n  at .*test_sharded_variable.py:\d+\n  map",
        ),
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
    assert "test_sharded_variable.py:" in line
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


STEPS, BATCH = 4, 32


def batches(index: int) -> Iterator[tuple[Any, Any]]:
    draw = np.random.default_rng(index)
    for _ in range(STEPS):
        yield draw.integers(0, 1000, size=BATCH).astype(np.int32), draw.normal(size=(BATCH, 8)).astype(np.float32)


def built(place: AbstractContextManager[None]) -> tuple[dflow.Embedding, dflow.Optimizer]:
    with place:
        table = dflow.Embedding(1000, 8, name="table", by="modulo")
        return table, dflow.Optimizer(optax.adagrad(0.1), [table], name="optimizer")


def loss_of(table: dflow.Embedding, ids: Any, wanted: Any) -> Any:
    return ((table(ids) - wanted) ** 2).mean()


def expected() -> np.ndarray[Any, Any]:
    """The table after training in one process."""
    table, optimizer = built(nullcontext())

    @dflow.jit
    def step(first: Any, second: Any) -> None:
        def loss() -> Any:
            return (loss_of(table, *first) + loss_of(table, *second)) / 2

        optimizer.apply(dflow.grad(loss, [table])())

    for first, second in zip(batches(0), batches(1), strict=True):
        step(first, second)
    return np.asarray(table.read())


def test_two_synchronous_workers_train_as_one_process_and_send_rows_alone() -> None:
    with (
        memory_cluster(ps=2, workers=2) as cluster,
        closing(cluster.worker(0)) as first,
        closing(cluster.worker(1)) as second,
        ThreadPoolExecutor(2) as threads,
    ):

        def train(worker: Any) -> dflow.Embedding:
            table, optimizer = built(worker.parameter_servers())

            @dflow.jit
            def step(ids: Any, wanted: Any) -> Any:
                value, gradients = dflow.value_and_grad(lambda: loss_of(table, ids, wanted), [table])()
                optimizer.apply(gradients)
                return value

            run = dflow.distributed.Sync(worker).run(step, batches(int(worker is second)), steps=STEPS, name="run")
            assert len([*run]) == STEPS
            return table

        [table, _] = threads.map(train, (first, second))
        np.testing.assert_allclose(table.read(), expected(), rtol=1e-6, atol=1e-7)
        sent = sum(edge.size_bytes for edge in first.server.channel.traffic())
        # For each id its number, twice, and its row; to each of the tasks the number of the round.
        assert sent <= STEPS * (BATCH * (4 + 4 + 8 * 4) + 2 * 4)

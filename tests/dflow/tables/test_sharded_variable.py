"""Sharded variables against one variable of the whole: every method, gradients and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
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

pytestmark = pytest.mark.once

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


def test_rows_without_elements_are_gathered_and_scattered(servers: Any) -> None:
    with servers():
        empty = dflow.ShardedVariable(lambda: jnp.zeros((9, 0)), shards=2, name="no elements")
    assert dflow.jit(lambda: empty.gather(jnp.array([1, 8])))().shape == (2, 0)
    empty.scatter_add(jnp.array([1]), jnp.ones((1, 0)))


def test_booleans_are_scattered_by_max_and_min() -> None:
    seen = dflow.ShardedVariable(lambda: jnp.zeros(9, bool), shards=2, name="seen rows")
    seen.scatter_max(jnp.array([1, 8, 1]), jnp.array([True, True, False]))
    np.testing.assert_array_equal(np.flatnonzero(seen.read()), [1, 8])
    seen.scatter_min(jnp.array([8]), jnp.array([False]))
    np.testing.assert_array_equal(np.flatnonzero(seen.read()), [1])

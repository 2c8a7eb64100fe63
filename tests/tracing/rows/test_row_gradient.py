"""Gradients made of rows: equal to the dense ones, without a value of the table's size on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import dflow
from dflow.tracing.errors import GraphTypeError, VariableShapeError
from dflow.tracing.rows.row_gradient import RowGradient
from dflow.tracing.state.resources import Variable
from tests.tracing.rows.lookup_table import SCALE, TABLE, grown

INDICES = jnp.array([[3, 3], [0, -1], [11, 40]])


LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda t, i: t[i],
    "gather": lambda t, i: t.gather(i) if isinstance(t, Variable) else t[i],
    "clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "fill": lambda t, i: jnp.nan_to_num(jnp.take(t, i, axis=0)),
    "embed": lambda t, i: jax.jit(lambda j: jnp.asarray(t).at[j].get(mode="fill", fill_value=0.5))(i),
    "bytes": lambda t, i: jnp.asarray(t)[i.astype(jnp.int8)],
    "one": lambda t, i: t[i[0, 1]],
    "vmap": lambda t, i: jax.vmap(jax.vmap(lambda j: jnp.asarray(t)[j]))(i),
    "numbers": lambda t, i: jnp.asarray(t)[i[2, 1]] + jnp.asarray(t)[i[1, 1]],
}


@pytest.mark.parametrize("look_up", LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_gradient_of_lookups_is_rows_and_equals_jaxs(
    look_up: Callable[..., Any], compiled: bool, table: Variable, scale: Variable
) -> None:
    def loss(t: Any, s: Any, i: Any) -> Any:
        return (jnp.sin(look_up(t, i)) * s).sum() + (look_up(t, i + 1) ** 2).sum()

    both = dflow.value_and_grad(lambda i: loss(table, scale.read(), i), {"t": table, "s": scale}, rows=True)
    value, grads = (dflow.jit(both) if compiled else both)(INDICES)
    want, want_grads = jax.value_and_grad(loss, argnums=(0, 1))(TABLE, SCALE, INDICES)
    assert isinstance(grads["t"], RowGradient)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(grads["t"].dense(), want_grads[0], rtol=1e-6)
    np.testing.assert_allclose(grads["s"], want_grads[1], rtol=1e-6)
    graph = dflow.graph(both, INDICES).graph
    assert grown(both, INDICES) == []
    assert "var.read" not in [node.op.name for node in graph.nodes if node.inputs[:1] == graph.refs[:1]]


USES: dict[str, Callable[[Variable, Any], Any]] = {
    "sum": lambda t, i: t[i].sum() + t.read().sum(),
    "returned by a jit": lambda t, i: t[i].sum() + jnp.sum(jax.jit(lambda: t.read() + 0)()),
    "handed out by a jit": lambda t, i: t[i].sum() + jnp.sum(jax.jit(lambda: (t.read(), i))()[0]),
    "slice": lambda t, i: t[i].sum() + t[1:3].sum(),
    "written": lambda t, i: (t.assign_add(TABLE), t[i].sum())[1],
    "scattered": lambda t, i: (t.scatter_add(i, jnp.ones((3, 2, 2))), t[i].sum())[1],
    "columns": lambda t, i: t[i].sum() + t.read()[:, jnp.array([1, 0])].sum(),
}


@pytest.mark.parametrize("use", USES)
def test_any_other_use_makes_it_dense(use: str, table: Variable) -> None:
    gradient = dflow.grad(lambda i: USES[use](table, i), table, rows=True)(INDICES)
    assert isinstance(gradient, jax.Array)
    assert gradient.shape == TABLE.shape
    assert float(gradient.sum()) != 0.0


def test_second_order_through_the_whole_gradient(table: Variable) -> None:
    def outer(i: Any) -> Any:
        return (dflow.grad(lambda: jnp.sum(table[i] ** 3), table)() ** 2).sum()

    def plain(t: Any) -> Any:
        return (jax.grad(lambda u: (u[INDICES] ** 3).sum())(t) ** 2).sum()

    np.testing.assert_allclose(dflow.jit(dflow.grad(outer, table))(INDICES), jax.grad(plain)(TABLE), rtol=1e-5)


def test_a_variable_with_a_gradient_function_has_a_dense_one() -> None:
    clipped = dflow.Variable(TABLE, name="clipped", gradient=lambda g: jnp.clip(g, -1.0, 1.0))
    gradient = dflow.grad(lambda i: 5.0 * clipped[i].sum(), clipped, rows=True)(INDICES)
    assert gradient.shape == TABLE.shape
    assert float(gradient.max()) == 1.0


def test_row_gradients_are_added_scaled_and_cast() -> None:
    gradient = RowGradient(jnp.array([1, 1]), jnp.ones((2, 2)), (3, 2))
    dense = gradient.dense()
    np.testing.assert_array_equal(dense, [[0, 0], [2, 2], [0, 0]])
    for got, want in ((2.0 * gradient, 2 * dense), (gradient / 4, dense / 4), (-gradient, -dense)):
        np.testing.assert_array_equal(got.dense(), want)
    np.testing.assert_array_equal((gradient + gradient * 3).dense(), 4 * dense)
    assert gradient.astype(jnp.bfloat16).dense().dtype == gradient.astype(jnp.bfloat16).dtype == jnp.bfloat16
    leaves, tree = jax.tree.flatten(gradient)
    assert [leaf.shape for leaf in leaves] == [(2,), (2, 2)]
    assert jax.tree.unflatten(tree, leaves).shape == (3, 2)


def test_arithmetic_of_row_gradients_refuses_other_shapes() -> None:
    gradient = RowGradient(jnp.array([1, 1]), jnp.ones((2, 2)), (3, 2))
    with pytest.raises(GraphTypeError, match=r"of \(3, 2\) was added to ArrayImpl(.|\n)*gradient.dense"):
        gradient + jnp.ones((3, 2))
    with pytest.raises(GraphTypeError, match=r"of \(3, 2\) was added to one of \(4, 2\)"):
        gradient + RowGradient(jnp.array([1]), jnp.ones((1, 2)), (4, 2))
    with pytest.raises(GraphTypeError, match=r"of \(3, 2\) was scaled by an array of \(2,\)"):
        gradient * jnp.ones(2)


def test_it_is_added_to_a_variable_row_by_row(table: Variable) -> None:
    @dflow.jit
    def step(i: Any) -> None:
        gradient = dflow.grad(lambda: jnp.sum(table[i]), table, rows=True)()
        table.assign_add(-0.5 * gradient)
        table.assign_sub(0.5 * gradient)

    assert grown(step, INDICES) == []
    step(INDICES)
    np.testing.assert_allclose(table.read(), TABLE - jax.grad(lambda t: t[INDICES].sum())(TABLE), rtol=1e-6)
    wrong = RowGradient(jnp.array([1]), jnp.ones((1, 2)), (3, 2))
    for update in (table.assign_add, table.assign):
        with pytest.raises(VariableShapeError, match=r"was given a row gradient of \(3, 2\)(.|\n)*gradient.dense"):
            update(wrong)


def test_a_row_gradient_of_another_shape_is_refused(table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.sgd(0.1), [table])
    with pytest.raises(GraphTypeError, match=r"variable 'table' has the shape \(3, 2\), but the variable \(13, 2\)"):
        optimizer.apply([RowGradient(jnp.array([1]), jnp.ones((1, 2)), (3, 2))])


def test_small_integers_index_large_tables() -> None:
    large = dflow.Variable(jnp.arange(300.0), name="large")
    value, gradient = dflow.value_and_grad(lambda i: (large[i] ** 2).sum(), large, rows=True)(
        jnp.array([5, -1], jnp.int8)
    )
    assert value == 25.0 + 299.0**2
    np.testing.assert_array_equal(gradient.indices, [5, 299])


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_a_gather_that_starts_along_other_dimensions_too(mode: str, table: Variable) -> None:
    """With `clip`, a start along a dimension that is taken whole has no effect; with `fill`, every row is out of
    bounds.
    """
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    starts = jnp.array([[3, 1], [4, 0]])

    def loss(t: Any) -> Any:
        rows = jax.lax.gather(jnp.asarray(t), starts, numbers, (1, 2), mode=mode, fill_value=0.0)
        return (rows**2).sum()

    value, gradient = dflow.value_and_grad(lambda: loss(table), table, rows=True)()
    want, want_gradient = jax.value_and_grad(loss)(TABLE)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    dense = gradient.dense() if mode == "clip" else gradient
    np.testing.assert_allclose(dense, want_gradient, rtol=1e-6)


ONE = RowGradient(jnp.array([3, 3, -1]), jnp.ones((3, 2)), TABLE.shape)
TWO = RowGradient(jnp.array([5, 1, 0]), jnp.ones((3, 2)), TABLE.shape)
COMPUTED: dict[str, Callable[[], Any]] = {
    "added": lambda: jax.tree.map(jnp.add, ONE, TWO),
    "scaled": lambda: jax.tree.map(lambda x: -0.5 * x, ONE),
    "divided": lambda: jax.tree.map(lambda x: x / 2, ONE),
    "summed": lambda: jax.tree.map(jnp.sum, ONE),
    "clipped": lambda: jax.tree.map(lambda x: jnp.clip(x, -1, 1), ONE),
    "zero where not finite": lambda: jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), ONE),
    "cast": lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), ONE),
    "norm": lambda: optax.tree.norm(ONE),
    "raveled": lambda: ravel_pytree(ONE),
    "optax": lambda: optax.sgd(0.1).update(ONE, optax.sgd(0.1).init(TABLE)),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_arithmetic_never_reaches_the_indices(how: str) -> None:
    for compute in (COMPUTED[how], dflow.jit(COMPUTED[how])):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=r"key|abstract"):
            compute()


def test_it_passes_through_functions_of_jax() -> None:
    def chosen(g: Any, h: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(g.rows[0, 0] > 0, a, b), g, h)

    for jit in (jax.jit, dflow.jit):
        got = jit(chosen)(ONE, TWO)
        np.testing.assert_array_equal(got.indices, ONE.indices)
    stacked = jax.lax.map(lambda ids: RowGradient(ids, jnp.ones((2, 2)), TABLE.shape), INDICES)
    np.testing.assert_array_equal(stacked.indices, INDICES)
    shaped = jax.eval_shape(chosen, ONE, TWO)
    assert (shaped.indices.shape, shaped.indices.dtype) == ((3,), jnp.int32)
    np.testing.assert_array_equal(jax.vmap(lambda g: g.indices, in_axes=0)(stacked), INDICES)
    carried, _ = jax.lax.scan(lambda g, h: (chosen(h, g), None), ONE, jax.tree.map(lambda x: x[None], TWO))
    np.testing.assert_array_equal(carried.indices, TWO.indices)


@pytest.mark.parametrize("use", ["dense", "apply", "add", "assign"])
@pytest.mark.parametrize(
    ("indices", "rows", "got"),
    [
        (jnp.ones(3), jnp.ones((3, 2)), r"float32\[3\] and float32\[3,2\]"),
        (jnp.ones(3, bool), jnp.ones((3, 2)), r"bool\[3\]"),
        (jnp.ones(2, int), jnp.ones((3, 2)), r"int32\[2\] and float32\[3,2\]"),
        (jnp.ones(3, int), jnp.ones((3, 4)), r"int32\[3\] and float32\[3,4\]"),
    ],
)
def test_one_that_is_not_made_of_indices_and_rows_is_refused(
    use: str, indices: Any, rows: Any, got: str, table: Variable
) -> None:
    gradient = RowGradient(indices, rows, TABLE.shape)
    uses: dict[str, Callable[[], Any]] = {
        "dense": gradient.dense,
        "apply": lambda: dflow.Optimizer(optax.sgd(0.1), [table]).apply([gradient]),
        "add": lambda: ONE + gradient,
        "assign": lambda: table.assign_add(gradient),
    }
    with pytest.raises(GraphTypeError, match=rf"expected indices int32\[k\] and rows \[k,2\], got {got}(.|\n)*is_leaf"):
        uses[use]()

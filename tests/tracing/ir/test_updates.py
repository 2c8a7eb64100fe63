"""Updates and lookups: results equal to plain JAX, refused arguments, and arrays sent by a codec."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers

import dflow
from dflow.tracing.errors import DflowError, VariableError, VariableShapeError
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.ir.updates import KINDS
from dflow.tracing.ir.wire_codecs import CODECS, LARGEST, decoded, encoded, encoded_type
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.primitives.state_primitives import record_update
from dflow.tracing.state.resources import Variable
from dflow.tracing.syntax.text import parse, text
from tests.reference.interpret import interpret

HERE = Path(__file__).name
TABLE = np.arange(10, dtype=np.float32).reshape(5, 2)
INDICES = np.array([1, 1, -1, 7, -9], np.int32)
ROWS = np.arange(10, 20, dtype=np.float32).reshape(5, 2) / 4

#: Each update on a NumPy table. `at` repeats for equal indices, which indexing does not.
REFERENCE: dict[str, Any] = {
    "assign": np.copyto,
    "assign_add": lambda old, new: np.add(old, new, out=old),
    "assign_add_rounded": lambda old, new: np.add(old, new, out=old),
    "assign_sub": lambda old, new: np.subtract(old, new, out=old),
    "assign_mul": lambda old, new: np.multiply(old, new, out=old),
    "assign_max": lambda old, new: np.maximum(old, new, out=old),
    "assign_min": lambda old, new: np.minimum(old, new, out=old),
    "scatter_update": lambda old, at, rows: old.__setitem__(at, rows),
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_max": np.maximum.at,
    "scatter_min": np.minimum.at,
}


def operands_of(kind: str) -> tuple[Any, ...]:
    if not KINDS[kind].by_rows:
        return (ROWS,)
    # Which of several rows for one index remains is undefined, so each index occurs once.
    return (INDICES[1:], ROWS[1:]) if kind == "scatter_update" else (INDICES, ROWS)


def method(table: Variable, kind: str) -> Any:
    """Return the method for this kind of update. `assign_add_rounded`, which only an optimizer uses, has none."""
    return getattr(table, kind, None) or functools.partial(record_update, table, kind)


def expected(kind: str) -> Any:
    table, operands = TABLE.copy(), operands_of(kind)
    if KINDS[kind].by_rows:
        there = (operands[0] >= -5) & (operands[0] < 5)
        operands = tuple(operand[there] for operand in operands)
    REFERENCE[kind](table, *operands)
    return table


@pytest.fixture
def table() -> Variable:
    return dflow.Variable(TABLE, name="table")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_update_does_what_numpy_does(kind: str, compiled: bool, table: Variable) -> None:
    update = method(table, kind)
    before = table.read()
    (dflow.jit(update) if compiled else update)(*operands_of(kind))
    np.testing.assert_array_equal(table.read(), expected(kind))
    np.testing.assert_array_equal(before, TABLE)


@pytest.mark.parametrize("kind", KINDS)
def test_each_update_is_one_op_that_means_what_numpy_does_and_prints_and_parses(kind: str, table: Variable) -> None:
    graph = trace(method(table, kind), operands_of(kind), {}).graph
    np.testing.assert_array_equal(interpret(graph, operands_of(kind), {"table": TABLE})[1]["table"], expected(kind))
    effects = [effect.value for effect, ref in graph.nodes[0].effects if ref is graph.refs[0]]
    assert effects == (["write"] if kind == "assign" else ["read", "write"])
    printed = text(graph, locs=False)
    assert f" !%1: token = var.{kind}(%table, %" in printed
    assert text(parse(printed)) == printed
    assert len(graph.nodes) == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("indices", [INDICES, INDICES.reshape(5, 1), np.int32(3), np.zeros((0,), np.int64)])
def test_a_lookup_is_jax_indexing(indices: Any, compiled: bool, table: Variable) -> None:
    rows = (dflow.jit(table.gather) if compiled else table.gather)(indices)
    np.testing.assert_array_equal(rows, jnp.asarray(TABLE)[indices])
    np.testing.assert_array_equal(table[indices], jnp.asarray(TABLE)[indices])


def test_indexing_by_integers_with_a_type_is_recorded_as_a_lookup(table: Variable) -> None:
    graph = trace(lambda i: (table[i], table[1], table[1:3], table[i, i]), (INDICES,), {}).graph
    assert [node.op.name for node in graph.nodes if node.op.name.startswith("var.")] == [
        "var.gather",
        *["var.read"] * 3,
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "assign"])
def test_the_compiled_update_writes_into_the_variables_own_buffer(kind: str, table: Variable) -> None:
    step = dflow.jit(method(table, kind))
    operands = [jnp.asarray(operand) for operand in operands_of(kind)]
    step(*operands)

    def where() -> int:
        return int(table.home.store.table.buffer(table.key).unsafe_buffer_pointer())  # type: ignore[attr-defined]

    before = where()
    step(*operands)
    method(table, kind)(*operands)
    assert where() == before


ANY_DTYPE = [np.bool_, np.int8, np.uint32, np.float16, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*ANY_DTYPE, ml_dtypes.float8_e5m2, ml_dtypes.int4])
def test_any_dtype_is_read_assigned_and_looked_up(dtype: Any) -> None:
    v = dflow.Variable(jnp.zeros((3, 2), dtype))
    v.assign(jnp.ones((3, 2), dtype))
    v.scatter_update(jnp.array([2]), jnp.zeros((1, 2), dtype))
    v.assign_max(jnp.zeros((3, 2), dtype))
    assert v.gather(jnp.array([1, 2])).dtype == v.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(v.read(), np.complex64)[:, 0], [1, 1, 0])


def test_keys_are_read_written_and_looked_up_but_not_computed_with() -> None:
    keys = dflow.Variable(jax.random.split(jax.random.key(3), 4), name="keys")

    @dflow.jit
    def step() -> Any:
        keys.scatter_update(jnp.array([0]), keys.gather(jnp.array([2])))
        keys.assign(keys.read()[::-1])
        return jax.random.uniform(keys[jnp.int32(3)])

    assert step() == jax.random.uniform(jax.random.split(jax.random.key(3), 4)[2])
    for kind in set(KINDS) - {"assign", "scatter_update", "assign_add_rounded"}:
        with pytest.raises(VariableShapeError, match=rf"'keys' has no {kind}: key<fry>\[4\] cannot be computed with"):
            getattr(keys, kind)(*operands_of(kind))
    for value, remedy in ((jnp.ones(4), "give it keys of key<fry>"), (1.0, r"the shape \(4,\)")):
        with pytest.raises(VariableShapeError, match=rf"holds key<fry>\[4\] but assign was given(.|\n)*{remedy}"):
            keys.assign(value)


def test_truth_values_have_no_difference() -> None:
    flags = dflow.Variable(jnp.zeros(2, bool), name="flags")
    with pytest.raises(VariableShapeError, match=r"'flags' has no assign_sub: JAX has none for bool\[2\]"):
        flags.assign_sub(jnp.ones(2, bool))


WRONG: dict[str, tuple[Any, str]] = {
    "indices": (
        lambda v: v.scatter_add(jnp.ones(2), jnp.ones((2, 2))),
        r"holds f32\[5,2\] and has no scatter_add here: the indices are f32\[2\], not integers(.|\n)*give it integers",
    ),
    "lookup": (lambda v: v.gather([True]), r"has no gather here: the indices are bool\[1\], not integers"),
    "shape": (
        lambda v: v.scatter_max(jnp.arange(2), jnp.ones((3, 2))),
        r"holds f32\[5,2\], at these indices rows of f32\[2,2\], but scatter_max was given f32\[3,2\](.|\n)*\(2, 2\)",
    ),
    "dtype": (
        lambda v: v.scatter_mul(jnp.arange(2), jnp.ones((2, 2), jnp.int32)),
        r"scatter_mul was given i32\[2,2\](.|\n)*convert it with .astype\(jnp.float32\)",
    ),
    "whole": (
        lambda v: v.assign_max(jnp.ones(2)),
        r"holds f32\[5,2\] but assign_max was given f32\[2\](.|\n)*reshape or broadcast_to",
    ),
    "kind of number": (
        lambda v: v.assign(TABLE.astype(int)),
        r"but assign was given i\d+\[5,2\](.|\n)*astype\(jnp.float32",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_what_does_not_fit_names_both_types_the_line_and_the_remedy(wrong: str, traced: bool, table: Variable) -> None:
    update, message = WRONG[wrong]
    with pytest.raises(VariableShapeError, match=f"variable 'table' .*{message}") as caught:
        trace(lambda: update(table), (), {}) if traced else update(table)
    assert f"{HERE}:" in str(caught.value)


def test_a_scalar_has_no_rows() -> None:
    with pytest.raises(VariableShapeError, match=r"holds f32\[\] and has no gather here: f32\[\] has no rows"):
        dflow.Variable(1.0, name="one").gather(jnp.array([0]))


def test_an_unknown_reduction_is_refused(table: Variable) -> None:
    with pytest.raises(VariableError, match=r"assign_add was given reduce='mean'(.|\n)*give it None or 'sum'"):
        table.assign_add(ROWS, reduce="mean")


# Under vmap.


@pytest.mark.parametrize("depth", [1, 2])
def test_a_compiled_function_may_be_batched_from_outside(depth: int, table: Variable) -> None:
    other = Variable(jnp.float32(1), name="other")

    def step(delta: Any) -> Any:
        seen = other * 2 + delta.sum()
        table.assign_add(delta, reduce="sum")
        table.scatter_add(jnp.array([1, 1]), delta[:2], reduce="sum")
        other.assign_mul(2.0)
        return seen

    deltas = jnp.arange(60, dtype=jnp.float32).reshape(2, 3, 5, 2)
    batched = dflow.jit(step)
    for _ in range(depth):
        batched = jax.vmap(batched)
    seen = batched(deltas := deltas if depth == 2 else deltas[0])
    np.testing.assert_array_equal(seen, 2 + deltas.sum((-2, -1)))
    total = np.asarray(deltas).reshape(-1, 5, 2).sum(0)
    total[1] += total[0] + total[1]
    np.testing.assert_array_equal(table.read(), TABLE + total)
    assert float(other) == 2.0


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 1)])
def test_rows_are_summed_over_the_batch_when_asked(axes: Any, table: Variable) -> None:
    indices, rows = jnp.array([[0, 1], [1, 1]]), jnp.arange(8, dtype=jnp.float32).reshape(2, 2, 2)
    taken = [jnp.take(a, 0, 0) if axis is None else a for a, axis in zip((indices, rows), axes, strict=True)]
    want = TABLE.copy()
    for turn in range(2):
        one = [a if axis is None else jnp.take(a, turn, axis) for a, axis in zip(taken, axes, strict=True)]
        np.add.at(want, np.asarray(one[0]), np.asarray(one[1]))
    dflow.jit(jax.vmap(lambda i, r: table.scatter_add(i, r, reduce="sum"), in_axes=axes))(*taken)
    np.testing.assert_array_equal(table.read(), want)


def test_values_that_differ_along_the_batch_are_refused_unless_summed(table: Variable) -> None:
    for update in (
        lambda i: table.scatter_add(i, jnp.ones(2)),
        lambda i: table.assign_mul(jnp.full((5, 2), i.astype(jnp.float32))),
        dflow.jit(lambda i: table.assign(jnp.full((5, 2), i.astype(jnp.float32)))),
    ):
        with pytest.raises(DflowError, match=r'differs along the batch(.|\n)*reduce="sum"') as caught:
            jax.vmap(update)(jnp.arange(2))
        assert f"{HERE}:" in str(caught.value)
    for reduce in (None, "sum"):
        jax.vmap(lambda x, reduce=reduce: (table.assign_add(ROWS, reduce=reduce), x))(jnp.arange(3.0))
    np.testing.assert_array_equal(table.read(), TABLE + 2 * ROWS, "what is the same for the batch is written once")


def test_a_branch_that_the_batch_does_not_agree_on_may_not_write(table: Variable) -> None:
    def branching(x: Any) -> Any:
        return jax.lax.cond(x > 0, lambda: table.assign_add(ROWS), lambda: None)

    def looping(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c < 3, lambda c: (table.assign_add(ROWS), c + 1)[1], x)

    for fn, name in ((branching, "cond"), (looping, "while")):
        with pytest.raises(DflowError, match=rf"\(table\) are written under vmap inside a {name} that may(.|\n)*where"):
            jax.vmap(fn)(jnp.arange(3.0))
    dflow.jit(lambda flag: jax.vmap(lambda x: (branching(flag), x)[1])(jnp.arange(3.0)))(jnp.float32(1))
    np.testing.assert_array_equal(table.read(), TABLE + ROWS)


def test_reads_in_a_loop_that_each_element_leaves_by_itself_are_fine(table: Variable) -> None:
    def loops(limit: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < limit()[1], lambda c: c + limit(), x)

    start = np.arange(12, dtype=np.float32).reshape(2, 3, 2) - 6
    batched = jax.vmap(jax.vmap(lambda x: loops(lambda: table.read()[1], x)))
    want = jax.vmap(jax.vmap(lambda x: loops(lambda: TABLE[1], x)))(start)
    traced = trace(batched, (start,), {})
    np.testing.assert_array_equal(dflow.jit(batched)(start), want)
    np.testing.assert_array_equal(interpret(traced.graph, [*traced.constants, start], {"table": TABLE})[0][0], want)


SMALLER = [codec for codec in CODECS if codec != "none"]
#: Largest error of an element, relative to the element and to the largest element.
BOUNDS = {
    "bfloat16": (2.0**-8, 0.0),
    "float8_e4m3fn": (2.0**-4, 2.0**-10 / 448),
    "float8_e5m2": (2.0**-3, 2.0**-17 / 57344),
    "int8": (0.0, 0.5 / 127),
}
_DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


_ENCODED, _DECODED = jax.jit(encoded, static_argnums=0), jax.jit(decoded, static_argnums=(0, 2))


def left_of(codec: str, value: Any) -> np.ndarray[Any, Any]:
    array = jnp.asarray(value)
    type = ArrayType(array.dtype, array.shape)
    made = encoded_type(codec, type)
    if made is None:
        return np.asarray(array)
    sent = _ENCODED(codec, array)
    assert (sent.dtype, sent.shape) == (made.dtype, made.shape)
    arrived = _DECODED(codec, sent, type)
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    return np.asarray(arrived)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(_DTYPES))
    shape = draw(st.sampled_from([(), (0,), (3,), (8,), (2, 3, 5)]))
    scale = draw(st.sampled_from([1e-38, 1e-6, 1.0, 1e4, 3e38]))
    elements = st.floats(-1, 1, width=32)
    values = draw(numbers.arrays(np.float32, shape, elements=elements))
    with np.errstate(all="ignore"):
        return np.asarray((values * np.float32(scale)).astype(dtype))


@pytest.mark.parametrize("codec", SMALLER)
@given(value=arrays())
def test_an_error_is_within_the_bound_that_is_stated(codec: str, value: Any) -> None:
    finite = np.isfinite(value.astype(np.float64))
    left, wide = (array.astype(np.float64)[finite] for array in (left_of(codec, value), value))
    most = np.abs(wide).max(initial=0.0)
    relative, absolute = BOUNDS[codec]
    # Numbers below the smallest normal one may become zero. A coarse dtype rounds once more.
    tiny, rounding = float(np.finfo(np.float32).tiny), float(jnp.finfo(value.dtype).eps) / 2
    allowed = relative * np.abs(wide) * 1.0001 + absolute * most * 1.0001 + rounding * np.abs(left) + 1.01 * tiny
    if value.dtype == np.float16:
        allowed = allowed + 2.0**-24
    fits = (codec != "bfloat16") | (np.abs(wide) < 3.38e38)
    assert (np.abs(left - wide) <= allowed)[fits].all()


@pytest.mark.parametrize("codec", SMALLER)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf], ids=str)
def test_numbers_that_are_not_finite_stay_so_and_spoil_no_others(codec: str, special: float) -> None:
    left = left_of(codec, np.array([1.0, special, -0.5, 0.0], np.float32))
    assert not np.isfinite(left[1])
    keeps_infinities = codec in ("bfloat16", "float8_e5m2")
    assert np.isnan(left[1]) if np.isnan(special) or not keeps_infinities else left[1] == special
    np.testing.assert_allclose(left[[0, 2, 3]], [1.0, -0.5, 0.0], rtol=2**-3, atol=0.5 / 127)


@pytest.mark.parametrize(
    ("codecs", "dtypes", "shape"),
    [
        (CODECS, ["bool", "int8", "int32", "uint8", "complex64"], (8,)),
        (["bfloat16"], ["bfloat16", "float16"], (8,)),
        (["int8"], ["float32"], ()),
        (["int8"], ["float16"], (4,)),
    ],
)
def test_an_array_without_fractions_or_that_would_not_get_smaller_is_sent_as_it_is(
    codecs: Any, dtypes: list[str], shape: Any
) -> None:
    assert {encoded_type(codec, ArrayType(jnp.dtype(dtype), shape)) for codec in codecs for dtype in dtypes} == {None}


def test_each_codec_sends_its_number_of_bytes() -> None:
    wide = ArrayType(np.dtype(np.float32), (100, 10))
    sizes = {codec: made.size_bytes for codec in SMALLER if (made := encoded_type(codec, wide)) is not None}
    assert sizes == {"bfloat16": 2000, **dict.fromkeys(LARGEST, 1004)}


@pytest.mark.parametrize("codec", ["float8_e4m3fn", "int8"])
def test_double_precision_keeps_its_range(codec: str) -> None:
    with jax.enable_x64(True):
        left = left_of(codec, np.array([1e300, -5e299, 0.0]))
    np.testing.assert_allclose(left, [1e300, -5e299, 0.0], rtol=2**-4, atol=1e300 / 254)


@pytest.mark.parametrize("codec", SMALLER)
@given(value=arrays())
def test_a_graph_means_what_is_compiled(codec: str, value: Any) -> None:
    type = ArrayType(value.dtype, value.shape)
    made = encoded_type(codec, type)
    if made is None:
        return
    taken, small, left = Value("x", type), Value("small", made), Value("left", type)
    nodes = (
        Node(ops.net_encode, (taken,), (small,), {"codec": codec}),
        Node(ops.net_decode, (small,), (left,), {"codec": codec, "type": type}),
    )
    graph = Graph((taken,), nodes, (left,))
    assert text(parse(text(graph))) == text(graph)
    [meant], _ = interpret(graph, [jnp.asarray(value)], {})
    # A scale that rounds the other way moves a value between two steps to the other step.
    relative, absolute = BOUNDS[codec]
    most = np.abs(value.astype(np.float64)[np.isfinite(value.astype(np.float64))]).max(initial=0.0)
    np.testing.assert_allclose(
        left_of(codec, value).astype(np.float64),
        np.asarray(meant, np.float64),
        rtol=2 * relative + 2e-2,
        atol=2 * absolute * most + 2.4e-38,
    )


def wires_of(fn: Any, *args: Any) -> list[tuple[str, str]]:
    graph = trace(fn, args, {}).graph
    found = [node.attributes for node in graph.nodes if node.op.name == "jax.wire"]
    return [(attributes["codec"], attributes["gradient"]) for attributes in found]


X = jnp.arange(6.0).reshape(2, 3)


def test_a_wish_passes_through_jit_and_vmap_and_the_gradient_has_its_own() -> None:
    inner = jax.jit(lambda x: dflow.wire(x * 2, "int8", gradient="bfloat16"))
    assert wires_of(inner, X) == [("int8", "bfloat16")]
    assert wires_of(jax.jit(inner), X) == [("int8", "bfloat16")]
    assert wires_of(jax.vmap(inner), X) == [("int8", "bfloat16")]
    assert wires_of(jax.grad(lambda x: inner(x).sum()), X)[-1] == ("bfloat16", "int8")
    np.testing.assert_array_equal(jax.vmap(inner)(X), X * 2)
    np.testing.assert_array_equal(jax.grad(lambda x: inner(x).sum())(X), np.full((2, 3), 2.0))
    assert float(jax.jvp(lambda x: inner(x).sum(), (X,), (X,))[1]) == 30.0


def test_a_wish_changes_no_value_of_one_process() -> None:
    v = dflow.Variable(X / 3)
    tree = {"v": v, "n": np.arange(3), "x": X / 7, "number": 0.1}
    for wired in (dflow.wire(tree, "float8_e5m2"), dflow.jit(lambda: dflow.wire(tree, "float8_e5m2"))()):
        np.testing.assert_array_equal(wired["v"], X / 3)
        np.testing.assert_array_equal(wired["x"], X / 7)
        np.testing.assert_array_equal(wired["n"], np.arange(3))
        assert wired["n"].dtype == np.arange(3).dtype or wired["n"].dtype == np.int32
        assert wired["number"] == np.float32(0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dflow.wire(X, "int4"), r"wire was given the codec 'int4'(.|\n)*int8"),
        (
            lambda: dflow.wire(X, "bfloat16", gradient="brotli"),
            r"'brotli'(.|\n)*the codecs are none, bfloat16",
        ),
        (lambda: dflow.wire(["x"], "int8"), "wire was given a str, which has no numbers"),
    ],
)
def test_an_unknown_codec_or_a_value_that_is_no_array_is_refused(call: Any, message: str) -> None:
    with pytest.raises(dflow.GraphTypeError, match=message) as caught:
        call()
    assert HERE in str(caught.value)

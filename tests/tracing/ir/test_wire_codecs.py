"""Arrays that travel by a codec: their errors beside NumPy, and JAX's transformations of `dflow.wire`."""

from __future__ import annotations

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
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.ir.wire_codecs import CODECS, LARGEST, decoded, encoded, encoded_type
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.syntax.text import parse, text
from tests.reference.interpret import interpret

HERE = Path(__file__).name
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
        (lambda: dflow.wire(["x"], "int8"), "wire was given a str, which is no array"),
    ],
)
def test_an_unknown_codec_or_a_value_that_is_no_array_is_refused(call: Any, message: str) -> None:
    with pytest.raises(dflow.GraphTypeError, match=message) as caught:
        call()
    assert HERE in str(caught.value)

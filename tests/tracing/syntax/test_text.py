"""The text form: parsing gives the same graph for every content from JAX, and errors with a position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from dflow.tracing.errors import DflowError, ParseError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.jaxprs.attributes import Body, evaluate, normal, restored
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.syntax.text import marked, parse, text
from tests.effort import examples
from tests.graphs_ import graphs
from tests.reference.interpret import interpret

X = jnp.arange(20.0).reshape(4, 5) / 7 - 1
IMAGE = jnp.arange(128.0).reshape(1, 8, 8, 2) / 100


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * x,))

TABLE = np.arange(5, dtype=np.float32)

#: Functions whose graphs are also run after parsing.
RUNNING: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "relu": (jax.nn.relu, (X,)),
    "conv": (
        lambda x: jax.lax.conv_general_dilated(
            x, jnp.ones((3, 3, 2, 4)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (IMAGE,),
    ),
    "gather with a fill": (lambda x, i: x.at[i].get(mode="fill", fill_value=7.0), (X, np.array([2, 9]))),
    "scatter add": (lambda x, i: x.at[i].add(0.5), (X, np.array([2, 2]))),
    "scan": (lambda x: jax.lax.scan(lambda c, a: (c + a * 0.5, c * a), x[0], x), (X,)),
    "scan in a scan": (
        lambda x: jax.lax.scan(lambda c, a: (jax.lax.scan(lambda d, b: (d + b, None), c, a)[0], c), 0.0, x),
        (X,),
    ),
    "cond": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: -x, x), (X,)),
    "switch": (lambda x, i: jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x), (X, 1)),
    "while": (lambda x: jax.lax.while_loop(lambda c: c.max() < 9, lambda c: c * 2 + 1, x), (X,)),
    "nested jit": (jax.jit(lambda y: jnp.sin(y) + TABLE), (X,)),
    "custom vjp": (clipped, (X,)),
    "gradient of a custom vjp": (jax.grad(lambda x: clipped(x).sum()), (X,)),
    "remat": (jax.grad(jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)).sum())), (X,)),
    "random permutation": (lambda x: jax.random.permutation(jax.random.key(1), x), (X,)),
    "dot in bf16": (lambda x: jnp.dot(x.astype(jnp.bfloat16), x.T, preferred_element_type=jnp.float32), (X,)),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), (X,)),
    "gradient of a max pool": (
        jax.grad(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "SAME").sum()),
        (X,),
    ),
    "tangent of integers": (
        lambda x, i: jax.jvp(lambda x, i: x[i], (x, i), (x, jnp.zeros_like(i, jax.dtypes.float0)))[1],
        (X, np.array([2, 1])),
    ),
    "int4": (lambda x: x.astype(jnp.int4) + jnp.int4(3), (X,)),
}


class Unprintable:
    """Identity function without a repr."""

    def __call__(self, x: Any) -> Any:
        return x

    def __repr__(self) -> str:
        raise ValueError("no repr of mine")


#: Functions whose graphs have a value without a text form.
READ_ONLY: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "callback": (lambda x: jax.pure_callback(lambda y: y, x, x), (X,)),
    "callback whose repr raises": (lambda x: jax.pure_callback(Unprintable(), x, x), (X,)),
    "print": (lambda x: jax.debug.print("{}", x), (X,)),
    "linear solve": (lambda x: jax.scipy.linalg.solve(x @ x.T + 9 * jnp.eye(4), x[:, 0]), (X,)),
    "reduce by a function": (lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a * 2 + b, (0,)), (X,)),
    "sharding": (
        lambda x: jax.lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        (X,),
    ),
    "large constant in a jit": (
        jax.jit(lambda y: y + np.arange(20.0, dtype=np.float32).reshape(4, 5)),
        (X,),
    ),
}


@pytest.mark.parametrize("name", [*RUNNING, *READ_ONLY])
def test_the_text_of_a_traced_function_reads_back_to_the_same_text(name: str) -> None:
    fn, arguments = (RUNNING | READ_ONLY)[name]
    printed = text(trace(fn, arguments, {}).graph)
    assert text(parse(printed)) == printed
    assert " at 0x" not in printed


#: Those of them that the interpreter breaks into parts.
CONTROL = [name for name in RUNNING if any(word in name for word in ("scan", "cond", "switch", "while", "custom vjp"))]
CONTROL += ["relu", "nested jit", "remat"]


def assert_gives(outputs: Any, name: str) -> None:
    fn, arguments = RUNNING[name]
    for output, wanted in zip(outputs, jax.tree.leaves(jax.jit(fn)(*arguments)), strict=True):
        np.testing.assert_allclose(np.asarray(output, wanted.dtype), wanted, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", RUNNING)
def test_a_graph_read_back_binds_to_what_the_function_gives(name: str) -> None:
    fn, arguments = RUNNING[name]
    traced = trace(fn, arguments, {})
    body = Body(parse(text(traced.graph)))
    assert_gives(jax.jit(lambda *inputs: evaluate(body, inputs))(*traced.constants, *arguments), name)


@pytest.mark.parametrize("name", CONTROL)
def test_a_graph_runs_node_by_node_to_what_the_function_gives(name: str) -> None:
    fn, arguments = RUNNING[name]
    traced = trace(fn, arguments, {})
    for graph in (traced.graph, parse(text(traced.graph))):
        assert_gives(interpret(graph, [*traced.constants, *arguments], {})[0], name)


@given(graphs())
@settings(max_examples=examples(60))
def test_any_graph_reads_back_to_the_same_text(graph: Graph) -> None:
    printed = text(graph)
    assert text(parse(printed)) == printed
    assert text(parse(text(graph, locs=False))) == text(graph, locs=False)


def test_a_graph_read_back_says_which_attribute_keeps_it_from_running() -> None:
    fn, arguments = READ_ONLY["callback"]
    graph = parse(text(trace(fn, arguments, {}).graph))
    with pytest.raises(DflowError, match=r"node %1 \(jax.pure_callback\) cannot run: its attribute 'callback' is <"):
        interpret(graph, arguments, {})


def test_large_constants_are_told_apart_by_a_digest() -> None:
    def printed(constant: Any) -> str:
        return text(trace(jax.jit(lambda y: y + constant), (np.zeros(40, np.float32),), {}).graph, False)

    one, other = np.zeros(40, np.float32), np.ones(40, np.float32)
    assert "<array f32[40] " in printed(one)
    assert printed(one) == printed(one.copy()) != printed(other)


GOOD = """\
graph(%w: ref<f32[3]> @/job:ps/task:0, %x: f32[3]) {
 !%w_1: f32[3] = var.read(%w)  # train.py:14
  %1: f32[3] = jax.mul(%w_1, 2.0:f32[]) {out_dtype=None}  # train.py:15
 !%2: token = var.assign_add(%w, %1)  @with-state  after(%w_1)
  return %1
}"""


def test_a_graph_is_printed_in_the_form_that_is_parsed() -> None:
    graph = parse(GOOD)
    assert text(graph) == GOOD
    assert [node.device for node in graph.nodes] == [None, None, "with-state"]
    assert [str(node.loc) for node in graph.nodes] == ["train.py:14", "train.py:15", "None"]
    assert graph.nodes[2].after == graph.nodes[0].outputs
    assert graph.inputs[0].device == "/job:ps/task:0"


def test_comments_and_blanks_of_ones_own_are_skipped() -> None:
    assert text(parse("# a comment\n" + GOOD.replace("{\n", "{  # begins\n\n", 1) + "\n# the end\n")) == GOOD


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("var.read(%w)", "var.read(%v)", r"line 2, column 27: %v is not defined above; a value is defined before"),
        ("%1: f32[3]", "%w_1: f32[3]", r"line 3, column 3: %w_1 is defined twice"),
        ("%x: f32[3]", "%x: f33[3]", r"line 1, column 44: 'f33' is not a dtype; the dtypes are bf16"),
        ("%x: f32[3]", "%x f32[3]", r"line 1, column 43: expected ':', found 'f32\[3\]\) \{'"),
        (
            "var.read",
            "var.reed",
            r"line 2, column 18: 'var.reed' is not an op; an op is jax.<primitive> or one of accum",
        ),
        (" !%w_1", "  %w_1", r"the node before, %w_1 \(var.read\), has effects; its line must start with '!'"),
        ("  %1:", " !%1:", None),
        ("2.0:f32[]", "2.0", r"line 3, column 33: expected a type after the literal, as in 2.0:f32\[\], found '\)"),
        ("{out_dtype=None}", "{out_dtype=}", r"line 3, column 52: expected an attribute's value, found '}"),
        ("{out_dtype=None}", '{out_dtype="a}', r"line 3, column 52: this string does not end"),
        ("return %1\n}", "return %1\n", r"expected '}', found the end"),
        ("return %1\n}", "return %1\n} x", r"line 6, column 3: expected the end, found 'x'"),
        ("%x: f32[3])", "%x: f32[3] = [1.0, 2.0, 3.0]:f32[3])", r"only a body inside a node may have inputs"),
    ],
)
def test_a_malformed_text_is_refused_with_its_position(before: str, after: str, message: str | None) -> None:
    assert before in GOOD
    broken = GOOD.replace(before, after, 1)
    if message is None:
        assert text(parse(broken)) == broken
        return
    with pytest.raises(ParseError, match=message):
        parse(broken)


def test_a_node_is_marked_among_at_most_ten_on_either_side() -> None:
    def long(x: Any) -> Any:
        for _ in range(40):
            x = jnp.sin(x)
        return x

    graph = trace(long, (1.0,), {}).graph
    lines = marked(graph, graph.nodes[20]).split("\n")
    assert [line for line in lines if line.startswith("-->")] == [line for line in lines if "%21:" in line]
    assert len(lines) == 1 + 1 + 21 + 1 + 2
    assert "... 10 nodes before" in lines[1]
    assert "... 9 nodes after" in lines[-3]


def test_an_attribute_that_names_a_kind_of_memory_is_carried() -> None:
    assert restored(normal({"memory_space": jax.memory.Space.Device})) == {"memory_space": jax.memory.Space.Device}

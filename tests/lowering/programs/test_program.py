"""Programs: their arguments, initialisers, prefetched lookups, and the pure function of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jex

import dflow
from dflow.lowering.programs.discharge import Discharged, discharge
from dflow.lowering.programs.initial_ops import SENT_BYTES, Exports, InitialOps, Recipe
from dflow.lowering.programs.prefetch import LEAST_TABLE_BYTES, prefetched
from dflow.lowering.programs.program import export_program, load_program, lower_program
from dflow.tracing.errors import InternalError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.syntax.text import parse
from tests.effort import examples
from tests.lowering.flat_programs import run_flat
from tests.lowering.meaning import assert_equal_states, assert_equal_values
from tests.lowering.stateful_graphs import some_inputs, some_state, stateful_graphs
from tests.reference.interpret import interpret

F32 = ArrayType(np.dtype("float32"), (3,))
Flat = Callable[..., list[Any]]
I32 = ArrayType(np.dtype("int32"), ())


def compiled(fn: Callable[..., list[jax.Array]], types: list[ArrayType], writes: int) -> Flat:
    return partial(run_flat, lower_program(fn, types, writes).compile(), writes)


def exported(fn: Callable[..., list[jax.Array]], types: list[ArrayType], writes: int) -> Flat:
    return partial(run_flat, load_program(export_program(fn, types), writes), writes)


either = pytest.mark.parametrize("make", [compiled, exported])
Make = Callable[[Callable[..., list[jax.Array]], list[ArrayType], int], Flat]


def values(count: int) -> list[jax.Array]:
    return [jnp.full(3, index, jnp.float32) for index in range(count)]


def scale(w: jax.Array, v: jax.Array, n: jax.Array) -> list[jax.Array]:
    return [w + v * n, v.sum()]


@either
def test_what_it_writes_is_overwritten_and_nothing_else(make: Make) -> None:
    program = make(lambda a, b, c: [a + c, b + c], [F32] * 3, 2)
    arguments = values(3)
    program(*arguments)
    assert [argument.is_deleted() for argument in arguments] == [True, True, False]


@either
def test_plain_numpy_arrays_are_taken_and_left_alone(make: Make) -> None:
    program = make(lambda w, x: [w + x], [F32] * 2, 1)
    arguments = [np.ones(3, np.float32), np.ones(3, np.float32)]
    assert program(*arguments)[0].tolist() == [2.0] * 3
    assert [argument.tolist() for argument in arguments] == [[1.0] * 3] * 2


def test_an_exported_program_is_bytes_for_this_platform_and_the_cpu() -> None:
    blob = export_program(scale, [F32, F32, I32], "train_step")
    assert isinstance(blob, bytes)
    read = jax.export.deserialize(bytearray(blob))
    assert read.fun_name == "train_step"
    assert set(read.platforms) == {"cpu", jax.default_backend()}
    for view in (bytearray(blob), memoryview(blob)):
        assert run_flat(load_program(view, 1), 1, *values(2), jnp.int32(1))[1].item() == 3.0


@either
def test_results_have_buffers_of_their_own(make: Make) -> None:
    program = make(lambda w, v, x: [x, v, x, v * 2], [F32] * 3, 1)
    arguments = values(3)
    for _ in range(3):
        results = program(jnp.zeros(3, jnp.float32), *arguments[1:])
        places = [array.unsafe_buffer_pointer() for array in (*results, *arguments[1:])]
        assert len(set(places)) == len(places)
        assert [result.tolist()[0] for result in results] == [2, 1, 2, 2]


KEY = jax.random.key(3)
ROW = np.linspace(-1, 1, 257, dtype=np.float32)
init = jax.nn.initializers

signed_p = jex.Primitive("signed")
signed_p.def_impl(lambda x, by: x * by)
signed_p.def_abstract_eval(lambda x, **_: x)


def normalised() -> Any:
    x = jax.random.normal(KEY, (999,))
    return (x - x.mean()) / x.std()


INITIALISERS: dict[str, Callable[[], Any]] = {
    "scaled": lambda: jax.random.normal(KEY, (64, 64)) * 0.02,
    "normalised": normalised,
    "of ops that JAX inlines in a trace": lambda: jax.random.lognormal(KEY, 0.7, (999,)),
    "of branches": lambda: jax.random.binomial(KEY, 20, 0.3, (99,)),
    "of a linear solver": lambda: init.orthogonal()(KEY, (16, 16)),
    "of an old key": lambda: jax.random.normal(jax.random.PRNGKey(7), (99,)) * 0.02,
    "of one of several keys": lambda: jax.random.normal(jax.random.split(KEY, 3)[1], (99,)),
    "of another kind of keys": lambda: jax.random.uniform(jax.random.key(1, impl="rbg"), (99,)) * 0.3,
    "of a loop": lambda: jax.lax.scan(lambda c, x: (c * 1.1 + x, c), 1.0, jnp.arange(50.0))[1],
    "of an array closed over": lambda: jnp.asarray(ROW) * 3 + 1,
    "of few bits": lambda: jnp.full((3,), 2.3, jnp.bfloat16) * 1.1,
}


def cooked(recipe: Recipe, blobs: list[bytes]) -> Any:
    """Return the value of a recipe."""
    programs = [load_program(blob, 0) for blob in blobs]
    values: list[Any] = list(recipe.arrays)
    for program, takes in recipe.calls:
        values += programs[program](*(values[number] for number in takes))
    return values[recipe.result]


@pytest.mark.parametrize("name", INITIALISERS)
def test_the_ops_give_the_bits_of_the_initialiser_here_and_elsewhere(name: str) -> None:
    initial, exports = INITIALISERS[name], Exports()
    ops, wanted = InitialOps(initial), initial()
    found = ops(), cooked(ops.recipe(exports), exports.blobs)
    assert [value.dtype for value in found] == [wanted.dtype] * 2
    for value in found:
        np.testing.assert_array_equal(value, wanted)


def test_initialisers_that_differ_in_numbers_share_their_programs() -> None:
    exports = Exports()
    recipes = [
        InitialOps(lambda n=n: jax.random.normal(jax.random.key(n), (9, 9)) * (0.1 * n)).recipe(exports)
        for n in range(1, 5)
    ]
    assert len(exports.blobs) == len(recipes[0].calls)
    assert len({tuple(recipe.calls) for recipe in recipes}) == 1


def test_parameters_that_compare_equal_and_differ_in_bits_have_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.lowering.programs.initial_ops.export_program", lambda *_: b"")
    exports = Exports()
    for by in (0.0, -0.0, 0.0):
        InitialOps(lambda by=by: signed_p.bind(jnp.ones(3), by=by)).recipe(exports)
    assert len(exports.blobs) == 3  # one of them for the ones


def test_a_recipe_is_for_values_that_are_larger_than_what_makes_them() -> None:
    many, few = (SENT_BYTES,), (SENT_BYTES // 4,)
    table = np.ones(many, np.float32)
    assert InitialOps(lambda: jnp.zeros(many)).are_sent
    assert not InitialOps(lambda: jnp.zeros(few)).are_sent
    assert not InitialOps(lambda: jnp.asarray(table) + 1).are_sent
    assert not InitialOps(lambda: jnp.asarray(table)).are_sent


def test_what_is_closed_over_is_read_at_once() -> None:
    row = np.ones(3, np.float32)
    scale = 2.0
    ops = InitialOps(lambda: jnp.asarray(row) * scale)
    row[:] = 7
    scale = 5.0
    np.testing.assert_array_equal(ops(), [2, 2, 2])


def test_the_ops_run_outside_of_the_trace_that_asks_for_them() -> None:
    ops, seen = InitialOps(lambda: jnp.arange(3.0) * 2), []
    jax.make_jaxpr(lambda: seen.append(ops()) or 0)()  # type: ignore[func-returns-value]
    np.testing.assert_array_equal(seen[0], [0, 2, 4])


ROWS = LEAST_TABLE_BYTES // 4 // 64


def table(rows: int = ROWS, shape: tuple[int, ...] = (64,), dtype: Any = jnp.float32) -> jax.Array:
    """A table whose elements are all different where the dtype allows."""
    return jnp.arange(rows * np.prod(shape, dtype=int)).reshape(rows, *shape).astype(dtype)


def gathers(table: Any, indices: Any, platform: str = "cpu") -> int:
    """Number of gathers in the program of a lookup."""
    lookup = jax.jit(lambda table, indices: table[prefetched(table, indices)])
    return jax.export.export(lookup, platforms=[platform])(table, indices).mlir_module().count('"stablehlo.gather"')


LARGE = table()
#: Compiled once for each number of indices.
rows = jax.jit(lambda table, places: table[prefetched(table, places)])


@settings(max_examples=examples(30), deadline=None)
@given(
    indices=st.lists(st.integers(-2 * ROWS, 2 * ROWS) | st.sampled_from([0, -1, ROWS - 1, ROWS, -ROWS]), max_size=5),
)
def test_the_rows_are_those_of_a_plain_lookup(indices: list[int]) -> None:
    places = jnp.array(indices, jnp.int32)
    np.testing.assert_array_equal(rows(LARGE, places), LARGE[places])


def test_zeros_are_found_too() -> None:
    zeros = jnp.zeros_like(LARGE)
    np.testing.assert_array_equal(zeros[prefetched(zeros, jnp.array([5, ROWS - 1]))], np.zeros((2, 64)))


@pytest.mark.parametrize(
    ("shape", "dtype", "reads"),
    [
        ((64,), jnp.float32, 2),
        ((8, 8), jnp.float32, 2),
        ((32,), jnp.float32, 2),
        ((64,), jnp.bfloat16, 2),
        ((31,), jnp.float32, 1),  # too short to gain
        ((65,), jnp.float32, 1),  # copied by vector instructions
        ((32,), jnp.bfloat16, 1),  # a cache line
        ((64,), bool, 1),
    ],
)
def test_which_rows_are_read_first(shape: tuple[int, ...], dtype: Any, reads: int) -> None:
    rows = -(-LEAST_TABLE_BYTES // (int(np.prod(shape)) * jnp.dtype(dtype).itemsize))
    assert gathers(table(rows, shape, dtype), jnp.array([1, 2])) == reads


def test_a_small_table_other_indices_and_other_platforms_read_once() -> None:
    indices = jnp.array([1, 2])
    assert gathers(LARGE[:-1], indices) == 1
    assert gathers(LARGE, indices.astype(jnp.int16)) == gathers(LARGE, indices.astype(jnp.uint32)) == 1
    assert gathers(LARGE, indices, "cuda") == gathers(LARGE, indices, "tpu") == 1


def test_a_step_reads_the_rows_of_a_variable_first() -> None:
    rows = dflow.Variable(LARGE, name="rows")

    @dflow.jit
    def step(ids: jax.Array) -> jax.Array:
        return rows[ids]

    program = step.lower(jnp.array([1, 2])).compile().as_text()
    assert program.count(" gather(") == 2
    np.testing.assert_array_equal(step(jnp.array([1, -1])), LARGE[jnp.array([1, -1])])


def run(pure: Discharged, graph: Graph, inputs: Sequence[Any], state: dict[str, Any], fn: Any) -> Any:
    """Call a discharged function; return the outputs and the state."""
    refs = (*pure.written, *pure.read)
    results = fn(*(state[ref.name] for ref in refs), *inputs)
    renewed = {ref.name: value for ref, value in zip(pure.written, results, strict=False)}
    return results[len(pure.written) :], state | renewed


@settings(max_examples=examples(60))
@given(graph=stateful_graphs(), compiled=st.booleans())
def test_a_discharged_graph_does_what_the_graph_means(graph: Graph, compiled: bool) -> None:
    pure = discharge(graph)
    inputs, state = some_inputs(graph), some_state(graph)
    outputs, after = run(pure, graph, inputs, state, jax.jit(pure.fn) if compiled else pure.fn)
    wanted, end = interpret(graph, inputs, state)
    assert_equal_values(outputs, wanted)
    assert_equal_states(after, end)
    assert pure.written + pure.read == tuple(sorted(graph.refs, key=lambda ref: ref not in pure.written))
    assert pure.operands == graph.inputs[len(graph.refs) :]


def test_written_variables_come_first_each_group_in_the_order_of_the_graph() -> None:
    graph = parse("""
graph(%a: ref<f32[]>, %b: ref<i32[2]>, %c: ref<f32[]>, %d: ref<i32[]>, %x: f32[], %y: i32[2]) {
 !%a_1: f32[] = var.read(%a)
 !%1: token = var.assign_add(%c, %a_1)
 !%2: token = var.assign(%b, %y)
  return %a_1
}""")
    pure = discharge(graph)
    assert [ref.name for ref in pure.written] == ["b", "c"]
    assert [ref.name for ref in pure.read] == ["a", "d"]
    assert [value.name for value in pure.operands] == ["x", "y"]
    assert list(map(str, pure.types)) == ["i32[2]", "f32[]", "f32[]", "i32[]", "f32[]", "i32[2]"]


def test_a_variable_keeps_its_type_whatever_literal_it_is_given() -> None:
    graph = parse("""
graph(%w: ref<bf16[]>, %v: ref<bf16[]>) {
 !%1: token = var.assign(%w, 2.0:~bf16[])
 !%2: token = var.assign_add(%v, 2.0:~bf16[])
  return 1.5:~bf16[]
}""")
    results = jax.jit(discharge(graph).fn)(jnp.bfloat16(1), jnp.bfloat16(1))
    assert [str(array_type_of(result).strong) for result in results] == ["bf16[]"] * 3
    assert [result.item() for result in results] == [2.0, 3.0, 1.5]


def test_a_transfer_cannot_run_inside_an_xla_call() -> None:
    graph = parse("""
graph(%x: f32[]) {
 !%1: token = net.send(%x) {destination="/job:ps/task:0", edge="x"}
  return
}""")
    with pytest.raises(InternalError, match=r"net\.send cannot run inside an XLA call"):
        discharge(graph).fn(jnp.float32(1))

"""Types and their text, equal keys and attributes, the user's lines, and marks of changed rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import dflow
from dflow.tables.changed_rows import track_changed_rows
from dflow.tracing.errors import GraphTypeError, InternalError, ParseError
from dflow.tracing.ir.each_once import representatives
from dflow.tracing.ir.exact_attributes import exact
from dflow.tracing.ir.explicit_sharding import explicit_sharding
from dflow.tracing.ir.op import OPS, op
from dflow.tracing.ir.row_marks import LIFE, PERIOD, fresh_marks, marked, marks_type
from dflow.tracing.ir.types import DTYPES, ArrayType, RefType, array_type_of, dtype_name, parse_dtype, parse_type
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.source import Loc, caller, is_user_file
from dflow.tracing.state.resources import Variable
from dflow.tracing.syntax.text import parse, text
from tests.effort import examples
from tests.reference.interpret import interpret


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_reads_back(name: str) -> None:
    assert dtype_name(DTYPES[name]) == name
    assert parse_dtype(name) == DTYPES[name]
    for type in (f"{name}[]", f"~{name}[]", f"{name}[2,0,3]", f"ref<{name}[3]>"):
        assert str(parse_type(type)) == type


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_read_back(implementation: str) -> None:
    type = array_type_of(jax.eval_shape(lambda: jax.random.key(0, impl=implementation)))
    assert parse_type(str(type)) == type


def test_the_short_names_are_jaxs() -> None:
    assert str(array_type_of(jnp.ones((2, 3), jnp.bfloat16))) == "bf16[2,3]"
    assert str(array_type_of(1.0)) == "~f32[]"
    assert str(array_type_of(np.uint8(1))) == "u8[]"
    assert {dtype_name(np.dtype(name)) for name in ("bool", "int32", "complex64")} == {"bool", "i32", "c64"}


_ENDLESS = ["ref<" * 3000 + "f32[]" + ">" * 3000, "queue<" * 3000 + ">" * 3000, f"f32[{'9' * 5000}]"]


@pytest.mark.parametrize(
    "text", ["f32", "f32[a]", "ref<token>", "f32[2", "[2]", "", "f32[1,,2]", "f32[2]\n", *_ENDLESS]
)
def test_a_text_that_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(
        ParseError,
        match=r"is not a type; a type looks like f32\[2,3\], ~f32\[\], ref<f32\[3\]>, queue<f32\[3\]>, accumulator",
    ):
        parse_type(text)


KINDS = st.sampled_from(list(AxisType))


@given(
    parts=st.lists(st.none() | st.sampled_from(["x", "y", "z"]) | st.just(("x", "z")), max_size=3),
    kinds=st.tuples(KINDS, KINDS, KINDS),
    unreduced=st.booleans(),
)
@settings(max_examples=examples(100))
def test_a_type_with_a_sharding_reads_back(parts: list[Any], kinds: tuple[AxisType, ...], unreduced: bool) -> None:
    mesh = AbstractMesh((2, 4, 2), ("x", "y", "z"), axis_types=kinds)
    named = [axis for part in parts for axis in (part if isinstance(part, tuple) else (part,)) if axis]
    assume(len(set(named)) == len(named))
    left = {axis for axis in mesh.explicit_axes if axis not in named} if unreduced else set()
    shape = tuple(8 for _ in parts)
    sharding = explicit_sharding(NamedSharding(mesh, PartitionSpec(*parts, unreduced=left)), shape)
    type = ArrayType(np.dtype("float32"), shape, sharding=sharding)
    for written in (str(type), f"ref<{type}>"):
        again = parse_type(written)
        assert str(again) == written
        assert (again.of if isinstance(again, RefType) else again).sharding == sharding  # type: ignore[union-attr]
    assert (sharding is None) == (AxisType.Explicit not in kinds)


def test_the_text_of_a_sharding() -> None:
    mesh = AbstractMesh((2, 4, 2), ("x", "y", "z"), axis_types=(AxisType.Explicit, AxisType.Auto, AxisType.Explicit))
    struct = jax.ShapeDtypeStruct((8, 8, 8), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(("x", "z"), "y")))
    assert str(array_type_of(struct)) == "bf16[8@(x,z),8,8]{x=2 y=4:auto z=2}"
    assert str(array_type_of(struct).strong) == "bf16[8,8,8]"
    assert array_type_of(struct) == array_type_of(struct).strong
    assert array_type_of(array_type_of(struct).struct).sharding == array_type_of(struct).sharding


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("f32[8@x]", r"is spread over the axes of a mesh and does not say which"),
        ("f32[8@x]{x}", r"has a mesh that does not fit; a type on a mesh looks like f32\[8@x,2\]\{x=4 y=2:auto\}"),
        ("f32[8@x]{x=2 y}", r"has a mesh that does not fit"),
        ("f32[8@x]{y=2}", r"has a mesh that does not fit"),
        ("f32[8@x]{x=2:strange}", r"has a mesh that does not fit"),
        ("f32[8@x]{x=a}", r"has a mesh that does not fit"),
        ("f32[8@x]{}", r"has a mesh that does not fit"),
        ("f32[9@x]{x=2}", r"has a mesh that does not fit"),
    ],
)
def test_a_sharding_that_cannot_be_read_is_refused(text: str, why: str) -> None:
    with pytest.raises(ParseError, match=why):
        parse_type(text)


def test_a_type_knows_its_size_and_its_strong_form() -> None:
    type = parse_type("~f16[2,3]")
    assert isinstance(type, ArrayType)
    assert type.size_bytes == 12
    assert str(type.strong) == "f16[2,3]"
    assert array_type_of(type.struct) == type
    assert RefType(type) == RefType(type)


def here() -> Loc:
    found = caller()
    assert found is not None
    return found


def test_the_users_line_is_the_innermost_that_is_not_ours_nor_jaxs() -> None:
    assert here().short == f"test_types.py:{here.__code__.co_firstlineno + 1}"
    assert is_user_file("/home/me/train.py")
    for file in (jax.__file__, os.__file__, trace.__code__.co_filename, "<frozen importlib._bootstrap>"):
        assert not is_user_file(file)


def test_an_ops_line_is_where_the_user_wrote_it() -> None:
    def step(x: Any) -> Any:
        return jnp.add(x, x)

    node = trace(step, (1.0,), {}).graph.nodes[0]
    assert node.loc is not None
    assert node.loc.line - step.__code__.co_firstlineno in (1, 2)


def test_an_op_is_declared_once() -> None:
    with pytest.raises(InternalError, match=r"op 'var.read' is declared twice"):
        op("var.read")(lambda: ())


@pytest.mark.parametrize(
    ("op", "operands", "message"),
    [
        ("var.read", "f32[2]", r"the operand is f32\[2\], not a variable"),
        ("var.assign", "ref<f32[3]> f32[2]", r"the value is f32\[2\] but the variable holds f32\[3\]"),
        ("var.assign_add", "f32[2] f32[2]", r"the first operand is f32\[2\], not a variable"),
        ("var.assign_mul", "ref<key<fry>[]> key<fry>[]", r"key<fry>\[\] cannot be computed with"),
        ("var.gather", "f32[5,2] i32[1]", r"the first operand is f32\[5,2\], not a variable"),
        ("var.gather", "ref<f32[5,2]> token", "the indices are token, not an array"),
        ("var.gather", "ref<f32[5,2]> f32[1]", r"the indices are f32\[1\], not integers"),
        ("var.scatter_add", "i32[1] i32[1] f32[1,2]", r"the first operand is i32\[1\], not a variable"),
        ("var.scatter_add", "ref<f32[5,2]> i32[1] f32[2]", r"the rows are f32\[2\] but i32\[1\] of f32\[5,2\]"),
        ("var.mark", "ref<i32[7]> f32[5,2]", r"the second operand is f32\[5,2\], not a variable"),
        ("var.mark", "ref<i32[5]> ref<f32[5,2]>", r"ref<i32\[5\]> are not the marks of ref<f32\[5,2\]>"),
        ("var.mark", "ref<i32[7]> ref<f32[5,2]> f32[1]", r"the indices are f32\[1\], not integers"),
    ],
)
def test_operands_that_an_op_on_a_variable_does_not_take_are_refused(op: str, operands: str, message: str) -> None:
    rule: Any = OPS[op].rule
    with pytest.raises(GraphTypeError, match=f"{op}: {message}"):
        rule(*map(parse_type, operands.split()))


@pytest.mark.once
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(0, 3), st.integers(-(2**31), 2**31 - 1)), st.booleans()), min_size=8, max_size=8
    )
)
def test_equal_numbers_have_one_representative(drawn: list[tuple[int, bool]]) -> None:
    numbers, wanted = map(np.asarray, zip(*drawn, strict=True))
    found = np.asarray(jax.jit(representatives)(numbers.astype(np.int32), wanted))
    for place, (number, is_wanted) in enumerate(drawn):
        equal = [other for other, each in enumerate(drawn) if each == (number, True)] if is_wanted else [place]
        assert found[place] in equal
        assert {found[other] for other in equal} == {found[place]}


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_all_numbers_may_be_equal_or_differ(count: int) -> None:
    differ = np.random.default_rng(0).permutation(count).astype(np.int32) * 4096
    np.testing.assert_array_equal(representatives(jnp.asarray(differ)), np.arange(count))
    assert len({*np.asarray(representatives(jnp.full(count, 7, jnp.int32)))}) == min(1, count)


@dataclass(frozen=True)
class Held:
    value: Any


WITHIN = {
    "alone": lambda value: value,
    "in a tuple": lambda value: (1, (value,)),
    "in a dataclass": lambda value: Held((value,)),
}


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_values_of_other_bits_or_types_have_other_keys(within: Any) -> None:
    for one, other in ((0.0, -0.0), (1, True), (1, 1.0)):
        assert exact(within(one)) != exact(within(other))
    assert hash(exact(within(0.0))) == hash(exact(within(0.0)))
    assert exact(within(0.0)) == exact(within(0.0))


def test_a_list_has_no_key_that_can_be_compared() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(exact([1]))


ROWS = 200


@pytest.fixture
def table() -> Variable:
    variable = dflow.Variable(jnp.zeros((ROWS, 2)), name="table")
    track_changed_rows(variable)
    return variable


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32"])
def test_no_row_that_an_update_changes_is_missed(dtype: str) -> None:
    limits = np.iinfo(dtype)
    indices = np.array([0, 7, 7, 100, limits.max, limits.min, limits.max - 60], dtype)
    marks = jnp.zeros(ROWS + 2, jnp.int32).at[PERIOD].set(5)
    changed = np.asarray(jnp.zeros(ROWS, bool).at[indices].set(True))
    found = np.asarray(marked(marks, indices))
    assert (found[:ROWS][changed] == 5).all()
    assert dtype == "uint32" or not found[:ROWS][~changed].any()
    np.testing.assert_array_equal(found[PERIOD:], [5, 0])
    np.testing.assert_array_equal(marked(marks)[:PERIOD], np.full(ROWS, 5))
    np.testing.assert_array_equal(marked(marks)[PERIOD:], [5, 0])


def test_lives_differ() -> None:
    lives = {int(fresh_marks(marks_type(3))[LIFE]) for _ in range(4)}
    assert len(lives) > 1


@pytest.mark.parametrize("by_rows", [True, False])
def test_an_update_is_followed_by_its_mark(by_rows: bool, table: Variable) -> None:
    def step(ids: Any, rows: Any) -> None:
        if by_rows:
            table.scatter_add(ids, rows)
        else:
            table.assign_add(rows)

    ids, rows = np.array([3, -1, 400], np.int32), np.ones((3, 2) if by_rows else (ROWS, 2), np.float32)
    graph = trace(step, (ids, rows), {}).graph
    printed = text(graph, locs=False)
    assert [node.op.name for node in graph.nodes] == [f"var.{'scatter' if by_rows else 'assign'}_add", "var.mark"]
    assert text(parse(printed)) == printed
    before = {ref.name: variable.read() for ref, variable in zip(graph.refs, (table, table.marks), strict=True)}
    before[graph.refs[1].name] = before[graph.refs[1].name].at[PERIOD].set(2)
    table.marks.scatter_add(jnp.array([PERIOD]), jnp.array([1]))  # type: ignore[union-attr]
    _, after = interpret(graph, [ids, rows], before)
    dflow.jit(step)(ids, rows)
    for variable, value in zip((table, table.marks), after.values(), strict=True):
        np.testing.assert_array_equal(variable.read(), value)  # type: ignore[union-attr]

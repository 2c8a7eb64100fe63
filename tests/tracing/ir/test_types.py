"""Types and their text, the user's lines, and effects that commute."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from dflow.tracing.errors import GraphTypeError, InternalError, ParseError
from dflow.tracing.ir.explicit_sharding import explicit_sharding
from dflow.tracing.ir.op import OPS, op
from dflow.tracing.ir.types import DTYPES, ArrayType, RefType, array_type_of, dtype_name, parse_dtype, parse_type
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.source import Loc, caller, is_user_file
from tests.effort import examples


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
    for text in (str(type), f"ref<{type}>"):
        again = parse_type(text)
        assert str(again) == text
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

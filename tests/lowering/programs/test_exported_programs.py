"""Programs from other processes: structures of pytrees as data, equal programs that share an export, and limits."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import flatbuffers
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax._src.export import serialization_generated as tables
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex

import dflow
from dflow.lowering.programs.discharge import Discharged, discharge
from dflow.lowering.programs.foreign_program import read_program, write_program
from dflow.lowering.programs.portable_tree import (
    MismatchError,
    Tree,
    UnknownNodeError,
    build,
    flatten,
    is_bound,
    leaves_of,
    parts_of_type,
    plain,
    text,
    tree_of,
)
from dflow.lowering.programs.program import export_program, load_program
from dflow.lowering.programs.shared_exports import computation, shared_exports
from dflow.tracing.errors import WireError
from dflow.tracing.ir.types import ArrayType
from tests.effort import examples

Pair = namedtuple("Pair", "first second")
Empty = namedtuple("Empty", "")

numbers = st.integers(0, 99)
keys = st.one_of(st.lists(st.sampled_from("abcd"), unique=True), st.lists(st.integers(0, 20), unique=True))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3)
    dicts = keys.flatmap(
        lambda names: st.tuples(*[inner] * len(names)).map(lambda of: dict(zip(names, of, strict=True)))
    )
    return st.one_of(
        several, several.map(tuple), dicts, dicts.map(OrderedDict), st.builds(Pair, inner, inner), st.just(Empty())
    )


trees = st.recursive(st.one_of(numbers, st.none()), containers, max_leaves=8)


def described(value: Any) -> tuple[Tree, list[Any]]:
    """Return the structure of a value after a round trip through a file, and the leaves."""
    leaves, treedef = jax.tree_util.tree_flatten(value)
    tree = tree_of(treedef, (f"i32[{leaf}]" for leaf in leaves), "x")
    return msgspec.json.decode(msgspec.json.encode(tree), type=Tree), leaves


@given(trees)
def test_a_tree_is_taken_apart_as_jax_does_and_put_together_again(value: Any) -> None:
    tree, leaves = described(value)
    assert flatten(tree, value, "x") == leaves
    built = build(tree, iter(leaves))
    assert built == value
    assert str(jax.tree_util.tree_structure(built)) == str(jax.tree_util.tree_structure(value))


@given(trees)
def test_the_plain_form_holds_what_files_of_jax_hold_and_loses_no_leaf(value: Any) -> None:
    tree, leaves = described(value)
    flat = build(plain(tree), iter(leaves))
    assert flatten(plain(tree), flat, "x") == leaves
    assert_is_plain(flat)


def assert_is_plain(value: Any) -> None:
    assert type(value) in (dict, list, tuple, int, type(None))
    for key in value if isinstance(value, dict) else ():
        assert isinstance(key, str)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        assert_is_plain(part)


@given(trees)
def test_each_leaf_has_the_path_that_a_program_would_write(value: Any) -> None:
    tree, leaves = described(value)
    assert [eval(path, {"x": value}) for path, _ in leaves_of(tree, "x")] == leaves  # noqa: S307


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"b": 1, "a": (2, None)}, "{'a': (i32[2], None), 'b': i32[1]}"),
        ([Pair(1, (2,))], "[Pair(first=i32[1], second=(i32[2],))]"),
        (None, "None"),
    ],
)
def test_a_structure_prints_as_python_writes_it(value: Any, shown: str) -> None:
    assert text(described(value)[0]) == shown


@pytest.mark.parametrize(
    ("due", "given", "message"),
    [
        ({"a": 1}, {"b": 1}, "x: expected {'a': i32[1]}, got a dict with the keys 'b'"),
        ({"a": 1}, [1], "x: expected {'a': i32[1]}, got a list of 1"),
        ([1, 2], [1], "x: expected [i32[1], i32[2]], got a list of 1"),
        ((1,), [1], "x: expected (i32[1],), got a list of 1"),
        ({"a": None}, {"a": 3}, "x['a']: expected None, got a int"),
        (Pair(1, 2), (1, 2), "x: expected Pair(first=i32[1], second=i32[2]), got a tuple of 2"),
    ],
)
def test_a_value_of_another_structure_is_refused_with_both(due: Any, given: Any, message: str) -> None:
    with pytest.raises(MismatchError) as caught:
        flatten(described(due)[0], given, "x")
    assert str(caught.value) == message


@jax.tree_util.register_pytree_node_class
class Own:
    """A pytree class that only this file knows."""

    def tree_flatten(self) -> Any:
        return (1,), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Own:
        return cls()


@pytest.mark.parametrize(
    ("value", "kind", "path"),
    [
        ({"a": [1, Own()]}, "Own", "x['a'][1]"),
        ({(1, 2): 3}, "tuple", "x"),
        ({1: 2, "1": 3}, "dict", "x"),
    ],
)
def test_a_class_of_the_users_is_refused_with_its_path(value: Any, kind: str, path: str) -> None:
    if kind == "dict":  # JAX sorts keys, so it accepts such a dict only if it is ordered
        value = OrderedDict(value)
    with pytest.raises(UnknownNodeError) as caught:
        described(value)
    assert (caught.value.kind.__name__.replace("Ordered", "").lower(), caught.value.path) == (kind.lower(), path)


def test_what_holds_no_array_but_a_class_of_the_users_is_bound() -> None:
    structure = jax.tree_util.tree_structure
    assert is_bound(structure(jax.tree_util.Partial(int)))
    assert not is_bound(structure({"a": None}))
    assert not is_bound(structure(Own()))


@pytest.mark.parametrize(
    ("type", "parts"),
    [
        ("f32[]", ("f32", [])),
        ("i32[3,b]", ("i32", ["3", "b"])),
        ("f32[max(a, b),2*b + 1]", ("f32", ["max(a, b)", "2*b + 1"])),
    ],
)
def test_the_parts_of_a_type_with_letters(type: str, parts: Any) -> None:
    assert parts_of_type(type) == parts


F32 = jax.ShapeDtypeStruct((3,), jnp.float32)


def program(fn: Callable[..., Any], *structs: Any) -> Discharged:
    return discharge(dflow.graph(dflow.jit(fn), *structs).graph)


def scaled(by: Any) -> Callable[[Any], Any]:
    return lambda x: jnp.sin(x) * by


def alike(one: Discharged, other: Discharged) -> bool:
    """Return whether two living programs may share an export."""
    return computation(one) == computation(other)


@pytest.mark.parametrize("place", [0, 1])
def test_names_and_lines_do_not_matter(place: int) -> None:
    variables = [dflow.Variable(jnp.zeros(3), name=name) for name in ("one", "other")]

    def first(x: Any) -> None:
        variables[0].assign_add(-0.1 * x)

    def second(step: Any) -> None:
        moved = -0.1 * step
        variables[place].assign_add(moved)

    assert alike(program(first, F32), program(second, F32))


def test_a_shared_export_computes_the_same() -> None:
    export, one, other = shared_exports(), program(lambda x: x * 2, F32), program(lambda y: y * 2, F32)
    assert export(one) is export(other)
    np.testing.assert_array_equal(load_program(export(other), 0)(jnp.ones(3))[0], [2, 2, 2])


@pytest.mark.parametrize(("shape", "dtype"), [((4,), jnp.float32), ((3,), jnp.bfloat16)])
def test_types_matter(shape: tuple[int, ...], dtype: Any) -> None:
    assert not alike(program(scaled(2.0), F32), program(scaled(2.0), jax.ShapeDtypeStruct(shape, dtype)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(2.0), scaled(2.5)),
        (scaled(2.0), lambda x: jnp.cos(x) * 2.0),
        (scaled(2.0), lambda x: jnp.sin(x) * x),
        (scaled(2.0), lambda x: (jnp.sin(x) * 2.0, x)),
        (scaled(2.0), lambda x, y: jnp.sin(x) * 2.0),
        (lambda x: x - 0.0, lambda x: x - -0.0),
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: (x, y + 1), lambda x, y: (y, y + 1)),
        (lambda x: jax.lax.reduce_precision(x, 8, 7), lambda x: jax.lax.reduce_precision(x, 8, 10)),
        (lambda x: jax.lax.cumsum(x, 0), lambda x: jax.lax.cumsum(x, reverse=True)),
    ],
)
def test_small_differences_matter(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    mine, others = (program(fn, *[F32] * fn.__code__.co_argcount) for fn in (one, other))
    assert not alike(mine, others)


@dataclass(frozen=True)
class Settings:
    """A parameter of a primitive that compares equal to parameters with another meaning."""

    rate: Any
    note: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True, eq=False)
class OwnNode:
    """A parameter that is equal only to itself."""

    rate: Any


damp_p = jex.Primitive("damp")
damp_p.def_abstract_eval(lambda x, **_: x)


@pytest.mark.parametrize("wrapped", [lambda by: by, lambda by: (1, by), Settings, lambda by: {by}])
@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), (np.float32(0.0), np.float32(-0.0))])
def test_parameters_that_compare_equal_are_told_apart(wrapped: Callable[[Any], Any], one: Any, other: Any) -> None:
    def damped(rate: Any) -> Discharged:
        by = wrapped(rate)
        by = frozenset(by) if isinstance(by, set) else Settings(by)
        return program(lambda x: damp_p.bind(x, by=by), F32)

    assert alike(damped(one), damped(one))
    assert not alike(damped(one), damped(other))


def test_a_parameter_that_equals_itself_alone_is_compared_as_it_says() -> None:
    own = [OwnNode(1.0), OwnNode(1.0)]
    one, same, other = (program(lambda x, by=by: damp_p.bind(x, by=by), F32) for by in (own[0], *own))
    assert alike(one, same)
    assert not alike(one, other)


def test_an_update_is_no_read() -> None:
    variable = dflow.Variable(jnp.zeros(3), name="w")
    assert not alike(program(lambda: variable.read() + 1.0), program(lambda: variable.assign_add(jnp.ones(3))))


def test_a_trace_context_matters() -> None:
    def under_scope(x: Any) -> Any:
        with set_xla_metadata(kind="other"):
            return jnp.sin(x) * 2.0

    assert not alike(program(under_scope, F32), program(scaled(2.0), F32))


def test_what_cannot_be_compared_has_its_own_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.lowering.programs.shared_exports.computation", lambda program: None)
    export, double = shared_exports(), program(lambda x: x * 2, F32)
    assert export(double) is not export(double)


F32_TYPE = ArrayType(np.dtype("float32"), (3,))
ALLOWED: list[Callable[[jax.Array], Any]] = [
    lambda x: jnp.linalg.cholesky(jnp.diag(x)),
    lambda x: tuple(jnp.linalg.eigh(jnp.diag(x))),
    lambda x: jax.random.normal(jax.random.key(0), (3,)) + x,
    lambda x: jax.lax.top_k(x, 2),
    lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x),
]


@pytest.mark.parametrize("fn", ALLOWED)
def test_what_jax_exports_by_itself_is_read(fn: Callable[[jax.Array], Any]) -> None:
    blob = write_program(export.export(jax.jit(fn))(F32_TYPE.struct))
    assert jax.tree.leaves(read_program(blob).call(jnp.ones(3)))


def export_unchecked(fn: Callable[..., Any], target: str) -> bytes:
    """Export as an attacker would: JAX's check at the sender is disabled."""
    allowed = [export.DisabledSafetyCheck.custom_call(target)]
    return write_program(export.export(jax.jit(fn), disabled_checks=allowed)(F32_TYPE.struct))


def calling(target: str) -> Callable[[jax.Array], jax.Array]:
    def call(x: jax.Array) -> jax.Array:
        found: jax.Array = jax.ffi.ffi_call(target, F32_TYPE.struct)(x)
        return found

    return call


@pytest.mark.parametrize("target", ["xla_ffi_python_cpu_callback", "xla_python_cpu_callback", "of_some_user"])
def test_a_call_of_what_jax_does_not_guarantee_is_refused(target: str) -> None:
    """Calls into Python receive a pointer that comes from the program itself."""
    blob = export_unchecked(calling(target), target)
    assert export.deserialize(bytearray(blob)).disabled_safety_checks
    with pytest.raises(WireError, match=f"program .* calls '{target}', which a program from another process may not"):
        load_program(blob, 0)


def test_a_call_inside_a_branch_or_a_loop_is_found() -> None:
    inner = calling("hidden")

    def call(x: jax.Array) -> jax.Array:
        looped: jax.Array = jax.lax.fori_loop(0, 2, lambda _, y: jax.lax.cond(y[0] > 0, inner, lambda z: z, y), x)
        return looped

    with pytest.raises(WireError, match="calls 'hidden'"):
        load_program(export_unchecked(call, "hidden"), 0)


@pytest.mark.parametrize("op", ["infeed", "outfeed"])
def test_a_program_that_waits_for_the_host_is_refused(op: str) -> None:
    text = {
        "infeed": '%t = stablehlo.create_token : !stablehlo.token\n %0:2 = "stablehlo.infeed"(%t) '
        '{infeed_config = ""} : (!stablehlo.token) -> (tensor<3xf32>, !stablehlo.token)\n return %0#0 : tensor<3xf32>',
        "outfeed": '%t = stablehlo.create_token : !stablehlo.token\n %0 = "stablehlo.outfeed"(%arg0, %t) '
        '{outfeed_config = ""} : (tensor<3xf32>, !stablehlo.token) -> !stablehlo.token\n return %arg0 : tensor<3xf32>',
    }[op]
    good = export.export(jax.jit(lambda x: x + 1))(F32_TYPE.struct)
    main = f"func.func public @main(%arg0: tensor<3xf32>) -> tensor<3xf32> {{ {text} }}"
    with pytest.raises(WireError, match=f"does 'stablehlo.{op}', which a program from another process may not"):
        read_program(replace(good, mlir_module_serialized=main.encode()).serialize())


def test_bytecode_is_refused_unread() -> None:
    """Its reader crashes on some malformed bytes."""
    blob = export.export(jax.jit(lambda x: x + 1))(F32_TYPE.struct).serialize()
    with pytest.raises(WireError, match="are no exported program: UnicodeDecodeError"):
        read_program(blob)


def test_a_tree_that_unfolds_without_end_is_refused() -> None:
    """Each node contains the node below twice, so 200 bytes stand for 2^60 leaves."""
    builder = flatbuffers.Builder()
    tables.PyTreeDefStart(builder)
    tables.PyTreeDefAddKind(builder, tables.PyTreeDefKind.leaf)
    node = tables.PyTreeDefEnd(builder)
    for _ in range(60):
        tables.PyTreeDefStartChildrenVector(builder, 2)
        builder.PrependUOffsetTRelative(node)
        builder.PrependUOffsetTRelative(node)
        children = builder.EndVector()
        tables.PyTreeDefStart(builder)
        tables.PyTreeDefAddKind(builder, tables.PyTreeDefKind.list)
        tables.PyTreeDefAddChildren(builder, children)
        node = tables.PyTreeDefEnd(builder)
    tables.ExportedStart(builder)
    tables.ExportedAddInTree(builder, node)
    tables.ExportedAddOutTree(builder, node)
    builder.Finish(tables.ExportedEnd(builder))
    with pytest.raises(WireError, match="trees of more than"):
        read_program(builder.Output())


GOOD = export_program(lambda x: [x * 2 + 1], [F32_TYPE])


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_damaged_programs_are_refused_or_are_other_programs(data: st.DataObject) -> None:
    blob = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        read_program(blob)


@given(st.binary(max_size=200) | st.integers(0, len(GOOD) - 64).map(lambda size: GOOD[:size]))
def test_any_bytes_and_a_program_cut_short_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match=f"{len(data)} bytes are no exported program"):
        read_program(data)

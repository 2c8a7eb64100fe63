"""Structures of pytrees as data: to JSON and back, and the structures that are refused."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import jax
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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

"""Python's idioms on a variable do what they express or are refused; none of them silently loses a write."""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow


@pytest.fixture
def v() -> dflow.Variable:
    return dflow.Variable(jnp.arange(3.0), name="idiom")


@pytest.mark.parametrize("op", [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul])
def test_an_in_place_operator_is_refused(v: dflow.Variable, op: Any) -> None:
    with pytest.raises(dflow.VariableError, match=r"'idiom' is updated by an in-place \w+, which would put an array"):
        op(v, 1.0)


def test_item_assignment_is_refused(v: dflow.Variable) -> None:
    with pytest.raises(dflow.VariableError, match=r"idiom.scatter_update\(indices, rows\)"):
        v[0] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("value", r"idiom\.read\(\)"),
        ("numpy", r"numpy\.asarray\(idiom\)"),
        ("eval", r"idiom\.read\(\)"),
        ("load", r"idiom\.assign\(value\)"),
        ("nonsense", ""),
    ],
)
def test_an_attribute_of_other_libraries_is_refused_with_its_name_here(v: dflow.Variable, name: str, way: str) -> None:
    assert not hasattr(v, name)
    with pytest.raises(AttributeError, match=f"'Variable' object has no attribute '{name}'.*{way}"):
        getattr(v, name)


def test_length_is_the_shapes(v: dflow.Variable) -> None:
    assert len(v) == 3
    with pytest.raises(TypeError, match="is a scalar, f32\\[\\], and has no len"):
        len(dflow.Variable(1.0))


def test_a_copied_array_is_the_users(v: dflow.Variable) -> None:
    mine = np.array(v)
    mine[0] = 9.0
    np.testing.assert_array_equal(v.read(), [0, 1, 2])


def test_a_handle_is_shared_by_copy_and_refuses_what_would_need_the_state(v: dflow.Variable) -> None:
    assert copy.copy(v) is v
    with pytest.raises(dflow.VariableError, match="is a handle to state and cannot be copied"):
        copy.deepcopy({"w": v})
    with pytest.raises(dflow.VariableError, match="is a handle to state and cannot be serialized"):
        v.__reduce_ex__(2)


def test_a_name_is_a_string() -> None:
    with pytest.raises(dflow.VariableError, match="a variable is named 3, a int"):
        dflow.Variable(0.0, name=3)  # type: ignore[arg-type]


def test_a_value_that_was_read_may_be_donated(v: dflow.Variable) -> None:
    jax.jit(lambda x: x + 1, donate_argnums=0)(v.read())
    np.testing.assert_array_equal(v.read(), [0, 1, 2])


def test_an_array_that_was_assigned_may_be_donated(v: dflow.Variable) -> None:
    mine = jnp.ones(3)
    v.assign(mine)
    jax.jit(lambda x: x + 1, donate_argnums=0)(mine)
    np.testing.assert_array_equal(v.read(), [1, 1, 1])


def test_a_tree_is_assigned_to(v: dflow.Variable) -> None:
    dflow.assign({"a": v}, {"a": jnp.ones(3)})
    np.testing.assert_array_equal(v.read(), [1, 1, 1])


def _squares(tree: Any, x: Any) -> Any:
    return (tree["a"] * tree["a"]).sum() * x


def test_a_variable_beside_what_jax_differentiates_is_let_be(v: dflow.Variable) -> None:
    tree, x = {"a": v}, 2.0
    of_x = functools.partial(_squares, tree)
    found = [
        jax.grad(_squares, argnums=1)(tree, x),
        jax.value_and_grad(lambda x, tree: _squares(tree, x))(x, tree=tree)[1],
        jax.jacfwd(_squares, argnums=1)(tree, x),
        jax.jacrev(_squares, argnums=1)(tree, x),
        jax.vjp(of_x, x)[1](1.0)[0],
        jax.jvp(lambda x: dflow.jit(_squares)(tree, x), (x,), (1.0,))[1],
        jax.grad(lambda x: (of_x(x), tree), has_aux=True)(x)[0],
        jax.grad(jax.checkpoint(_squares), argnums=1)(tree, x),
        dflow.jit(jax.grad(_squares, argnums=1))(tree, x),
    ]
    np.testing.assert_array_equal(np.asarray(found), [5.0] * len(found))
    assert jax.hessian(_squares, argnums=1)(tree, x) == 0.0

"""Variables in user code, and the errors for wrong use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.tracing.errors import InternalError, VariableError
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.context import current_home
from dflow.tracing.state.resources import Variable, read
from dflow.tracing.state.variable_trees import variables
from tests.graphs_ import a_home
from tests.reference.interpret import interpret


@pytest.fixture
def w() -> Variable:
    with a_home():
        return Variable(jnp.arange(3.0), name="w")


def test_python_scalars_take_the_variables_dtype() -> None:
    with a_home():
        half = Variable(jnp.zeros((), jnp.bfloat16), name="half")
    half.assign_add(2.5)
    half.assign_add(1)
    assert half.read() == 3.5
    assert half.read().dtype == jnp.bfloat16


def test_a_variable_is_not_made_inside_traced_code() -> None:
    def step(x: Any) -> Any:
        return Variable(x, name="inner").read()

    with (
        a_home(),
        pytest.raises(VariableError, match=r"\(inner\) is created inside traced code(.|\n)*create it before"),
    ):
        jax.make_jaxpr(step)(1.0)


def test_a_variable_is_an_argument_a_result_and_twice_the_same(w: Variable) -> None:
    def step(tree: Any, again: Variable, x: Any) -> Any:
        tree["w"].assign_add(x)
        again.assign_add(x)
        return again, tree["w"].read()

    traced = trace(step, ({"w": w}, w, np.ones(3, np.float32)), {})
    assert traced.variables == (w,)
    assert [str(value.type) for value in traced.graph.inputs] == ["ref<f32[3]>", "f32[3]"]
    outputs, state = interpret(traced.graph, [np.ones(3, np.float32)], {"w": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(state["w"], [2.0, 2.0, 2.0])
    returned, value = jax.tree.unflatten(traced.out_tree, outputs)
    assert returned is w
    np.testing.assert_array_equal(value, [2.0, 2.0, 2.0])


def test_a_tree_of_arrays_becomes_a_tree_of_named_variables() -> None:
    with a_home():
        made = variables({"dense": [jnp.ones(2), lambda: jnp.zeros(3)]}, prefix="model/")
    assert [v.name for v in jax.tree.leaves(made, is_leaf=lambda v: isinstance(v, Variable))] == [
        "model/dense/0",
        "model/dense/1",
    ]
    jax.tree.map(np.testing.assert_array_equal, read(made), {"dense": [jnp.ones(2), jnp.zeros(3)]})


def test_an_initial_value_may_be_a_function_and_has_the_dtype() -> None:
    with a_home():
        made = Variable(lambda: jnp.ones(2), dtype=jnp.float16)
        near = Variable(0, near=made)
    assert str(made.type) == "f16[2]"
    assert made.name.startswith("variable_")
    assert near.home is made.home
    assert str(near.type) == "i32[]"


def test_without_a_home_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.tracing.state.context._default", [])
    with pytest.raises(InternalError, match="no home for variables is set; import dflow"):
        current_home()

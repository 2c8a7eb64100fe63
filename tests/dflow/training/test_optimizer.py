"""`dflow.Optimizer`: structures of variables, slots and their names, its own name, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.tracing.errors import GraphTypeError, VariableError
from dflow.training.optimizer import derived_name
from tests.effort import examples

HERE = Path(__file__).name


def test_nested_containers_keep_their_structure_and_are_named_by_their_paths() -> None:
    tree = {"a": [jnp.zeros(1), (jnp.ones(2), None)], "b": {"c": lambda: jnp.full(3, 2.0)}, "d": 1.5}
    model = dflow.variables(tree, prefix="net/")
    values = dflow.read(model)
    assert jax.tree.structure(values) == jax.tree.structure(tree)
    names = [leaf.name for leaf in jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, dflow.Variable))]
    assert names == ["net/a/0", "net/a/1/0", "net/b/c", "net/d"]
    np.testing.assert_array_equal(values["b"]["c"], [2, 2, 2])
    assert dflow.read({"x": 3, "v": model["d"]}) == {"x": 3, "v": 1.5}


@pytest.mark.parametrize("shape", ["one", "list", "tuple"])
def test_variables_in_any_structure(shape: str) -> None:
    first, second = dflow.Variable(jnp.ones(2)), dflow.Variable(jnp.ones(3))
    variables: Any = {"one": first, "list": [first, second], "tuple": (first, [second])}[shape]
    optimizer = dflow.Optimizer(optax.sgd(0.5), variables)

    @dflow.jit
    def step() -> None:
        optimizer.apply(dflow.grad(lambda: first.read().sum() + 2 * second.read().sum(), variables)())

    step()
    np.testing.assert_array_equal(first, [0.5, 0.5])
    np.testing.assert_array_equal(second, np.ones(3) if shape == "one" else np.zeros(3))


def test_slots_are_variables_named_for_what_they_belong_to() -> None:
    model = dflow.variables({"dense": {"kernel": jnp.ones((2, 3))}}, prefix="m/")
    optimizer = dflow.Optimizer(optax.adam(1e-3), model, name="adam")
    assert optimizer.slots[0].mu["dense"]["kernel"].name == "adam/0/mu/m/dense/kernel"
    assert optimizer.slots[0].count.name == "adam/0/count"
    assert dflow.Optimizer(optax.sgd(0.1), model).name != dflow.Optimizer(optax.sgd(0.1), model).name
    model = dflow.variables({"kernel": jnp.ones(2), "deep": {"kernel": jnp.ones(3)}}, prefix="paths/")
    mu = dflow.Optimizer(optax.adam(1e-3), model, name="paths").slots[0].mu
    assert (mu["kernel"].name, mu["deep"]["kernel"].name) == ("paths/0/mu/paths/kernel", "paths/0/mu/paths/deep/kernel")


def test_the_name_of_a_slot_begins_with_its_container_once() -> None:
    with dflow.container("run1"):
        w = dflow.Variable(jnp.zeros(2), name="w")
        inside = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
        with dflow.container("again"):
            further = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
    outside = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
    names = [optimizer.slots[0].mu[0].name for optimizer in (inside, further, outside)]
    assert names == ["run1/adam/0/mu/w", "run1/again/adam/0/mu/run1/w", "adam/0/mu/run1/w"]


def test_slots_that_begin_as_a_copy_of_the_parameters() -> None:
    lookahead = optax.ema(0.5)
    copies = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: p * 2, params), lambda updates, state, params=None: (updates, state)
    )
    weights = dflow.Variable(lambda: jnp.arange(3.0), name="weights")
    weights.assign_add(jnp.ones(3))
    optimizer = dflow.Optimizer(optax.chain(lookahead, copies), weights)
    np.testing.assert_array_equal(jax.tree.leaves(dflow.read(optimizer.slots))[-1], [2, 4, 6])
    np.testing.assert_array_equal(weights, [1, 2, 3])


# Wrong arguments, with the user's line.


def assert_names_line(error: BaseException, words: str) -> None:
    [line] = [line for line in str(error).splitlines() if line.startswith("  at ")]
    assert HERE in line
    assert words in Path(__file__).read_text().splitlines()[int(line.rpartition(":")[2]) - 1]


def test_what_is_no_variable_is_refused() -> None:
    v = dflow.Variable(jnp.ones(2))
    with pytest.raises(VariableError, match="an optimizer needs variables, but was given ArrayImpl, float") as caught:
        dflow.Optimizer(optax.sgd(0.1), [v, jnp.ones(3), 2.0])
    assert_names_line(caught.value, "dflow.Optimizer(optax.sgd(0.1), [v, jnp.ones(3), 2.0])")
    assert "make variables of a model's parameters with dflow.variables(params)" in str(caught.value)
    with pytest.raises(VariableError, match=r"variable 'n', which holds i32\[\] and has no gradient"):
        dflow.Optimizer(optax.sgd(0.1), [v, dflow.Variable(1, name="n")])
    with pytest.raises(VariableError, match="an optimizer needs variables, but was given none"):
        dflow.Optimizer(optax.sgd(0.1), {})


@pytest.mark.parametrize(
    ("gradients", "text"),
    [
        ({"a": jnp.ones(2)}, "the gradients have the structure .* but the variables"),
        ({"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)}, "the gradients have the structure"),
        ([jnp.ones(2), jnp.ones(3)], "the gradients have the structure"),
        ({"a": jnp.ones(2), "z": jnp.ones(3)}, "the gradients have the structure"),
        ({"a": jnp.ones(2), "b": jnp.ones(1)}, r"the gradient of variable 'b' has the shape \(1,\), .* \(3,\)"),
    ],
    ids=["one missing", "one too many", "another container", "another name", "another shape"],
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_gradients_that_do_not_fit_are_refused(gradients: Any, text: str, traced: bool) -> None:
    model = {"a": dflow.Variable(jnp.ones(2), name="a"), "b": dflow.Variable(jnp.ones(3), name="b")}
    optimizer = dflow.Optimizer(optax.adam(0.1), model)

    def step(given: Any) -> None:
        optimizer.apply(given)

    with pytest.raises(GraphTypeError, match=text) as caught:
        (dflow.jit(step) if traced else step)(gradients)
    assert_names_line(caught.value, "optimizer.apply(given)")
    np.testing.assert_array_equal(model["a"], [1, 1])


@pytest.mark.parametrize("name", ["update", "step", "minimize"])
def test_a_name_of_another_framework_says_apply(name: str) -> None:
    optimizer = dflow.Optimizer(optax.sgd(0.1), dflow.Variable(1.0, name="w"))
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\n  at .*\n  write optimizer\.apply\("):
        getattr(optimizer, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'elsewhere'$"):
        optimizer.elsewhere  # noqa: B018


def test_parameters_may_be_in_a_class_that_checks_them() -> None:
    @jax.tree_util.register_pytree_node_class
    class Layer:
        def __init__(self, weight: Any) -> None:
            assert weight.ndim == 2
            self.weight = weight

        def tree_flatten(self) -> tuple[Any, None]:
            return (self.weight,), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Layer:
            return cls(*children)

    layer = Layer(dflow.Variable(jnp.ones((2, 2)), name="checked"))
    opt = dflow.Optimizer(optax.adam(0.1), layer)
    opt.apply(dflow.grad(lambda: jnp.sum(layer.weight**2), layer)())
    np.testing.assert_allclose(layer.weight.read(), 0.9 * jnp.ones((2, 2)), rtol=1e-5)


# Names that every process derives from the variables.


def variables_of(*names: str) -> list[dflow.Variable]:
    return [dflow.Variable(jnp.zeros(2), name=name) for name in names]


def test_every_process_derives_the_same_name() -> None:
    made = dflow.Optimizer(optax.adam(0.1), variables_of("b", "a"))
    assert made.slots[0].mu[1].name == "optimizer_c4a78e5b/0/mu/a"


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, unique=True), st.lists(st.sampled_from("abcd"), min_size=1))
def test_names_are_equal_for_equal_variables_alone(one: list[str], other: list[str]) -> None:
    assert (derived_name(variables_of(*one)) == derived_name(variables_of(*other))) is (one == other)


def test_a_second_optimizer_of_the_same_variables_has_a_name_of_its_own() -> None:
    variables = variables_of("w", "b")
    made = [dflow.Optimizer(optax.adam(0.1), variables) for _ in range(3)]
    assert [optimizer.name.removeprefix(made[0].name) for optimizer in made] == ["", "_1", "_2"]
    assert dflow.Optimizer(optax.adam(0.1), variables_of("w", "b")).name == made[0].name

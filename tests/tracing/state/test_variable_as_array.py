"""A variable is a leaf of pytrees, an array to all functions of JAX, and itself in functions of dflow.jit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dflow
from dflow.tracing.state.variable_as_array import OF_BUFFERS


@pytest.fixture
def v() -> dflow.Variable:
    return dflow.Variable(jnp.array([1.0, 2.0, 3.0]), name="leaf")


def same(got: Any, want: Any) -> None:
    left, right = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


_OF_TREES: dict[str, Callable[[Any, Any], Any]] = {
    "leaves": lambda tree, _: jax.tree.leaves(tree),
    "map": lambda tree, _: jax.tree.map(lambda p: 2 * p - 1, tree),
    "map of two": lambda tree, values: jax.tree.map(lambda p, g: p - 0.1 * g, tree, values),
    "reduce": lambda tree, _: jax.tree.reduce(lambda total, p: total + (p**2).sum(), tree, 0.0),
    "tree.norm": lambda tree, _: optax.tree.norm(tree, squared=True),
    "apply_updates": optax.apply_updates,
    "ravel_pytree": lambda tree, _: jax.flatten_util.ravel_pytree(tree)[0],
    "adam": lambda tree, values: optax.adam(0.1).update(values, optax.adam(0.1).init(tree), tree)[0],
    "weight decay": lambda tree, values: optax.add_decayed_weights(0.1).update(values, optax.EmptyState(), tree)[0],
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", _OF_TREES)
def test_functions_of_trees_see_the_values(name: str, traced: bool) -> None:
    values = {"a": jnp.array([1.0, -2.0]), "b": (jnp.ones((2, 2)), jnp.float32(3.0))}
    tree = dflow.variables(values)
    of_tree = _OF_TREES[name]
    got = dflow.jit(lambda: of_tree(tree, values))() if traced else of_tree(tree, values)
    same(got, of_tree(values, values))


def cubes(x: Any) -> Any:
    return (x**3).sum()


_TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit(cubes),
    "jit, in a tree": lambda v: jax.jit(lambda tree: tree["a"][0] + tree["b"])({"a": [v], "b": 2.0}),
    "grad": jax.grad(cubes),
    "vjp": lambda v: jax.vjp(cubes, v)[1](1.0),
    "jvp": lambda v: jax.jvp(cubes, (v,), (v,)),
    "hessian": jax.hessian(cubes),
    "vmap": jax.vmap(lambda x: x**3),
    "vmap beside": lambda v: jax.vmap(lambda x, y: x * y, in_axes=(None, 0))(v, jnp.arange(4.0)),
    "checkpoint": jax.grad(jax.checkpoint(cubes)),
    "scan, carried": lambda v: jax.lax.scan(lambda c, x: (c + x, c), v, jnp.ones((2, 3))),
    "scan, over": lambda v: jax.lax.scan(lambda c, x: (c + x, c * x), 0.0, v),
    "map": lambda v: jax.lax.map(lambda x: x**3, v),
    "while": lambda v: jax.lax.while_loop(lambda x: x[0] < 5, lambda x: x * 2, v),
    "cond": lambda v: jax.lax.cond(True, lambda x: x + 1, lambda x: x, v),
    "custom_jvp": jax.nn.relu,
    "custom_vjp": jax.grad(lambda x: optax.safe_norm(x, 0.1)),
    "eval_shape": lambda v: np.ones(jax.eval_shape(lambda x: x, v).shape),
    "device_put": jax.device_put,
    "dflow.grad": dflow.grad(cubes),
    "dflow.while_loop": lambda v: dflow.while_loop(lambda x: x[0] < 5, lambda x: x * 2, v, max_iters=9),
}


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "where": lambda v: jnp.where(v > 0, v, 0),
    "dot": lambda v: jax.lax.dot(v, v),
    "stack": lambda v: jnp.stack([v, jnp.ones(3)]),
    "array": lambda v: jnp.array([v, v]),
    "zeros_like": jnp.zeros_like,
    "einsum": lambda v: jnp.einsum("i,j->ij", v, v),
    "ufunc": jnp.add.reduce,
    "piecewise": lambda v: jnp.piecewise(v, [v > 2], [lambda x: x, lambda x: -x]),
    "at": lambda v: v.at[0].add(5.0),
    "divmod": lambda v: divmod(v, 2.0),
    "round": lambda v: round(v / 3, 1),
}


@pytest.mark.parametrize("name", [*_TRANSFORMS, *_FUNCTIONS])
def test_functions_and_transformations_of_jax_take_the_value_of_a_variable(v: dflow.Variable, name: str) -> None:
    use = (_TRANSFORMS | _FUNCTIONS)[name]
    wanted = use(jnp.array([1.0, 2.0, 3.0]))
    same(use(v), wanted)
    same(dflow.jit(lambda: use(v))(), wanted)


@pytest.mark.parametrize("transform", [jax.vmap, jax.checkpoint, jax.jit, dflow.jit])
def test_an_argument_is_the_value_of_when_it_was_passed(v: dflow.Variable, transform: Callable[..., Any]) -> None:
    @dflow.jit
    def step() -> Any:
        def later(x: Any) -> Any:
            v.assign(jnp.zeros(3))
            return x + 0

        return transform(later)(v + 0 if transform is dflow.jit else v)

    np.testing.assert_array_equal(step(), [1, 2, 3])
    np.testing.assert_array_equal(v.read(), [0, 0, 0])


def test_functions_of_dflow_get_the_variable_itself(v: dflow.Variable) -> None:
    @dflow.jit
    def doubled(x: Any, scale: Any = 2.0) -> Any:
        if dflow.is_variable(x):
            x.assign(x * scale)
            return {"given": x, "sum": x.sum()}
        return {"given": x * scale, "sum": jnp.float32(0)}

    first = doubled(jnp.ones(3))
    np.testing.assert_array_equal(first["given"], [2, 2, 2])
    for turn in (1, 2, 3):
        result = doubled(v)
        assert result["given"] is v
        assert float(result["sum"]) == 6.0 * 2**turn
    result = doubled(scale=jnp.float32(0.5), x=v)
    assert result["given"] is v
    other = dflow.Variable(jnp.ones(3))
    assert doubled(other)["given"] is other
    np.testing.assert_array_equal(doubled(jnp.ones(3))["given"], [2, 2, 2])
    np.testing.assert_array_equal(v.read(), [4, 8, 12])


_LARGE = np.ones((1 << 16,), np.float32)

_STEPS: dict[str, Callable[[dflow.Variable], Any]] = {
    "state": lambda v: v.assign_add(jnp.ones(3)),
    "constants": lambda v: jnp.sum(_LARGE),
    "callback": lambda v: v.assign_add(
        jax.pure_callback(lambda: np.ones(3, np.float32), jax.ShapeDtypeStruct((3,), jnp.float32))
    ),
}


@pytest.mark.parametrize("kind", _STEPS)
def test_a_step_compiled_for_an_array_gets_the_variable_itself_too(v: dflow.Variable, kind: str) -> None:
    @dflow.jit
    def step(x: Any) -> Any:
        return _STEPS[kind](v), x

    assert step(jnp.ones(3))[1].shape == (3,)
    other = dflow.Variable(jnp.ones(3))
    assert step(other)[1] is other
    assert step(other)[1] is other
    assert not dflow.is_variable(step(jnp.ones(3))[1])


@pytest.mark.parametrize("static", [{"static_argnums": 0}, {"static_argnames": "variable"}])
def test_a_static_variable_is_refused_with_a_remedy_that_works(v: dflow.Variable, static: Any) -> None:
    def add(variable: Any, by: Any) -> None:
        variable.assign_add(by)

    with pytest.raises(dflow.VariableError, match=r"'leaf' is passed as a static argument of add\n.*\n  leave it out"):
        dflow.jit(add, **static)(v, jnp.ones(3))
    dflow.jit(add)(v, jnp.ones(3))
    dflow.jit(add)(v, jnp.ones(3))
    np.testing.assert_array_equal(v.read(), [3, 4, 5])


def test_variables_are_compared_by_value_as_arrays(v: dflow.Variable) -> None:
    other = dflow.Variable(v.read().at[1].set(9.0), name="other")
    array, copy = v.read(), other.read()

    def compared() -> list[Any]:
        return [v == other, v != other, v == copy, copy == v, np.asarray(array) == v, v == 2, v != 2.5, v == v]

    wanted = [array == copy, array != copy, array == copy, copy == array, array == array, array == 2, array != 2.5]
    wanted.append(jnp.ones(3, bool))
    with dflow.eager():
        eager = dflow.jit(compared)()
    for got in (compared(), dflow.jit(compared)(), eager):
        for one, value in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, value)
    assert jnp.mean(v == other) == jnp.mean(array == copy)
    for strange in (None, "leaf", object()):
        assert (v == strange, v != strange) == (False, True)
    with pytest.raises(TypeError, match="unsupported operand"):
        v == [1.0, 2.0, 3.0]  # noqa: B015


def test_variables_are_found_by_identity(v: dflow.Variable) -> None:
    other = dflow.Variable(v.read(), name="other")
    assert {v: 1, other: 2}[v] == 1
    assert len({v, other, v}) == 2
    assert v in [v, other]
    assert hash(v) != hash(other)


def test_a_variable_has_the_public_attributes_of_an_array(v: dflow.Variable) -> None:
    array = v.read()
    for name in dir(array):
        if name.startswith("_") or name in {"device", "sharding"}:
            continue
        try:
            wanted = getattr(array, name)
        except (AttributeError, NotImplementedError, ValueError) as error:
            with pytest.raises(type(error)):
                getattr(v, name)
            continue
        if name in OF_BUFFERS:
            with pytest.raises(AttributeError, match=f"'Variable' object has no attribute {name!r}; "):
                getattr(v, name)
        else:
            assert type(getattr(v, name)) is type(wanted), name
    assert v.tolist() == array.tolist()
    assert v.devices() == array.devices()
    assert not v.is_deleted()
    assert v.tobytes() == array.tobytes()
    np.testing.assert_array_equal(v.block_until_ready(), array)
    assert jax.block_until_ready({"v": v})["v"] is v
    np.testing.assert_array_equal(np.from_dlpack(v), array)
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"tolist\(\)"):
        dflow.jit(lambda: (v.tolist(),))()


@pytest.mark.parametrize("stage", ["graph", "lower", "eager", "eval_shape", "disabled", "numbers"])
def test_every_way_to_run_a_function_passes_the_variable(v: dflow.Variable, stage: str) -> None:
    @dflow.jit
    def add(variable: Any, by: Any) -> Any:
        variable.assign_add(by)
        return variable

    by, times = jnp.ones(3), 1
    if stage == "graph":
        assert [ref.name for ref in dflow.graph(add, v, by).graph.refs] == ["leaf"]
        times = 0
    elif stage == "lower":
        assert add.lower(v, by).compile()(v, by) is v
    elif stage == "eval_shape":
        assert add.eval_shape(v, by) is v
        times = 0
    elif stage == "numbers":
        with jax.debug_nans(True):
            assert add(v, by) is v
    else:
        with dflow.eager() if stage == "eager" else jax.disable_jit():
            assert add(v, by) is v
    np.testing.assert_array_equal(v.read(), np.array([1, 2, 3]) + times)


_WRITING: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit(lambda x: x.assign(0.0)),
    "grad": jax.grad(lambda x: x.assign_add(1.0)),
    "scan": lambda v: jax.lax.scan(lambda c, _: (c.scatter_add(0, 1.0), 0), v, length=2),
    "read": jax.grad(lambda x: x.read().sum()),
    "within": dflow.jit(jax.checkpoint(lambda x: x.assign_sub(1.0))),
}


@pytest.mark.parametrize("case", _WRITING)
def test_a_method_of_an_argument_within_a_transformation_says_what_to_do(v: dflow.Variable, case: str) -> None:
    with pytest.raises(AttributeError, match=r"(?s)a traced f32\[3\] has no attribute '\w+': a variable ") as caught:
        _WRITING[case](v)
    assert "test_variable_as_array.py" in str(caught.value)
    remedy = "use it as it is" if case == "read" else "have the function close over the variable, and write w."
    assert remedy in str(caught.value)


def test_vmap_hands_on_an_argument_that_it_does_not_map(v: dflow.Variable) -> None:
    jax.vmap(lambda w, x: w.assign_add(x * jnp.ones(3), reduce="sum"), in_axes=(None, 0))(v, jnp.ones(2))
    np.testing.assert_array_equal(v.read(), [3, 4, 5])


class Affine(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: Any) -> Any:
        return x @ self.weight + self.bias


def test_an_equinox_model_of_variables_is_used_as_one_of_arrays() -> None:
    plain = Affine(jnp.arange(6.0).reshape(3, 2), jnp.ones(2))
    model = dflow.variables(plain)
    x = jnp.arange(3.0)

    def loss(model: Any, x: Any) -> Any:
        return (model(x) ** 2).mean()

    for _ in range(2):
        same(eqx.filter_jit(loss)(model, x), loss(plain, x))
        same(eqx.filter_value_and_grad(loss)(model, x), eqx.filter_value_and_grad(loss)(plain, x))
        same(dflow.jit(eqx.filter_jit(loss))(model, x), loss(plain, x))
        model.bias.assign_add(jnp.ones(2))
        plain = Affine(plain.weight, plain.bias + 1)


def test_an_nnx_module_of_variables_is_used_as_one_of_arrays() -> None:
    class Model(nnx.Module):
        def __init__(self, weight: Any) -> None:
            self.weight = nnx.Param(weight)

        def __call__(self, x: Any) -> Any:
            return x @ self.weight

    weight, x = dflow.Variable(jnp.ones((3, 2))), jnp.arange(3.0)
    want = nnx.value_and_grad(lambda model: model(x).sum())(Model(jnp.ones((3, 2))))
    same(nnx.value_and_grad(lambda model: model(x).sum())(Model(weight)), want)
    same(nnx.jit(lambda model, x: model(x).sum())(Model(weight), x), want[0])
    same(dflow.jit(lambda x: nnx.jit(lambda model, x: model(x).sum())(Model(weight), x))(x), want[0])


@pytest.mark.parametrize("compiled", [jax.jit, eqx.filter_jit, nnx.jit])
@pytest.mark.parametrize("use", ["read", "write"])
def test_a_function_compiled_without_dflow_names_the_users_line(
    v: dflow.Variable, compiled: Callable[..., Any], use: str
) -> None:
    def total(x: Any) -> Any:
        return (x * v).sum() if use == "read" else v.assign_add(x)  # the line

    line = total.__code__.co_firstlineno + 1
    with pytest.raises(dflow.PlainJitError, match=rf"'leaf' is used in a function .*\n  at .*_as_array.py:{line}\n"):
        compiled(total)(jnp.ones(3))


def own_rule(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    with_rule = jax.custom_jvp(fn)
    with_rule.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    return with_rule


#: Functions that return the variable; each is one object, whose trace JAX may keep.
_RETURNING: dict[str, Callable[[dflow.Variable], Callable[[Any], Any]]] = {
    "jit": lambda v: jax.jit(lambda x: (v, x)),
    "custom_jvp": lambda v: jax.jit(own_rule(lambda x: (v, x))),
    "dflow.jit": lambda v: jax.jit(dflow.jit(lambda x: (v, x))),
    "cond": lambda v: partial(jax.lax.cond, True, lambda x: (v, x), lambda x: (v, x)),
    "scan": lambda v: lambda x: jax.lax.scan(lambda c, _: (c, v), x, None, length=1),
}


@pytest.mark.parametrize("kind", _RETURNING)
def test_a_variable_returned_from_what_jax_compiles_is_refused(v: dflow.Variable, kind: str) -> None:
    with pytest.raises(dflow.PlainJitError, match=r"'leaf' is used in a function .*\n  at .*_as_array.py:\d+\n"):
        _RETURNING[kind](v)(jnp.ones(3))


def test_a_variable_returned_from_a_checkpoint_is_its_value_of_each_call(v: dflow.Variable) -> None:
    both = jax.checkpoint(lambda x: (v, x))
    both(jnp.ones(3))
    v.assign(jnp.zeros(3))
    np.testing.assert_array_equal(both(jnp.ones(3))[0], [0, 0, 0])


_BODIES: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "scan": lambda body: jax.lax.scan(lambda c, _: (c, body(c)), 0.0, None, length=2)[1],
    "map": lambda body: jax.lax.map(body, jnp.arange(2.0)),
    "cond": lambda body: jnp.stack([jax.lax.cond(jnp.bool(True), body, body, 0.0) for _ in range(2)]),
    "fori": lambda body: jnp.stack([jax.lax.fori_loop(0, 1, lambda _, c: body(c), jnp.ones(3)) for _ in range(2)]),
    "checkpoint": lambda body: jnp.stack([jax.checkpoint(body)(float(turn)) for turn in range(2)]),
    "jit": lambda body: jnp.stack([jax.jit(body)(float(turn)) for turn in range(2)]),
}


@pytest.mark.parametrize("kind", _BODIES)
def test_a_body_that_writes_a_variable_and_returns_it_gives_what_it_wrote(kind: str) -> None:
    v = dflow.Variable(jnp.ones(3), name="leaf")

    def body(_: Any) -> Any:
        v.assign_add(jnp.ones(3))
        return v

    got = jnp.stack(list(dflow.jit(lambda: _BODIES[kind](body))()))
    np.testing.assert_array_equal(got, [[2, 2, 2], [3, 3, 3]])
    np.testing.assert_array_equal(v, [3, 3, 3])


@pytest.mark.parametrize("convert", [int, float, complex, operator.index, range], ids=lambda fn: fn.__name__)
def test_a_conversion_is_that_of_the_value_and_a_type_error_where_it_has_none(convert: Callable[[Any], Any]) -> None:
    assert convert(dflow.Variable(jnp.int32(3), name="three")) == convert(3)
    with pytest.raises(TypeError):
        convert(dflow.Variable(jax.random.key(0), name="key"))

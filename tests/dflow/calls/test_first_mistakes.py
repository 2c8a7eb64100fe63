"""The mistakes of a new user: errors name the place and a remedy, in tracebacks of the user's frames."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.testing import memory_cluster


class Made:
    """The variables of the cases."""

    def __init__(self) -> None:
        self.w, self.b = dflow.Variable(jnp.ones((3, 2)), name="w"), dflow.Variable(jnp.ones(2), name="b")
        self.x = jnp.ones((4, 5))

    def loss(self) -> Any:
        return (self.w**2).sum() + self.b.sum()


PRODUCTS: dict[str, tuple[Callable[[Made], Any], str]] = {
    "x @ w": (
        lambda made: dflow.jit(lambda x: x @ made.w)(made.x),
        "f32[4,5] and variable 'w' of f32[3,2]: give 3 features to 'w', or make it for 5",
    ),
    "w @ x": (
        lambda made: dflow.jit(lambda x: made.w @ x)(made.x),
        "variable 'w' of f32[3,2] and f32[4,5]: give 2 features to 'w', or make it for 4",
    ),
    "eager": (
        lambda made: np.ones((4, 5), np.float32) @ made.w,
        "f32[4,5] and variable 'w' of f32[3,2]: give 3 features to 'w', or make it for 5",
    ),
    "in a gradient": (
        lambda made: dflow.jit(lambda x: dflow.grad(lambda: (x @ made.w).mean() + 1, made.w)())(made.x),
        "f32[4,5] and variable 'w' of f32[3,2]: give 3 features to 'w', or make it for 5",
    ),
    "sum": (lambda made: dflow.jit(lambda x: x + made.w)(made.x), "f32[4,5] and variable 'w' of f32[3,2]: give them"),
    "einsum": (
        lambda made: dflow.jit(lambda x: jnp.einsum("ij,jk", x, made.w))(made.x),
        "f32[4,5] and variable 'w' of f32[3,2]: give them",
    ),
}


@pytest.mark.parametrize("way", PRODUCTS)
def test_shapes_that_do_not_fit_name_the_variable_and_both_shapes(way: str) -> None:
    call, message = PRODUCTS[way]
    with pytest.raises((TypeError, ValueError)) as caught:
        call(Made())
    *_, last = caught.value.__notes__
    assert "test_first_mistakes.py:" in last
    assert f"the operands are {message}" in last


FORGOTTEN: dict[str, tuple[Callable[[Made], Any], Callable[[Made], Any], str]] = {
    "list": (lambda made: [made.w], lambda made: [made.w, made.b], "of 'w', got those of 'w', 'b': it has no variable"),
    "dict": (lambda made: {"w": made.w}, lambda made: {"w": made.w, "b": made.b}, "it has no variable 'b'"),
    "missing": (lambda made: [made.w, made.b], lambda made: [made.w], "that of 'b' is missing"),
}


@pytest.mark.parametrize("way", FORGOTTEN)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_forgotten_variable_of_an_optimizer_is_named(way: str, compiled: bool) -> None:
    made = Made()
    mine, differentiated, message = FORGOTTEN[way]
    optimizer = dflow.Optimizer(optax.sgd(0.1), mine(made), name="sgd")

    def step() -> None:
        optimizer.apply(dflow.grad(made.loss, differentiated(made))())

    with pytest.raises(dflow.GraphTypeError, match="apply: expected the gradients of 'sgd', of ") as caught:
        (dflow.jit(step) if compiled else step)()
    assert message in str(caught.value)
    assert not any("internal frames" in note for note in getattr(caught.value, "__notes__", ()))


def test_an_optimizer_says_what_it_is() -> None:
    made = Made()
    assert repr(dflow.Optimizer(optax.adam(0.1), [made.w, made.b], name="adam")) == (
        "<Optimizer 'adam' of 'w', 'b': 5 slots>"
    )
    many = [dflow.Variable(0.0, name=f"v{number}") for number in range(7)]
    assert repr(dflow.Optimizer(optax.sgd(0.1), many, name="sgd")) == (
        "<Optimizer 'sgd' of 'v0', 'v1', 'v2', 'v3', 'v4' and 2 more: 0 slots>"
    )


IDS: dict[str, tuple[Any, str]] = {
    "nan of pandas": (np.array([["a"], [float("nan")]], object), r"got nan at \(1, 0\)"),
    "nan of numbers": (np.array([1.0, np.nan]), r"got nan at \(1,\)"),
    "None among numbers": ([1, None], r"got None at \(1,\)"),
    "masked": (np.ma.array([1, 2], mask=[False, True]), r"got a masked id at \(1,\)"),
    "mixed with numbers first": ([5, "a"], r"only integers, got 'a' \(str\) at \(1,\)"),
    "large": ([1, 2**64], r"integers of at most 64 bits, got 18446744073709551616 at \(1,\)"),
    "columns": ({"user": ["a"]}, "one column, got a dict of 1"),
    "a float among integers": (np.array([1, 1.0], object), r"only integers, got 1.0 \(float\) at \(1,\)"),
}


@pytest.mark.parametrize("kind", IDS)
def test_a_value_among_ids_that_is_none_is_named_with_its_place(kind: str) -> None:
    ids, message = IDS[kind]
    with pytest.raises(dflow.InputError, match=rf"wide ids: expected .*{message}\n  at .*\n  "):
        dflow.wide_ids(ids)


def test_a_missing_id_of_pandas_is_named_with_its_column() -> None:
    pd = pytest.importorskip("pandas")
    for missing, shown in ((pd.NA, "<NA>"), (pd.NaT, "NaT"), (None, "None")):
        with pytest.raises(dflow.InputError, match=rf"wide ids: expected .* got {shown} at \(1,\)"):
            dflow.wide_ids(np.array(["a", missing], object))
    for dtype in ("string", "category", "Int64"):
        column = pd.Series([1, None] if dtype == "Int64" else ["a", None], name="user", dtype=dtype)
        with pytest.raises(dflow.InputError, match=r"wide ids of column 'user': expected .* got .* at \(1,\)"):
            dflow.wide_ids(column)


@pytest.mark.parametrize("dtype", ["float64", "Int64", "object"])
def test_the_remedy_of_a_missing_id_works(dtype: str) -> None:
    pd = pytest.importorskip("pandas")
    column = pd.Series(["a", None] if dtype == "object" else [1, None], dtype=dtype)
    remedy = "column.fillna('')" if dtype == "object" else "column.fillna(-1).astype(int)"
    with pytest.raises(dflow.InputError, match=re.escape(f"such as {remedy} in pandas")):
        dflow.wide_ids(column)
    assert dflow.wide_ids(eval(remedy)).high.shape == (2,)  # noqa: S307


def test_a_table_names_itself_and_the_place_of_a_missing_id() -> None:
    table = dflow.Embedding(8, 2, name="users", vocabulary=dflow.Vocabulary())
    with pytest.raises(dflow.InputError, match=r"ids of table 'users': expected .* got None at \(1,\)"):
        table(["a", None])


def test_integers_as_objects_are_ids() -> None:
    given = dflow.wide_ids(np.array([2**40 + 1, -1], object))
    wanted = dflow.wide_ids(np.array([2**40 + 1, -1]))
    np.testing.assert_array_equal(np.stack([given.high, given.low]), np.stack([wanted.high, wanted.low]))


def test_a_redefinition_works_after_its_error_and_the_remedy() -> None:
    """A notebook keeps the error with its frames."""
    kept: list[Any] = []
    w = dflow.Variable(jnp.zeros(3), name="kernel")
    try:
        dflow.Variable(jnp.zeros(4), name="kernel")
    except dflow.VariableError as error:
        kept.append(error)
    assert "delete the first" in str(kept[0])
    del w
    assert dflow.Variable(jnp.zeros(4), name="kernel").shape == (4,)


def test_trainable_variables_are_those_that_have_gradients() -> None:
    tree = {
        "w": dflow.Variable(jnp.ones(2)),
        "half": dflow.Variable(jnp.ones(2, jnp.bfloat16)),
        "count": dflow.Variable(0),
        "flag": dflow.Variable(False),
        "key": dflow.Variable(jax.random.key(0)),
        "fixed": dflow.Variable(1.0, trainable=False),
        "wave": dflow.Variable(jnp.ones(2, jnp.complex64)),
    }
    found = dflow.trainable_variables(tree)
    assert [*map(id, found)] == [id(tree["half"]), id(tree["w"]), id(tree["wave"])]
    assert len(dflow.grad(lambda: sum(jnp.sum(jnp.abs(one.read())) for one in found), found)()) == 3


def test_functions_among_the_leaves_of_a_module_have_a_remedy_that_works() -> None:
    equinox = pytest.importorskip("equinox")
    module = equinox.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    x = jnp.ones(2)
    with pytest.raises(TypeError) as caught:
        dflow.jit(lambda module, x: module(x))(module, x)
    assert "equinox.partition(module, equinox.is_array)" in caught.value.__notes__[-1]
    with pytest.raises(dflow.VariableError, match=r"equinox.partition\(module, equinox.is_array\)"):
        dflow.variables(module)
    arrays, rest = equinox.partition(module, equinox.is_array)
    wanted = module(x)
    np.testing.assert_allclose(dflow.jit(lambda arrays, x: equinox.combine(arrays, rest)(x))(arrays, x), wanted)
    params = dflow.variables(arrays)
    np.testing.assert_allclose(dflow.jit(lambda x: equinox.combine(dflow.read(params), rest)(x) * 1)(x), wanted)


@dataclass
class Layer:
    """A class with generated methods that make a variable."""

    size: int
    w: Any = None

    def __post_init__(self) -> None:
        self.w = dflow.Variable(jnp.zeros(self.size), name=f"layer{self.size}")


def test_the_line_is_not_that_of_a_generated_method() -> None:
    made = dflow.Variable(0.0, name="outer")

    namespace: dict[str, Any] = {"made": made}
    exec("def __init__(self):\n    made.assign(None)\n", namespace)
    with pytest.raises(dflow.VariableShapeError, match=r"\n  at .*test_first_mistakes.py:"):
        namespace["__init__"](None)
    assert Layer(3).w.loc.file.endswith("test_first_mistakes.py")


def test_a_nan_beside_a_lookup_is_found_where_it_is() -> None:
    table = dflow.Embedding(4, 2, name="table")

    @dflow.jit
    def step(ids: Any, x: Any) -> Any:
        return table(ids).sum() + jnp.log(x)

    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        step(jnp.array([1, 2]), -1.0)
    assert "log" in str(caught.value)


def test_an_error_in_a_run_shows_the_users_frames() -> None:
    with memory_cluster(ps=1) as memory:
        cluster = memory.worker()
        table_of = dflow.Embedding
        with cluster.parameter_servers():
            table = table_of(4, 2, name="table")
        step = dflow.jit(lambda ids: table(ids).sum())
        with pytest.raises(dflow.InputError, match="got 9") as caught:
            [*dflow.distributed.Async(cluster).run(step, [jnp.array([9])], steps=1)]
        files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
        cluster.close()
    assert files == {__file__}


@pytest.fixture
def v() -> dflow.Variable:
    return dflow.Variable(jnp.array([1.0, 2.0, 3.0]), name="leaf")


def frames_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def fails(x: Any) -> Any:
    raise ValueError("from the user")


@pytest.mark.parametrize("way", ["first", "second", "nested", "variable", "gradient", "traced_gradient"])
def test_a_traceback_shows_the_users_frames_alone(v: dflow.Variable, way: str) -> None:
    @dflow.jit
    def step(x: Any, *_: Any) -> Any:
        if x.shape == (3,):
            if way == "traced_gradient":
                return dflow.grad(fails)(x)
            return dflow.jit(fails)(x) if way == "nested" else fails(x)
        return x + v.sum()

    if way == "second":
        step(jnp.ones(2))
    if way == "gradient":
        step = dflow.grad(fails)
    with pytest.raises(ValueError, match="from the user") as caught:
        step(jnp.ones(3), v) if way == "variable" else step(jnp.ones(3))
    _test, *inner = frames_of(caught.value)
    assert inner == (["fails"] if way == "gradient" else ["step", "fails"])
    notes = getattr(caught.value, "__notes__", [])
    assert sum("removed its internal frames" in note for note in notes) == 1


def test_a_traceback_shows_all_frames_when_jax_is_told_so(v: dflow.Variable) -> None:
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(ValueError, match="from the user") as caught:
            dflow.jit(fails)(jnp.ones(3))
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert "_first_call" in frames_of(caught.value)


_WAYS: dict[str, Callable[[], Any]] = {
    "lower": lambda: dflow.jit(fails).lower(jnp.ones(3)),
    "trace": lambda: dflow.jit(fails).trace(jnp.ones(3)),
    "eval_shape": lambda: dflow.jit(fails).eval_shape(jnp.ones(3)),
    "value_and_grad": lambda: dflow.value_and_grad(fails)(jnp.ones(3)),
    "jvp": lambda: dflow.jvp(fails, (1.0,), (1.0,)),
    "vjp": lambda: dflow.vjp(fails, 1.0),
    "hvp": lambda: dflow.hvp(fails)(1.0, 1.0),
}


@pytest.mark.parametrize("way", _WAYS)
def test_other_ways_into_a_users_function_show_no_frames_either(way: str) -> None:
    with pytest.raises(ValueError, match="from the user") as caught:
        _WAYS[way]()
    assert frames_of(caught.value)[1:] == ["<lambda>", "fails"]

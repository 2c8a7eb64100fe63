"""`dflow.numpy`, `dflow.lax`, `dflow.nn`, `dflow.random`: JAX's own, with variables accepted."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.functional import public_names

MIRRORED = [
    (dflow.numpy, jax.numpy),
    (dflow.numpy.linalg, jax.numpy.linalg),
    (dflow.numpy.fft, jax.numpy.fft),
    (dflow.lax, jax.lax),
    (dflow.nn, jax.nn),
    (dflow.nn.initializers, jax.nn.initializers),
    (dflow.random, jax.random),
]

A = np.array([[0.3, -0.5, 0.25], [0.75, 0.1, -0.2], [-0.4, 0.6, 0.9]], np.float32)
B = np.array([[0.5, 0.5, -0.75], [0.2, 0.9, 0.4], [0.1, -0.3, 0.8]], np.float32)
SYMMETRIC = A @ A.T + np.eye(3, dtype=np.float32)
VECTOR = np.array([0.5, 0.25, -1.0], np.float32)
INTEGERS = np.array([[3, 1, 2], [2, 2, 7]], np.int32)
BOOLS = np.array([[True, False, True], [False, False, True]])
WAVES = A + 1j * B


def _each(names: str, arguments: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), arguments)


#: A function of each form of arguments and results; arrays among the arguments are tried as arrays and as variables.
#: `make array-api-suite` tries every function of the standard.
STANDARD: dict[str, tuple[Any, ...]] = {
    **_each("abs argmax mean sort unique_counts ones_like tril linalg.svd linalg.slogdet linalg.matrix_norm", (A,)),
    **_each("unstack asarray linalg.matrix_transpose fft.rfft", (A,)),
    **_each("add less_equal matmul linalg.cross tensordot vecdot", (A, B)),
    "clip": (A, -0.25, 0.25),
    "where": (A > 0, A, B),
    "broadcast_arrays": (VECTOR, A),
    "broadcast_to": (VECTOR, (2, 3)),
    "concat": ([A, B],),
    "permute_dims": (A, (1, 0)),
    "reshape": (A, (9,)),
    "repeat": (VECTOR, 2),
    "nonzero": (BOOLS,),
    "searchsorted": (np.sort(VECTOR), A),
    "take": (A, np.array([0, 2]), 1),
    "astype": (A, np.dtype(np.int32)),
    "full_like": (A, 7),
    "full": ((2, 2), np.float32(3)),
    "meshgrid": (VECTOR, VECTOR),
    "arange": (0, 5),
    "isdtype": (np.dtype(np.float32), "real floating"),
    "result_type": (A, INTEGERS),
    "finfo": (np.dtype(np.float32),),
    "linalg.solve": (SYMMETRIC, VECTOR),
    "fft.fft": (WAVES,),
    "fft.fftfreq": (4,),
}

CONSTANTS = ["e", "inf", "nan", "newaxis", "pi"]
DTYPES = ["bool", "complex64", "complex128", "float32", "float64"]
DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def as_variables(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: dflow.Variable(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)


def member(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def same(left: Any, right: Any) -> None:
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        if not isinstance(one, jax.Array):
            assert (type(one), str(one)) == (type(other), str(other))
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", sorted(STANDARD))
def test_a_function_of_the_array_api_gives_for_variables_what_it_gives_for_arrays(name: str) -> None:
    arguments = STANDARD[name]
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, arguments)
    expected = member(jnp, name)(*arrays)
    same(member(dflow.numpy, name)(*as_variables(arguments)), expected)
    same(member(dflow.numpy, name)(*arrays), expected)


def test_the_constants_and_dtypes_of_the_array_api_are_jaxs_own() -> None:
    for name in (*CONSTANTS, *DTYPES):
        assert getattr(dflow.numpy, name) is getattr(jnp, name), name
    assert dflow.numpy.__array_api_version__ == jnp.__array_api_version__
    same([*dflow.numpy.__array_namespace_info__().dtypes()], [*jnp.__array_namespace_info__().dtypes()])


@pytest.mark.parametrize(("module", "source"), MIRRORED, ids=lambda module: module.__name__)
def test_every_public_name_of_jax_is_there_and_listed(module: ModuleType, source: ModuleType) -> None:
    assert set(dir(module)) == set(public_names(source)) == set(module.__all__)
    for name in public_names(source):
        ours, theirs = getattr(module, name), getattr(source, name)
        if isinstance(theirs, type) or not callable(theirs):
            assert ours is theirs or isinstance(theirs, ModuleType), name


@pytest.mark.parametrize(("module", "source"), MIRRORED, ids=lambda module: module.__name__)
def test_a_function_keeps_its_signature_and_documentation(module: ModuleType, source: ModuleType) -> None:
    functions = [name for name in public_names(source) if inspect.isroutine(getattr(source, name))]
    assert functions
    for name in functions:
        ours, theirs = getattr(module, name), getattr(source, name)
        assert inspect.getdoc(ours) == inspect.getdoc(theirs)
        assert inspect.signature(ours) == inspect.signature(theirs), name


def test_the_modules_can_be_imported_by_name() -> None:
    assert importlib.import_module("dflow.numpy") is dflow.numpy
    assert importlib.import_module("dflow.numpy.linalg") is dflow.numpy.linalg
    assert importlib.import_module("dflow.nn.initializers") is dflow.nn.initializers


def test_a_name_that_jax_does_not_have_is_refused_by_its_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'dflow.numpy' has no attribute 'summ'"):
        dflow.numpy.summ  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'dflow.numpy' has no attribute '__path__'"):
        dflow.numpy.__path__  # noqa: B018
    with pytest.raises(AttributeError, match=r"'Ufunc' object has no attribute '_absent'"):
        dflow.numpy.add._absent  # noqa: B018


def test_variables_may_be_keyword_arguments() -> None:
    w = dflow.Variable(VECTOR)
    same(dflow.numpy.sum(a=w, where=dflow.Variable(VECTOR > 0)), jnp.float32(0.75))


def test_a_ufunc_and_its_methods_take_variables() -> None:
    w, v = dflow.Variable(VECTOR), jnp.asarray(VECTOR)
    same(dflow.numpy.add(w, 1), jnp.add(v, 1))
    same(dflow.numpy.add.reduce(w), jnp.add.reduce(v))
    same(dflow.numpy.multiply.outer(w, w), jnp.multiply.outer(v, v))
    same(
        dflow.numpy.add.at(w, np.array([0, 0]), w[:2], inplace=False),
        jnp.add.at(v, np.array([0, 0]), v[:2], inplace=False),
    )
    assert (dflow.numpy.add.nin, dflow.numpy.add.identity) == (jnp.add.nin, jnp.add.identity)
    assert inspect.getdoc(dflow.numpy.add) == inspect.getdoc(jnp.add)
    assert "reduce" in dir(dflow.numpy.add)
    assert repr(dflow.numpy.add) == repr(jnp.add)


def test_a_function_that_gives_a_function_gives_one_that_takes_variables() -> None:
    w = dflow.Variable(VECTOR)
    same(dflow.numpy.vectorize(lambda x: x + 1)(w), jnp.asarray(VECTOR) + 1)
    half = dflow.numpy.frompyfunc(lambda x, y: (x + y) / 2, 2, 1, identity=0)
    same(half(w, w), jnp.asarray(VECTOR))
    same(half.outer(w, w)[0], (VECTOR[0] + jnp.asarray(VECTOR)) / 2)
    key = dflow.Variable(jax.random.key_data(jax.random.key(3)))
    first = dflow.nn.initializers.normal()
    same(first(dflow.random.wrap_key_data(key), (2,)), jax.nn.initializers.normal()(jax.random.key(3), (2,)))


def test_the_other_modules_take_variables_eagerly_and_in_traced_code() -> None:
    w, v = dflow.Variable(VECTOR), jnp.asarray(VECTOR)
    key = jax.random.key(0)
    calls = [
        (dflow.nn.softmax, jax.nn.softmax, ()),
        (dflow.nn.relu, jax.nn.relu, ()),
        (dflow.lax.sin, jax.lax.sin, ()),
        (dflow.lax.cumsum, jax.lax.cumsum, ()),
        (lambda x: dflow.random.categorical(key, x), lambda x: jax.random.categorical(key, x), ()),
        (lambda x: dflow.lax.fori_loop(0, 3, lambda _, c: c * 2, x), lambda x: x * 8, ()),
        (lambda x: dflow.lax.scan(lambda c, r: (c + r["a"], c), x, {"a": x}), None, ()),
    ]
    for ours, theirs, more in calls:
        expected = (theirs or ours)(v, *more)
        same(ours(w, *more), expected)
        compiled, traced = dflow.jit(lambda ours=ours, more=more: ours(w, *more))(), jax.jit(theirs or ours)(v, *more)
        same(compiled, traced)

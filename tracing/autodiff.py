"""Gradients with respect to variables and arguments, of functions that read and write state.

The function is traced, its state is discharged to values, the pure function is differentiated by JAX, and what the
function wrote is written back, once. So a counter or a batch-norm statistic that is written inside a loop of the
differentiated function survives, which under plain `jax.grad` it would not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.discharge import State, evaluate
from dflow.tracing.errors import GraphTypeError, VariableError
from dflow.tracing.jax_frontend import accesses, make_jaxpr
from dflow.tracing.resources import Variable, is_variable, name
from dflow.tracing.source import at, caller
from dflow.tracing.types import array_type_of


def value_and_grad(
    fun: Callable[..., Any],
    variables: Any = None,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """A function that gives `fun`'s value and its gradient.

    fun        returns a real scalar, or `(scalar, aux)` when `has_aux` is set; it may read and write variables
    variables  a pytree of variables to differentiate with respect to
    argnums    which positional arguments to differentiate with respect to; 0 when no variables are given
    returns    `(value, gradient)`; the gradient has the structure of `variables` (of the argument, of the tuple of
               arguments when `argnums` is a sequence) with arrays for leaves, and is the pair of both when both are
               given
    raises     GraphTypeError when the value is no real scalar or something to differentiate is not floating

    What `fun` writes is written once, as if it had run alone. Writes carry no gradient to what they wrote; a later
    read in `fun` does.
    """
    if variables is None and argnums is None:
        argnums = 0

    @functools.wraps(fun)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        wrt, wrt_tree = jax.tree_util.tree_flatten(variables, is_leaf=is_variable)
        _check_variables(wrt)
        picked, picked_tree, rebuild = _pick(args, argnums)
        (value, aux), grads = _differentiate(fun, wrt, picked, rebuild, kwargs, has_aux)
        by_variable = jax.tree_util.tree_unflatten(wrt_tree, grads[0])
        by_argument = jax.tree_util.tree_unflatten(picked_tree, grads[1])
        gradient = by_argument if variables is None else by_variable if argnums is None else (by_variable, by_argument)
        return ((value, aux), gradient) if has_aux else (value, gradient)

    return differentiated


def grad(
    fun: Callable[..., Any],
    variables: Any = None,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `value_and_grad`, without the value: the gradient, or `(gradient, aux)` when `has_aux` is set."""
    both = value_and_grad(fun, variables, argnums=argnums, has_aux=has_aux)

    @functools.wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def _check_variables(wrt: Sequence[Any]) -> None:
    for leaf in wrt:
        if not isinstance(leaf, Variable):
            raise VariableError(
                f"value_and_grad was given {type(leaf).__name__} among its variables{at(caller())}\n"
                "  to differentiate with respect to arguments, give argnums"
            )
        _check_floating(f"variable {leaf.name!r}", leaf.dtype)


def _check_floating(what: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise GraphTypeError(
            f"{what} is {dtype}, which has no gradient{at(caller())}\n"
            "  leave it out, or make it floating with .astype(jnp.float32)"
        )


def _pick(args: tuple[Any, ...], argnums: int | Sequence[int] | None) -> tuple[list[Any], Any, Callable[..., Any]]:
    """The leaves of the arguments to differentiate, their structure, and how to put leaves back among the others."""
    numbers = [] if argnums is None else [argnums] if isinstance(argnums, int) else list(argnums)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise GraphTypeError(f"argnums has {number} but the function was given {len(args)} arguments{at(caller())}")
    numbers = [number % len(args) for number in numbers]
    chosen: Any = tuple(args[number] for number in numbers)
    leaves, tree = jax.tree_util.tree_flatten(chosen[0] if isinstance(argnums, int) else chosen)
    for leaf in leaves:
        _check_floating("an argument to differentiate", array_type_of(leaf).dtype)

    def rebuild(new: Sequence[Any]) -> tuple[Any, ...]:
        values = jax.tree_util.tree_unflatten(tree, new)
        by_number = dict(zip(numbers, [values] if isinstance(argnums, int) else values, strict=True))
        return tuple(by_number.get(index, arg) for index, arg in enumerate(args))

    return leaves, tree, rebuild


def _differentiate(
    fun: Callable[..., Any],
    wrt: list[Variable],
    picked: list[Any],
    rebuild: Callable[..., Any],
    kwargs: dict[str, Any],
    has_aux: bool,
) -> tuple[tuple[Any, Any], tuple[list[Any], list[Any]]]:
    if not wrt and not picked:
        raise GraphTypeError(f"nothing to differentiate: give variables, or argnums{at(caller())}")
    aux_tree: Any = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal aux_tree
        result = fun(*rebuild(leaves), **kwargs)
        value, aux = result if has_aux else (result, None)
        aux_leaves, aux_tree = jax.tree_util.tree_flatten(aux)
        return [_scalar(value), *aux_leaves]

    jaxpr, consts, _ = make_jaxpr(flat, *picked)
    reads, writes = accesses(jaxpr.effects)
    before = {variable: variable.read() for variable in dict.fromkeys([*reads, *writes, *wrt])}

    def pure(values: list[Any], leaves: list[Any]) -> tuple[Any, Any]:
        state = State({**before, **dict(zip(wrt, values, strict=True))})
        value, *aux = evaluate(jaxpr, consts, leaves, state)
        return value, (aux, state.of(writes))

    start = [before[variable] for variable in wrt]
    (value, (aux, after)), grads = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True)(start, picked)
    for variable, written in zip(writes, after, strict=True):
        variable.assign(written)
    named = [name(gradient, f"grad/{variable.name}") for gradient, variable in zip(grads[0], wrt, strict=True)]
    return (value, jax.tree_util.tree_unflatten(aux_tree, aux)), (named, grads[1])


def _scalar(value: Any) -> Any:
    if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
        raise GraphTypeError(
            f"the function to differentiate returned {type(value).__name__}, not a scalar{at(caller())}\n"
            "  return a number, or (number, aux) with has_aux=True"
        )
    array = jnp.asarray(value)
    if array.shape != () or not jnp.issubdtype(array.dtype, jnp.floating):
        raise GraphTypeError(
            f"the function to differentiate returned {array_type_of(array)}, not a real scalar{at(caller())}\n"
            "  reduce it, for instance with .mean() or .sum()"
        )
    return array

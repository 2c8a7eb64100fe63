"""Derivatives with respect to variables and arguments, of functions that read and write state.

The function is traced, its state is discharged to values, the pure function is differentiated by JAX, and what the
function wrote is written back, once. So a counter or a batch-norm statistic that is written inside a loop of the
differentiated function survives, which under plain `jax.grad` it would not.

A variable that the function only looks rows up in is not read whole. Its gradient is the result of `rows_to_dense`: an
array like any other, which `keep_rows` leaves out of the compiled program where its rows are enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.derivatives.border import Border
from dflow.tracing.derivatives.discharge import State, evaluate
from dflow.tracing.derivatives.early_lookups import lookup_sites
from dflow.tracing.derivatives.loops import NOT_REVERSED, REVERSED
from dflow.tracing.derivatives.one_device import on_one_device
from dflow.tracing.derivatives.uncalled import Derivative
from dflow.tracing.devices.device_name import is_on_task
from dflow.tracing.errors import GraphTypeError, VariableError
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import accesses, hides_frames, is_tracing, make_jaxpr, only_added
from dflow.tracing.names_of_values import note_gradient
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.primitives.id_checks import awaits_checks
from dflow.tracing.rows.lookups import RowsFound, TappedLookups, rows_found
from dflow.tracing.rows.row_gradient import RowGradient
from dflow.tracing.rows.rows_to_dense import rows_to_dense
from dflow.tracing.source import at, caller, warn_at
from dflow.tracing.state.resources import Variable, is_variable, name, read
from dflow.tracing.state.variable_trees import handles


class UnreadVariableWarning(UserWarning):
    """Warns that a gradient is zero because the function does not read the variable."""


@suggests_keywords
def value_and_grad(
    fun: Callable[..., Any],
    variables: Any = None,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    rows: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes `fun`'s value and its gradient.

    fun        returns a real scalar, or `(scalar, aux)` when `has_aux` is set; it may read and write variables
    variables  a pytree of variables to differentiate with respect to
    argnums    which positional arguments to differentiate with respect to; 0 when no variables are given
    returns    `(value, gradient)`; the gradient has the structure of `variables` (of the argument, of the tuple of
               arguments when `argnums` is a sequence) with arrays for leaves, and is the pair of both when both are
               given
    rows       whether the gradient of a variable that `fun` only looks rows up in is a `RowGradient`, not an array
    raises     GraphTypeError when the value is no real scalar or something to differentiate is not floating;
               VariableError for a variable that is not trainable

    `fun` writes its variables once, as if it had run alone. A write itself carries no gradient; a later read in `fun`
    does.
    """
    return _value_and_grad("value_and_grad", fun, variables, argnums, has_aux, rows)


def _value_and_grad(
    function: str,
    fun: Callable[..., Any],
    variables: Any,
    argnums: int | Sequence[int] | None,
    has_aux: bool,
    rows: bool,
) -> Callable[..., Any]:
    """`value_and_grad`, as errors of `function`."""
    _check_function(function, fun)

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        wrt = _Wrt(function, variables, argnums, args)
        pure = _Pure(
            lambda *leaves: _loss(fun(*wrt.arguments(leaves), **kwargs), has_aux),
            wrt.variables,
            wrt.leaves,
            by_rows=True,
        )
        _warn_of_unread(function, wrt.variables, pure.effects)
        (value, aux), gradients = pure.value_and_grad(rows)
        gradient = wrt.gradient(*gradients)
        return ((value, aux), gradient) if has_aux else (value, gradient)

    return Derivative(function, fun, differentiated)


@suggests_keywords
def grad(
    fun: Callable[..., Any],
    variables: Any = None,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    rows: bool = False,
) -> Callable[..., Any]:
    """Like `value_and_grad`, without the value: the gradient, or `(gradient, aux)` when `has_aux` is set."""
    both = _value_and_grad("grad", fun, variables, argnums, has_aux, rows)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return Derivative("grad", fun, gradient)


@hides_frames
@awaits_checks
def jvp(
    fun: Callable[..., Any],
    primals: Sequence[Any] = (),
    tangents: Sequence[Any] = (),
    *,
    variables: Any = None,
    directions: Any = None,
) -> tuple[Any, Any]:
    """`fun(*primals)` and its derivative along `tangents` and, for `variables`, along `directions`.

    primals, tangents      the positional arguments, and a tangent of the same structure for each, as in `jax.jvp`
    variables, directions  a pytree of variables, and arrays in its structure; the other variables stay as they are
    returns                `(value, tangent)` of the same structure, which may be any
    raises                 GraphTypeError when a tangent does not fit what it is the tangent of

    What `fun` writes is written once.
    """
    _check_function("jvp", fun)
    wrt, tree = _flat_variables("jvp", variables)
    along = _flat_like("the directions", directions, tree)
    leaves, in_tree = _flat_arguments(tuple(primals))
    moved = _flat_like("the tangents", tuple(tangents), in_tree)
    for variable, direction in zip(wrt, along, strict=True):
        _check_fits(f"the direction of variable {variable.name!r}", direction, variable.type)
    pure = _Pure(lambda *new: (fun(*jax.tree_util.tree_unflatten(in_tree, new)), None), wrt, leaves)
    primal, out, after = jax.jvp(pure.values_first, (pure.start, leaves), (along, moved), has_aux=True)
    pure.border.write_back(after)
    return jax.tree_util.tree_unflatten(pure.tree, primal), jax.tree_util.tree_unflatten(pure.tree, out)


@hides_frames
@awaits_checks
def vjp(fun: Callable[..., Any], *primals: Any, variables: Any = None) -> tuple[Any, Callable[[Any], Any]]:
    """`fun(*primals)` and a function from a cotangent of that value to the gradients.

    The function gives a tuple with one gradient per argument, as `jax.vjp`'s does, and with `variables` the pair
    `(by_variable, by_argument)`. What `fun` writes is written now; the function writes nothing, and may be called
    again.
    """
    _check_function("vjp", fun)
    wrt, tree = _flat_variables("vjp", variables)
    leaves, in_tree = _flat_arguments(primals)
    pure = _Pure(lambda *new: (fun(*jax.tree_util.tree_unflatten(in_tree, new)), None), wrt, leaves)
    value, pull, after = jax.vjp(pure.values_first, pure.start, leaves, has_aux=True)
    pure.border.write_back(after)

    def pulled(cotangent: Any) -> Any:
        by_variable, by_argument = pull(_flat_like("the cotangent", cotangent, pure.tree))
        by_argument = jax.tree_util.tree_unflatten(in_tree, by_argument)
        if variables is None:
            return by_argument
        named = [_finished(variable, gradient) for variable, gradient in zip(wrt, by_variable, strict=True)]
        return jax.tree_util.tree_unflatten(tree, named), by_argument

    return jax.tree_util.tree_unflatten(pure.tree, value), pulled


@suggests_keywords
def hvp(
    fun: Callable[..., Any], variables: Any = None, *, argnums: int | Sequence[int] | None = None
) -> Callable[..., Any]:
    """A function from a direction and the arguments of `fun` to the Hessian of `fun` times that direction.

    `fun`, `variables` and `argnums` are as in `grad`; the direction and the result have the structure of the
    gradient that `grad` gives, with an array for every leaf. It costs about two gradients, and what `fun` writes is
    written once.
    """
    _check_function("hvp", fun)

    @hides_frames
    @functools.wraps(fun)
    def product(direction: Any, *args: Any, **kwargs: Any) -> Any:
        wrt = _Wrt("hvp", variables, argnums, args)
        along = wrt.flat(direction)
        pure = _Pure(lambda *leaves: _loss(fun(*wrt.arguments(leaves), **kwargs), False), wrt.variables, wrt.leaves)
        gradient = jax.grad(pure.scalar_first, argnums=(0, 1), has_aux=True)
        _, moved, after = jax.jvp(gradient, (pure.start, wrt.leaves), along, has_aux=True)
        pure.border.write_back(after)
        return wrt.gradient(*moved)

    return product


class _Wrt:
    """The `variables`, and the `leaves` of the arguments, to differentiate a function with respect to."""

    def __init__(self, function: str, variables: Any, argnums: int | Sequence[int] | None, args: Any) -> None:
        if variables is None and argnums is None:
            argnums = 0
        self._by_variable, self._by_argument = variables is not None, argnums is not None
        self.variables, tree = _flat_variables(function, variables)
        #: `arguments` puts new leaves in their positions among the arguments.
        self.leaves, picked_tree, self.arguments = _pick(function, args, argnums)
        self._trees = (tree, picked_tree)
        if not self.variables and not self.leaves:
            raise _nothing(function, "there is no variable and no array")

    def gradient(self, by_variable: Sequence[Any], by_argument: Sequence[Any]) -> Any:
        """Put values for the variables and the leaves into the structure of the gradient that the user gets."""
        for variable, gradient in zip(self.variables, by_variable, strict=True):
            note_gradient(gradient, variable.name)
        both = tuple(map(jax.tree_util.tree_unflatten, self._trees, (by_variable, by_argument)))
        return both[1] if not self._by_variable else both[0] if not self._by_argument else both

    def flat(self, direction: Any) -> tuple[list[Any], list[Any]]:
        """The inverse of `gradient` for a direction: its values for the variables and for the leaves."""
        is_pair = self._by_variable and self._by_argument
        parts = tuple(direction) if is_pair else (direction, ()) if self._by_variable else (None, direction)
        first, second = (_flat_like("the direction", part, tree) for part, tree in zip(parts, self._trees, strict=True))
        for leaf, step in zip([*self.variables, *self.leaves], [*first, *second], strict=True):
            _check_fits("the direction", step, leaf.type if is_variable(leaf) else array_type_of(leaf))
        return first, second


class _Pure:
    """A function with state, traced once, as pure functions of the values of `wrt` and of the `picked` leaves.

    `fun` takes the leaves and returns a pair: the result to differentiate, and the aux.
    """

    def __init__(
        self, fun: Callable[..., tuple[Any, Any]], wrt: list[Variable], picked: list[Any], *, by_rows: bool = False
    ) -> None:
        trees: list[Any] = []

        def flat(*leaves: Any) -> tuple[list[Any], list[Any]]:
            result, beside = fun(*leaves)
            results, tree = jax.tree_util.tree_flatten(result)
            aux, aux_tree = jax.tree_util.tree_flatten(handles(beside))
            trees[:] = [tree, aux_tree]
            return results, aux

        self._jaxpr, self._consts, _ = make_jaxpr(flat, *picked)
        self.effects = self._jaxpr.effects
        #: The structure of the results.
        self.tree, self._aux_tree = trees
        self._wrt, self._picked = wrt, picked
        kept = {id(variable) for variable in wrt}
        at_once = not is_tracing()
        self.border = Border(
            self._jaxpr.effects, lambda variable: id(variable) not in kept and (at_once or is_on_task(variable.device))
        )
        self._sites = lookup_sites(self._jaxpr, wrt if by_rows else [])
        tables = {site.variable for site in self._sites}
        touched = dict.fromkeys([*self.border.touched, *wrt])
        held = [variable for variable in touched if variable not in tables]
        self._before = dict(zip(held, on_one_device([self.border.value(variable) for variable in held]), strict=True))
        self._whole = [variable for variable in wrt if variable not in tables]
        #: The values of those of `wrt` that are read whole: all, unless `by_rows`.
        self.start = [self._before[variable] for variable in self._whole]

    def values_first(self, values: list[Any], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the results, and the final values of the variables that are written."""
        results, _, after, _ = self._run(values, leaves, [])
        return results, after

    def scalar_first(self, values: list[Any], leaves: list[Any]) -> tuple[Any, list[Any]]:
        """Like `values_first`, for a function with one result."""
        (value,), after = self.values_first(values, leaves)
        return value, after

    def value_and_grad(self, rows: bool) -> tuple[tuple[Any, Any], tuple[list[Any], list[Any]]]:
        """Return `((value, aux), (gradients by variable, gradients by leaf))`, and write the variables."""

        def loss(values: list[Any], leaves: list[Any], taps: list[Any]) -> tuple[Any, Any]:
            (value,), *rest = self._run(values, leaves, taps)
            return value, rest

        taps = [jnp.zeros(site.rows.shape, site.rows.dtype) for site in self._sites]
        differentiate = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        try:
            (value, (aux, after, indices)), grads = differentiate(self.start, self._picked, taps)
        except ValueError as error:
            _advise(error)
            raise
        self.border.write_back(after)
        whole = dict(zip(self._whole, grads[0], strict=True))
        by_variable = [
            _finished(variable, whole[variable])
            if variable in whole
            else _finished_rows(variable, rows_found(variable, self._sites, indices, grads[2]), rows)
            for variable in self._wrt
        ]
        return (value, jax.tree_util.tree_unflatten(self._aux_tree, aux)), (by_variable, grads[1])

    def _run(self, values: list[Any], leaves: list[Any], taps: list[Any]) -> Any:
        lookups = TappedLookups(self._sites, taps)
        state = State({**self._before, **dict(zip(self._whole, values, strict=True))}, lookups)
        flat = evaluate(self._jaxpr, self._consts, leaves, state)
        count = self.tree.num_leaves
        return flat[:count], flat[count:], state.of(self.border.writes), lookups.indices


def _warn_of_unread(function: str, variables: Sequence[Any], effects: Any) -> None:
    """Warn, at the user's line, if a function with these effects reads some of the variables nowhere."""
    read = set(accesses(effects)[0]).difference(only_added(effects))
    unread = [variable.name for variable in variables if variable not in read]
    if not unread:
        return
    names = ", ".join(map(repr, unread[:5])) + (", ..." if len(unread) > 5 else "")
    line = caller()
    text = (
        f"{function} differentiates by {len(unread)} variables that the function never reads, {names}: their gradients "
        f"are zero{at(line)}\n  read them in the function, or leave them out of the variables"
    )
    warn_at(line, text, UnreadVariableWarning)


def _advise(error: ValueError) -> None:
    """Add the remedy to JAX's error about a loop without reverse-mode gradient, unless an inner gradient did so."""
    if str(error).startswith(NOT_REVERSED) and not any(REVERSED in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"{at(caller())}\n{REVERSED}".removeprefix("\n"))


def _finished(variable: Variable, gradient: Any) -> Any:
    """A variable's gradient for the user: changed by the variable's `gradient` function, and named."""
    if variable.gradient is not None:
        changed = variable.gradient(gradient)
        _check_fits(f"what the gradient function of variable {variable.name!r} gives", changed, variable.type)
        gradient = changed
    return name(gradient, f"grad/{variable.name}")


def _finished_rows(variable: Variable, found: RowsFound, as_rows: bool) -> Any:
    """Like `_finished`, for a gradient given by rows; with `as_rows` a `RowGradient`, if no function changes it."""
    found = variable.hooks.gradient_rows(found)
    if as_rows and variable.gradient is None:
        indices, rows = found.indices, name(found.rows, f"grad/{variable.name}")
        if found.once:  # a row gradient's indices are those of existing rows
            is_row = indices < variable.shape[0]
            indices = jnp.where(is_row, indices, 0)
            rows = jnp.where(is_row.reshape(-1, *[1] * (variable.ndim - 1)), rows, 0)
        return RowGradient(indices, rows, variable.shape)
    return _finished(variable, rows_to_dense(*found[:2], variable.shape, variable.name, once=found.once))


def _flat_variables(function: str, variables: Any) -> tuple[list[Any], Any]:
    wrt, tree = jax.tree_util.tree_flatten(variables, is_leaf=is_variable)
    for leaf in wrt:
        if not isinstance(leaf, Variable):
            raise VariableError(
                f"{function} was given {type(leaf).__name__} among its variables",
                "to differentiate with respect to arguments, give argnums",
            )
        _check_floating(f"variable {leaf.name!r}", leaf.dtype)
        if not leaf.trainable:
            raise VariableError(
                f"variable {leaf.name!r} is not trainable",
                "leave it out, for instance by dflow.trainable_variables(tree), or make it with trainable=True",
            )
    return wrt, tree


def _flat_arguments(arguments: Any) -> tuple[list[Any], Any]:
    leaves, tree = jax.tree_util.tree_flatten(read(arguments))
    return leaves, tree


def _flat_like(what: str, value: Any, tree: Any) -> list[Any]:
    given: Any = jax.tree_util.tree_structure(value)
    if given != tree:
        raise GraphTypeError(f"the structure of {what}: expected {tree}, got {given}", at=caller())
    return list(jax.tree_util.tree_leaves(value))


def _check_fits(what: str, value: Any, type: Any) -> None:
    given = array_type_of(value)
    if given.shape != type.shape or (given.dtype != type.dtype and not given.weak):
        raise GraphTypeError(f"{what}: expected {type}, got {given}", at=caller())


def _nothing(function: str, why: str) -> GraphTypeError:
    return GraphTypeError(
        f"nothing to differentiate: {why}",
        f"name the variables, dflow.{function}(loss, [w]), or give arguments and argnums",
    )


def _check_function(function: str, fun: Any) -> None:
    if not callable(fun) or isinstance(fun, Variable):
        raise GraphTypeError(
            f"{function} was given {type(fun).__name__} to differentiate, which is no function",
            f"the function comes first: dflow.{function}(loss, [w])",
        )


def _check_floating(what: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise GraphTypeError(
            f"{what} is {dtype}, which has no gradient", "leave it out, or make it floating with .astype(jnp.float32)"
        )


def _pick(
    function: str, args: tuple[Any, ...], argnums: int | Sequence[int] | None
) -> tuple[list[Any], Any, Callable[..., Any]]:
    """The leaves of the arguments to differentiate, their structure, and a function from new leaves to arguments."""
    numbers = [] if argnums is None else [argnums] if isinstance(argnums, int) else list(argnums)
    for number in numbers:
        if not args:
            raise _nothing(function, "the function has no arguments, and no variables were given")
        if not -len(args) <= number < len(args):
            raise GraphTypeError(f"argnums has {number} but the function was given {len(args)} arguments", at=caller())
    numbers = [number % len(args) for number in numbers]
    chosen: Any = tuple(args[number] for number in numbers)
    leaves, tree = _flat_arguments(chosen[0] if isinstance(argnums, int) else chosen)
    for leaf in leaves:
        _check_floating("an argument to differentiate", array_type_of(leaf).dtype)

    def rebuild(new: Sequence[Any]) -> tuple[Any, ...]:
        values = jax.tree_util.tree_unflatten(tree, new)
        by_number = dict(zip(numbers, [values] if isinstance(argnums, int) else values, strict=True))
        return tuple(by_number.get(index, arg) for index, arg in enumerate(args))

    return leaves, tree, rebuild


def _loss(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """The real scalar that the function to differentiate returned, as an array, and the aux beside it."""
    value, aux = result if has_aux else (result, None)
    if not hasattr(value, "dtype") and not isinstance(value, (int, float)):
        raise GraphTypeError(
            f"the function to differentiate returned {type(value).__name__}, not a scalar",
            "return a number, or (number, aux) with has_aux=True",
        )
    array = jnp.asarray(value)
    if array.shape != () or not jnp.issubdtype(array.dtype, jnp.floating):
        raise GraphTypeError(
            f"the function to differentiate returned {array_type_of(array)}, not a real scalar",
            "reduce it, for instance with .mean() or .sum()",
        )
    return array, aux

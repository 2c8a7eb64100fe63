"""Functions with a custom derivative rule and a body that uses variables, as pure functions that keep the rule.

The pure function has the same rule: it is `jax.custom_jvp` or `jax.custom_vjp` of the discharged body, and its rule
calls JAX's derivative of the original call. The body's writes happen once; a later read of a written variable has
ordinary derivatives. The rule writes nothing.

A rule gives derivatives with respect to the function's arguments only. So a result that depends on a differentiated
variable is refused, as JAX refuses a closed-over array there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from dflow.tracing.errors import DflowError
from dflow.tracing.jax_frontend import Jaxpr, is_literal, line_bound, make_jaxpr, touches_state

_Values = list[Any]


@dataclass(frozen=True, eq=False)
class CustomCall:
    """One call of a function with a custom derivative rule that uses variables.

    `names`     names of the variables; "values" are theirs, in this order
    `body`      from values and operands to results and the new values of the variables that it writes
    `original`  from operands to results; it uses the variables themselves and has JAX's rule
    `run`       runs a function that uses the variables, on operands and values
    `queues`    queues and accumulators that the body uses
    """

    names: Sequence[str]
    body: Callable[[_Values, _Values], tuple[_Values, _Values]]
    original: Callable[[_Values], _Values]
    run: Callable[[Callable[..., _Values], _Values, _Values], _Values]
    queues: Sequence[Any]

    def with_jvp(self, values: _Values, operands: _Values) -> tuple[_Values, _Values]:
        """Call it as a `custom_jvp` function; return the results and the values of the variables written."""

        def rule(primals: Any, tangents: Any) -> Any:
            return self._along(*primals, *tangents)

        call = jax.custom_jvp(self.body)
        call.defjvp(rule, symbolic_zeros=True)
        return call(values, operands)

    def with_vjp(self, values: _Values, operands: _Values) -> tuple[_Values, _Values]:
        """Call it as a `custom_vjp` function; return the results and the values of the variables written."""
        call = jax.custom_vjp(self.body)
        call.defvjp(self._forward, self._backward, symbolic_zeros=True)
        return call(values, operands)

    def _along(self, values: _Values, operands: _Values, moved_values: _Values, moved: _Values) -> Any:
        self._refuse_queues()
        self._refuse_moved(values, operands, [_moves(t, v) for t, v in zip(moved_values, values, strict=True)])
        live = _Participants([_moves(t, operand) for t, operand in zip(moved, operands, strict=True)])
        directions = live.pick(moved)

        def tangents(*args: Any) -> _Values:
            given, along = args[: len(operands)], list(args[len(operands) :])
            out, out_along, rest = jax.jvp(partial(self._parts, live, given), live.pick(given), along, has_aux=True)
            return [*out, *out_along, *rest]

        results = self.body(values, operands)[0]
        along = zero_from_primal(results)
        floating = _Participants([_is_floating(result) for result in results])
        if directions:
            flat = self.run(tangents, [*operands, *directions], values)
            count = len(floating.positions)
            results = floating.joined(flat[:count], flat[2 * count :])
            along = floating.fill(along, flat[count : 2 * count])
        written, written_along = self._written_along(values, operands, moved_values, moved)
        return (results, written), (along, written_along)

    def _written_along(self, values: _Values, operands: _Values, moved_values: _Values, moved: _Values) -> Any:
        count = len(values)
        whole, along = [*values, *operands], [*moved_values, *moved]
        live = _Participants([_moves(t, value) for t, value in zip(along, whole, strict=True)])

        def written(*given: Any) -> _Values:
            filled = live.fill(whole, given)
            return self.body(filled[:count], filled[count:])[1]

        return jax.jvp(written, live.pick(whole), live.pick(along))

    def _parts(self, live: _Participants, operands: Sequence[Any], *given: Any) -> tuple[_Values, _Values]:
        """Call `original` on the live operands; return the results with a floating dtype, and the others."""
        results = self.original(live.fill(operands, given))
        return [r for r in results if _is_floating(r)], [r for r in results if not _is_floating(r)]

    def _forward(self, values: Any, operands: Any) -> Any:
        is_moved, moves = ([_is_moved(primal) for primal in primals] for primals in (values, operands))
        values, operands = ([primal.value for primal in primals] for primals in (values, operands))
        self._refuse_queues()
        self._refuse_moved(values, operands, is_moved)
        # Only operands that move take part: JAX refuses a derivative with respect to a closed-over array.
        live, trees = _Participants(moves), list[Any]()

        def with_pull(*given: Any) -> _Values:
            out, pull, rest = jax.vjp(partial(self._parts, live, given), *live.pick(given), has_aux=True)
            leaves, tree = jax.tree_util.tree_flatten(pull)
            trees.append((len(out), len(rest), tree))
            return [*out, *rest, *leaves]

        flat = self.run(with_pull, operands, values)
        count, others, tree = trees[-1]
        floating = _Participants([_is_floating(result) for result in self.body(values, operands)[0]])
        results = floating.joined(flat[:count], flat[count : count + others])
        pull = jax.tree_util.tree_unflatten(tree, flat[count + others :])
        written, written_pull = self._written_pull(values, operands)
        return (results, written), (live, pull, written_pull, values, operands)

    def _written_pull(self, values: _Values, operands: _Values) -> tuple[_Values, Any]:
        whole, count = [*values, *operands], len(values)
        live = _Participants([_is_floating(value) for value in whole])

        def written(*given: Any) -> tuple[_Values, _Values]:
            filled = live.fill(whole, given)
            after = self.body(filled[:count], filled[count:])[1]
            return [value for value in after if _is_floating(value)], after

        _, pull, after = jax.vjp(written, *live.pick(whole), has_aux=True)
        return after, pull

    def _backward(self, residuals: Any, cotangents: Any) -> Any:
        live, pull, written_pull, values, operands = residuals
        by_result, by_written = cotangents
        count = len(values)
        floating = _Participants([_is_floating(value) for value in (*values, *operands)])
        total: _Values = [None] * (count + len(operands))
        incoming = [_instantiated(ct) for ct in by_result if _is_floating(ct)]
        _refuse_state(pull, incoming)
        _add(total, [count + position for position in live.positions], pull(incoming))
        if not all(isinstance(ct, SymbolicZero) for ct in by_written):
            _add(total, floating.positions, written_pull([_instantiated(ct) for ct in by_written if _is_floating(ct)]))
        return total[:count], total[count:]

    def _refuse_queues(self) -> None:
        """Raise if the body uses a queue: its derivative runs the body for the results and again for the writes."""
        for resource in self.queues:
            raise resource.error(
                f"{resource.title} is used in a differentiated function with a custom derivative rule, whose "
                "derivative runs it several times",
                "use it before the function, and pass the value as an argument, or after it",
                at=line_bound(),
            )

    def _refuse_moved(self, values: _Values, operands: _Values, is_moved: list[bool]) -> None:
        """Raise DflowError if a result depends on a differentiated variable: the rule gives no derivative for it."""
        if not any(is_moved):
            return
        jaxpr, _, _ = make_jaxpr(lambda vs, os: self.body(vs, os)[0], values, operands)
        needed = set(_needed(jaxpr))
        names = [
            name
            for name, moved, var in zip(self.names, is_moved, jaxpr.invars, strict=False)
            if moved and var in needed
        ]
        if names:
            raise DflowError(
                f"a function with a custom derivative rule gives a result that depends on variables "
                f"({', '.join(names)}), and the rule says nothing of their derivative",
                f"pass the value as an argument, {names[0]}.read(), and let the rule say it",
                at=line_bound(),
            )


@jax.tree_util.register_static
class _Participants:
    """The positions in a list of the values that take part in a derivative. A pytree without leaves."""

    def __init__(self, is_live: Sequence[bool]) -> None:
        self.positions = [position for position, live in enumerate(is_live) if live]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Participants) and self.positions == other.positions

    def __hash__(self) -> int:
        return hash(tuple(self.positions))

    def pick(self, values: Sequence[Any]) -> _Values:
        """The values at the positions."""
        return [values[position] for position in self.positions]

    def fill(self, values: Sequence[Any], given: Sequence[Any]) -> _Values:
        """A copy of `values`, with `given` at the positions."""
        by_position = dict(zip(self.positions, given, strict=True))
        return [by_position.get(position, value) for position, value in enumerate(values)]

    def joined(self, given: Sequence[Any], others: Sequence[Any]) -> _Values:
        """One list of both: `given` at the positions, `others` at the rest."""
        at_positions, between = iter(given), iter(others)
        return [
            next(at_positions if position in self.positions else between)
            for position in range(len(given) + len(others))
        ]


def _needed(jaxpr: Jaxpr) -> Iterator[Any]:
    """The variables of a jaxpr that its results may depend on; an equation's results depend on all its operands."""
    live = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    for equation in reversed(jaxpr.eqns):
        if live.intersection(equation.outvars):
            live.update(atom for atom in equation.invars if not is_literal(atom))
    yield from live


def _refuse_state(pull: Callable[..., Any], cotangents: _Values) -> None:
    jaxpr, _, _ = make_jaxpr(pull, cotangents)
    if touches_state(jaxpr.effects):
        raise DflowError(
            "the backward rule of a custom_vjp function uses variables, and when it runs they may hold another value",
            "read them in the forward rule, and hand the values on as residuals",
            at=line_bound(),
        )


def _add(total: _Values, positions: Sequence[int], more: Sequence[Any]) -> None:
    for position, value in zip(positions, more, strict=True):
        total[position] = value if total[position] is None else total[position] + value


def _moves(tangent: Any, value: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and _is_floating(value)


def _is_moved(primal: Any) -> bool:
    """Whether a primal of a forward rule with symbolic zeros takes part in the derivative."""
    return bool(primal.perturbed) and _is_floating(primal.value)


def _is_floating(value: Any) -> bool:
    dtype = value.dtype if isinstance(value, SymbolicZero) else jax.typeof(value).dtype
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _instantiated(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent

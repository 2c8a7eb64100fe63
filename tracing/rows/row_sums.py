"""Gradients that a loop sums, kept as the rows of all its iterations.

The initial value of such a carry of a scan is zero or a gradient of lookups, and each iteration only adds a gradient of
lookups to it. The carry is left out of the loop: each iteration returns the rows that it adds, and the rows of all
iterations are the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.jax_frontend import Equation, Jaxpr, closed_parts, scan_counts
from dflow.tracing.rows.row_values import Index, NotOfRowsError, Rest, Rowwise, is_zero
from dflow.tracing.rows.rows_to_dense import rows_to_dense, rows_to_dense_p

#: The name in messages of a gradient that a loop sums.
_SUM = "a sum in a loop"


def carried_sums(equation: Equation, operands: Sequence[Any]) -> list[int]:
    """Indices of the carries of a scan that only sum, and whose initial value is zero or given by rows."""
    consts, carry = scan_counts(equation.params)
    jaxpr, _ = closed_parts(equation.params["jaxpr"])
    return [
        number
        for number, value in enumerate(operands[consts : consts + carry])
        if isinstance(value, Rowwise) and is_zero(value.rest) and _is_sum(jaxpr, jaxpr.invars[consts + number], number)
    ]


def _is_sum(jaxpr: Jaxpr, carried: Any, result: int) -> bool:
    """Whether a result of a loop's body is the carried value plus something computed without it."""
    while carried is not jaxpr.outvars[result]:
        users = [equation for equation in jaxpr.eqns for atom in equation.invars if atom is carried]
        if carried in jaxpr.outvars or len(users) != 1 or users[0].primitive.name not in ("add", "add_any"):
            return False
        [carried] = users[0].outvars
    is_used = any(atom is carried for equation in jaxpr.eqns for atom in equation.invars)
    return not is_used and sum(atom is carried for atom in jaxpr.outvars) == 1


def summed_over(
    equation: Equation,
    operands: Sequence[Any],
    sums: Sequence[int],
    run: Callable[[Jaxpr, list[Any], list[Any]], tuple[list[Any], Callable[[Any], Any]]],
) -> list[Any] | None:
    """Return the results of a scan, its carries `sums` as rows; None if an iteration adds a dense array to one.

    operands  `Rowwise` initial values for the carries `sums`, arrays for the rest
    run       runs the body; returns its results, some of them `Rowwise`, and a function that makes a result dense
    """
    params = equation.params
    consts, carry = scan_counts(params)
    body, first = closed_parts(params["jaxpr"]), operands[consts : consts + carry]

    def step(carried: Any, row: Any) -> Any:
        others = iter(carried)
        given = [
            Rowwise(value.equation, value.operands, value.rest) if number in sums else next(others)
            for number, value in enumerate(first)
        ]
        results, dense = run(*body, [*operands[:consts], *given, *row])
        grown = [results[number] for number in sums]
        if not all(isinstance(value, Rowwise) and value.is_sparse for value in grown):
            raise NotOfRowsError
        after = [dense(value) for number, value in enumerate(results[:carry]) if number not in sums]
        return after, ([(value.index.positions, value.rows) for value in grown], [*map(dense, results[carry:])])

    options = {key: params[key] for key in ("length", "reverse", "unroll", "_split_transpose") if key in params}
    kept = [value for number, value in enumerate(first) if number not in sums]
    try:
        after, (grown, ys) = jax.lax.scan(step, kept, operands[consts + carry :], **options)
    except NotOfRowsError:
        return None
    others, grown_by = iter(after), dict(zip(sums, grown, strict=True))
    totals = [
        _total(equation, number, value, *grown_by[number]) if number in grown_by else next(others)
        for number, value in enumerate(first)
    ]
    return [*totals, *ys]


def of_rows(value: Rowwise) -> Rowwise:
    """The same sparse array, with a dense form that depends on nothing but its rows."""
    assert value.index is not None
    return made_of(value.equation, 0, "a table", value.index, value.rows, value.rest)


def made_of(equation: Equation, result: int, table: str, index: Index, rows: Any, rest: Rest) -> Rowwise:
    """Result number `result` of an equation, zero outside `index`; `rows_to_dense` makes its dense form.

    `table` names the gradient in messages.
    """
    outvar = equation.outvars[result]
    params = {"shape": outvar.aval.shape, "table": table, "once": index.is_packed}
    source = equation.replace(primitive=rows_to_dense_p, params=params, outvars=[outvar], effects=set())
    return Rowwise(source, [index.positions, rows], rest, index, rows)


def _total(equation: Equation, number: int, first: Rowwise, positions: Any, rows: Any) -> Any:
    """A sum over a loop, from its initial value and the positions and rows that each iteration added."""
    shape = first.aval.shape
    positions, rows = positions.reshape(-1), rows.reshape(-1, *shape[1:])
    if first.index is not None:
        positions, rows = jnp.concatenate([first.index.positions, positions]), jnp.concatenate([first.rows, rows])
    if positions.shape[0] >= shape[0]:
        return rows_to_dense(positions, rows, shape, _SUM)
    return made_of(equation, number, _SUM, Index(positions, shape[0]), rows, first.rest)

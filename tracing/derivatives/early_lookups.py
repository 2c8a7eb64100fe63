"""The lookups of a function in variables that it uses by lookups only, with those inside bodies.

A lookup in the body of a `scan`, a `cond` or a `checkpoint` is done before that equation. A part of the body computes
the positions for all iterations and branches, a lookup finds their rows, and the body takes its rows as an operand. So
their gradient is rows too, and a loop over a table on another task needs one lookup there.

This is impossible where a position depends on rows that the same equation looks up (a decoder that feeds its own output
back). It does not pay where the iterations look up at least as many rows as the table has.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflow.tracing.derivatives.discharge import State, run_bodies, without_tables
from dflow.tracing.jax_frontend import Equation, Jaxpr, accesses, equations_within, live_part, make_jaxpr, origin_of
from dflow.tracing.rows.lookups import BodyLookups, Search, Site, Table, later_p
from dflow.tracing.rows.rows_to_dense import LARGE_BYTES, LARGE_RATIO, DenseGradientWarning
from dflow.tracing.source import at


def lookup_sites(jaxpr: Jaxpr, variables: Sequence[Any]) -> list[Site]:
    """The lookups in those of `variables` that `jaxpr` uses by lookups only, in the order it runs them.

    A variable with an explicit sharding counts as used in other ways, since the sharding sets that of the result.
    """
    search = Search()
    search.walk(jaxpr, {})
    wanted = {variable for variable in variables if variable.type.sharding is None}
    tables = wanted.intersection(site.variable for site in search.sites) - search.used_whole - search.inside.keys()
    late = {table: body[0] for body in search.bodies for table in late_in(*body, tables)}
    for variable in variables:
        if variable in wanted and variable not in search.used_whole and variable in (inside := search.inside | late):
            _warn_of_lookups_inside(variable, inside[variable])
    often = _looked_up_often(search, tables - late.keys())
    for variable in variables:
        if variable in often and variable in search.branched:
            _warn_of_branches(variable, often[variable], search)
    tables -= late.keys() | often.keys()
    return [site for site in search.sites if site.variable in tables]


def _looked_up_often(search: Search, tables: Collection[Any]) -> dict[Any, int]:
    """The tables with lookups in bodies and, in all, at least as many rows looked up as they have; with that number.

    Lookups in all branches of a `cond` count, since they all run before it, whichever branch runs.
    """
    inside = {site.variable for _, _, sites in search.bodies for site in sites if site.variable in tables}
    found = {
        table: sum(math.prod(site.positions.shape) for site in search.sites if site.variable is table)
        for table in inside
    }
    return {table: count for table, count in found.items() if count >= table.shape[0]}


def late_in(
    equation: Equation, operands: Mapping[int, Any], sites: Sequence[Site], tables: Collection[Any]
) -> set[Any]:
    """The tables with a lookup in the bodies of an equation, of `Search.bodies`, whose positions need the equation."""
    sites = [site for site in sites if site.variable in tables]
    if not sites:
        return set()
    read = [variable for variable in {v: 0 for vs in accesses(equation.effects) for v in vs} if variable not in tables]
    # A table that is no candidate is an array like any other.
    held = {number: Table(variable) for number, variable in operands.items() if variable in tables}
    arrays, all_of = without_tables([held.get(number, atom.aval) for number, atom in enumerate(equation.invars)])

    def positions(values: list[Any], arrays: list[Any]) -> list[Any]:
        state = State(zip(read, values, strict=True), BodyLookups(tables, None))
        return run_bodies(equation, all_of(arrays), state, None)[1]

    jaxpr, _, _ = make_jaxpr(positions, [variable.type.struct for variable in read], arrays)
    return {
        site.variable
        for number, site in enumerate(sites)
        if not _is_early(live_part(jaxpr, [other == number for other in range(len(sites))]))
    }


def _is_early(jaxpr: Jaxpr) -> bool:
    """Whether a program has no effects, and needs no rows that are looked up later."""
    return not jaxpr.effects and all(equation.primitive is not later_p for equation in equations_within(jaxpr))


def _warn_of_lookups_inside(variable: Any, equation: Equation) -> None:
    """Warn where the gradient of a large table is dense only because it is looked up inside a body."""
    size_bytes = variable.type.size_bytes
    if size_bytes < LARGE_BYTES:
        return
    body = "checkpoint" if equation.primitive.name.startswith("remat") else equation.primitive.name
    warnings.warn(
        f"variable {variable.name!r} is looked up inside a {body}, so its gradient is dense, "
        f"{size_bytes / 1e6:.0f} MB{at(origin_of(equation).own_loc)}\n"
        f"  look the rows up before the {body}, and pass them to it",
        DenseGradientWarning,
        stacklevel=2,
    )


def _warn_of_branches(variable: Any, count: int, search: Search) -> None:
    """Warn where the gradient of a large table is dense although a branch of a `cond` looks up few of its rows."""
    size_bytes, rows = variable.type.size_bytes, variable.shape[0]
    if size_bytes < LARGE_BYTES or rows < LARGE_RATIO * search.least[variable]:
        return
    warnings.warn(
        f"variable {variable.name!r}: {count} lookups in {rows} rows, with those of every branch of a cond, so its "
        f"gradient is dense, {size_bytes / 1e6:.0f} MB, whichever branch runs"
        f"{at(origin_of(search.branched[variable]).own_loc)}\n"
        "  call dflow.grad inside each branch, and update the variable there",
        DenseGradientWarning,
        stacklevel=2,
    )

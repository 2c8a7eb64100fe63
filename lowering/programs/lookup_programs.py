"""An exported function in two programs, before and after its lookups, so that the rows may come from elsewhere.

    numbers   takes the values of the other variables, the large constants and the arguments, as the whole program does;
              returns, of each lookup, the numbers of the rows that it looks up
    results   takes these rows too, as a list after the constants; returns what the whole program returns, without the
              tables in its dict of variables

A number past an end of the table stands for the row at that end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import export
from jax import jit as jax_jit

from dflow.lowering.programs.export import PureProgram
from dflow.tracing.derivatives.early_lookups import late_in
from dflow.tracing.errors import DflowError
from dflow.tracing.jax_frontend import live_part, make_jaxpr
from dflow.tracing.primitives.id_checks import without_id_checks
from dflow.tracing.rows.lookups import GivenLookups, Search, Site
from dflow.tracing.state.resources import Variable


@dataclass(frozen=True)
class LookupPrograms:
    """The bytes of the two programs, and the table of each lookup in order."""

    tables: Sequence[Variable]
    numbers: bytes
    results: bytes


def lookup_programs(
    program: PureProgram, platforms: Sequence[str], disabled_checks: Sequence[export.DisabledSafetyCheck]
) -> LookupPrograms | None:
    """Return the two programs of a function; None if it has no table, or JAX cannot export it in this form.

    A table is a variable of two dimensions or more that the function looks rows up in, and neither uses otherwise nor
    writes. The numbers of rows must not depend on rows of tables: a variable that they depend on is none.
    """
    sites = _sites(program)
    while sites and (needed := _needed_for_numbers(program, sites)):
        sites = [site for site in sites if site.variable not in needed]
    if not sites:
        return None
    (state, constants, *args), kwargs = program.structs
    tables = {site.variable.name for site in sites}
    state = {name: struct for name, struct in state.items() if name not in tables}
    rows = [site.rows.struct for site in sites]

    def numbers(state: Any, constants: Any, *args: Any, **kwargs: Any) -> Any:
        return _looked_up(program, sites, state, constants, _zeros(rows), args, kwargs)[0]

    def results(state: Any, constants: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        return _looked_up(program, sites, state, constants, rows, args, kwargs)[1]

    def exported(function: Callable[..., Any], *given: Any) -> bytes:
        function.__name__ = f"{program.name}_{function.__name__}"
        made = export.export(
            jax_jit(function, keep_unused=True), platforms=tuple(platforms), disabled_checks=disabled_checks
        )(*given, *args, **kwargs)
        return bytes(made.serialize())

    try:
        with without_id_checks():
            before, after = exported(numbers, state, constants), exported(results, state, constants, rows)
    except (DflowError, Warning):
        raise
    except Exception:  # JAX takes fewer sizes that are open for an argument than for a value inside
        return None
    return LookupPrograms([site.variable for site in sites], before, after)


def _sites(program: PureProgram) -> list[Site]:
    search = Search()
    search.walk(program.jaxpr, {})
    tables = {site.variable for site in search.sites if len(site.variable.shape) > 1}
    tables -= search.used_whole | search.inside.keys() | {*program.written}
    tables -= {table for body in search.bodies for table in late_in(*body, tables)}
    return [site for site in search.sites if site.variable in tables]


def _looked_up(
    program: PureProgram, sites: Sequence[Site], state: Any, constants: Any, rows: Any, args: Any, kwargs: Any
) -> tuple[list[Any], Any]:
    """Return the numbers of the rows that each lookup asks for, and the results with these rows."""
    lookups = GivenLookups({site.variable for site in sites}, rows)
    results = program.looking_up(lookups, state, constants, tuple(args), kwargs)
    return lookups.positions, results


def _zeros(structs: Sequence[Any]) -> list[Any]:
    """Return rows that nothing needs, so that XLA makes none."""
    return [jnp.zeros(struct.shape, struct.dtype) for struct in structs]


def _needed_for_numbers(program: PureProgram, sites: Sequence[Site]) -> set[Variable]:
    """Return the tables whose rows the numbers of rows of any table depend on."""
    (state, constants, *args), kwargs = program.structs

    def numbers(rows: Any, state: Any, constants: Any, args: Any, kwargs: Any) -> Any:
        return _looked_up(program, sites, state, constants, rows, args, kwargs)[0]

    jaxpr, _, _ = make_jaxpr(numbers, [site.rows.struct for site in sites], state, constants, args, kwargs)
    live = live_part(jaxpr)
    used = {id(atom) for atoms in (live.outvars, *(one.invars for one in live.eqns)) for atom in atoms}
    return {site.variable for site, row in zip(sites, live.invars, strict=False) if id(row) in used}

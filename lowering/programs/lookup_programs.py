"""An exported function in two programs, before and after its lookups, so that the rows may come from elsewhere.

    numbers   takes the values of the other variables, the large constants and the arguments, as the whole program does;
              returns, of each lookup, the numbers of the rows that it looks up
    results   takes these rows too, as a list after the constants; returns what the whole program returns, without the
              tables in its dict of variables
    asked     if some tables have a vocabulary: as `numbers`, but of a lookup in such a table the ids, u32[n, 2], which
              depend on no variable of the vocabulary; for rows of a table that is trained meanwhile

A number past an end of the table stands for the row at that end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax import jit as jax_jit
from jax.tree_util import tree_flatten_with_path

from dflow.lowering.programs.export import PureProgram
from dflow.tracing.derivatives.early_lookups import late_in
from dflow.tracing.errors import DflowError
from dflow.tracing.jax_frontend import Jaxpr, is_literal, live_part, make_jaxpr
from dflow.tracing.primitives.id_checks import without_id_checks
from dflow.tracing.primitives.state_primitives import name_p
from dflow.tracing.rows.lookups import GivenLookups, Search, Site
from dflow.tracing.state.resources import Variable


@dataclass(frozen=True)
class LookupPrograms:
    """The bytes of the programs, and the table of each lookup in order.

    asked    None without a vocabulary, or if the ids cannot be separated from the rest of the program
    """

    tables: Sequence[Variable]
    numbers: bytes
    results: bytes
    asked: bytes | None


class LookupsLeftOut(UserWarning):
    """A function is exported without the programs around its lookups."""


def lookup_programs(
    program: PureProgram, platforms: Sequence[str], disabled_checks: Sequence[export.DisabledSafetyCheck]
) -> LookupPrograms | None:
    """Return the programs of a function; None if it has no table, or, with a warning, if JAX cannot export them.

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

    def asked(state: Any, constants: Any, *args: Any, **kwargs: Any) -> Any:
        return _evaluated(ids, (state, constants, args, kwargs))

    def exported(function: Callable[..., Any], *given: Any) -> bytes:
        function.__name__ = f"{program.name}_{function.__name__}"
        made = export.export(
            jax_jit(function, keep_unused=True), platforms=tuple(platforms), disabled_checks=disabled_checks
        )(*given, *args, **kwargs)
        return bytes(made.serialize())

    try:
        with without_id_checks():
            before, after = exported(numbers, state, constants), exported(results, state, constants, rows)
            ids = _asked(program, sites, state, constants, rows, args, kwargs)
            instead = None if ids is None else exported(asked, state, constants)
    except (DflowError, Warning):
        raise
    except Exception as error:  # JAX takes fewer sizes that are open for an argument than for a value inside
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"{program.name} is exported without the lookups of {', '.join(sorted(tables))}, so that its tables cannot "
            f"stay at tasks (dflow serve --tables): JAX does not export them apart: {reason}\n"
            f"  export it for one size of its arguments if it is to be served so",
            LookupsLeftOut,
            stacklevel=2,
        )
        return None
    return LookupPrograms([site.variable for site in sites], before, after, instead)


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


def _asked(
    program: PureProgram, sites: Sequence[Site], state: Any, constants: Any, rows: Any, args: Any, kwargs: Any
) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the program `asked`, on the leaves of its arguments; None if there is none."""
    beside = {name for site in sites if (how := site.variable.hooks.id_rows) is not None for name in how.variables}
    if not beside:
        return None

    def looked_up(part: int, state: Any, constants: Any, args: Any, kwargs: Any) -> Any:
        found, (results, _, *outside) = _looked_up(program, sites, state, constants, _zeros(rows), args, kwargs)
        return (found, (results, outside))[part]

    given = state, constants, args, kwargs
    is_beside = [path[0].idx == 0 and path[1].key in beside for path, _ in _leaves(given)]
    jaxpr, consts, _ = make_jaxpr(partial(looked_up, 0), *given)
    outvars = [
        var if site.variable.hooks.id_rows is None else _ids_before(jaxpr, var)
        for site, var in zip(sites, jaxpr.outvars, strict=True)
    ]
    if None in outvars:
        return None
    jaxpr = live_part(jaxpr.replace(outvars=outvars))
    others = live_part(make_jaxpr(partial(looked_up, 1), *given)[0])
    if any(_uses(one, is_beside) for one in (jaxpr, others)):
        return None
    return jaxpr, consts


def _leaves(given: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = tree_flatten_with_path(given)[0]
    return found


def _evaluated(part: tuple[Jaxpr, Sequence[Any]] | None, given: Any) -> Any:
    assert part is not None
    return jax.core.eval_jaxpr(*part, *(leaf for _, leaf in _leaves(given)))


def _uses(jaxpr: Jaxpr, inputs: Sequence[bool]) -> bool:
    """Whether a program uses one of the inputs of a mask."""
    used = {id(atom) for atoms in (jaxpr.outvars, *(one.invars for one in jaxpr.eqns)) for atom in atoms}
    return any(id(var) in used for var, is_one in zip(jaxpr.invars, inputs, strict=True) if is_one)


def _ids_before(jaxpr: Jaxpr, rows: Any) -> Any:
    """Return the ids of a shard, u32[n, 2], that a lookup was given to find `rows`; None if they are not seen here."""
    made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    found, seen, left = set(), set(), [rows]
    while left:
        atom = left.pop()
        if is_literal(atom) or atom in seen or (equation := made_by.get(atom)) is None:
            continue
        seen.add(atom)
        if equation.primitive is name_p and atom.aval.dtype == np.uint32 and atom.aval.shape[-1:] == (2,):
            found.add(atom)
        else:
            left += equation.invars
    [ids] = found if len(found) == 1 else [None]
    return ids if ids is not None and ids.aval.shape == (*rows.aval.shape, 2) else None


def _needed_for_numbers(program: PureProgram, sites: Sequence[Site]) -> set[Variable]:
    """Return the tables whose rows the numbers of rows of any table depend on."""
    (state, constants, *args), kwargs = program.structs

    def numbers(rows: Any, state: Any, constants: Any, args: Any, kwargs: Any) -> Any:
        return _looked_up(program, sites, state, constants, rows, args, kwargs)[0]

    jaxpr, _, _ = make_jaxpr(numbers, [site.rows.struct for site in sites], state, constants, args, kwargs)
    live = live_part(jaxpr)
    used = {id(atom) for atoms in (live.outvars, *(one.invars for one in live.eqns)) for atom in atoms}
    return {site.variable for site, row in zip(sites, live.invars, strict=False) if id(row) in used}

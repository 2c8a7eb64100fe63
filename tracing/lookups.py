"""Lookups of rows, taken apart from other uses of a variable, so that their gradient is made of rows.

A variable that a function only looks rows up in is never read whole: each lookup is recorded as one, and the
derivative with respect to its rows is taken in the place of one with respect to the variable. Lookups count that
stand in the function itself or in functions that it calls by `jit`; one in a loop, a branch or a `remat` is a use
like any other. `variable.gather`, `variable[indices]`, and JAX's own gather of whole rows from a read (`jnp.take`
along axis 0, indexing by an array or a number, under `vmap` too) are lookups.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from dflow.tracing.explicit_sharding import sharding_of_aval
from dflow.tracing.jax_frontend import Equation, Jaxpr, accesses, closed_parts, inner_parts, is_literal, origin_of
from dflow.tracing.rows_to_dense import LARGE_BYTES, DenseGradientWarning
from dflow.tracing.source import at
from dflow.tracing.state_primitives import gather_p, read_p
from dflow.tracing.types import ArrayType

#: Calls whose body is looked into, and which parameter holds it.
CALLS: Mapping[str, str] = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


@dataclass(frozen=True)
class Table:
    """Stands in for the value of a variable that is only looked up."""

    variable: Any


@dataclass(frozen=True)
class Site:
    """One lookup: in which variable, and the type of its rows."""

    variable: Any
    rows: ArrayType


def lookup_sites(jaxpr: Jaxpr, variables: Sequence[Any]) -> list[Site]:
    """Every lookup of the variables that `jaxpr` uses by lookups alone, in the order it runs them.

    A lookup in a table with an explicit sharding, which says how its result is spread, is a use like any other.
    """
    search = _Search()
    variables = [variable for variable in variables if variable.type.sharding is None]
    search.walk(jaxpr, {})
    for variable in variables:
        _warn_of_lookups_inside(variable, search)
    whole = search.used_whole | search.inside.keys()
    return [site for site in search.sites if site.variable in variables and site.variable not in whole]


def _warn_of_lookups_inside(variable: Any, search: _Search) -> None:
    """Warn where the gradient of a large table is dense only because it is looked up inside a body."""
    size_bytes = variable.type.size_bytes
    if variable not in search.inside or variable in search.used_whole or size_bytes < LARGE_BYTES:
        return
    equation = search.inside[variable]
    body = "checkpoint" if equation.primitive.name.startswith("remat") else equation.primitive.name
    warnings.warn(
        f"variable {variable.name!r} is looked up inside a {body}, so its gradient is dense, "
        f"{size_bytes / 1e6:.0f} MB{at(origin_of(equation).own_loc)}\n"
        f"  look the rows up before the {body}, and pass them to it",
        DenseGradientWarning,
        stacklevel=2,
    )


class _Search:
    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.used_whole: set[Any] = set()
        #: Variables that the body of a loop, branch or remat only looks rows up in, with the first such equation.
        self.inside: dict[Any, Equation] = {}

    def walk(self, jaxpr: Jaxpr, tables: dict[Any, Any]) -> None:
        """Look at every equation; `tables` has the variable that each value is a read of."""
        for equation in jaxpr.eqns:
            self._look(equation, tables)
        self._whole(jaxpr.outvars, tables)

    def _look(self, equation: Equation, tables: dict[Any, Any]) -> None:
        if equation.primitive is read_p:
            tables[equation.outvars[0]] = equation.params["handle"].variable
        elif equation.primitive is gather_p and sharding_of_aval(equation.outvars[0].aval) is None:
            self._found(equation.params["handle"].variable, equation)
        elif equation.primitive.name in CALLS:
            inner = closed_parts(equation.params[CALLS[equation.primitive.name]])[0]
            given = zip(inner.invars, equation.invars, strict=True)
            self.walk(inner, {var: tables[atom] for var, atom in given if not is_literal(atom) and atom in tables})
        elif is_row_gather(equation) and equation.invars[0] in tables:
            self._found(tables[equation.invars[0]], equation, _kept_dim(equation))
            self._whole(equation.invars[1:], tables)
        else:
            self._whole(equation.invars, tables)
            self._inside(equation)

    def _inside(self, equation: Equation) -> None:
        """Note the variables that a body touches: all are used whole, some by lookups alone."""
        body = _Search()
        for inner, _ in inner_parts(equation.params):
            body.walk(inner, {})
        only_looked_up = {site.variable for site in body.sites} - body.used_whole
        touched = set().union(*accesses(equation.effects))
        self.inside |= dict.fromkeys(only_looked_up - self.inside.keys(), equation)
        self.used_whole |= touched - only_looked_up

    def _found(self, variable: Any, equation: Equation, kept_dim: int | None = None) -> None:
        aval = equation.outvars[0].aval
        shape = tuple(size for dim, size in enumerate(aval.shape) if dim != kept_dim)
        self.sites.append(Site(variable, ArrayType(aval.dtype, shape)))

    def _whole(self, atoms: Sequence[Any], tables: Mapping[Any, Any]) -> None:
        self.used_whole.update(tables[atom] for atom in atoms if not is_literal(atom) and atom in tables)


def is_row_gather(equation: Equation) -> bool:
    """Whether an equation takes whole rows along the first dimension of its first operand, and nothing else."""
    if equation.primitive.name not in ("gather", "dynamic_slice") or is_literal(equation.invars[0]):
        return False
    if sharding_of_aval(equation.outvars[0].aval) is not None:
        return False
    shape = equation.invars[0].aval.shape
    takes_rows = bool(shape) and tuple(equation.params["slice_sizes"]) == (1, *shape[1:])
    return takes_rows and (equation.primitive.name == "dynamic_slice" or _is_plain_gather(equation))


def _is_plain_gather(equation: Equation) -> bool:
    numbers, batch = equation.params["dimension_numbers"], _batch_dims(equation)
    starts = tuple(numbers.start_index_map)
    # A start along another dimension says nothing when it is clipped, since the whole of that dimension is taken.
    only_rows = starts == (0,) or (
        starts == tuple(range(len(starts))) and equation.params["mode"] == GatherScatterMode.CLIP
    )
    offsets = len(equation.outvars[0].aval.shape) - batch
    return bool(
        only_rows
        and tuple(numbers.collapsed_slice_dims) in ((0,), ())
        and not numbers.operand_batching_dims
        and tuple(numbers.offset_dims) == tuple(range(batch, batch + offsets))
    )


def _batch_dims(equation: Equation) -> int:
    """How many dimensions the indices have that name rows."""
    return len(equation.invars[1].aval.shape) - 1 if equation.primitive.name == "gather" else 0


def _kept_dim(equation: Equation) -> int | None:
    """Where the result has a dimension of size 1 for each single row, or None when it has none."""
    if equation.primitive.name == "gather" and equation.params["dimension_numbers"].collapsed_slice_dims:
        return None
    return _batch_dims(equation)


@jax.custom_jvp
def _tapped(rows: Any, tap: Any) -> Any:
    """`rows`, whose derivative with respect to `tap` is that with respect to them."""
    return rows


@_tapped.defjvp
def _tapped_jvp(primals: Any, tangents: Any) -> Any:
    return _tapped(*primals), tangents[0] + tangents[1]


class Lookups:
    """The lookups of one run of a function: `taps` stand for the rows that each of `sites` finds, in order."""

    def __init__(self, sites: Sequence[Site], taps: Sequence[Any]) -> None:
        self.tables = {site.variable for site in sites}
        self.indices: list[Any] = []
        self._taps = iter(taps)

    def rows(self, variable: Any, indices: Any) -> Any:
        """The rows of a variable at indices that may count from the end or be past one."""
        indices = _wide(indices)
        return self._rows(variable, jnp.where(indices < 0, indices + variable.shape[0], indices), drops=True)

    def gather(self, equation: Equation, variable: Any, starts: Any) -> Any:
        """What JAX's own gather gives, by a lookup; `starts` is its second operand."""
        is_gather, kept_dim = equation.primitive.name == "gather", _kept_dim(equation)
        mode = equation.params["mode"] if is_gather else GatherScatterMode.CLIP
        places = _wide(starts[..., 0] if is_gather else jnp.asarray(starts))
        rows = self._rows(variable, places, drops=mode != GatherScatterMode.CLIP)
        if mode == GatherScatterMode.FILL_OR_DROP:
            rows = jnp.where(_is_there(variable, places), rows, _fill_value(equation.params["fill_value"], rows.dtype))
        return rows if kept_dim is None else jnp.expand_dims(rows, kept_dim)

    def _rows(self, variable: Any, places: Any, *, drops: bool) -> Any:
        """Rows by places from the start; of one past an end, that at the end, whose gradient is dropped if `drops`."""
        tap = next(self._taps)
        if drops:
            tap = jnp.where(_is_there(variable, places), tap, jnp.zeros_like(tap))
        inside = jnp.clip(places, 0, variable.shape[0] - 1)
        self.indices.append(inside)
        return _tapped(gather_p.bind(inside, handle=variable.handle), tap)


def _is_there(variable: Any, places: Any) -> Any:
    """Whether there is a row at each place, in a shape that broadcasts with the rows."""
    is_there = (places >= 0) & (places < variable.shape[0])
    return jnp.reshape(is_there, (*is_there.shape, *[1] * (variable.ndim - 1)))


def _wide(indices: Any) -> Any:
    """Indices of a dtype that has room for any count of rows."""
    return indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)


def _fill_value(stated: Any, dtype: Any) -> Any:
    """What JAX gives for a row that does not exist."""
    return jnp.asarray(jnp.nan if stated is None else stated, dtype)


def rows_found(
    variable: Any, sites: Sequence[Site], indices: Sequence[Any], rows: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    """The indices and rows of the gradient of one variable, from the gradients of the rows of every site."""
    mine = [place for place, site in enumerate(sites) if site.variable is variable]
    flat = [jnp.reshape(rows[place], (-1, *variable.shape[1:])) for place in mine]
    places = [jnp.reshape(indices[place], -1).astype(jnp.int32) for place in mine]
    return jnp.concatenate(places), jnp.concatenate(flat)

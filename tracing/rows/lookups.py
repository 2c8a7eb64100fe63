"""Lookups of rows, taken apart from other uses of a variable, so that their gradient is made of rows.

A variable that a function only looks rows up in is never read whole: each lookup is recorded as one, and the
derivative is taken with respect to its rows, not to the variable. `variable.gather`, `variable[indices]`, and JAX's
own gather of whole rows from a read (`jnp.take` along axis 0, indexing by an array or a number, under `vmap` too) are
lookups. They count in the function itself and in functions that it calls by `jit`.

Lookups in a `scan`, a `cond` or a `checkpoint` are done before it, for all iterations and branches, and the body takes
their rows (`early_lookups`). In any other body a lookup is a use like any other.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.lax import GatherScatterMode

from dflow.tracing.ir.explicit_sharding import sharding_of_aval
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import (
    Equation,
    Jaxpr,
    accesses,
    closed_parts,
    host_resources,
    inner_parts,
    is_literal,
    live_part,
    make_jaxpr,
    scan_counts,
)
from dflow.tracing.primitives.state_primitives import gather_p, read_p

#: Calls whose body is looked into, and which parameter holds it.
CALLS: Mapping[str, str] = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
#: Calls that say how to differentiate, which was done before there is a program to pass over, and likewise.
RULED: Mapping[str, str] = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
#: Equations whose lookups are done before them.
BODIES = frozenset(("scan", "cond", "checkpoint", "remat2"))


@dataclass(frozen=True)
class Table:
    """Stands in for the value of a variable that is only looked up."""

    variable: Any


@dataclass(frozen=True)
class Site:
    """One lookup, or one of all iterations of a loop.

    `rows`       type of the rows found
    `positions`  type of their positions
    `drops`      whether a position outside the table gets no gradient
    `once`       whether no row is looked up twice
    """

    variable: Any
    rows: ArrayType
    positions: ArrayType
    drops: bool
    once: bool = False


class Search:
    """Finds the lookups in a program, in the order it runs them, and the variables that it uses in other ways."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.used_whole: set[Any] = set()
        #: Variables that the body of an equation only looks rows up in, but where that cannot be done before it.
        self.inside: dict[Any, Equation] = {}
        #: The equations of the program, and of functions it calls, that have lookups in their bodies. Each with the
        #: variables whose values are operands, by number of the operand, and with the lookups of all iterations.
        self.bodies: list[tuple[Equation, Mapping[int, Any], Sequence[Site]]] = []
        #: Number of rows of each variable that a run looks up at least, whichever branches it takes.
        self.least: Counter[Any] = Counter()
        #: The first `cond` that looks rows of a variable up.
        self.branched: dict[Any, Equation] = {}

    def walk(self, jaxpr: Jaxpr, tables: dict[Any, Any]) -> None:
        """Look at every equation; `tables` maps each value read from a variable to that variable."""
        for equation in jaxpr.eqns:
            self.look(equation, tables)
        self._whole(jaxpr.outvars, tables)

    def look(self, equation: Equation, tables: dict[Any, Any]) -> None:
        """Look at an equation, as `walk` does."""
        if equation.primitive is read_p:
            tables[equation.outvars[0]] = equation.params["handle"].variable
        elif equation.primitive is gather_p and sharding_of_aval(equation.outvars[0].aval) is None:
            self._found(equation.params["handle"].variable, equation)
        elif equation.primitive.name in CALLS:
            inner = closed_parts(equation.params[CALLS[equation.primitive.name]])[0]
            self.walk(inner, _tables_inside(inner.invars, equation.invars, tables))
        elif equation.primitive.name in BODIES and not host_resources(equation.effects):
            self._look_into(equation, tables)
        elif is_row_gather(equation) and equation.invars[0] in tables:
            self._found(tables[equation.invars[0]], equation, _kept_dim(equation))
            self._whole(equation.invars[1:], tables)
        else:
            self._whole(equation.invars, tables)
            self._inside(equation)

    def _look_into(self, equation: Equation, tables: dict[Any, Any]) -> None:
        """Search bodies whose lookups can be done before the equation. A variable that a scan carries is used whole."""
        first, last = _passed_in(equation)
        given, body, by_part = equation.invars[first:last], Search(), []
        for inner, _ in inner_parts(equation.params):
            body.least = Counter()
            body.walk(inner, _tables_inside(inner.invars[: len(given)], given, tables))
            by_part.append(body.least)
        self._whole(equation.invars[last:], tables)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for variable, count in functools.reduce(operator.and_, by_part).items():
            self.least[variable] += times * count
        here = {site.variable: equation for site in body.sites} if equation.primitive.name == "cond" else {}
        self.branched = body.branched | here | self.branched
        self.used_whole |= body.used_whole
        self.inside = body.inside | self.inside
        if body.sites:
            reads = enumerate(equation.invars)
            held = {number: tables[atom] for number, atom in reads if not is_literal(atom) and atom in tables}
            sites = [_repeated(site, equation) for site in body.sites]
            self.sites += sites
            self.bodies.append((equation, held, sites))

    def _inside(self, equation: Equation) -> None:
        """Record the variables that bodies touch: in `inside` if they are only looked up, else in `used_whole`."""
        body = Search()
        for inner, _ in inner_parts(equation.params):
            body.walk(inner, {})
        only_looked_up = {site.variable for site in body.sites} - body.used_whole
        touched = set().union(*accesses(equation.effects))
        self.inside |= dict.fromkeys(only_looked_up - self.inside.keys(), equation)
        self.used_whole |= touched - only_looked_up

    def _found(self, variable: Any, equation: Equation, kept_dim: int | None = None) -> None:
        aval = equation.outvars[0].aval
        shape = tuple(size for dim, size in enumerate(aval.shape) if dim != kept_dim)
        is_own = equation.primitive is gather_p
        indices = equation.invars[0 if is_own else 1].aval.dtype
        positions = ArrayType(_wide_dtype(indices), shape[: len(shape) - len(variable.shape) + 1])
        drops = is_own or _mode(equation) != GatherScatterMode.CLIP
        once = is_own and equation.params["once"]
        self.sites.append(Site(variable, ArrayType(aval.dtype, shape), positions, drops, once))
        self.least[variable] += math.prod(positions.shape)

    def _whole(self, atoms: Sequence[Any], tables: Mapping[Any, Any]) -> None:
        self.used_whole.update(tables[atom] for atom in atoms if not is_literal(atom) and atom in tables)


def _passed_in(equation: Equation) -> tuple[int, int]:
    """The range `first, end` of the operands that every body gets unchanged."""
    if equation.primitive.name == "scan":
        return 0, scan_counts(equation.params)[0]
    return int(equation.primitive.name == "cond"), len(equation.invars)


def _repeated(site: Site, equation: Equation) -> Site:
    """Return the site of a body's lookup for all iterations: a scan adds a first dimension."""
    times = (equation.params["length"],) if equation.primitive.name == "scan" else ()
    rows, positions = (ArrayType(type.dtype, (*times, *type.shape)) for type in (site.rows, site.positions))
    return replace(site, rows=rows, positions=positions, once=site.once and not times)


def _tables_inside(inner: Sequence[Any], outer: Sequence[Any], tables: Mapping[Any, Any]) -> dict[Any, Any]:
    given = zip(inner, outer, strict=True)
    return {var: tables[atom] for var, atom in given if not is_literal(atom) and atom in tables}


def sites_in(part: Equation | Jaxpr, operands: Sequence[Any], tables: Collection[Any]) -> list[Site]:
    """The lookups of a program, or in the bodies of an equation, in the order it runs; some operands are `Table`s."""
    search, given = Search(), zip(part.invars, operands, strict=True)
    read = {atom: operand.variable for atom, operand in given if isinstance(operand, Table)}
    (search.walk if hasattr(part, "eqns") else search.look)(part, read)
    return [site for site in search.sites if site.variable in tables]


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


def _mode(equation: Equation) -> Any:
    """The mode of a gather: its rule for a position past an end."""
    return equation.params["mode"] if equation.primitive.name == "gather" else GatherScatterMode.CLIP


def _batch_dims(equation: Equation) -> int:
    """Number of dimensions of the indices that name rows."""
    return len(equation.invars[1].aval.shape) - 1 if equation.primitive.name == "gather" else 0


def _kept_dim(equation: Equation) -> int | None:
    """The dimension of size 1 that the result has for the rows, or None."""
    if equation.primitive.name == "gather" and equation.params["dimension_numbers"].collapsed_slice_dims:
        return None
    return _batch_dims(equation)


@jax.custom_jvp
def _tapped(rows: Any, tap: Any) -> Any:
    """Return `rows`. The derivative with respect to `tap` is that with respect to `rows`."""
    return rows


@_tapped.defjvp
def _tapped_jvp(primals: Any, tangents: Any) -> Any:
    return _tapped(*primals), tangents[0] + tangents[1]


class Found(NamedTuple):
    """The rows that a lookup found, and their positions.

    Positions count from the start of the table. One outside the table, negative or too large, has the row at that end.
    """

    rows: Any
    positions: Any


#: Runs an equation in a `State`, with what lookups in its bodies found: the results, and no positions. With None for
#: it the positions of the lookups too, and results made of `later_p`.
RunBody: TypeAlias = Callable[[Any, Sequence[Found] | None], tuple[list[Any], list[Any]]]


class Lookups(ABC):
    """Serves the lookups in `tables`, in the order of the program."""

    def __init__(self, tables: Collection[Any]) -> None:
        self.tables = frozenset(tables)

    def rows(self, variable: Any, indices: Any, once: bool) -> Any:
        """The rows of a variable at indices, which may be negative (from the end) or out of bounds.

        With `once`, no row is looked up twice and no index is negative.
        """
        indices = _wide(indices)
        positions = indices if once else jnp.where(indices < 0, indices + variable.shape[0], indices)
        return self._find(variable, positions).rows

    def gather(self, equation: Equation, variable: Any, starts: Any) -> Any:
        """The result of a JAX gather of whole rows, by a lookup; `starts` is its second operand."""
        is_gather, kept_dim = equation.primitive.name == "gather", _kept_dim(equation)
        rows, positions = self._find(variable, _wide(starts[..., 0] if is_gather else jnp.asarray(starts)))
        if _mode(equation) == GatherScatterMode.FILL_OR_DROP:
            fill = equation.params["fill_value"]
            fill = jnp.asarray(jnp.nan if fill is None else fill, rows.dtype)
            rows = jnp.where(_is_there(variable, positions), rows, fill)
        return rows if kept_dim is None else jnp.expand_dims(rows, kept_dim)

    @abstractmethod
    def _find(self, variable: Any, positions: Any) -> Found:
        """Look rows up by positions that count from the start."""

    @abstractmethod
    def inside(self, sites: Sequence[Site], run: RunBody, state: Any) -> list[Any]:
        """The results of an equation with these lookups in its bodies."""


class EarlyLookups(Lookups):
    """Lookups that are done before the equations that have them in their bodies."""

    def inside(self, sites: Sequence[Site], run: RunBody, state: Any) -> list[Any]:
        """Do all lookups of the equation's bodies before it, and hand the bodies the rows and positions."""
        jaxpr, consts, _ = make_jaxpr(lambda: run(state.copy(), None)[1])
        positions = jax.core.eval_jaxpr(live_part(jaxpr), [*map(jax.lax.stop_gradient, consts)])
        found = [self._find(site.variable, position) for site, position in zip(sites, positions, strict=True)]
        return run(state, found)[0]


class GivenLookups(EarlyLookups):
    """The lookups of one run of a function, in its order: their rows are given, and `positions` has their positions."""

    def __init__(self, tables: Collection[Any], rows: Sequence[Any]) -> None:
        super().__init__(tables)
        self.positions: list[Any] = []
        self._left = iter(rows)

    def _find(self, variable: Any, positions: Any) -> Found:
        self.positions.append(positions)
        return Found(next(self._left), positions)


class TappedLookups(EarlyLookups):
    """The lookups of one run of a function, in the order of `sites`.

    Each adds one of `taps` to its rows for derivatives only: the gradient of a tap is the gradient of the rows.
    """

    def __init__(self, sites: Sequence[Site], taps: Sequence[Any]) -> None:
        super().__init__({site.variable for site in sites})
        self.indices: list[Any] = []
        self._left = iter([*zip(sites, taps, strict=True)])

    def _find(self, variable: Any, positions: Any) -> Found:
        site, tap = next(self._left)
        if site.drops and not site.once:
            tap = jnp.where(_is_there(variable, positions), tap, jnp.zeros_like(tap))
        # Of positions that occur once, those past the end are no rows, as in a unique `Index`.
        inside = positions if site.once else jnp.clip(positions, 0, variable.shape[0] - 1)
        self.indices.append(inside)
        return Found(_tapped(gather_p.bind(inside, handle=variable.handle, once=site.once), tap), positions)


class BodyLookups(Lookups):
    """The lookups of a body: their results are given, or `found` is None and their positions are computed."""

    def __init__(self, tables: Collection[Any], found: Sequence[Found] | None) -> None:
        super().__init__(tables)
        self.positions: list[Any] = []
        self._given = None if found is None else iter(found)

    def _find(self, variable: Any, positions: Any) -> Found:
        if self._given is not None:
            return next(self._given)
        self.positions.append(positions)
        return Found(later_p.bind(shape=(*positions.shape, *variable.shape[1:]), dtype=variable.dtype), positions)

    def inside(self, sites: Sequence[Site], run: RunBody, state: Any) -> list[Any]:
        """Hand the bodies the results found earlier; without any, collect the positions that the bodies compute."""
        results, positions = run(state, None if self._given is None else [next(self._given) for _ in sites])
        self.positions += positions
        return results


#: Rows that are not looked up yet, in a program that finds the positions of lookups.
later_p = jex.Primitive("rows_later")
later_p.def_abstract_eval(lambda *, shape, dtype: jax.core.ShapedArray(shape, dtype))


def _is_there(variable: Any, positions: Any) -> Any:
    """A mask of the positions inside the table, in a shape that broadcasts with the rows."""
    is_there = (positions >= 0) & (positions < variable.shape[0])
    return jnp.reshape(is_there, (*is_there.shape, *[1] * (variable.ndim - 1)))


def _wide(indices: Any) -> Any:
    """Indices of a dtype that has room for any count of rows."""
    return indices.astype(_wide_dtype(indices.dtype))


def _wide_dtype(dtype: Any) -> Any:
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.int32)


class RowsFound(NamedTuple):
    """The indices and rows of the gradient of one variable; with `once`, equal indices are those of no row."""

    indices: jax.Array
    rows: jax.Array
    once: bool


def rows_found(variable: Any, sites: Sequence[Site], indices: Sequence[Any], rows: Sequence[Any]) -> RowsFound:
    """The gradient of one variable, from the gradients of the rows of every site."""
    mine = [position for position, site in enumerate(sites) if site.variable is variable]
    flat = [jnp.reshape(rows[position], (-1, *variable.shape[1:])) for position in mine]
    positions = [jnp.reshape(indices[position], -1).astype(jnp.int32) for position in mine]
    once = len(mine) == 1 and sites[mine[0]].once
    return RowsFound(jnp.concatenate(positions), jnp.concatenate(flat), once)

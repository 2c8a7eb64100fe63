"""Run a program for whole arrays on the shards of these arrays: only sums and other reductions leave a shard.

Each value is an array, the parts of an array (`Cut`), or an array that is repeated along some dimensions and not made
yet (`Repeated`). An elementwise op runs on each part. A reduction, or a product that sums over the divided dimension,
runs on each part, and the results are combined. Other ops raise `NotOnPartsError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tables.shard_layout import ShardLayout
from dflow.tracing.jax_frontend import (
    Equation,
    Jaxpr,
    bind,
    closed_parts,
    evaluated,
    origin_of,
    scan_counts,
)
from dflow.tracing.rows.lookups import CALLS, RULED
from dflow.tracing.rows.row_wise import ELEMENTWISE

_FUNCTIONS = {**CALLS, **RULED}
_ELEMENTWISE = ELEMENTWISE | {"stop_gradient", "bitcast_convert_type"}
#: How the results of the parts of a reduction are combined.
_REDUCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_prod": jnp.multiply,
    "reduce_and": jnp.bitwise_and,
    "reduce_or": jnp.bitwise_or,
}


class NotOnPartsError(Exception):
    """An op needs an array whole."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The parts of an array, divided along `axis` as `layout` divides."""

    parts: tuple[Any, ...]
    axis: int
    layout: ShardLayout


@dataclass(frozen=True, eq=False)
class Repeated:
    """The result of a `broadcast_in_dim` of an array, which is not made yet."""

    equation: Equation
    operand: Any

    def whole(self) -> Any:
        """The array."""
        return bind(self.equation.primitive, self.equation.params, [self.operand], None)[0]

    def part(self, cut: Cut, shard: int) -> Any:
        """The part of the array beside a part of `cut`."""
        shape, dims = self.equation.params["shape"], self.equation.params["broadcast_dimensions"]
        if shape[cut.axis] == 1:
            return self.whole()
        operand, part = self.operand, cut.layout.part(shard)._replace(axis=cut.axis)
        if cut.axis in dims and jnp.shape(operand)[dims.index(cut.axis)] != 1:
            operand = part._replace(axis=dims.index(cut.axis)).of(operand)
        params = {**self.equation.params, "shape": part.shape(shape)}
        return bind(self.equation.primitive, params, [operand], None)[0]


def run_on_parts(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return the results of a program, each an array or a `Cut`, for such arguments. Raises NotOnPartsError."""

    def run(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        with origin_of(equation).restored():
            return _results(equation, operands)

    return [*map(_made, evaluated(jaxpr, consts, args, run))]


def _results(equation: Equation, operands: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _FUNCTIONS:
        return run_on_parts(*closed_parts(params[_FUNCTIONS[name]]), operands)
    if name == "broadcast_in_dim" and not isinstance(operands[0], Cut):
        return [Repeated(equation, _made(operands[0]))] if len(operands) == 1 else _plainly(equation, operands)
    cuts = [operand for operand in operands if isinstance(operand, Cut)]
    if not cuts:
        return _plainly(equation, operands)
    if name in _ELEMENTWISE:
        return [_elementwise(equation, operands, cuts)]
    if name not in _RULES:
        raise NotOnPartsError(name)
    return _RULES[name](equation, operands)


def _made(value: Any) -> Any:
    return value.whole() if isinstance(value, Repeated) else value


def _plainly(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    return bind(equation.primitive, equation.params, [*map(_made, operands)], None)


def _elementwise(equation: Equation, operands: Sequence[Any], cuts: Sequence[Cut]) -> Cut:
    first = cuts[0]
    if any((cut.axis, cut.layout) != (first.axis, first.layout) for cut in cuts):
        raise NotOnPartsError(equation.primitive.name)
    parts = [
        bind(equation.primitive, equation.params, [beside(operand, first, shard) for operand in operands], None)[0]
        for shard in range(first.layout.shards)
    ]
    return Cut(tuple(parts), first.axis, first.layout)


def beside(value: Any, cut: Cut, shard: int) -> Any:
    """The part of a value of the same shape beside a part of `cut`."""
    if isinstance(value, Cut):
        return value.parts[shard]
    if isinstance(value, Repeated):
        return value.part(cut, shard)
    if jnp.shape(value) == () or jnp.shape(value)[cut.axis] == 1:
        return value
    return cut.layout.part(shard)._replace(axis=cut.axis).of(jnp.asarray(value))


def _on_each(equation: Equation, cut: Cut, axis: int, params: Callable[[Any], Mapping[str, Any]] | None = None) -> Cut:
    """Apply an equation of one operand to each part; the result is divided along `axis`."""
    parts = []
    for part in cut.parts:
        changed = equation.params if params is None else {**equation.params, **params(part)}
        parts += bind(equation.primitive, changed, [part], None)
    return Cut(tuple(parts), axis, cut.layout)


def _broadcast(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    [cut] = operands
    axis, shape = equation.params["broadcast_dimensions"][cut.axis], equation.params["shape"]
    return [_on_each(equation, cut, axis, lambda part: {"shape": _with(shape, axis, part.shape[cut.axis])})]


def _with(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _reshape(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """A reshape, or squeeze, that leaves the divided dimension as it is: the same number of elements before it."""
    cut, given, result = operands[0], equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    before = int(np.prod(given[: cut.axis]))
    axes = [axis for axis, size in enumerate(result) if size == given[cut.axis] and np.prod(result[:axis]) == before]
    if not axes or (equation.params.get("dimensions") is not None and equation.primitive.name == "reshape"):
        raise NotOnPartsError(equation.primitive.name)
    axis = axes[0]
    parts = tuple(part.reshape(_with(result, axis, part.shape[cut.axis])) for part in cut.parts)
    return [Cut(parts, axis, cut.layout)]


def _transpose(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    return [_on_each(equation, operands[0], equation.params["permutation"].index(operands[0].axis))]


def _reduce(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    [cut] = operands
    axes = tuple(equation.params["axes"])
    if cut.axis not in axes:
        return [_on_each(equation, cut, cut.axis - sum(axis < cut.axis for axis in axes))]
    return [functools.reduce(_REDUCTIONS[equation.primitive.name], _on_each(equation, cut, 0).parts)]


def _dot(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """A product of matrices: the sum of the products of the parts, or each part's product with a whole array."""
    contracted, batch = equation.params["dimension_numbers"]
    cut = next(operand for operand in operands if isinstance(operand, Cut))
    side = operands.index(cut)
    other = operands[1 - side]
    is_summed = cut.axis in contracted[side]
    if cut.axis in batch[side] or (isinstance(other, Cut) and not is_summed):
        raise NotOnPartsError("dot_general")
    along = cut.axis
    if is_summed:
        along = contracted[1 - side][contracted[side].index(cut.axis)]
        if isinstance(other, Cut) and (other.axis, other.layout) != (along, cut.layout):
            raise NotOnPartsError("dot_general")
    products: list[Any] = []
    for shard, part in enumerate(cut.parts):
        with_it = beside(other, Cut(cut.parts, along, cut.layout), shard) if is_summed else _made(other)
        pair = [part, with_it] if side == 0 else [with_it, part]
        products += bind(equation.primitive, equation.params, pair, None)
    if is_summed:
        return [functools.reduce(jnp.add, products)]
    free = [axis for axis in range(cut.parts[0].ndim) if axis not in (*contracted[side], *batch[side])]
    before = 0 if side == 0 else len(jnp.shape(other)) - len(contracted[0]) - len(batch[0])
    return [Cut(tuple(products), len(batch[0]) + before + free.index(cut.axis), cut.layout)]


def _cond(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """All branches are computed, and the results of one are taken."""
    index, *rest = operands
    if isinstance(index, Cut):
        raise NotOnPartsError("cond")
    results = [run_on_parts(*closed_parts(branch), rest) for branch in equation.params["branches"]]
    return [_chosen(_made(index), values) for values in zip(*results, strict=True)]


def _chosen(index: Any, values: Sequence[Any]) -> Any:
    cut = next((value for value in values if isinstance(value, Cut)), None)
    which = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(values) - 1)
    if cut is None:
        return jax.lax.select_n(which, *values)
    if any(isinstance(value, Cut) and (value.axis, value.layout) != (cut.axis, cut.layout) for value in values):
        raise NotOnPartsError("cond")
    parts = [
        jax.lax.select_n(which, *(beside(value, cut, shard) for value in values)) for shard in range(cut.layout.shards)
    ]
    return Cut(tuple(parts), cut.axis, cut.layout)


def _scan(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """A scan whose carries stay divided as they are, over arrays that are not divided."""
    params = equation.params
    consts, carry = scan_counts(params)
    body = closed_parts(params["jaxpr"])
    first, xs = [*map(_made, operands[consts : consts + carry])], [*map(_made, operands[consts + carry :])]
    if any(isinstance(value, Cut) for value in xs):
        raise NotOnPartsError("scan")

    def step(carried: Any, row: Any) -> Any:
        given = [_like(value, parts) for value, parts in zip(first, carried, strict=True)]
        results = run_on_parts(*body, [*operands[:consts], *given, *row])
        after = [_parts(value, result) for value, result in zip(first, results[:carry], strict=True)]
        if any(isinstance(value, Cut) for value in results[carry:]):
            raise NotOnPartsError("scan")
        return after, results[carry:]

    start = [list(value.parts) if isinstance(value, Cut) else [value] for value in first]
    options = {key: params[key] for key in ("length", "reverse", "unroll") if key in params}
    after, ys = jax.lax.scan(step, start, xs, **options)
    return [*(_like(value, parts) for value, parts in zip(first, after, strict=True)), *ys]


def _like(value: Any, parts: Sequence[Any]) -> Any:
    return Cut(tuple(parts), value.axis, value.layout) if isinstance(value, Cut) else parts[0]


def _parts(value: Any, result: Any) -> list[Any]:
    if isinstance(value, Cut):
        return [beside(result, value, shard) for shard in range(value.layout.shards)]
    if isinstance(result, Cut):
        raise NotOnPartsError("scan")
    return [result]


_RULES: Mapping[str, Callable[[Equation, Sequence[Any]], Sequence[Any]]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    "dot_general": _dot,
    "cond": _cond,
    "scan": _scan,
    **dict.fromkeys(_REDUCTIONS, _reduce),
}

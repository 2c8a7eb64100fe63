"""What each op of StableHLO is in `jax.lax`.

A rule takes the op, its operands, and a function that gives its regions as functions of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from dflow.exporting.converting.known_sizes import Sizes, as_array
from dflow.exporting.converting.stablehlo_attributes import (
    attribute,
    dimension_numbers,
    dtype_of,
    literal,
    numbers,
    padding,
    shape_of,
)
from dflow.tracing.errors import ExportError

Regions = Callable[[int], Callable[..., list[Any]]]
Rule = Callable[[Any, Sequence[Any], Regions], Any]

_REDUCTIONS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lax.reduce_sum, lax.add),
    "maximum": (lax.reduce_max, lax.max),
    "minimum": (lax.reduce_min, lax.min),
    "multiply": (lax.reduce_prod, lax.mul),
    "and": (lax.reduce_and, lax.bitwise_and),
    "or": (lax.reduce_or, lax.bitwise_or),
    "xor": (lax.reduce_xor, lax.bitwise_xor),
}
_SCATTERS: Mapping[str, Callable[..., Any]] = {
    "add": lax.scatter_add, "multiply": lax.scatter_mul, "minimum": lax.scatter_min, "maximum": lax.scatter_max,
    "": lax.scatter,
}  # fmt: skip


def _plain(fn: Callable[..., Any]) -> Rule:
    return lambda op, given, region: fn(*map(as_array, given))


def _functions(functions: Mapping[str, Any]) -> Mapping[str, Callable[..., Any]]:
    return functions


def _known(value: Any) -> list[Any]:
    """Return sizes as a list of numbers and dimensions. Raises ExportError for sizes that values determine."""
    if isinstance(value, Sizes):
        return [*value.values.reshape(-1)]
    if isinstance(value, np.ndarray):
        return [int(one) for one in value.reshape(-1)]
    raise ExportError("expected sizes that the shapes of the arguments determine, got some that their values determine")


def _compare(op: Any, given: Sequence[Any], region: Regions) -> Any:
    compare = {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}[_direction(op)]
    return compare(*map(as_array, given))


def _select(op: Any, given: Sequence[Any], region: Regions) -> Any:
    which, yes, no = map(as_array, given)
    if yes.dtype == np.bool_:  # for formats that select numbers alone
        return lax.bitwise_or(lax.bitwise_and(which, yes), lax.bitwise_and(lax.bitwise_not(which), no))
    return lax.select_n(jnp.broadcast_to(which, np.shape(yes)) if np.ndim(which) < np.ndim(yes) else which, no, yes)


def _convert(op: Any, given: Sequence[Any], region: Regions) -> Any:
    return lax.convert_element_type(as_array(given[0]), dtype_of(op.results[0].type))


def _broadcast(op: Any, given: Sequence[Any], region: Regions) -> Any:
    shape = shape_of(op.results[0].type) if len(given) == 1 else _known(given[1])
    return lax.broadcast_in_dim(as_array(given[0]), shape, numbers(op, "broadcast_dimensions") or ())


def _reshape(op: Any, given: Sequence[Any], region: Regions) -> Any:
    return lax.reshape(as_array(given[0]), shape_of(op.results[0].type) if len(given) == 1 else _known(given[1]))


def _iota(op: Any, given: Sequence[Any], region: Regions) -> Any:
    type = op.results[0].type
    shape = _known(given[0]) if given else shape_of(type)
    return lax.broadcasted_iota(dtype_of(type), shape, int(attribute(op, "iota_dimension")))


def _slice(op: Any, given: Sequence[Any], region: Regions) -> Any:
    bounds = (numbers(op, name) for name in ("start_indices", "limit_indices", "strides"))
    if len(given) > 1:
        bounds = map(_known, given[1:])  # type: ignore[assignment]
    return lax.slice(as_array(given[0]), *map(tuple, bounds))  # type: ignore[arg-type]


def _pad(op: Any, given: Sequence[Any], region: Regions) -> Any:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    sizes = [*map(_known, given[2:])] if len(given) > 2 else [numbers(op, name) for name in names]
    return lax.pad(as_array(given[0]), as_array(given[1]), [*zip(*sizes, strict=True)])


def _gather(op: Any, given: Sequence[Any], region: Regions) -> Any:
    of, array, indices = (
        dimension_numbers(op, "dimension_numbers", "GatherDimensionNumbers"),
        as_array(given[0]),
        as_array(given[1]),
    )
    dims = lax.GatherDimensionNumbers(
        tuple(of.offset_dims),
        tuple(of.collapsed_slice_dims),
        tuple(of.start_index_map),
        tuple(of.operand_batching_dims),
        tuple(of.start_indices_batching_dims),
    )
    sizes = numbers(op, "slice_sizes") if len(given) < 3 else _known(given[2])
    return lax.gather(array, _index_vectors(indices, of), dims, tuple(sizes or ()), mode="clip")


def _index_vectors(indices: Any, dims: Any) -> Any:
    """Return indices with the vectors in their last dimension, as JAX has them."""
    return (
        jnp.moveaxis(indices, dims.index_vector_dim, -1) if dims.index_vector_dim < indices.ndim else indices[..., None]
    )


def _scatter(op: Any, given: Sequence[Any], region: Regions) -> Any:
    of, body = dimension_numbers(op, "scatter_dimension_numbers", "ScatterDimensionNumbers"), _body(op)
    array, indices, updates = map(as_array, given)
    dims = lax.ScatterDimensionNumbers(
        tuple(of.update_window_dims),
        tuple(of.inserted_window_dims),
        tuple(of.scattered_dims_to_operand_dims),
        tuple(of.input_batching_dims),
        tuple(of.scatter_indices_batching_dims),
    )
    options = {"unique_indices": bool(attribute(op, "unique_indices", False)), "mode": "drop"}
    return _SCATTERS[body](array, _index_vectors(indices, of), updates, dims, **options)


def _body(op: Any) -> str:
    """Return the only op of a region that combines two elements; empty if it gives the second."""
    *ops, _ = op.regions[0].blocks[0].operations
    return "" if not ops else ops[0].operation.name.removeprefix("stablehlo.") if len(ops) == 1 else "?"


def _dot(op: Any, given: Sequence[Any], region: Regions) -> Any:
    of = dimension_numbers(op, "dot_dimension_numbers", "DotDimensionNumbers")
    dims = (
        (tuple(of.lhs_contracting_dimensions), tuple(of.rhs_contracting_dimensions)),
        (tuple(of.lhs_batching_dimensions), tuple(of.rhs_batching_dimensions)),
    )
    dtype = dtype_of(op.results[0].type)
    one, two = map(as_array, given)
    is_own = np.dtype(one.dtype) == np.dtype(two.dtype) == dtype
    return lax.dot_general(one, two, dims, preferred_element_type=None if is_own else dtype)


def _convolution(op: Any, given: Sequence[Any], region: Regions) -> Any:
    of, rank = (
        dimension_numbers(op, "dimension_numbers", "ConvDimensionNumbers"),
        len(shape_of(op.operands[0].type)) - 2,
    )
    one, two = map(as_array, given)
    return lax.conv_general_dilated(
        one,
        two,
        numbers(op, "window_strides") or [1] * rank,
        padding(op, rank),
        numbers(op, "lhs_dilation") or [1] * rank,
        numbers(op, "rhs_dilation") or [1] * rank,
        lax.ConvDimensionNumbers(
            (of.input_batch_dimension, of.input_feature_dimension, *of.input_spatial_dimensions),
            (of.kernel_output_feature_dimension, of.kernel_input_feature_dimension, *of.kernel_spatial_dimensions),
            (of.output_batch_dimension, of.output_feature_dimension, *of.output_spatial_dimensions),
        ),
        int(attribute(op, "feature_group_count", 1)),
        int(attribute(op, "batch_group_count", 1)),
        preferred_element_type=dtype_of(op.results[0].type),
    )


def _reduce(op: Any, given: Sequence[Any], region: Regions) -> Any:
    dims = tuple(numbers(op, "dimensions") or ())
    values, initial = [*map(as_array, given[: len(given) // 2])], [*map(as_array, given[len(given) // 2 :])]
    body = _body(op)
    if len(values) == 1 and body in _REDUCTIONS:
        reduce, combine = _REDUCTIONS[body]
        found = reduce(values[0], dims)
        return found if _is_neutral(op.operands[1], body) else combine(found, jnp.broadcast_to(initial[0], found.shape))
    if len(values) == 2 and len(dims) == 1 and (direction := _extreme(op)):
        position = {"gt": lax.argmax, "lt": lax.argmin}[direction](values[0], dims[0], dtype_of(op.results[1].type))
        return [{"gt": lax.reduce_max, "lt": lax.reduce_min}[direction](values[0], dims), position]
    if len(values) == 1:
        return lax.reduce(values[0], initial[0], lambda one, two: region(0)(one, two)[0], dims)
    return lax.reduce(values, initial, lambda one, two: tuple(region(0)(*one, *two)), dims)


def _is_neutral(operand: Any, body: str) -> bool:
    """Whether the initial value of a reduction is a constant that changes nothing."""
    if getattr(operand.owner, "name", None) != "stablehlo.constant":
        return False
    value = literal(operand.owner)
    least: Any
    most: Any
    if value.dtype == np.bool_:
        least, most = False, True
    elif jnp.issubdtype(value.dtype, jnp.inexact):
        least, most = -np.inf, np.inf
    else:
        least, most = np.iinfo(value.dtype).min, np.iinfo(value.dtype).max
    ones = True if value.dtype == np.bool_ else -1
    neutral = {"add": 0, "multiply": 1, "maximum": least, "minimum": most, "and": ones, "or": 0, "xor": 0}
    return bool(value == neutral[body])


def _extreme(op: Any) -> str:
    """Return the comparison of a reduction that gives an extreme and its position, as JAX lowers argmax; or nothing."""
    if not _is_iota(op.operands[1]):
        return ""
    ops = op.regions[0].blocks[0].operations
    found = [_direction(one) for one in ops if one.operation.name == "stablehlo.compare"]
    return found[0] if found and found[0] in ("gt", "lt") else ""


def _is_iota(operand: Any) -> bool:
    return getattr(operand.owner, "name", None) in ("stablehlo.iota", "stablehlo.dynamic_iota")


def _direction(op: Any) -> str:
    """Return the direction of a comparison, such as `gt`."""
    return str(attribute(op, "comparison_direction")).rpartition(" ")[2].strip("#>").lower()


def _reduce_window(op: Any, given: Sequence[Any], region: Regions) -> Any:
    if len(given) != 2:
        raise ExportError("expected a window over one array, got one over several")
    return windowed(op, given[1], as_array(given[0]), range(len(shape_of(op.operands[0].type))))


def windowed(op: Any, initial: Any, array: Any, axes: Sequence[int]) -> Any:
    """Return a reduction by windows over the last dimensions of an array, which are these of the op's operand."""
    rank, body, front = len(shape_of(op.operands[0].type)), _body(op), array.ndim - len(axes)
    if body not in ("add", "maximum", "minimum", "multiply"):
        raise ExportError(f"expected a window of sums, products or extremes, got one of {body}")

    def sizes(name: str) -> tuple[int, ...]:
        found = numbers(op, name) or [1] * rank
        return (*[1] * front, *(found[axis] for axis in axes))

    edges = padding(op, rank)
    return lax.reduce_window(
        array,
        np.asarray(literal(op.operands[1].owner)) if _is_neutral(op.operands[1], body) else as_array(initial),
        _REDUCTIONS[body][1],
        sizes("window_dimensions"),
        sizes("window_strides"),
        [(0, 0)] * front + [edges[axis] for axis in axes],
        sizes("base_dilations"),
        sizes("window_dilations"),
    )


def _sort(op: Any, given: Sequence[Any], region: Regions) -> Any:
    block = op.regions[0].blocks[0]
    used = {
        argument
        for one in block.operations
        for argument in map(str, one.operation.operands)
        if "block argument" in argument
    }
    keys = sum(any(str(block.arguments[2 * index + side]) in used for side in (0, 1)) for index in range(len(given)))
    arrays, dim = tuple(map(as_array, given)), int(attribute(op, "dimension", -1))
    directions = [_direction(one) for one in block.operations if one.operation.name == "stablehlo.compare"]
    if directions[-1] == "gt":  # as JAX lowers the k largest
        if len(arrays) != 2 or dim != arrays[0].ndim - 1 or not _is_iota(op.operands[1]):
            raise ExportError("expected an ascending sort, or one for the largest values, got another")
        return lax.top_k(arrays[0], arrays[0].shape[dim])
    return lax.sort(arrays, dim, bool(attribute(op, "is_stable", False)), num_keys=keys)


def _while(op: Any, given: Sequence[Any], region: Regions) -> Any:
    condition, body = region(0), region(1)
    start = tuple(jnp.asarray(as_array(one)) for one in given)
    return lax.while_loop(lambda carry: condition(*carry)[0], lambda carry: tuple(body(*carry)), start)


def _case(op: Any, given: Sequence[Any], region: Regions) -> Any:
    branches = [region(number) for number in range(len(op.regions))]
    return lax.switch(as_array(given[0]), [lambda branch=branch: tuple(branch()) for branch in branches])


def _if(op: Any, given: Sequence[Any], region: Regions) -> Any:
    return lax.cond(as_array(given[0]), lambda: tuple(region(0)()), lambda: tuple(region(1)()))


def _dynamic_slice(op: Any, given: Sequence[Any], region: Regions) -> Any:
    return lax.dynamic_slice(as_array(given[0]), [*map(as_array, given[1:])], numbers(op, "slice_sizes") or ())


def _dynamic_update(op: Any, given: Sequence[Any], region: Regions) -> Any:
    return lax.dynamic_update_slice(as_array(given[0]), as_array(given[1]), [*map(as_array, given[2:])])


def _top_k(op: Any, given: Sequence[Any], region: Regions) -> Any:
    return lax.top_k(as_array(given[0]), int(attribute(op, "k")))


def _precision(op: Any, given: Sequence[Any], region: Regions) -> Any:
    return lax.reduce_precision(
        as_array(given[0]), int(attribute(op, "exponent_bits")), int(attribute(op, "mantissa_bits"))
    )


def _clamp(op: Any, given: Sequence[Any], region: Regions) -> Any:
    return lax.clamp(*map(as_array, given))


RULES: Mapping[str, Rule] = {
    **{
        name: _plain(fn)
        for name, fn in _functions(
            {
                "abs": lax.abs,
                "add": lax.add,
                "atan2": lax.atan2,
                "cbrt": lax.cbrt,
                "ceil": lax.ceil,
                "complex": lax.complex,
                "cosine": lax.cos,
                "count_leading_zeros": lax.clz,
                "divide": lax.div,
                "exponential": lax.exp,
                "exponential_minus_one": lax.expm1,
                "floor": lax.floor,
                "imag": lax.imag,
                "is_finite": lax.is_finite,
                "log": lax.log,
                "log_plus_one": lax.log1p,
                "logistic": lax.logistic,
                "maximum": lax.max,
                "minimum": lax.min,
                "multiply": lax.mul,
                "negate": lax.neg,
                "not": lax.bitwise_not,
                "or": lax.bitwise_or,
                "and": lax.bitwise_and,
                "xor": lax.bitwise_xor,
                "popcnt": lax.population_count,
                "power": lax.pow,
                "real": lax.real,
                "remainder": lax.rem,
                "rsqrt": lax.rsqrt,
                "sign": lax.sign,
                "shift_left": lax.shift_left,
                "shift_right_arithmetic": lax.shift_right_arithmetic,
                "shift_right_logical": lax.shift_right_logical,
                "sine": lax.sin,
                "sqrt": lax.sqrt,
                "subtract": lax.sub,
                "tan": lax.tan,
                "tanh": lax.tanh,
                "erf": lax.erf,
                "erfc": lax.erfc,
                "erf_inv": lax.erf_inv,
                "lgamma": lax.lgamma,
                "digamma": lax.digamma,
                "acos": lax.acos,
                "acosh": lax.acosh,
                "asin": lax.asin,
                "asinh": lax.asinh,
                "atan": lax.atan,
                "atanh": lax.atanh,
                "cosh": lax.cosh,
                "sinh": lax.sinh,
                "square": lax.square,
                "optimization_barrier": lambda *all: [*all],
                "round_nearest_even": partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN),
                "round_nearest_afz": partial(lax.round, rounding_method=lax.RoundingMethod.AWAY_FROM_ZERO),
            }
        ).items()
    },
    "compare": _compare,
    "select": _select,
    "clamp": _clamp,
    "convert": _convert,
    "constant": lambda op, given, region: jnp.asarray(literal(op)),
    "bitcast_convert": lambda op, given, region: lax.bitcast_convert_type(
        as_array(given[0]), dtype_of(op.results[0].type)
    ),
    "iota": _iota,
    "dynamic_iota": _iota,
    "broadcast_in_dim": _broadcast,
    "dynamic_broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "dynamic_reshape": _reshape,
    "transpose": lambda op, given, region: lax.transpose(as_array(given[0]), numbers(op, "permutation") or ()),
    "slice": _slice,
    "real_dynamic_slice": _slice,
    "pad": _pad,
    "dynamic_pad": _pad,
    "concatenate": lambda op, given, region: lax.concatenate([*map(as_array, given)], int(attribute(op, "dimension"))),
    "reverse": lambda op, given, region: lax.rev(as_array(given[0]), numbers(op, "dimensions") or ()),
    "gather": _gather,
    "dynamic_gather": _gather,
    "scatter": _scatter,
    "dot_general": _dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "reduce_precision": _precision,
    "sort": _sort,
    "top_k": _top_k,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "while": _while,
    "case": _case,
    "if": _if,
}

"""Attributes and types of StableHLO's ops as values of Python."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir.dialects import stablehlo

_TENSOR = re.compile(r"tensor<((?:[\d?]+x)*)(.*)>")
_DTYPES = {
    "i1": "bool", "i4": "int4", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "ui4": "uint4",
    "ui8": "uint8", "ui16": "uint16", "ui32": "uint32", "ui64": "uint64", "f16": "float16", "bf16": "bfloat16",
    "f32": "float32", "f64": "float64", "complex<f32>": "complex64", "complex<f64>": "complex128",
    "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2",
}  # fmt: skip


def attribute(op: Any, name: str, default: Any = None) -> Any:
    """Return the value of an attribute: a number, a text or a bool; another one as it is; `default` if it has none."""
    attributes = op.operation.attributes  # it has no method `get` in each JAX
    found = attributes[name] if name in attributes else None  # noqa: SIM401
    return default if found is None else getattr(found, "value", found)


def numbers(op: Any, name: str) -> list[int] | None:
    """Return an attribute that is a list of integers or bools; None if the op does not have it."""
    attributes = op.operation.attributes
    return [int(one) for one in attributes[name]] if name in attributes else None


def dimension_numbers(op: Any, name: str, kind: str) -> Any:
    """Return an attribute that has dimensions; `kind` is the name of its class, such as `GatherDimensionNumbers`."""
    return getattr(stablehlo, kind)(op.operation.attributes[name])


def padding(op: Any, rank: int) -> list[tuple[int, int]]:
    """Return the attribute `padding`, a pair for each of `rank` dimensions."""
    attributes = op.operation.attributes
    if "padding" not in attributes:
        return [(0, 0)] * rank
    return [(int(low), int(high)) for low, high in np.array(attributes["padding"]).reshape(rank, 2)]


def literal(op: Any) -> Any:
    """Return the value of a constant as a NumPy array."""
    type, value = op.operation.results[0].type, op.operation.attributes["value"]
    shape, dtype = shape_of(type), dtype_of(type)
    if value.is_splat:
        return np.full(shape, getattr(value.get_splat_value(), "value", None), dtype)
    try:
        return np.array(value, dtype).reshape(shape)
    except (TypeError, ValueError):  # dtypes that NumPy does not have, such as bfloat16
        return np.array([value[index] for index in range(len(value))], dtype).reshape(shape)


def dtype_of(type: Any) -> Any:
    """Return the dtype of a tensor type."""
    return jnp.dtype(_DTYPES[_parts(type)[1]])


def shape_of(type: Any) -> tuple[int, ...]:
    """Return the shape of a tensor type, with -1 for an open size."""
    return tuple(-1 if dim == "?" else int(dim) for dim in _parts(type)[0].split("x") if dim)


def _parts(type: Any) -> tuple[str, str]:
    found = _TENSOR.fullmatch(str(type).partition(", #")[0].removesuffix(">") + ">")
    if found is None:
        raise AssertionError(f"expected a tensor, got {type}")
    return found[1], found[2]

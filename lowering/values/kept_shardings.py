"""Values written by a step keep the sharding of their variable, whatever sharding XLA would choose.

A variable without a mesh refuses a value whose type has explicit mesh axes: its reads would lack them in their type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import jax
from jax import jit as jax_jit
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from dflow.lowering.files.whole_arrays import placed
from dflow.lowering.values.variable_key import shown
from dflow.tracing.errors import VariableShapeError
from dflow.tracing.ir.explicit_sharding import is_explicit, is_split
from dflow.tracing.ir.types import array_type_of


def is_spread(sharding: Sharding | None) -> TypeGuard[Sharding]:
    """Whether a sharding covers several devices, so that XLA has choices, or is on a mesh with explicit axes."""
    return sharding is not None and (len(sharding.device_set) > 1 or is_explicit(sharding))


def kept_shardings(
    fn: Callable[..., Sequence[Any]], shardings: Mapping[str, Sharding | None]
) -> Callable[..., list[Any]]:
    """Return `fn`, to be traced, with its first results, the values of these variables, constrained to their shardings.

    For None and a single device nothing is constrained, but a value divided over explicit axes raises
    VariableShapeError.
    """

    def kept(*args: Any) -> list[Any]:
        results = list(fn(*args))
        for number, (key, sharding) in enumerate(shardings.items()):
            if is_spread(sharding):
                results[number] = _at(sharding, results[number])
            else:
                refuse_divided(key, results[number])
        return results

    return kept


def refuse_divided(key: str, value: Any) -> None:
    """Raise VariableShapeError for a value to be written to a variable on no mesh, if explicit axes divide it."""
    type = array_type_of(value)
    if is_split(type.sharding):
        raise VariableShapeError(
            f"variable {shown(key)!r} is spread over no mesh, but is written a value of {type}",
            "make it spread so, dflow.Variable(..., sharding=jax.sharding.NamedSharding(mesh, spec))",
        )


def _at(sharding: Sharding, value: Any) -> Any:
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_types) == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint(value, sharding)
    # A constraint must not name explicit axes. Neither `device_put` nor `out_shardings` alone covers all cases of them.
    return jax_jit(partial(jax.device_put, device=sharding), out_shardings=sharding)(value)


def beside(operand: Any, value: jax.Array) -> Any:
    """Return an operand of a program on the devices of the value: replicated over a mesh, else sharded like it."""
    if not (isinstance(operand, jax.Array) and value.committed and operand.committed):
        return operand
    if operand.sharding.device_set == value.sharding.device_set:
        return operand
    if isinstance(value.sharding, NamedSharding):
        return placed(operand, NamedSharding(value.sharding.mesh, PartitionSpec()))
    return placed(operand, value.sharding)

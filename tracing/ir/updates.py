"""What the updates of a variable compute, and which operands each takes: one table for all of them.

Every way to run an update goes by this table but the reference interpreter, which has its own. An update of rows has
JAX's meaning of `x.at[indices]`: a negative index counts from the end, a row that does not exist is not written, and
of equal indices every one adds, multiplies or compares, while `scatter_update` keeps any one of their rows. A lookup
has that of `x[indices]`: an index past either end gives the row at that end, and no gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from dflow.tracing.ir.types import ArrayType, array_type_of

#: From the old value and the operand to the new value.
ASSIGNS: Mapping[str, Callable[[Any, Any], Any]] = {
    "assign": lambda old, new: new,
    "assign_add": operator.add,
    "assign_add_rounded": lambda old, delta: (old + delta).astype(old.dtype),
    "assign_sub": operator.sub,
    "assign_mul": operator.mul,
    "assign_max": jnp.maximum,
    "assign_min": jnp.minimum,
}

#: From the old value, indices and rows to the new value.
SCATTERS: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "scatter_update": lambda old, indices, rows: old.at[indices].set(rows, **_spread_as(old)),
    "scatter_add": lambda old, indices, rows: old.at[indices].add(rows, **_spread_as(old)),
    "scatter_mul": lambda old, indices, rows: old.at[indices].multiply(rows, **_spread_as(old)),
    "scatter_max": lambda old, indices, rows: old.at[indices].max(rows, **_spread_as(old)),
    "scatter_min": lambda old, indices, rows: old.at[indices].min(rows, **_spread_as(old)),
}


def _spread_as(value: Any) -> Mapping[str, Any]:
    """The option of JAX's scatters for a result that is spread as `value` over the explicit axes of a mesh."""
    sharding = array_type_of(value).sharding
    return {} if sharding is None else {"out_sharding": sharding}


#: Every kind of update.
KINDS: Mapping[str, Callable[..., Any]] = {**ASSIGNS, **SCATTERS}


def updated(kind: str, old: Any, *operands: Any) -> Any:
    """The value of a variable after an update."""
    return KINDS[kind](jnp.asarray(old), *operands)


def looked_up(value: Any, indices: Any) -> Any:
    """The rows of `value` at `indices`, which may have any shape."""
    return jnp.asarray(value)[indices]


def lookup_type(held: ArrayType, indices: ArrayType) -> ArrayType:
    """The dtype and shape of a lookup's result, and of the rows that an update of rows takes."""
    return ArrayType(held.dtype, indices.shape + held.shape[1:])


def lookup_sharding(held: ArrayType, indices: ArrayType) -> NamedSharding | None:
    """How a lookup's result is spread over explicit axes. Raises JAX's ShardingTypeError where that is not decided."""
    if held.sharding is None and indices.sharding is None:
        return None
    return array_type_of(jax.eval_shape(looked_up, held.struct, indices.struct)).sharding


def indices_refusal(held: ArrayType, indices: ArrayType) -> str | None:
    """Why a variable that holds `held` cannot be indexed so, or None."""
    if not held.shape:
        return f"{held} has no rows"
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        return f"the indices are {indices}, not integers"
    return None


def operand_types(kind: str, held: ArrayType, operands: Sequence[ArrayType]) -> tuple[ArrayType, ...]:
    """What the operands of an update should be, given what they are."""
    if kind == "assign_add_rounded":
        return (ArrayType(operands[0].dtype, held.shape),)
    return (held,) if kind in ASSIGNS else (operands[0], lookup_type(held, operands[0]))


def kind_refusal(kind: str, held: ArrayType) -> str | None:
    """Why no variable that holds `held` has an update of this kind, or None."""
    if kind in ("assign", "scatter_update"):
        return None
    if jnp.issubdtype(held.dtype, jax.dtypes.extended):
        return f"{held} cannot be computed with; only assign and scatter_update write it"
    if held.dtype == bool and kind in ("assign_sub", "scatter_add", "scatter_mul"):
        return f"JAX has none for {held}; write jnp.logical_or or jnp.logical_and of the old value by assign"
    return None

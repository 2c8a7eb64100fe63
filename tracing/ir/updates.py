"""The updates of a variable: what each computes, its operands and its properties, in one table.

All code that runs or transforms an update reads this table, except the reference interpreter, which has its own. An
update of rows has JAX's meaning of `x.at[indices]`: a negative index counts from the end, a row that does not exist is
not written, and of equal indices every one adds, multiplies or compares, while `scatter_update` keeps any one of their
rows. Rows of few bits for one index are first summed in float32. A lookup has the meaning of `x[indices]`: an index
past either end gives the row at that end, and no gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.ir.wide_sums import each_position_once, is_narrow, sum_dtype


@dataclass(frozen=True)
class Update:
    """A kind of update.

    `compute`        from the old value and the operands to the new value
    `by_rows`        whether the operands are indices and rows; else there is one, of the variable's shape
    `reads`          whether the new value depends on the old one
    `sign`           1 for a sum and -1 for a difference, whose order makes no difference; 0 for others
    `keeps_by_zero`  whether an operand of zeros changes nothing
    `any_dtype`      whether the operand may have another dtype than the variable
    `takes_keys`     whether it works on PRNG keys, with which nothing can be computed
    `takes_bools`    whether it works on bools
    """

    compute: Callable[..., Any]
    by_rows: bool = False
    reads: bool = True
    sign: int = 0
    keeps_by_zero: bool = False
    any_dtype: bool = False
    takes_keys: bool = False
    takes_bools: bool = True


def _scatter(method: str, **properties: Any) -> Update:
    """The update of rows that JAX calls `x.at[indices].<method>(rows)`."""

    def compute(old: Any, indices: Any, rows: Any) -> Any:
        sharding = array_type_of(old).sharding
        options = {} if sharding is None else {"out_sharding": sharding}
        if method not in ("add", "subtract") or not is_narrow(old.dtype):
            return getattr(old.at[indices], method)(rows, **options)
        if sharding is not None:
            wide = old.astype(sum_dtype(old.dtype))
            return getattr(wide.at[indices], method)(rows.astype(wide.dtype), **options).astype(old.dtype)
        positions, sums = each_position_once(indices, rows, old.shape[0])
        return getattr(old.at[positions], method)(sums, mode="drop")

    return Update(compute, by_rows=True, **properties)


#: Every kind of update, by name.
KINDS: Mapping[str, Update] = {
    "assign": Update(lambda old, new: new, reads=False, takes_keys=True),
    "assign_add": Update(operator.add, sign=1, keeps_by_zero=True),
    "assign_add_rounded": Update(
        lambda old, delta: (old + delta).astype(old.dtype), keeps_by_zero=True, any_dtype=True
    ),
    "assign_sub": Update(operator.sub, sign=-1, keeps_by_zero=True, takes_bools=False),
    "assign_mul": Update(operator.mul),
    "assign_max": Update(jnp.maximum),
    "assign_min": Update(jnp.minimum),
    "scatter_update": _scatter("set", takes_keys=True),
    "scatter_add": _scatter("add", sign=1, takes_bools=False),
    "scatter_sub": _scatter("subtract", sign=-1, takes_bools=False),
    "scatter_mul": _scatter("multiply", takes_bools=False),
    "scatter_max": _scatter("max"),
    "scatter_min": _scatter("min"),
}


def updated(kind: str, old: Any, *operands: Any) -> Any:
    """The value of a variable after an update."""
    return KINDS[kind].compute(jnp.asarray(old), *operands)


def looked_up(value: Any, indices: Any) -> Any:
    """The rows of `value` at `indices`, which may have any shape."""
    return jnp.asarray(value)[indices]


def lookup_type(held: ArrayType, indices: ArrayType) -> ArrayType:
    """The dtype and shape of a lookup's result, and of the rows that an update of rows takes."""
    return ArrayType(held.dtype, indices.shape + held.shape[1:])


def lookup_sharding(held: ArrayType, indices: ArrayType) -> NamedSharding | None:
    """The sharding of a lookup's result over explicit axes. Raises JAX's ShardingTypeError if it is ambiguous."""
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
    """The expected types of an update's operands, for operands of these types."""
    update = KINDS[kind]
    if update.by_rows:
        return (operands[0], lookup_type(held, operands[0]))
    return (ArrayType(operands[0].dtype, held.shape),) if update.any_dtype else (held,)


def kind_refusal(kind: str, held: ArrayType) -> str | None:
    """Why no variable that holds `held` has an update of this kind, or None."""
    update = KINDS[kind]
    if jnp.issubdtype(held.dtype, jax.dtypes.extended) and not update.takes_keys:
        writers = " and ".join(name for name, other in KINDS.items() if other.takes_keys)
        return f"{held} cannot be computed with; only {writers} write it"
    if held.dtype == bool and not update.takes_bools:
        return f"JAX has none for {held}; write jnp.logical_or or jnp.logical_and of the old value by assign"
    return None
